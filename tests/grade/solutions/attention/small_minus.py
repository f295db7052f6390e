# slip: none
import math


def attention(q, k, v, mask=None):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -5.0)
    return scores.softmax(-1) @ v
