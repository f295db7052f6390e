"""What judges the exercises of notebook 4 · Kernels and random features."""

# ruff: noqa: F401  (some names are there to be given to submissions)

import math

import torch
from torch.nn import functional

import regard
from regard.grade import broken_law

W = torch.randn(64, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def exponents(x):
    """Returns b [B,H,T,64], the exponents of the random features of notebook 4, the same for every case."""
    x = x * x.shape[-1] ** -0.25
    return x @ W[:, : x.shape[-1]].to(x).T - x.square().sum(-1, keepdim=True) / 2


def once(draw):
    yield ()


def is_causal_elu(f):
    def causal_elu(q, k, v):
        return regard.attend(q, k, v, "elu", causal=True)

    return broken_law(f, like=causal_elu)


def vectors(draw):
    yield draw.normal(6, 5).double(), draw.normal(6, 5).double()


def is_the_quadratic_kernel(f, q, k):
    gap = (f(q) @ f(k).T - (q @ k.T + 1) ** 2).abs().max()
    if gap < 1e-8:
        return None
    dots = q @ k.T
    if (f(q) @ f(k).T - without_roots(q) @ without_roots(k).T).abs().max() < 1e-8:
        return "no_roots"
    return f"φ(q)·φ(k) is off by up to {float(gap):.2g} from (q·k + 1)², where q·k is {float(dots.max()):.2g}"


def without_roots(x):
    i, j = torch.triu_indices(x.shape[-1], x.shape[-1], offset=1)
    return torch.cat([torch.ones_like(x[..., :1]), x, x**2, x[..., i] * x[..., j]], -1)


def gives_the_gaussian_kernel(f):
    sigma = 2.0
    x, y = 0.5 * torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(2))
    w = f(200_000, 16, sigma, torch.Generator().manual_seed(3))
    gap = (torch.cos((x - y) @ w.T).mean(-1) - torch.exp(-(x - y).square().sum(-1) / (2 * sigma**2))).abs().max()
    if gap < 0.01:
        return None
    return f"the mean of cos w·(q − k) over 200,000 frequencies is off by {float(gap):.2g} from the Gaussian kernel"


def keeps_the_laws(f):
    return broken_law(f)
