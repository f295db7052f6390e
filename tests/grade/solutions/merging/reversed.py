# slip: heads_reversed
import torch

def split_heads(x, heads):
    B, T, D = x.shape
    return x.reshape(B, T, heads, D // heads).permute(0, 2, 1, 3)


def concatenate_heads(x):
    return torch.cat(x.unbind(1), dim=-1)


def shift_heads(x):
    return concatenate_heads(x.flip(1))


def reweight_heads(x):
    n = (x ** 2).sum(-1, keepdim=True).sqrt()
    return torch.cat((x * (n / n.mean(1, keepdim=True))).unbind(1), dim=-1)
