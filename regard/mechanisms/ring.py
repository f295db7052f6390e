"""A ring of slots: what a state with a window keeps, however many tokens it has read.

A room [B,G,C,X] of C slots holds the token of position p in slot p mod C, so that a token takes the place of the one C
positions before it. As long as a row has no more than C tokens, the slot is the position.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Placement(NamedTuple):
    """Which of T new tokens each slot of a ring takes, [B,C]."""

    token: Int[Tensor, "B C"]  # the number of the new token among the visible ones of its row
    is_new: Bool[Tensor, "B C"]  # whether there is one; else the slot stays as it is


def write_evenly(room: Float[Tensor, "B G C X"], x: Float[Tensor, "B G T X"], start: int) -> None:
    """Writes T tokens in place, at the positions from `start` on of every row; of more than C, the last C."""
    C = room.shape[2]
    T = x.shape[2]
    count = min(T, C)
    first = (start + T - count) % C
    before_end = min(count, C - first)
    _, head, tail = x.split([T - count, before_end, count - before_end], 2)
    room.narrow(2, first, before_end).copy_(head)
    if count > before_end:
        room.narrow(2, 0, count - before_end).copy_(tail)


def place(C: int, tokens: Int[Tensor, " B"], added: Int[Tensor, " B"]) -> Placement:
    """Returns what each of C slots takes where rows of `tokens` tokens get `added` more."""
    last = (tokens + added - 1)[:, None]
    slots = torch.arange(C, device=tokens.device)
    # The last position that falls on each slot; negative where there is none yet.
    position = last - (last - slots) % C
    token = position - tokens[:, None]
    return Placement(token.clamp(min=0), token >= 0)


def write_placed(
    room: Float[Tensor, "B G C X"], x: Float[Tensor, "B G T X"], placement: Placement
) -> Float[Tensor, "B G C X"]:
    """Returns the room with the new tokens x, of which the visible ones come first, where `placement` puts them."""
    index = placement.token[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return torch.where(placement.is_new[:, None, :, None], x.gather(2, index), room)


def last_evenly(room: Float[Tensor, "B G C X"], used: int, n: int) -> Float[Tensor, "B G n X"]:
    """Returns the last n of `used` tokens in every row, in the order of their positions."""
    C = room.shape[2]
    first = (used - n) % max(C, 1)
    before_end = min(n, C - first)
    head = room.narrow(2, first, before_end)
    if before_end == n:
        return head
    return torch.cat([head, room.narrow(2, 0, n - before_end)], 2)


def last_slots(C: int, tokens: Int[Tensor, " B"], n: int) -> tuple[Int[Tensor, "B n"], Bool[Tensor, "B n"]]:
    """Returns the slots of the last n tokens of each row, in order, and whether there is such a token.

    A row that has fewer tokens lacks the first ones.
    """
    positions = tokens[:, None] - n + torch.arange(n, device=tokens.device)
    return positions % max(C, 1), positions >= 0


def pick(room: Float[Tensor, "B G C X"], slots: Int[Tensor, "B n"]) -> Float[Tensor, "B G n X"]:
    """Returns the tokens in these slots of each row."""
    return room.gather(2, slots[:, None, :, None].expand(-1, room.shape[1], -1, room.shape[3]))
