"""Sinusoidal positions: PE[t, 2i] = sin(t·ωᵢ), PE[t, 2i+1] = cos(t·ωᵢ), ωᵢ = 10000^(−2i/d)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from regard.grade.cases import Draw, GradeCase

Function = Callable[[int, int], Tensor]


def small(draw: Draw) -> Iterator[GradeCase]:
    """Yields lengths and even widths."""
    for length, width in ((5, 4), (11, 6), (2, 10)):
        yield GradeCase((length, width))


def long(draw: Draw) -> Iterator[GradeCase]:
    """Yields positions in the thousands."""
    yield GradeCase((draw.random.randint(2000, 3000), 32))


def _angles(length: int, width: int, exponent: float = 2.0, base: float = 10000.0, first: int = 0) -> Tensor:
    """Returns t·ωᵢ for i < width/2, [length,width/2], in float64."""
    steps = torch.arange(width // 2, dtype=torch.float64)
    frequencies = base ** (-exponent * steps / width)
    return torch.arange(first, first + length, dtype=torch.float64)[:, None] * frequencies


def _interleaved(even: Tensor, odd: Tensor) -> Tensor:
    return torch.stack([even, odd], -1).flatten(-2).float()


def sinusoidal_positions(length: int, width: int) -> Tensor:
    """Returns the table [length,width]."""
    angles = _angles(length, width)
    return _interleaved(angles.sin(), angles.cos())


def halves(length: int, width: int) -> Tensor:
    angles = _angles(length, width)
    return torch.cat([angles.sin(), angles.cos()], -1).float()


def cosine_halves(length: int, width: int) -> Tensor:
    angles = _angles(length, width)
    return torch.cat([angles.cos(), angles.sin()], -1).float()


def extra_axis(length: int, width: int) -> Tensor:
    return sinusoidal_positions(length, width)[None]


def swapped(length: int, width: int) -> Tensor:
    angles = _angles(length, width)
    return _interleaved(angles.cos(), angles.sin())


def exponent_halved(length: int, width: int) -> Tensor:
    angles = _angles(length, width, exponent=1.0)
    return _interleaved(angles.sin(), angles.cos())


def exponent_doubled(length: int, width: int) -> Tensor:
    angles = _angles(length, width, exponent=4.0)
    return _interleaved(angles.sin(), angles.cos())


def frequency_each(length: int, width: int) -> Tensor:
    """Returns the table in which each column has another frequency, so that sin and cos of a pair do not share one."""
    columns = torch.arange(width, dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * 10000.0 ** (-columns / width)
    return torch.where(columns % 2 == 0, angles.sin(), angles.cos()).float()


def frequency_each_doubled(length: int, width: int) -> Tensor:
    columns = torch.arange(width, dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * 10000.0 ** (-2 * columns / width)
    return torch.where(columns % 2 == 0, angles.sin(), angles.cos()).float()


def multiplied(length: int, width: int) -> Tensor:
    angles = _angles(length, width, exponent=-2.0)
    return _interleaved(angles.sin(), angles.cos())


def from_one(length: int, width: int) -> Tensor:
    angles = _angles(length, width, first=1)
    return _interleaved(angles.sin(), angles.cos())


def small_base(length: int, width: int) -> Tensor:
    angles = _angles(length, width, base=1000.0)
    return _interleaved(angles.sin(), angles.cos())


def large_base(length: int, width: int) -> Tensor:
    angles = _angles(length, width, base=100000.0)
    return _interleaved(angles.sin(), angles.cos())


def unbracketed(length: int, width: int) -> Tensor:
    """Returns the table of t / 10000 ** 2*i / width, which Python reads as t / 10000² · i / width."""
    steps = torch.arange(width // 2, dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64)[:, None] / 1e8 * steps / width
    return _interleaved(angles.sin(), angles.cos())


def rounded_angle(length: int, width: int) -> Tensor:
    angles = _angles(length, width).add(1e-9).floor()  # 1e-9: so that rounding does not make 10 · 0.1 less than 1
    return _interleaved(angles.sin(), angles.cos())


def over_length(length: int, width: int) -> Tensor:
    angles = _angles(length, width) / length
    return _interleaved(angles.sin(), angles.cos())


def turned_back(length: int, width: int) -> Tensor:
    angles = _angles(length, width)
    return _interleaved(-angles.sin(), angles.cos())


def scaled(length: int, width: int) -> Tensor:
    return sinusoidal_positions(length, width) / math.sqrt(width)


def by_row(length: int, width: int) -> Tensor:
    """Returns the table whose even rows are sines and whose odd rows are cosines."""
    angles = _angles(length, width).repeat_interleave(2, -1)
    is_even = torch.arange(length)[:, None] % 2 == 0
    return torch.where(is_even, angles.sin(), angles.cos()).float()


def natural_base(length: int, width: int) -> Tensor:
    angles = _angles(length, width, base=math.e)
    return _interleaved(angles.sin(), angles.cos())


def decimal_logarithm(length: int, width: int) -> Tensor:
    """Returns the table whose frequencies are exp(−2i/width · log₁₀ 10000)."""
    angles = _angles(length, width, base=math.exp(4.0))
    return _interleaved(angles.sin(), angles.cos())


def rounded_exponent(length: int, width: int) -> Tensor:
    exponents = 2 * torch.arange(width // 2) // width
    angles = torch.arange(length, dtype=torch.float64)[:, None] * 10000.0 ** (-exponents.double())
    return _interleaved(angles.sin(), angles.cos())


def only_sines(length: int, width: int) -> Tensor:
    angles = _angles(length, width)
    return _interleaved(angles.sin(), angles.sin())


def no_cosines(length: int, width: int) -> Tensor:
    angles = _angles(length, width)
    return _interleaved(angles.sin(), torch.zeros_like(angles))


def last_pair_slowest(length: int, width: int) -> Tensor:
    frequencies = 10000.0 ** -torch.linspace(0, 1, width // 2, dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return _interleaved(angles.sin(), angles.cos())


def backwards(length: int, width: int) -> Tensor:
    angles = _angles(length, width).flip(-1)
    return _interleaved(angles.sin(), angles.cos())


def in_degrees(length: int, width: int) -> Tensor:
    angles = _angles(length, width) * math.pi / 180
    return _interleaved(angles.sin(), angles.cos())


def whole_turns(length: int, width: int) -> Tensor:
    angles = _angles(length, width) * 2 * math.pi
    return _interleaved(angles.sin(), angles.cos())


def first_row_empty(length: int, width: int) -> Tensor:
    table = sinusoidal_positions(length, width)
    table[0] = 0.0
    return table


def cosine_of_next(length: int, width: int) -> Tensor:
    """Returns the table whose cosines have the exponents −(2i + 1)/width."""
    angles = _angles(length, width)
    return _interleaved(angles.sin(), (angles * 10000.0 ** (-1 / width)).cos())


def is_transposed(length: int, width: int) -> Tensor:
    return sinusoidal_positions(length, width).mT


def first_row(f: Function, length: int, width: int) -> Any:
    """Returns what is wrong with position 0, where every sine is 0 and every cosine 1."""
    table = torch.as_tensor(f(length, width))
    row = table[0].flatten().double()
    want = torch.arange(width).ge(width // 2).double()  # the sorted row: zeros, then ones
    if not bool(table[..., 1::2].any()):
        return "no_cosines"
    if not torch.allclose(row.sort().values, want, atol=1e-5):
        return f"position 0 is {[round(float(x), 2) for x in row[:6]]}: every sine of 0 is 0, and every cosine 1"
    return None


def turns(f: Function, length: int, width: int) -> Any:
    """Returns what is wrong if a step by one position does not turn each pair by the same angle everywhere."""
    table = torch.as_tensor(f(length, width)).double()
    if table.shape != (length, width):
        return f"the table has the shape {list(table.shape)}, expected {[length, width]}"
    pairs = torch.view_as_complex(table.unflatten(-1, (-1, 2)).contiguous())
    step = pairs[1:] * pairs[:-1].conj()
    if not torch.allclose(step, step[:1].expand_as(step), atol=2e-3):
        return "one position further is not the same turn of a pair (2i, 2i+1) everywhere: does it share a frequency?"
    return None
