# slip: map_twice
"""Maps queries and keys twice."""

import torch
def kernel_attention_pairs(q, k, v, phi, causal):
    q, k = phi(phi(q)), phi(phi(k))
    A = q @ k.mT
    if causal: A = A.tril()
    return A @ v / A.sum(-1, keepdim=True)
def kernel_attention_linear(q, k, v, phi, causal):
    q, k = phi(phi(q)), phi(phi(k))
    kv = k[..., :, None] * v[..., None, :]
    S, z = (kv.cumsum(1), k.cumsum(1)) if causal else (kv.sum(1, True), k.sum(1, True))
    return torch.einsum('btf,btfv->btv', q, S.expand(-1, q.shape[1], -1, -1)) / (q * z).sum(-1, True)
