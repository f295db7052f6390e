"""A decoding step of multi-head and of multi-query attention: (token, cached keys and values) → (output, new cache).

x [b,d], P_q [h,d,k], P_o [h,d,v]. Multi-head: P_k [h,d,k], P_v [h,d,v], states [b,h,m,k] and [b,h,m,v]. Multi-query:
P_k [d,k], P_v [d,v], states [b,m,k] and [b,m,v]. As in the paper on multi-query attention, scores are not scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from regard.grade.advice import SubmissionError
from regard.grade.cases import Draw, GradeCase

Step = tuple[Tensor, Tensor, Tensor]
Function = Callable[..., Any]
SIZES = ((2, 7, 3, 5, 11, 4), (3, 6, 2, 4, 5, 1), (1, 5, 4, 2, 3, 6))  # b, d, h, k, v, m


def multihead(draw: Draw) -> Iterator[GradeCase]:
    """Yields steps of multi-head attention."""
    for sizes in SIZES:
        yield GradeCase(_arguments(draw, sizes, shared=False))


def multiquery(draw: Draw) -> Iterator[GradeCase]:
    """Yields steps of multi-query attention."""
    for sizes in SIZES:
        yield GradeCase(_arguments(draw, sizes, shared=True))


def multihead_empty(draw: Draw) -> Iterator[GradeCase]:
    """Yields the first step of multi-head attention, with an empty state."""
    yield GradeCase(_arguments(draw, (2, 7, 3, 5, 11, 0), shared=False), words="the first token")


def multiquery_empty(draw: Draw) -> Iterator[GradeCase]:
    """Yields the first step of multi-query attention, with an empty state."""
    yield GradeCase(_arguments(draw, (2, 7, 3, 5, 11, 0), shared=True), words="the first token")


def _arguments(draw: Draw, sizes: tuple[int, ...], shared: bool) -> tuple[Tensor, ...]:
    """Returns x, prev_K, prev_V, P_q, P_k, P_v, P_o."""
    b, d, h, *widths = sizes
    k, v, m = widths
    heads: tuple[int, ...] = (h,)
    if shared:
        heads = ()
    return (
        draw.normal(b, d),
        draw.normal(b, *heads, m, k),
        draw.normal(b, *heads, m, v),
        draw.normal(h, d, k) / d**0.5,
        draw.normal(*heads, d, k) / d**0.5,
        draw.normal(*heads, d, v) / d**0.5,
        draw.normal(h, d, v) / (h * v) ** 0.5,
    )


def multihead_attention_incremental(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor
) -> Step:
    """Returns y [b,d] and the states with one more key and value, [b,h,m+1,k] and [b,h,m+1,v]."""
    keys, values = _extend(x, prev_K, prev_V, P_k, P_v)
    return _attend(x, keys, values, P_q, P_o), keys, values


# One function for both, as states without an axis of heads are shared by all heads.
multiquery_attention_incremental = multihead_attention_incremental


def _extend(x: Tensor, prev_K: Tensor, prev_V: Tensor, P_k: Tensor, P_v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the states with the new token's key and value appended."""
    key = torch.einsum("bd,...dk->b...k", x, P_k).unsqueeze(-2)
    value = torch.einsum("bd,...dv->b...v", x, P_v).unsqueeze(-2)
    return torch.cat([prev_K, key], -2), torch.cat([prev_V, value], -2)


def _per_head(state: Tensor, h: int) -> Tensor:
    """Returns a state as [b,h,m,k]: one that heads share is repeated."""
    if state.dim() == 4:
        return state
    return state[:, None].expand(-1, h, -1, -1)


def _logits(x: Tensor, keys: Tensor, P_q: Tensor) -> Tensor:
    q = torch.einsum("bd,hdk->bhk", x, P_q)
    return torch.einsum("bhk,bhmk->bhm", q, _per_head(keys, P_q.shape[0]))


def _mix(weights: Tensor, values: Tensor, P_o: Tensor) -> Tensor:
    """Returns the heads' outputs projected and summed, [b,d]."""
    out = torch.einsum("bhm,bhmv->bhv", weights, _per_head(values, P_o.shape[0]))
    return torch.einsum("bhv,hdv->bd", out, P_o)


def _attend(x: Tensor, keys: Tensor, values: Tensor, P_q: Tensor, P_o: Tensor) -> Tensor:
    return _mix(_logits(x, keys, P_q).softmax(-1), values, P_o)


def scaled(x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor) -> Step:
    keys, values = _extend(x, prev_K, prev_V, P_k, P_v)
    return _attend(x, keys, values, P_q / P_q.shape[-1] ** 0.5, P_o), keys, values


def scaled_by_model_width(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor
) -> Step:
    keys, values = _extend(x, prev_K, prev_V, P_k, P_v)
    return _attend(x, keys, values, P_q / x.shape[-1] ** 0.5, P_o), keys, values


def scaled_by_heads(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor
) -> Step:
    keys, values = _extend(x, prev_K, prev_V, P_k, P_v)
    return _attend(x, keys, values, P_q / P_q.shape[0] ** 0.5, P_o), keys, values


def only_itself(x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor) -> Step:
    keys, values = _extend(x, prev_K, prev_V, P_k, P_v)
    return _attend(x, keys[..., -1:, :], values[..., -1:, :], P_q, P_o), keys, values


def query_appended(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor
) -> Step:
    """Returns the multi-head step that appends the query in place of the key."""
    assert P_k.dim() == 3
    keys, values = _extend(x, prev_K, prev_V, P_q, P_v)
    return _attend(x, keys, values, P_q, P_o), keys, values


def output_last(x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor) -> Step:
    keys, values = _extend(x, prev_K, prev_V, P_k, P_v)
    return keys, values, _attend(x, keys, values, P_q, P_o)


def no_output_projection(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor
) -> Step:
    keys, values = _extend(x, prev_K, prev_V, P_k, P_v)
    weights = _logits(x, keys, P_q).softmax(-1)
    out = torch.einsum("bhm,bhmv->bhv", weights, _per_head(values, P_o.shape[0]))
    return out.flatten(1), keys, values


def old_values(x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor) -> Step:
    keys, values = _extend(x, prev_K, prev_V, P_k, P_v)
    return _attend(x, keys, values, P_q, P_o), keys, prev_V


def only_the_new(x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor) -> Step:
    keys, values = _extend(x, prev_K, prev_V, P_k, P_v)
    return _attend(x, keys, values, P_q, P_o), keys[..., -1:, :], values[..., -1:, :]


def oldest_lost(x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor) -> Step:
    keys, values = _extend(x, prev_K[..., 1:, :], prev_V[..., 1:, :], P_k, P_v)
    return _attend(x, keys, values, P_q, P_o), keys, values


def without_itself(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor
) -> Step:
    keys, values = _extend(x, prev_K, prev_V, P_k, P_v)
    return _attend(x, prev_K, prev_V, P_q, P_o), keys, values


def old_state(x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor) -> Step:
    keys, values = _extend(x, prev_K, prev_V, P_k, P_v)
    return _attend(x, keys, values, P_q, P_o), prev_K, prev_V


def states_exchanged(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor
) -> Step:
    keys, values = _extend(x, prev_K, prev_V, P_k, P_v)
    return _attend(x, keys, values, P_q, P_o), values, keys


def state_for_each_head(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor
) -> Step:
    """Returns the multi-query step whose states are repeated for all heads."""
    keys, values = _extend(x, prev_K, prev_V, P_k, P_v)
    h = P_q.shape[0]
    return _attend(x, keys, values, P_q, P_o), _per_head(keys, h), _per_head(values, h)


def first_head_only(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor
) -> Step:
    keys, values = _extend(x, prev_K, prev_V, P_k, P_v)
    first = torch.zeros_like(P_o)
    first[0] = P_o[0]
    return _attend(x, keys, values, P_q, first), keys, values


def put_in_front(x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor) -> Step:
    keys, values = _extend(x, prev_K, prev_V, P_k, P_v)
    return _attend(x, keys, values, P_q, P_o), keys.roll(1, -2), values.roll(1, -2)


def over_heads(x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor) -> Step:
    keys, values = _extend(x, prev_K, prev_V, P_k, P_v)
    return _mix(_logits(x, keys, P_q).softmax(1), values, P_o), keys, values


def over_batch(x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor) -> Step:
    keys, values = _extend(x, prev_K, prev_V, P_k, P_v)
    return _mix(_logits(x, keys, P_q).softmax(0), values, P_o), keys, values


def no_softmax(x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor) -> Step:
    keys, values = _extend(x, prev_K, prev_V, P_k, P_v)
    return _mix(_logits(x, keys, P_q), values, P_o), keys, values


def heads_averaged(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor
) -> Step:
    keys, values = _extend(x, prev_K, prev_V, P_k, P_v)
    return _attend(x, keys, values, P_q, P_o / P_o.shape[0]), keys, values


def summed_over_queries(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor
) -> Step:
    """Returns the step whose einsum sums queries and keys separately: "bhk,bnj->bhn" for "bhk,bnk->bhn"."""
    keys, values = _extend(x, prev_K, prev_V, P_k, P_v)
    q = torch.einsum("bd,hdk->bhk", x, P_q).sum(-1)
    logits = q[..., None] * _per_head(keys, P_q.shape[0]).sum(-1)
    return _mix(logits.softmax(-1), values, P_o), keys, values


def query_misread(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor
) -> Step:
    """Returns the step whose query [b,h,k] is reshaped to [b,k,h] instead of transposed."""
    keys, values = _extend(x, prev_K, prev_V, P_k, P_v)
    q = torch.einsum("bd,hdk->bhk", x, P_q)
    q = q.reshape(q.shape[0], q.shape[2], q.shape[1]).mT
    logits = torch.einsum("bhk,bhmk->bhm", q, _per_head(keys, P_q.shape[0]))
    return _mix(logits.softmax(-1), values, P_o), keys, values


def sigmoid_instead(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor
) -> Step:
    keys, values = _extend(x, prev_K, prev_V, P_k, P_v)
    return _mix(_logits(x, keys, P_q).sigmoid(), values, P_o), keys, values


def projections_exchanged(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor
) -> Step:
    """Returns the multi-head step whose queries are made by P_k and whose keys are made by P_q."""
    assert P_k.dim() == 3
    return multihead_attention_incremental(x, prev_K, prev_V, P_k, P_q, P_v, P_o)


def appended_twice(
    x: Tensor, prev_K: Tensor, prev_V: Tensor, P_q: Tensor, P_k: Tensor, P_v: Tensor, P_o: Tensor
) -> Step:
    keys, values = _extend(x, *_extend(x, prev_K, prev_V, P_k, P_v), P_k, P_v)
    return _attend(x, keys, values, P_q, P_o), keys, values


def steps_are_whole(f: Function, x: Tensor, *rest: Tensor) -> Any:
    """Returns what is wrong if five steps, each with the last one's state, differ from causal attention."""
    prev_K, prev_V, *weights = rest
    tokens = torch.randn(5, *x.shape, generator=torch.Generator().manual_seed(3))
    states: list[Any] = [prev_K, prev_V]
    right = [prev_K, prev_V]
    for n, token in enumerate(tokens, 1):
        returned = f(token, *states, *weights)
        if not isinstance(returned, tuple | list) or len(returned) != 3:
            raise SubmissionError("A step returns three things: y, new_K, new_V.")
        y, *states = returned
        want, *right = multihead_attention_incremental(token, right[0], right[1], *weights)
        if states[0].shape != right[0].shape:
            return f"after step {n} the keys have the shape {list(states[0].shape)}, expected {list(right[0].shape)}"
        if not torch.allclose(y, want, atol=1e-4):
            return f"step {n} of five gives another output than attention over all tokens so far"
    return None
