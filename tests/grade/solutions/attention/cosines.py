# slip: unit_vectors_scaled
"""Normalises queries and keys."""

import math, torch
import torch.nn.functional as F
def attention(q, k, v, mask=None):
    q = F.normalize(q, dim=-1); k = F.normalize(k, dim=-1)
    s = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
    if mask is not None: s = s.masked_fill(~mask, -1e9)
    return s.softmax(-1) @ v
