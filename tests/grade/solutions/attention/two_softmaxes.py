# slip: softmax_twice
"""Takes the softmax of the weights."""

import math, torch
def attention(q, k, v, mask=None):
    s = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
    if mask is not None: s = s.masked_fill(~mask, float('-inf'))
    w = torch.softmax(s, -1)
    return torch.softmax(w, -1) @ v
