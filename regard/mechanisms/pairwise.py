"""Mechanisms given by an explicit weight for each pair of query and key.

A mechanism of this family writes one method, `weights`. The parallel face is weights @ v, the recurrent face keeps
keys and values in a `Cache`, and the cost is that of all pairs.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from regard.errors import MaskError
from regard.mechanisms.base import Cost, Face, Mechanism, require_cross, without_autocast
from regard.mechanisms.cache import (
    Cache,
    append_to_cache,
    check_fits,
    empty_cache,
    last_tokens,
    used_slots,
    visible_counts,
    write_cache,
)
from regard.mechanisms.nonfinite import mark_rows, replace_nonfinite, rows_of_documents, rows_that_see
from regard.mechanisms.pair_costs import attended_size, pair_cost, pair_gradient_cost
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
    check_sizes,
    upcast_half,
)

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
        size = check_sizes(q, k, v, mask, heads=getattr(self, "heads", None))
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
        return write_cache(state, k, v, visible)

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
        parameters = self.learned_numbers(attended_size(size, face)) * size.e
        return pair_cost(self, size, face, self.score_flops(size.K)) + Cost(0, 0, 0, parameters, 0)

    def gradient_cost(self, size: Size) -> Cost:
        cost = pair_gradient_cost(self, size, self.score_flops(size.K), self.learns)
        if self.learns:  # its parameters are read, and their gradients written
            cost += Cost(0, 0, 0, 2 * self.learned_numbers(size) * size.e, 0)
        return cost


def scores(q: Queries, k: Keys, mask: Mask) -> Weights:
    """Returns q·k for every pair, [B,H,T,S]; query head h meets key head h // (H/G).

    Nothing is hidden yet: `mask` says which keys nobody sees, so that NaN in them stays there. Weights come from
    `mask.softmax(scores)`, or from `mask.normalise(similarities)` where they are no softmax.
    """
    check_sizes(q, k, k, mask)
    q = upcast_half(q)
    k = upcast_half(mask.zero_hidden(k))
    B, H, T, K = q.shape
    _, G, S, _ = k.shape
    # [B,G,(H/G)·T,K] @ [B,G,K,S]: the query heads of a group are rows of one product, so that keys are not repeated.
    with without_autocast(q):
        return (q.reshape(B, G, H // G * T, K) @ k.mT).view(B, H, T, S)


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
    if fast is not None and mask.documents is None:
        out: Tensor = fast(mechanism, q, k, v, mask)
        return out
    if fast is None:
        return attend_by_definition(mechanism, q, k, v, mask)
    # It computes 0·NaN: what is not a number must not reach other documents.
    finite = replace_nonfinite(k, v, mask)
    out = fast(mechanism, q, finite.k, finite.v, mask)
    return mark_rows(out, rows_of_documents(finite.broken, mask.documents, mask.causal, T))


def attend_by_definition(mechanism: Mechanism, q: Queries | None, k: Keys | None, v: Values, mask: Mask) -> Outputs:
    """Returns weights @ v [B,H,T,V]; what is not a number reaches those rows only that see it."""
    T, _ = mask.size(q, v if k is None else k)
    finite = replace_nonfinite(k, v, mask)
    with without_autocast(v):
        weights = mechanism.weights(q, finite.k, mask)
        weights = functional.dropout(weights, mechanism.dropout, mechanism.training)
        out = mix(weights, upcast_half(finite.v).to(weights.dtype)).to(v.dtype)
    return mark_rows(out, rows_that_see(finite.broken, mask, T))


def extend_cache(
    mechanism: Mechanism, q: Tensor | None, k: Tensor | None, v: Tensor, state: Cache, visible: Tensor | None
) -> tuple[Tensor, Cache]:
    """Returns the causal attention of new tokens and the cache with them: append, then attend over the slots."""
    T = check_sizes(q, k, v, Mask(causal=True, visible=visible), new=True).T
    if T == 0:
        return zero_output(mechanism, q, v), state
    if state.rules.window is not None:
        return _extend_ring(mechanism, q, k, v, state, visible)
    before = state.tokens
    state = append_to_cache(state, k, v, visible)
    rows = None
    if not state.even:
        seen = visible_counts(v, visible)
        limit = before[:, None] + seen.cumsum(1)
        rows = Rows(limit - seen, limit)
    keys, values = used_slots(state)
    mask = state.rules.but(causal=True, rows=rows, size_override=(T, state.used))
    return attend_by_weights(mechanism, *_in_one_dtype(q, keys, values), mask).to(v.dtype), state


def _in_one_dtype(q: Tensor | None, k: Tensor | None, v: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Returns queries, and the keys and values of a cache, in the dtype that holds them all; None for what is absent.

    A cache may have another dtype than the new tokens, as under autocast.
    """
    if q is None or q.dtype == v.dtype:
        return q, k, v
    dtype = torch.promote_types(q.dtype, v.dtype)
    if k is not None:
        k = k.to(dtype)
    return q.to(dtype), k, v.to(dtype)


def _extend_ring(
    mechanism: Mechanism, q: Tensor | None, k: Tensor | None, v: Tensor, state: Cache, visible: Tensor | None
) -> tuple[Tensor, Cache]:
    """Returns the causal attention of new tokens within the window, and the ring with them.

    They attend to themselves and to those before them that the first of them may see: window − 1 tokens.
    """
    assert state.rules.window is not None
    check_fits(state, k, v)
    _check_length(mechanism, state, v, visible)
    T = v.shape[2]
    before = min(state.used, state.rules.window - 1)
    past = last_tokens(state, before)
    keys = None
    if k is not None and past.k is not None:
        keys = torch.cat([past.k, k.to(past.k.dtype)], 2)
    values = torch.cat([past.v, v.to(past.v.dtype)], 2)
    visible_keys = None
    if past.visible is not None or visible is not None:
        counts = [visible_counts(past.v, past.visible), visible_counts(v, visible)]
        visible_keys = torch.cat(counts, 1).bool()
    mask = state.rules.but(causal=True, visible=visible_keys, start=past.start, size_override=(T, before + T))
    state = append_to_cache(state, k, v, visible)  # after the past was copied: it writes over the oldest tokens
    return attend_by_weights(mechanism, *_in_one_dtype(q, keys, values), mask).to(v.dtype), state


def _check_length(mechanism: Mechanism, state: Cache, v: Values, visible: Visible | None) -> None:
    """Raises where new tokens lie beyond the positions that a mechanism was built for."""
    reach = state.used + v.shape[2]
    if mechanism.length is None or reach <= mechanism.length:
        return
    if not state.even or visible is not None:
        # `used` counts padding too; the exact count waits for the device, so it is asked only where it decides.
        reach = int((state.tokens + visible_counts(v, visible).sum(1)).max())
    mechanism.check_length(reach)


def read_cache(mechanism: Mechanism, q: Tensor, state: Cache, positions: Tensor | None, bias: Tensor | None) -> Tensor:
    """Returns the attention of queries over all that a cache holds."""
    if positions is None and (state.rules.window is not None or state.rules.depends_on_heads):
        raise MaskError(
            "reading with a window, slopes or relative positions needs the queries' places: "
            "read(q, state, positions=[B,T])"
        )
    keys, values = used_slots(state)
    if state.used == 0:
        return zero_output(mechanism, q, values)
    visible = None
    start = None
    if state.used > state.v.shape[2]:  # a ring: its slots are in no order, and the first tokens are gone
        past = last_tokens(state, state.v.shape[2])
        keys = past.k
        values = past.v
        visible = past.visible
        start = past.start
    elif not state.even:
        visible = torch.arange(state.used, device=q.device) < state.tokens[:, None]
    rows = None
    if positions is not None:
        rows = Rows(positions, positions + 1)
    mask = state.rules.but(visible=visible, start=start, rows=rows, bias=bias)
    slots = _in_one_dtype(q, keys, values)
    check_sizes(*slots, mask)
    return attend_by_weights(mechanism, *slots, mask).to(q.dtype)


def zero_output(mechanism: Mechanism, q: Tensor | None, v: Tensor) -> Tensor:
    """Returns the output for no tokens, or over no keys: zeros [B,H,T,V]."""
    B, G, S, V = v.shape
    if q is None:
        return v.new_zeros(B, getattr(mechanism, "heads", G), S, V)
    return v.new_zeros((*q.shape[:3], v.shape[3]))
