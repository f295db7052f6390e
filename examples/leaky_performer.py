"""A causal FAVOR+ with a mistake that is easy to make and hard to see.

Its keys are stabilised by the largest exponent *of the whole sequence*, and a small epsilon keeps features positive.
Both are common. Together they let the last key change what earlier queries see: the maximum is not causal.

    regard check --plugin examples/leaky_performer.py

finds it by itself and says by how much. The cure is a running maximum and no epsilon: see regard/mechanisms/linear.py.
"""

import torch

FEATURES, EPSILON = 64, 1e-4


def leaky_performer(q, k, v, causal=True):
    width = q.shape[-1]
    w = torch.randn(FEATURES, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(q)

    def exponents(x):
        x = x * width**-0.25
        return x @ w.mT - x.square().sum(-1, keepdim=True) / 2

    a, b = exponents(q), exponents(k)
    phi_q = torch.exp(a - a.amax(-1, keepdim=True)) + EPSILON
    phi_k = torch.exp(b - b.amax((-1, -2), keepdim=True)) + EPSILON  # the maximum over all keys, later ones too
    similar = phi_q @ phi_k.mT
    if causal:
        similar = similar.tril()
    return similar @ v / similar.sum(-1, keepdim=True)
