# slip: masked_by_zero


def attention(q, k, v, mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores * mask
    return scores.softmax(-1) @ v
