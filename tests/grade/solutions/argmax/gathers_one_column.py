# slip: first_column
"""Expands what was gathered, not the indices."""

import torch
def argmax_attention(q, k, v, causal):
    s = q @ k.mT
    if causal: s = s.masked_fill(torch.triu(torch.ones(s.shape[-2:], dtype=torch.bool), 1), -1e9)
    idx = s.argmax(-1)
    return torch.gather(v, 1, idx[..., None]).expand(-1, -1, v.shape[-1])
