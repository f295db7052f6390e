# slip: largest_entry
import torch


def split_heads(x, heads):
    B, T, D = x.shape
    return x.view(B, T, heads, D // heads).transpose(1, 2)


def concatenate_heads(x):
    B, H, T, V = x.shape
    return x.transpose(1, 2).reshape(B, T, H * V)


def shift_heads(x):
    return concatenate_heads(torch.roll(x, 1, dims=1))


def reweight_heads(x):
    n = x.abs().amax(-1, keepdim=True)
    return concatenate_heads(x * n / n.mean(dim=1, keepdim=True))
