"""Answers to the exercises of notebook 5 · Decoding and caches.

Each takes the place of a cell, and uses the names that are defined above it there.
"""


# answer: step
def step(q, keys, values):
    """One token: q [B,H,K] against a cache keys [B,G,n,K], values [B,G,n,V] → [B,H,V]."""
    B, H, K = q.shape
    q = q.view(B, keys.shape[1], -1, K)  # [B, G, H/G, K]
    scores = torch.einsum("bghk,bgnk->bghn", q, keys) / K**0.5  # one step needs the factor as well
    return torch.einsum("bghn,bgnv->bghv", scores.softmax(-1), values).reshape(B, H, -1)


# answer: chunked
def chunked(q, k, v):
    """Causal attention with φ(x) = elu(x) + 1: what came before the chunk from S and Z, the chunk itself by pairs."""
    phi_q, phi_k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    S, Z, out = 0, 0, []
    for qs, ks, vs in zip(phi_q.split(2, 2), phi_k.split(2, 2), v.split(2, 2), strict=True):
        pairs = (qs @ ks.mT).tril()  # within the chunk each token sees itself and what is before it
        above, below = pairs @ vs, pairs.sum(-1, keepdim=True)
        if out:
            above, below = above + qs @ S, below + qs @ Z
        out.append(above / below)
        S, Z = S + ks.mT @ vs, Z + ks.sum(2, keepdim=True).mT
    return torch.cat(out, 2)


# answer: flops
def flops(b, n, D, H, G, K, V):
    """FLOPs of one decoding step of a layer; a score takes K products, a mixture V for each token and head."""
    projections = 2 * b * D * (H * K + G * K + G * V + H * V)
    return projections + 2 * b * H * (n + 1) * (K + V)


# answer: nucleus
def nucleus(p, most):
    """The distribution p [N] on the fewest likeliest tokens that together have at least `most`."""
    falling, which = p.sort(descending=True)
    kept = falling.cumsum(0) - falling < most  # as long as those before it are not enough
    out = torch.zeros_like(p)
    out[which[kept]] = falling[kept]
    return out / out.sum()
