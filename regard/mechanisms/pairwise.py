"""Mechanisms given by an explicit weight for each pair of query and key.

A mechanism of this family writes one method, `weights`. The parallel face is weights @ v, the recurrent face keeps
keys and values in a `Cache`, and the cost is that of all pairs.
"""

from __future__ import annotations

from abc import abstractmethod
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

    k: Float[Tensor, "B G C K"] | None
    v: Float[Tensor, "B G C V"]
    tokens: Int[Tensor, " B"]  # visible tokens of each row
    used: int  # no row has more
    even: bool  # every row has exactly `used`: then nothing needs masking
    rules: Mask


_CAUSAL = Mask(causal=True)


class Pairwise(Mechanism):
    """The family: `weights` is the mechanism, everything else follows from it."""

    order = "N²·max(K,V)"
    memory = "N·G·(K+V)"
    training_memory = "N²+N·(K+V)"

    @property
    def learns(self) -> bool:
        """Whether gradients pass through the weights, and not to the values only."""
        return True

    @abstractmethod
    def weights(self, q: Queries | None, k: Keys | None, mask: Mask = Mask()) -> Weights: ...

    def score_flops(self, K: int) -> int:
        """FLOPs of the matrix product behind one score."""
        return 2 * K

    def learned_numbers(self, size: Size) -> int:
        """Numbers that a call reads of the mechanism's own parameters, whatever the batch."""
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
        own = self.learned_numbers(size) * size.e
        return pair_cost(self, size, face, self.score_flops(size.K)) + Cost(0, 0, 0, own, 0)

    def gradient_cost(self, size: Size) -> Cost:
        own = 2 * self.learned_numbers(size) * size.e if self.learns else 0
        return pair_gradient_cost(self, size, self.score_flops(size.K), self.learns) + Cost(0, 0, 0, own, 0)


def scores(q: Queries, k: Keys, mask: Mask) -> Weights:
    """q·k for every pair, [B,H,T,S]; query head h meets key head h // (H/G)."""
    check_sizes(q, k, k, mask)
    q, k = upcast_half(q), upcast_half(mask.zero_hidden(k))
    B, H, T, _ = q.shape
    G, S = k.shape[1], k.shape[2]
    return (q.reshape(B, G, H // G * T, -1) @ k.mT).view(B, H, T, S)


def mix(weights: Weights, v: Values) -> Outputs:
    """weights @ v, with each key/value head serving its group of query heads."""
    B, H, T, S = weights.shape
    G = v.shape[1]
    return (weights.reshape(B, G, H // G * T, S) @ v).view(v.shape[0], H, T, v.shape[3])


def attend_by_weights(mechanism: Mechanism, q: Queries | None, k: Keys | None, v: Values, mask: Mask) -> Outputs:
    """The parallel face by its definition, weights @ v, or by a kernel that does the same."""
    if "k" not in mechanism.needs and mask.size_override is None:
        mask = mask.but(size_override=(v.shape[2] if q is None else q.shape[2], v.shape[2]))
    fast = mechanism.select_kernel("forward", q, k, v, mask)
    if fast is not None:
        out: Tensor = fast(mechanism, q, k, v, mask)
        return out
    if v.shape[2] == 0:
        return zero_output(q, v)
    with without_autocast(v):
        weights = mechanism.weights(q, None if k is None else mask.zero_hidden(k), mask)
        weights = functional.dropout(weights, mechanism.dropout, mechanism.training)
        return mix(weights, upcast_half(mask.zero_hidden(v)).to(weights.dtype)).to(v.dtype)


def empty_cache(mechanism: Mechanism, size: Size, rules: Mask) -> Cache:
    refuse_in_state(mechanism, rules)
    check_mask(rules, size)

    def room(width: int) -> Tensor:
        return torch.zeros(size.B, size.G, size.S, width, dtype=size.dtype, device=size.device)

    count = torch.zeros(size.B, dtype=torch.long, device=size.device)
    k = room(size.K) if "k" in mechanism.needs else None
    return Cache(k, room(size.V), count, 0, True, rules)


def append_to_cache(state: Cache, k: Tensor | None, v: Tensor, visible: Tensor | None) -> Cache:
    """Writes tokens at the next free slots of each row; invisible ones take none. In place unless gradients flow."""
    T, start = v.shape[2], state.used
    if not _fits(state, k, v):
        K = 0 if state.k is None else state.k.shape[3]
        check_state(Size(B=state.v.shape[0], G=state.v.shape[1], K=K, V=state.v.shape[3]), k if K else None, v)
    state = grow_cache(state, start + T)
    if state.even and visible is None:
        k_room = None if state.k is None or k is None else _put(state.k, k, start)
        return Cache(k_room, _put(state.v, v, start), state.tokens + T, start + T, True, state.rules)
    if visible is None:
        order, added = None, torch.full_like(state.tokens, T)
    else:
        order, added = torch.argsort((~visible).to(torch.uint8), dim=1, stable=True), visible.sum(1)
        v = Mask(visible=visible).zero_hidden(v)
        k = None if k is None else Mask(visible=visible).zero_hidden(k)
    # Invisible tokens go behind the visible ones, where the next write covers them.
    slots = state.tokens[:, None] + torch.arange(T, device=v.device)

    def put(room: Tensor, x: Tensor) -> Tensor:
        x = x.to(room.dtype)
        if order is not None:
            x = x.gather(2, order[:, None, :, None].expand_as(x))
        index = slots[:, None, :, None].expand_as(x)
        return room.scatter(2, index, x) if _kept(room, x) else room.scatter_(2, index, x)

    k_room = None if state.k is None or k is None else put(state.k, k)
    return Cache(k_room, put(state.v, v), state.tokens + added, start + T, False, state.rules)


def _fits(state: Cache, k: Tensor | None, v: Tensor) -> bool:
    (B, G, _, V), (b, g, _, w) = state.v.shape, v.shape
    return (b, g, w) == (B, G, V) and (state.k is None or (k is not None and state.k.shape[3] == k.shape[3]))


def _put(room: Tensor, x: Tensor, start: int) -> Tensor:
    """The room with x at the same slots of every row."""
    room = room.clone() if _kept(room, x) else room
    room.narrow(2, start, x.shape[2]).copy_(x)
    return room


def _kept(room: Tensor, x: Tensor) -> bool:
    """Whether gradients flow, so that nothing may be overwritten."""
    return torch.is_grad_enabled() and (x.requires_grad or room.requires_grad)


def grow_cache(state: Cache, need: int) -> Cache:
    """The same cache with room for `need` tokens."""
    room = state.v.shape[2]
    if need <= room:
        return state
    more = max(need, 2 * room) - room

    def grow(x: Tensor) -> Tensor:
        return functional.pad(x, (0, 0, 0, more))

    return state._replace(k=None if state.k is None else grow(state.k), v=grow(state.v))


def _slots(state: Cache) -> tuple[Tensor | None, Tensor]:
    return None if state.k is None else state.k[:, :, : state.used], state.v[:, :, : state.used]


def extend_cache(
    mechanism: Mechanism, q: Tensor | None, k: Tensor | None, v: Tensor, state: Cache, visible: Tensor | None
) -> tuple[Tensor, Cache]:
    """The recurrent face of anything with a `Cache`: append, then attend over the slots."""
    T = check_sizes(q, k, v, Mask(causal=True, visible=visible), new=True).T
    if T == 0:
        return zero_output(q, v), state
    before = state.tokens
    state = append_to_cache(state, k, v, visible)
    rows = None
    if not state.even:
        seen = torch.ones(v.shape[0], T, dtype=torch.long, device=v.device) if visible is None else visible.long()
        limit = before[:, None] + seen.cumsum(1)
        rows = Rows(limit - seen, limit)
    keys, values = _slots(state)
    mask = state.rules.but(causal=True, rows=rows, size_override=(T, state.used))
    return attend_by_weights(mechanism, q, keys, values, mask).to(v.dtype), state


def read_cache(mechanism: Mechanism, q: Tensor, state: Cache, positions: Tensor | None, bias: Tensor | None) -> Tensor:
    if positions is None and (state.rules.window is not None or state.rules.depends_on_heads):
        raise MaskError(
            "reading with a window, slopes or relative positions needs the queries' places: "
            "read(q, state, positions=[B,T])"
        )
    keys, values = _slots(state)
    if state.used == 0:
        return zero_output(q, values)
    visible = None if state.even else torch.arange(state.used, device=q.device) < state.tokens[:, None]
    rows = None if positions is None else Rows(positions, positions + 1)
    mask = state.rules.but(visible=visible, rows=rows, bias=bias)
    check_sizes(q, keys, values, mask)
    return attend_by_weights(mechanism, q, keys, values, mask)


def zero_output(q: Tensor | None, v: Tensor) -> Tensor:
    """The output for no tokens, or over no keys: zeros."""
    B, G, T, V = v.shape
    return v.new_zeros((B, G, T, V) if q is None else (*q.shape[:3], V))


def count_pairs(size: Size) -> int:
    """Pairs of query and key that count: the causal half where the queries are the last T keys."""
    T, S = size.T, size.S
    return T * S - T * (T - 1) // 2 if size.causal else T * S


def pair_cost(mechanism: Mechanism, size: Size, face: Face, score: int, elementwise: int = 5) -> Cost:
    """Cost of all pairs: `score` FLOPs each for the score, 2V for the mixing."""
    B, T, S, H, G, K, V = size.B, size.T, size.S, size.H, size.G, size.K, size.V
    k_width = K if "k" in mechanism.needs else 0
    q_width = K if "q" in mechanism.needs else 0
    mixing = 0 if face == "weights" else 2 * V
    per_pair = (B if "q" in mechanism.needs else 1) * score + B * mixing  # scores without q serve the whole batch
    useful = count_pairs(Size(T=T, S=S, causal=size.causal or face == "recurrent"))
    moved = H * T * q_width + G * S * k_width + (H * T * S if face == "weights" else G * S * V + H * T * V)
    return Cost(
        matmul=H * T * S * per_pair,
        useful=H * useful * per_pair,
        elementwise=B * H * useful * elementwise,
        bytes=B * moved * size.e,
        state=B * G * S * (k_width + V) * size.e,
    )


def pair_gradient_cost(mechanism: Mechanism, size: Size, score: int, learns: bool, elementwise: int = 4) -> Cost:
    """Of the gradients of all pairs: to v one product; where weights learn, one to them and two for each score."""
    B, V, per_batch = size.B, size.V, size.B if "q" in mechanism.needs else 1
    per_pair = 2 * B * V + (2 * B * V + 2 * per_batch * score if learns else 0)
    useful = count_pairs(size)
    return Cost(
        matmul=size.H * size.T * size.S * per_pair,
        useful=size.H * useful * per_pair,
        elementwise=B * size.H * useful * elementwise if learns else 0,
        bytes=gradient_bytes(mechanism, size),
        state=0,
    )
