"""What judges the exercises of notebook 3 · Positions."""

# ruff: noqa: F401  (some names are there to be given to submissions)

import math

import torch

from regard.nn.positions import Rotary, frequencies, rotate, shift_matrix, sinusoids


def tables(draw):
    yield 50, 8
    yield 20, 6


def each_its_own(length, d):
    t = torch.arange(length, dtype=torch.float64)[:, None]
    column = torch.arange(d, dtype=torch.float64)
    angles = t * 10000 ** (-column / d)
    return torch.where(column % 2 == 0, angles.sin(), angles.cos())


def widths(draw):
    yield (64,)
    yield (32,)


def looks_two_back(f, d):
    """Returns what is wrong where the matrix, sharpened, does not look at the token two before."""
    p = sinusoids(20, d)
    found = (30 / math.sqrt(d) * (p @ f(d).to(p).T) @ p.T).argmax(-1)
    places = torch.arange(20)
    if torch.equal(found[2:], places[:-2]):
        return None
    if torch.equal(found[:-2], places[2:]):
        return "two_ahead"
    return f"query 10 looks at key {int(found[10])}, expected 8"


def turns(draw):
    for width in (8, 32):
        yield draw.normal(24, width).double(), torch.arange(24)


def turn(x, places):
    rotation = Rotary(x.shape[-1]).rotation(places[None], len(places), torch.float64)
    return rotate(x[None, None], rotation)[0, 0]


def mixed_pairs(x, places):
    angles = places[:, None] * frequencies(x.shape[-1]).repeat_interleave(2)
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def paddings(draw):
    yield (torch.tensor([[False, False, True, True, True], [True, True, True, False, False]]),)
    yield (torch.tensor([[True, False, True, True, False, True]]),)


def visible_before(visible):
    return visible.cumsum(1) - visible.long()


def from_the_edge(visible):
    return torch.arange(visible.shape[1]).expand(visible.shape)
