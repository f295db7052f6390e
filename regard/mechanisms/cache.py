"""Keys and values of the past: the state of mechanisms that compare pairs, and of all that have a window."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from regard.errors import MaskError
from regard.mechanisms import ring
from regard.mechanisms.base import Mechanism, refuse_in_state
from regard.shapes import Mask, Size, Values, Visible, check_mask, check_state


class Cache(NamedTuple):
    """Keys and values by position: slot p holds the p-th visible token of its row, so padding takes no room.

    With a window the slots are a ring of at most `window`: slot p mod C holds the last token that falls on it.
    """

    k: Float[Tensor, "B G C K"] | None  # C slots, of which some are free; None where a mechanism needs no keys
    v: Float[Tensor, "B G C V"]
    tokens: Int[Tensor, " B"]  # visible tokens of each row
    used: int  # no row has more; without a window, never more than there are slots
    even: bool  # every row has exactly `used`: then nothing needs masking
    rules: Mask  # window, slopes and softcap, which hold at every step

    @property
    def is_ring(self) -> bool:
        """Returns whether there is a slot for every token within the window, so that none are added any more."""
        return self.rules.window is not None and self.v.shape[2] >= self.rules.window


def empty_cache(mechanism: Mechanism, size: Size, rules: Mask) -> Cache:
    """Returns a cache without tokens, with room for S in each row, or for the window where that is less."""
    refuse_in_state(mechanism, rules)
    check_mask(rules, size)
    slots = min(size.S, rules.window or size.S)

    def room(width: int) -> Tensor:
        return torch.zeros(size.B, size.G, slots, width, dtype=size.dtype, device=size.device)

    count = torch.zeros(size.B, dtype=torch.long, device=size.device)
    k = room(size.K) if "k" in mechanism.needs else None
    return Cache(k, room(size.V), count, 0, True, rules)


def append_to_cache(state: Cache, k: Tensor | None, v: Tensor, visible: Tensor | None) -> Cache:
    """Returns the cache with tokens at the next slots of each row; invisible ones take none.

    The room is written in place under `torch.no_grad()` and `inference_mode()` only: otherwise an earlier call may have
    kept it for a gradient, of its queries alone even. It grows where it is too small; with a window, up to the window,
    and from then on a new token takes the slot of the oldest.
    """
    check_fits(state, k, v)
    if v.shape[2] == 0:
        return state
    state = grow_for_tokens(state, v.shape[2])
    if state.even and visible is None:
        return _append_evenly(state, k, v)
    if state.rules.window is not None and (visible is not None or v.shape[2] > 1):
        return _append_to_ring(state, k, v, visible)
    return _append_visible(state, k, v, visible)


def write_cache(state: Cache, k: Tensor | None, v: Tensor, visible: Tensor | None) -> Cache:
    """Returns the cache with another sequence in it, of which nothing is forgotten: queries may stand anywhere."""
    if state.used > state.v.shape[2]:
        raise MaskError(
            "a state with a window that has been extended beyond it has forgotten its first tokens and cannot be "
            "written to: write into an empty one"
        )
    return append_to_cache(grow_cache(state, state.used + v.shape[2]), k, v, visible)


def check_fits(state: Cache, k: Tensor | None, v: Tensor) -> None:
    """Raises where tokens have other heads, widths or rows than the cache."""
    same_values = v.shape[:2] == state.v.shape[:2] and v.shape[3] == state.v.shape[3]
    same_keys = state.k is None or (k is not None and k.shape[3] == state.k.shape[3])
    if same_values and same_keys:
        return  # before any size is built: this is asked at every step of decoding
    B, G, _, V = state.v.shape
    if state.k is None:
        check_state(Size(B=B, G=G, K=0, V=V), None, v)
    else:
        check_state(Size(B=B, G=G, K=state.k.shape[3], V=V), k, v)


def _append_evenly(state: Cache, k: Tensor | None, v: Tensor) -> Cache:
    """Returns the cache with all tokens at the same slots of every row."""
    T = v.shape[2]

    def put(room: Tensor, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            room = room.clone()
        ring.write_evenly(room, x, state.used)
        return room

    return _store(state, k, v, put)._replace(tokens=state.tokens + T, used=state.used + T)


def _append_visible(state: Cache, k: Tensor | None, v: Tensor, visible: Tensor | None) -> Cache:
    """Returns the cache with the visible tokens of each row at its own next slots."""
    T = v.shape[2]
    # Invisible tokens go behind the visible ones, where the next write covers them.
    slots = state.tokens[:, None] + torch.arange(T, device=v.device)
    if state.rules.window is not None:
        slots = slots % state.v.shape[2]
    added = visible_counts(v, visible).sum(1)

    def put(room: Tensor, x: Tensor) -> Tensor:
        x = _visible_first(x.to(room.dtype), visible)
        index = slots[:, None, :, None].expand_as(x)
        if torch.is_grad_enabled():
            return room.scatter(2, index, x)
        return room.scatter_(2, index, x)

    return _store(state, k, v, put)._replace(tokens=state.tokens + added, used=state.used + T, even=False)


def _append_to_ring(state: Cache, k: Tensor | None, v: Tensor, visible: Tensor | None) -> Cache:
    """Returns the ring with the visible tokens of each row; the oldest make room, the invisible ones touch nothing."""
    added = visible_counts(v, visible).sum(1)
    placement = ring.place(state.v.shape[2], state.tokens, added)

    def put(room: Tensor, x: Tensor) -> Tensor:
        return ring.write_placed(room, _visible_first(x.to(room.dtype), visible), placement)

    used = state.used + v.shape[2]
    return _store(state, k, v, put)._replace(tokens=state.tokens + added, used=used, even=False)


def _visible_first(x: Tensor, visible: Tensor | None) -> Tensor:
    """Returns tokens x [B,G,T,X] with the visible ones of each row before the others, which are zeros."""
    if visible is None:
        return x
    order = torch.argsort((~visible).to(torch.uint8), dim=1, stable=True)
    return Mask(visible=visible).zero_hidden(x).gather(2, order[:, None, :, None].expand_as(x))


def _store(state: Cache, k: Tensor | None, v: Tensor, put: Callable[[Tensor, Tensor], Tensor]) -> Cache:
    """Returns the cache with keys, where it has any, and values put into their rooms."""
    if state.k is None or k is None:
        return state._replace(k=None, v=put(state.v, v))
    return state._replace(k=put(state.k, k), v=put(state.v, v))


def grow_for_tokens(state: Cache, T: int) -> Cache:
    """Returns the cache with room for T more tokens, or for as many as its window.

    `used` counts invisible tokens too, which take no slot. Their number waits for the device, so it is asked for only
    where the room would have to grow.
    """
    if state.is_ring:
        return state
    if state.used + T > state.v.shape[2] and not state.even and not torch.compiler.is_compiling():
        state = state._replace(used=int(state.tokens.max()))
    need = state.used + T
    return grow_cache(state, min(need, state.rules.window or need))


def grow_cache(state: Cache, need: int) -> Cache:
    """Returns the cache with room for `need` tokens: at least doubled, so that growing costs little in all.

    Up to the window it grows no further than the window.
    """
    room = state.v.shape[2]
    if need <= room:
        return state
    target = max(need, 2 * room)
    if state.rules.window is not None and need <= state.rules.window:
        target = min(target, state.rules.window)
    more = target - room

    def grow(x: Tensor) -> Tensor:
        return functional.pad(x, (0, 0, 0, more))

    return state._replace(k=None if state.k is None else grow(state.k), v=grow(state.v))


def used_slots(state: Cache) -> tuple[Tensor | None, Tensor]:
    """Returns the keys, where there are any, and the values of the slots that some row uses."""
    values = state.v[:, :, : state.used]
    if state.k is None:
        return None, values
    return state.k[:, :, : state.used], values


class Past(NamedTuple):
    """The last n tokens of a cache, in order."""

    k: Float[Tensor, "B G n K"] | None
    v: Float[Tensor, "B G n V"]
    visible: Bool[Tensor, "B n"] | None  # rows with fewer tokens lack the first ones; None where none lacks any
    start: Int[Tensor, "#B"]  # the position of the first


def last_tokens(state: Cache, n: int) -> Past:
    """Returns the last n tokens of each row; no row has more than `used`, and n is at most that."""
    if state.even:
        k = None if state.k is None else ring.last_evenly(state.k, state.used, n)
        start = torch.full((1,), state.used - n, device=state.v.device)
        return Past(k, ring.last_evenly(state.v, state.used, n), None, start)
    slots, visible = ring.last_slots(state.v.shape[2], state.tokens, n)
    k = None if state.k is None else ring.pick(state.k, slots)
    return Past(k, ring.pick(state.v, slots), visible, (state.tokens - n).clamp(min=0))


def visible_counts(v: Values, visible: Visible | None) -> Int[Tensor, "B S"]:
    """Returns 1 for each visible token, and 0 for the others."""
    if visible is None:
        return torch.ones(v.shape[0], v.shape[2], dtype=torch.long, device=v.device)
    return visible.long()
