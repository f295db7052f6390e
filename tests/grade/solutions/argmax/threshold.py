# slip: more_than_half
"""Thresholds softmax at a half."""

import torch
def argmax_attention(q, k, v, causal):
    s = q @ k.mT
    if causal: s = s.masked_fill(torch.triu(torch.ones(s.shape[-2:], dtype=torch.bool), 1), float('-inf'))
    w = (s.softmax(-1) > .5).float()
    return w @ v
