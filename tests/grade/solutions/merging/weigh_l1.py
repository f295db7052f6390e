# slip: sum_of_sizes
import torch

def split_heads(x, heads):
    B, T, D = x.shape
    return x.reshape(B, T, heads, D // heads).permute(0, 2, 1, 3)


def concatenate_heads(x):
    return torch.cat(x.unbind(1), dim=-1)


def shift_heads(x):
    hs = list(x.unbind(1))
    return torch.cat([hs[-1]] + hs[:-1], dim=-1)


def reweight_heads(x):
    n = x.abs().sum(-1, keepdim=True)
    return concatenate_heads(x * n / n.mean(1, keepdim=True))
