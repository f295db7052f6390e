# slip: dense_bias_after_relu
"""Adds the first bias behind the relu."""

import torch
def m(s): return s.masked_fill(torch.triu(torch.ones(s.shape[-2:], dtype=torch.bool), 1), float('-inf')).softmax(-1)
def dense_synthesizer(x, w1, b1, w2, b2, v):
    T = x.shape[2]
    s = torch.relu(x @ w1) + b1
    s = s @ w2[:, :T] + b2[:T]
    return m(s) @ v
def random_synthesizer(R, v):
    T = v.shape[2]
    return m(R[:, :T, :T] + v.mean()) @ v[:, :1]
