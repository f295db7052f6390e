# slip: none
"""Hides by the mask of the first sequence."""

import math, torch
def attention(q, k, v, mask=None):
    s = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
    if mask is not None: s = s.masked_fill(~mask[0], float('-inf'))
    return s.softmax(-1) @ v
