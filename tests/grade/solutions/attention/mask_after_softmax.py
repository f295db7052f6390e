# slip: masked_after

import torch


def attention(q, k, v, mask=None):
    weights = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)
    if mask is not None:
        weights = weights * mask.float()
    return weights @ v
