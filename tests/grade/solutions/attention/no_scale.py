# slip: unscaled

import torch


def attention(q, k, v, mask=None):
    scores = torch.bmm(q, k.transpose(1, 2))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return torch.bmm(torch.softmax(scores, dim=-1), v)
