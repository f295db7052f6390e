# slip: none
import math

import torch


def attention(q, k, v, mask=None):
    scores = torch.einsum("btk,bsk->bts", q, k) / math.sqrt(k.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    return weights @ v, weights
