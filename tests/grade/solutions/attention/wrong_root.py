# slip: divided_by_length
import math


def attention(q, k, v, mask=None):
    scores = q @ k.mT / math.sqrt(k.shape[1])
    if mask is not None:
        scores[~mask] = float("-inf")
    return scores.softmax(-1) @ v
