# slip: causal_instead
import math

import torch

def attention(q, k, v, mask=None):
    B, T, K = q.shape
    S = k.shape[1]

    s = q @ k.transpose(-2, -1) / math.sqrt(K)
    if mask is not None:
        s = s.masked_fill(torch.ones(T, S).triu(1).bool(), float('-inf'))
    return s.softmax(-1) @ v
