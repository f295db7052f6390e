"""Mechanisms given by an explicit weight for each pair of query and key.

A mechanism of this family writes one method, `weights`. The parallel face is weights @ v, the recurrent face keeps
keys and values in a `Cache`, and the cost is that of all pairs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from regard.errors import MaskError
from regard.mechanisms.base import (
    Cost,
    Face,
    Mechanism,
    gradient_bytes,
    needed_widths,
    refuse_in_state,
    require_cross,
    without_autocast,
)
from regard.shapes import (
    Keys,
    Mask,
    Outputs,
    Queries,
    Rows,
    Size,
    Values,
    Visible,
    Weights,
    check_mask,
    check_sizes,
    check_state,
    upcast_half,
)


class Cache(NamedTuple):
    """Keys and values by position: slot p holds the p-th visible token of its row, so padding takes no room."""

    k: Float[Tensor, "B G C K"] | None  # C slots, of which some are free; None where a mechanism needs no keys
    v: Float[Tensor, "B G C V"]
    tokens: Int[Tensor, " B"]  # visible tokens of each row
    used: int  # no row has more
    even: bool  # every row has exactly `used`: then nothing needs masking
    rules: Mask  # window, slopes and softcap, which hold at every step


_CAUSAL = Mask(causal=True)


class Pairwise(Mechanism):
    """The family: `weights` is the mechanism, everything else follows from it."""

    order = "N²·max(K,V)"
    memory = "N·G·(K+V)"
    training_memory = "N²+N·(K+V)"

    @property
    def learns(self) -> bool:
        """Returns whether gradients pass through the weights, and not to the values only."""
        return True

    @abstractmethod
    def weights(self, q: Queries | None, k: Keys | None, mask: Mask = Mask()) -> Weights: ...

    def score_flops(self, K: int) -> int:
        """Returns the FLOPs of the matrix product behind one score."""
        return 2 * K

    def learned_numbers(self, size: Size) -> int:
        """Returns how many of the mechanism's own parameters a call reads, whatever the batch."""
        return 0

    def forward(self, q: Queries | None, k: Keys | None, v: Values, mask: Mask = Mask()) -> Outputs:
        size = check_sizes(q, k, v, mask)
        if size.T != size.S and not mask.causal:
            require_cross(self)
        return attend_by_weights(self, q, k, v, mask)

    def empty(self, size: Size, rules: Mask = Mask()) -> Cache:
        return empty_cache(self, size, rules)

    def extend(
        self,
        q: Float[Tensor, "B H T K"] | None,
        k: Float[Tensor, "B G T K"] | None,
        v: Float[Tensor, "B G T V"],
        state: Cache,
        visible: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Outputs, Cache]:
        check_sizes(q, k, v, _CAUSAL if visible is None else _CAUSAL.but(visible=visible), new=True)
        fast = self.select_kernel("extend", q, k, v, state, visible)
        if fast is not None:
            result: tuple[Tensor, Cache] = fast(self, q, k, v, state, visible)
            return result
        return extend_cache(self, q, k, v, state, visible)

    def write(self, state: Cache, k: Keys | None, v: Values, visible: Visible | None = None) -> Cache:
        require_cross(self)
        check_sizes(None, k, v, Mask(visible=visible))
        return append_to_cache(state, k, v, visible)

    def read(
        self,
        q: Queries,
        state: Cache,
        positions: Int[Tensor, "B T"] | None = None,
        bias: Float[Tensor, "..."] | None = None,
    ) -> Outputs:
        require_cross(self)
        return read_cache(self, q, state, positions, bias)

    def cost(self, size: Size, face: Face = "parallel") -> Cost:
        parameters = self.learned_numbers(size) * size.e
        return pair_cost(self, size, face, self.score_flops(size.K)) + Cost(0, 0, 0, parameters, 0)

    def gradient_cost(self, size: Size) -> Cost:
        cost = pair_gradient_cost(self, size, self.score_flops(size.K), self.learns)
        if self.learns:  # its parameters are read, and their gradients written
            cost += Cost(0, 0, 0, 2 * self.learned_numbers(size) * size.e, 0)
        return cost


def scores(q: Queries, k: Keys, mask: Mask) -> Weights:
    """Returns q·k for every pair, [B,H,T,S]; query head h meets key head h // (H/G)."""
    check_sizes(q, k, k, mask)
    q = upcast_half(q)
    k = upcast_half(mask.zero_hidden(k))
    B, H, T, _ = q.shape
    _, G, S, _ = k.shape
    # [B,G,(H/G)·T,K] @ [B,G,K,S]: the query heads of a group are rows of one product, so that keys are not repeated.
    return (q.reshape(B, G, H // G * T, -1) @ k.mT).view(B, H, T, S)


def mix(weights: Weights, v: Values) -> Outputs:
    """Returns weights @ v, with each key/value head serving its group of query heads."""
    B, H, T, S = weights.shape
    _, G, _, V = v.shape
    # [B,G,(H/G)·T,S] @ [B,G,S,V]; weights may have one row for the whole batch, which v then decides.
    return (weights.reshape(B, G, H // G * T, S) @ v).view(v.shape[0], H, T, V)


def attend_by_weights(mechanism: Mechanism, q: Queries | None, k: Keys | None, v: Values, mask: Mask) -> Outputs:
    """Returns the output of the parallel face by its definition, weights @ v, or by a kernel that does the same."""
    if "k" not in mechanism.needs and mask.size_override is None:
        queries = v if q is None else q
        mask = mask.but(size_override=(queries.shape[2], v.shape[2]))
    T, S = mask.size(q, v if k is None else k)
    mask = mask.without_idle_rules(T, S)
    fast = mechanism.select_kernel("forward", q, k, v, mask)
    if fast is not None:
        out: Tensor = fast(mechanism, q, k, v, mask)
        return out
    if v.shape[2] == 0:
        return zero_output(q, v)
    with without_autocast(v):
        if k is not None:
            k = mask.zero_hidden(k)
        weights = mechanism.weights(q, k, mask)
        weights = functional.dropout(weights, mechanism.dropout, mechanism.training)
        return mix(weights, upcast_half(mask.zero_hidden(v)).to(weights.dtype)).to(v.dtype)


def empty_cache(mechanism: Mechanism, size: Size, rules: Mask) -> Cache:
    """Returns a cache without tokens, with room for S in each row."""
    refuse_in_state(mechanism, rules)
    check_mask(rules, size)

    def room(width: int) -> Tensor:
        return torch.zeros(size.B, size.G, size.S, width, dtype=size.dtype, device=size.device)

    count = torch.zeros(size.B, dtype=torch.long, device=size.device)
    k = room(size.K) if "k" in mechanism.needs else None
    return Cache(k, room(size.V), count, 0, True, rules)


def append_to_cache(state: Cache, k: Tensor | None, v: Tensor, visible: Tensor | None) -> Cache:
    """Returns the cache with tokens at the next free slots of each row; invisible ones take none.

    The room is written in place unless gradients flow, and grows where it is too small.
    """
    _check_fits(state, k, v)
    state = grow_cache(state, state.used + v.shape[2])
    if state.even and visible is None:
        return _append_evenly(state, k, v)
    return _append_visible(state, k, v, visible)


def _check_fits(state: Cache, k: Tensor | None, v: Tensor) -> None:
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
        if _must_copy(room, x):
            room = room.clone()
        room.narrow(2, state.used, T).copy_(x)
        return room

    return _store(state, k, v, put)._replace(tokens=state.tokens + T, used=state.used + T)


def _append_visible(state: Cache, k: Tensor | None, v: Tensor, visible: Tensor | None) -> Cache:
    """Returns the cache with the visible tokens of each row at its own next slots."""
    T = v.shape[2]
    # Invisible tokens go behind the visible ones, where the next write covers them.
    slots = state.tokens[:, None] + torch.arange(T, device=v.device)
    order = None
    added = torch.full_like(state.tokens, T)
    if visible is not None:
        order = torch.argsort((~visible).to(torch.uint8), dim=1, stable=True)
        added = visible.sum(1)
        mask = Mask(visible=visible)
        v = mask.zero_hidden(v)
        k = None if k is None else mask.zero_hidden(k)

    def put(room: Tensor, x: Tensor) -> Tensor:
        x = x.to(room.dtype)
        if order is not None:
            x = x.gather(2, order[:, None, :, None].expand_as(x))
        index = slots[:, None, :, None].expand_as(x)
        if _must_copy(room, x):
            return room.scatter(2, index, x)
        return room.scatter_(2, index, x)

    return _store(state, k, v, put)._replace(tokens=state.tokens + added, used=state.used + T, even=False)


def _store(state: Cache, k: Tensor | None, v: Tensor, put: Callable[[Tensor, Tensor], Tensor]) -> Cache:
    """Returns the cache with keys, where it has any, and values put into their rooms."""
    if state.k is None or k is None:
        return state._replace(k=None, v=put(state.v, v))
    return state._replace(k=put(state.k, k), v=put(state.v, v))


def _must_copy(room: Tensor, x: Tensor) -> bool:
    """Returns whether gradients flow, so that nothing may be overwritten."""
    return torch.is_grad_enabled() and (x.requires_grad or room.requires_grad)


def grow_cache(state: Cache, need: int) -> Cache:
    """Returns the cache with room for `need` tokens: at least doubled, so that growing costs little in all."""
    room = state.v.shape[2]
    if need <= room:
        return state
    more = max(need, 2 * room) - room

    def grow(x: Tensor) -> Tensor:
        return functional.pad(x, (0, 0, 0, more))

    return state._replace(k=None if state.k is None else grow(state.k), v=grow(state.v))


def _used_slots(state: Cache) -> tuple[Tensor | None, Tensor]:
    """Returns the keys, where there are any, and the values of the slots that some row uses."""
    values = state.v[:, :, : state.used]
    if state.k is None:
        return None, values
    return state.k[:, :, : state.used], values


def extend_cache(
    mechanism: Mechanism, q: Tensor | None, k: Tensor | None, v: Tensor, state: Cache, visible: Tensor | None
) -> tuple[Tensor, Cache]:
    """Returns the causal attention of new tokens and the cache with them: append, then attend over the slots."""
    T = check_sizes(q, k, v, Mask(causal=True, visible=visible), new=True).T
    if T == 0:
        return zero_output(q, v), state
    before = state.tokens
    state = append_to_cache(state, k, v, visible)
    rows = None
    if not state.even:
        seen = visible_counts(v, visible)
        limit = before[:, None] + seen.cumsum(1)
        rows = Rows(limit - seen, limit)
    keys, values = _used_slots(state)
    mask = state.rules.but(causal=True, rows=rows, size_override=(T, state.used))
    return attend_by_weights(mechanism, q, keys, values, mask).to(v.dtype), state


def visible_counts(v: Values, visible: Visible | None) -> Int[Tensor, "B S"]:
    """Returns 1 for each visible token, and 0 for the others."""
    if visible is None:
        return torch.ones(v.shape[0], v.shape[2], dtype=torch.long, device=v.device)
    return visible.long()


def read_cache(mechanism: Mechanism, q: Tensor, state: Cache, positions: Tensor | None, bias: Tensor | None) -> Tensor:
    """Returns the attention of queries over all that a cache holds."""
    if positions is None and (state.rules.window is not None or state.rules.depends_on_heads):
        raise MaskError(
            "reading with a window, slopes or relative positions needs the queries' places: "
            "read(q, state, positions=[B,T])"
        )
    keys, values = _used_slots(state)
    if state.used == 0:
        return zero_output(q, values)
    visible = None
    if not state.even:
        visible = torch.arange(state.used, device=q.device) < state.tokens[:, None]
    rows = None
    if positions is not None:
        rows = Rows(positions, positions + 1)
    mask = state.rules.but(visible=visible, rows=rows, bias=bias)
    check_sizes(q, keys, values, mask)
    return attend_by_weights(mechanism, q, keys, values, mask)


def zero_output(q: Tensor | None, v: Tensor) -> Tensor:
    """Returns the output for no tokens, or over no keys: zeros [B,H,T,V]."""
    if q is None:
        return v.new_zeros(v.shape)
    return v.new_zeros((*q.shape[:3], v.shape[3]))


def count_pairs(size: Size) -> int:
    """Returns the pairs of query and key that count: the causal half where the queries are the last T keys."""
    if not size.causal:
        return size.T * size.S
    return size.T * size.S - size.T * (size.T - 1) // 2


def pair_cost(mechanism: Mechanism, size: Size, face: Face, score: int, elementwise: int = 5) -> Cost:
    """Returns the cost of all pairs: `score` FLOPs each for the score, 2V for the mixing."""
    B, H, G, V = size.B, size.H, size.G, size.V
    q_width, k_width = needed_widths(mechanism, size)
    mixing = 2 * V
    outputs = G * size.S * V + H * size.T * V  # numbers moved: the values, and the output
    if face == "weights":
        mixing = 0
        outputs = H * size.T * size.S
    inputs = H * size.T * q_width + G * size.S * k_width
    per_pair = _score_batch(mechanism, size) * score + B * mixing
    useful = count_pairs(replace(size, causal=size.causal or face == "recurrent"))
    return Cost(
        matmul=H * size.T * size.S * per_pair,
        useful=H * useful * per_pair,
        elementwise=B * H * useful * elementwise,
        bytes=B * (inputs + outputs) * size.e,
        state=B * G * size.S * (k_width + V) * size.e,
    )


def pair_gradient_cost(mechanism: Mechanism, size: Size, score: int, learns: bool, elementwise: int = 4) -> Cost:
    """Returns the cost of the gradients of all pairs.

    The values take one product. Where weights learn, they take one, too, and each score two.
    """
    useful = count_pairs(size)
    per_pair = 2 * size.B * size.V
    work = 0
    if learns:
        per_pair += 2 * size.B * size.V + 2 * _score_batch(mechanism, size) * score
        work = size.B * size.H * useful * elementwise
    return Cost(
        matmul=size.H * size.T * size.S * per_pair,
        useful=size.H * useful * per_pair,
        elementwise=work,
        bytes=gradient_bytes(mechanism, size),
        state=0,
    )


def _score_batch(mechanism: Mechanism, size: Size) -> int:
    """Returns how often scores are computed: once for each sequence, but once in all where they do without q."""
    if "q" in mechanism.needs:
        return size.B
    return 1
