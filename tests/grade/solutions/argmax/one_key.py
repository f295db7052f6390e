# slip: one_for_all
"""Chooses one key for a whole sequence."""

import torch
def argmax_attention(q, k, v, causal):
    s = q @ k.mT
    if causal: s = s.masked_fill(torch.triu(torch.ones(s.shape[-2:], dtype=torch.bool), 1), float('-inf'))
    best = s.sum(1).argmax(-1) if not causal else s.flatten(1).argmax(-1) % k.shape[1]
    return v[torch.arange(len(v)), best][:, None].expand(-1, q.shape[1], -1)
