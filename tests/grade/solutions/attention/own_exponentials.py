# slip: overflow
import math

import torch


def attention(q, k, v, mask=None):
    e = torch.exp(q @ k.mT / math.sqrt(q.shape[-1]))
    if mask is not None:
        e = e * mask
    return (e / e.sum(-1, keepdim=True)) @ v
