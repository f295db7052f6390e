# slip: scaled_after
import math


def attention(q, k, v, mask=None):
    B, T, K = q.shape
    S = k.shape[1]

    s = q @ k.transpose(-2, -1)
    if mask is not None:
        s = s.masked_fill(mask == 0, -1e9)
    return (s.softmax(-1) / math.sqrt(K)) @ v
