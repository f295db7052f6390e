# slip: one_later
"""Keeps one diagonal too many."""

import torch
def kernel_attention_pairs(q, k, v, phi, causal):
    A = phi(q) @ phi(k).mT
    if causal: A = A.tril(1)
    return A @ v / A.sum(-1, keepdim=True)
def kernel_attention_linear(q, k, v, phi, causal):
    q, k = phi(q), phi(k)
    kv = k[..., :, None] * v[..., None, :]
    if not causal:
        return q @ (k.mT @ v) / (q @ k.sum(1)[..., None])
    S, z = kv.cumsum(1).roll(-1, 1), k.cumsum(1).roll(-1, 1)
    S[:, -1], z[:, -1] = kv.sum(1), k.sum(1)
    return torch.einsum('btf,btfv->btv', q, S) / (q * z).sum(-1, True)
