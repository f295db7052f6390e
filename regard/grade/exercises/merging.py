"""Merging heads, [B,H,T,V] → [B,T,H·V]: side by side, rotated by one, or weighed by their norms; and splitting them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from regard.grade.cases import Draw, GradeCase
from regard.nn.merges import MERGES

Function = Callable[..., Tensor]


def heads(draw: Draw) -> Iterator[GradeCase]:
    """Yields outputs of heads of several sizes."""
    for B, H, T, V in ((2, 3, 5, 7), (1, 4, 2, 3), (3, 2, 7, 5)):
        yield GradeCase((draw.normal(B, H, T, V),))


def tokens(draw: Draw) -> Iterator[GradeCase]:
    """Yields tokens to split, and numbers of heads."""
    for B, T, H, V in ((2, 5, 3, 7), (1, 2, 4, 3)):
        yield GradeCase((draw.normal(B, T, H * V), H))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Returns tokens [B,T,H·V] as heads [B,H,T,V]."""
    B, T, D = x.shape
    return x.reshape(B, T, heads, D // heads).transpose(1, 2)


def _merge(name: str, x: Tensor) -> Tensor:
    out: Tensor = MERGES.find(name)()(x)
    return out


def concatenate_heads(x: Tensor) -> Tensor:
    """Returns heads side by side."""
    return _merge("concatenate", x)


def shift_heads(x: Tensor) -> Tensor:
    """Returns heads side by side, head h where head h + 1 was."""
    return _merge("shift", x)


def reweight_heads(x: Tensor) -> Tensor:
    """Returns heads side by side, each times its norm over the mean norm of heads, at each position."""
    return _merge("reweight", x)


def split_by_view(x: Tensor, heads: int) -> Tensor:
    B, T, D = x.shape
    return x.reshape(B, heads, T, D // heads)


def split_interleaved(x: Tensor, heads: int) -> Tensor:
    B, T, D = x.shape
    return x.reshape(B, T, D // heads, heads).permute(0, 3, 1, 2)


def split_tokens_first(x: Tensor, heads: int) -> Tensor:
    B, T, D = x.shape
    return x.reshape(B, T, heads, D // heads)


def not_transposed(x: Tensor) -> Tensor:
    B, H, T, V = x.shape
    return x.reshape(B, T, H * V)


def interleaved(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).flatten(2)


def summed(x: Tensor) -> Tensor:
    return x.sum(1)


def averaged(x: Tensor) -> Tensor:
    return x.mean(1)


def not_shifted(x: Tensor) -> Tensor:
    return concatenate_heads(x)


def shifted_backwards(x: Tensor) -> Tensor:
    return concatenate_heads(x.roll(-1, 1))


def shifted_tokens(x: Tensor) -> Tensor:
    return concatenate_heads(x.roll(1, 2))


def shifted_entries(x: Tensor) -> Tensor:
    return concatenate_heads(x).roll(1, -1)


def shifted_within_heads(x: Tensor) -> Tensor:
    return concatenate_heads(x.roll(1, -1))


def shifted_by_two(x: Tensor) -> Tensor:
    return concatenate_heads(x.roll(2, 1))


def heads_reversed(x: Tensor) -> Tensor:
    return concatenate_heads(x.flip(1))


def first_lost(x: Tensor) -> Tensor:
    moved = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    return concatenate_heads(moved)


def _length(x: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length


def not_weighed(x: Tensor) -> Tensor:
    return concatenate_heads(x)


def over_sequence(x: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return concatenate_heads(x * length / length.mean(1, keepdim=True))


def over_sequence_not_divided(x: Tensor) -> Tensor:
    return _merge("reweight-sequence", x)


def not_divided(x: Tensor) -> Tensor:
    return concatenate_heads(x * _length(x))


def mean_over_tokens(x: Tensor) -> Tensor:
    return concatenate_heads(x * _length(x) / _length(x).mean(2, keepdim=True))


def mean_over_everything(x: Tensor) -> Tensor:
    return concatenate_heads(x * _length(x) / _length(x).mean())


def mean_over_batch(x: Tensor) -> Tensor:
    return concatenate_heads(x * _length(x) / _length(x).mean(0, keepdim=True))


def largest_entry(x: Tensor) -> Tensor:
    size = x.abs().amax(-1, keepdim=True)
    return concatenate_heads(x * size / size.mean(1, keepdim=True))


def heads_reversed_side_by_side(x: Tensor) -> Tensor:
    return concatenate_heads(x.flip(1))


def deviation(x: Tensor) -> Tensor:
    spread = x.std(-1, keepdim=True)
    return concatenate_heads(x * spread / spread.mean(1, keepdim=True))


def shifted_batch(x: Tensor) -> Tensor:
    return concatenate_heads(x.roll(1, 0))


def rolled_flat(x: Tensor) -> Tensor:
    return concatenate_heads(x.roll(1))


def divided_by_sum(x: Tensor) -> Tensor:
    return concatenate_heads(x * _length(x) / _length(x).sum(1, keepdim=True))


def inverted(x: Tensor) -> Tensor:
    return concatenate_heads(x * _length(x).mean(1, keepdim=True) / _length(x))


def sum_of_sizes(x: Tensor) -> Tensor:
    sizes = x.abs().sum(-1, keepdim=True)
    return concatenate_heads(x * sizes / sizes.mean(1, keepdim=True))


def softmax_of_lengths(x: Tensor) -> Tensor:
    return concatenate_heads(x * _length(x).softmax(1))


def divided_by_largest(x: Tensor) -> Tensor:
    return concatenate_heads(x * _length(x) / _length(x).amax(1, keepdim=True))


def normalised(x: Tensor) -> Tensor:
    return concatenate_heads(x / _length(x))


def squared_length(x: Tensor) -> Tensor:
    squares = x.square().sum(-1, keepdim=True)
    return concatenate_heads(x * squares / squares.mean(1, keepdim=True))


def later_tokens_do_not_matter(f: Function, x: Tensor) -> Any:
    """Returns the slip of weights that depend on later tokens, or what is wrong with the output's shape."""
    changed = x.clone()
    changed[:, :, -1] *= 5.0
    whole = f(x)
    want = concatenate_heads(x)
    if whole.shape != want.shape:
        return f"the output has the shape {list(whole.shape)}, expected {list(want.shape)}"
    before = whole[:, :-1]
    if torch.allclose(before, f(changed)[:, :-1], atol=1e-5):
        return None
    return "looks_ahead"
