"""Attention with packed documents and padding on a CPU, stretch by stretch, without a matrix of what may be seen.

A stretch is one document of one row, or the whole row. Where its visible tokens stand side by side, its attention is
that of a shorter sequence without any such rule, and nothing is computed for pairs that do not see each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from regard.mechanisms.base import can_read
from regard.shapes import Mask

# Pairs of all heads for each stretch: with fewer, its calls cost more than one dense mask for all.
LEAST_PAIRS = 2**18

Attend = Callable[[Tensor, Tensor, Tensor, Mask], Tensor]


class Stretch(NamedTuple):
    """A document of a row: how many tokens it has, how many hidden ones come first, how many visible ones then."""

    length: int
    before: int
    visible: int


def find_stretches(q: Tensor, mask: Mask, S: int) -> list[list[Stretch]] | None:
    """Returns the stretches of each row, or of one row where all are alike; None where another way is needed or faster.

    q [B,H,T,K] are queries over S keys.
    """
    B, H, T, _ = q.shape
    most = B * H * T * S // LEAST_PAIRS
    if q.device.type != "cpu" or most < B or _refuse_stretches(mask, T, S) is not None:
        return None
    rows = _read_stretches(mask)
    if rows is None or sum(map(len, rows)) > most:
        return None
    return rows


def _refuse_stretches(mask: Mask, T: int, S: int) -> str | None:
    """Returns why the rules of T queries over S keys cannot be taken by stretches, or None."""
    if mask.visible is None and mask.documents is None:
        return "it is for packed documents and padding"
    if mask.adjusts_scores or mask.rows is not None or mask.start is not None:
        return "it knows no rules beside causal, the window, documents and padding"
    if mask.window is not None and not mask.causal:
        return "it takes a window where it is causal"
    if T != S:
        return "it takes each query to stand at the key of the same index"
    for rule in (mask.visible, mask.documents):
        if rule is not None and not (rule.device.type == "cpu" and can_read(rule)):
            return "it reads documents and padding on a CPU"
    return None


def _read_stretches(mask: Mask) -> list[list[Stretch]] | None:
    """Returns the stretches of each row, of one row where all are alike, or None where visible tokens have gaps."""
    rule = mask.visible if mask.documents is None else mask.documents
    assert rule is not None
    B, S = rule.shape
    visible = mask.visible
    if visible is None:
        visible = torch.ones(B, S, dtype=torch.bool)
    begins = torch.zeros(B, S, dtype=torch.bool)
    begins[:, 0] = True
    if mask.documents is not None:
        begins[:, 1:] = mask.documents[:, 1:] != mask.documents[:, :-1]
    # All rows one after the other: where stretches start and end, and how many visible tokens stand before each place.
    starts = begins.flatten().nonzero().flatten()
    ends = torch.cat([starts[1:], starts.new_tensor([B * S])])
    seen = visible.flatten()
    counts = torch.cat([starts.new_zeros(1), seen.cumsum(0)])
    numbers = counts[ends] - counts[starts]
    places = torch.cat([seen.nonzero().flatten(), starts.new_tensor([B * S])])  # of visible tokens, and one behind all
    first = torch.where(numbers > 0, places[counts[starts]], starts)
    last = torch.where(numbers > 0, places[(counts[ends] - 1).clamp(min=0)], starts - 1)
    if bool((last - first + 1 != numbers).any()):
        return None
    listed = torch.stack([starts // S, ends - starts, first - starts, numbers], 1).tolist()
    rows: list[list[Stretch]] = [[] for _ in range(B)]
    for row, length, before, number in listed:
        rows[row].append(Stretch(length, before, number))
    if all(row == rows[0] for row in rows):
        return rows[:1]
    return rows


def attend_by_stretches(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Mask, rows: list[list[Stretch]]
) -> Tensor:
    """Returns attention [B,H,T,V] under documents and padding; `attend` computes it for shorter plain sequences."""
    rules = Mask(causal=mask.causal, window=mask.window)
    if len(rows) == 1:
        return _attend_row(attend, q, k, v, rules, rows[0])
    # Split and not sliced, here and below: the gradient of a slice would be as long as the whole sequence.
    parts = zip(q.split(1), k.split(1), v.split(1), rows, strict=True)
    return torch.cat([_attend_row(attend, *part[:3], rules, part[3]) for part in parts])


def _attend_row(attend: Attend, q: Tensor, k: Tensor, v: Tensor, rules: Mask, stretches: list[Stretch]) -> Tensor:
    """Returns attention [B,H,T,V] of rows that have these stretches."""
    lengths = [stretch.length for stretch in stretches]
    parts = zip(q.split(lengths, 2), k.split(lengths, 2), v.split(lengths, 2), stretches, strict=True)
    return torch.cat([_attend_stretch(attend, *part[:3], rules, part[3]) for part in parts], 2)


def _attend_stretch(attend: Attend, q: Tensor, k: Tensor, v: Tensor, rules: Mask, stretch: Stretch) -> Tensor:
    """Returns attention [B,H,T,V] of one stretch, zeros for queries that see nothing."""
    N = stretch.visible
    sizes = [stretch.before, N, stretch.length - stretch.before - N]
    k, v = (x.split(sizes, 2)[1] for x in (k, v))
    if not rules.causal:
        return _attend_or_zeros(attend, q, k, v, rules)
    before, among, after = q.split(sizes, 2)
    outs = [_attend_or_zeros(attend, before, k[:, :, :0], v[:, :, :0], rules)]
    outs.append(_attend_or_zeros(attend, among, k, v, rules.without_idle_rules(N, N)))
    # A hidden query behind the visible tokens sees all of them, or as many as its window has places before it.
    if rules.window is not None and rules.window <= N:
        k, v = (x[:, :, N - rules.window + 1 :] for x in (k, v))
    outs.append(_attend_or_zeros(attend, after, k, v, Mask()))
    return torch.cat([out for out in outs if out.shape[2] > 0], 2)


def _attend_or_zeros(attend: Attend, q: Tensor, k: Tensor, v: Tensor, rules: Mask) -> Tensor:
    """Returns attention [B,H,T,V], or zeros that depend on nothing where there are no queries or no keys."""
    if q.shape[2] == 0 or k.shape[2] == 0:
        return v.new_zeros(*q.shape[:3], v.shape[3])
    return attend(q, k, v, rules)
