# slip: minus_too_small
import math


def attention(q, k, v, mask=None):
    B, T, K = q.shape
    S = k.shape[1]

    s = q @ k.transpose(-2, -1) / math.sqrt(K)
    if mask is not None:
        s = s + (1 - mask.float()) * -10
    return s.softmax(-1) @ v
