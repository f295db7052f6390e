# slip: over_all_pairs
import math


def attention(q, k, v, mask=None):
    B, T, K = q.shape
    S = k.shape[1]

    s = q @ k.transpose(-2, -1) / math.sqrt(K)
    if mask is not None:
        s = s.masked_fill(mask == 0, -1e9)
    return s.view(B, -1).softmax(-1).view(B, T, S) @ v
