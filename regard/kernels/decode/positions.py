"""One decoding step of a synthesizer: what it has learned is multiplied where it lies.

The parallel face makes keys of all that was learned, in the order of the tokens and as wide as fused attention wants
them. For one query that would move far more than the step reads.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from regard.kernels.decode.cpu import refuse_special_step
from regard.kernels.registry import kernel
from regard.mechanisms import Cache, RandomSynthesizer, Synthesizer
from regard.mechanisms.cache import append_to_cache
from regard.mechanisms.pairwise import mix
from regard.mechanisms.synthesizer import Positional
from regard.shapes import upcast_half


def _when(
    mechanism: Positional, q: Tensor | None, k: Tensor | None, v: Tensor, state: Cache, visible: Tensor | None = None
) -> str | None:
    """Returns why the kernel cannot run, or None."""
    if torch.is_grad_enabled():
        return "it has no gradient"
    if next(mechanism.parameters()).dtype != v.dtype:
        return "it takes values of the dtype in which it has learned"
    if state.rules.window is not None:
        return "it knows no window"
    if isinstance(mechanism, Synthesizer) and mechanism.relative:
        return "it reads scores by position, not by distance"
    if not state.even and state.used >= mechanism.length:
        return "it does not count the visible tokens of rows that may have reached the end"
    return refuse_special_step(mechanism, v, state, visible)


@kernel(Synthesizer, "extend", name="in-place", when=_when)
def synthesizer(
    mechanism: Synthesizer, q: Tensor, k: Tensor | None, v: Tensor, state: Cache, visible: Tensor | None = None
) -> tuple[Tensor, Cache]:
    """Returns the output of the new token [B,H,1,V], and the cache with its value."""
    mechanism.check_queries(q, mechanism.width)
    state = _append_value(mechanism, v, state)
    keys = mechanism.keys[:, : state.used]
    offset = mechanism.offset[:, None, : state.used]
    scores = _product(q[:, :, 0].relu().transpose(0, 1), keys) + offset
    return _attend(scores, state), state


@kernel(RandomSynthesizer, "extend", name="in-place", when=_when)
def random_synthesizer(
    mechanism: RandomSynthesizer, q: Tensor | None, k: Tensor | None, v: Tensor, state: Cache,
    visible: Tensor | None = None,
) -> tuple[Tensor, Cache]:  # fmt: skip
    """Returns the output of the new token [B,H,1,V], and the cache with its value."""
    mechanism.check_queries(q)
    state = _append_value(mechanism, v, state)
    rows = mechanism.left[:, state.used - 1 : state.used]  # [H,1,·]; where rows differ in length, each has its own
    if not state.even:
        rows = mechanism.left.index_select(1, state.tokens - 1)
    if mechanism.right is None:
        scores = upcast_half(rows[:, :, : state.used])
    else:
        scores = _product(rows, mechanism.right[:, : state.used])
    return _attend(scores.expand(-1, v.shape[0], -1), state), state


def _append_value(mechanism: Positional, v: Tensor, state: Cache) -> Cache:
    """Returns the cache with the value of one more token, or raises where the mechanism has no score for it."""
    mechanism.check_length(state.used + 1)
    return append_to_cache(state, None, v, None)


def _product(a: Float[Tensor, "H B K"], b: Float[Tensor, "H S K"]) -> Float[Tensor, "H B S"]:
    """Returns a·bᵀ of each head, in float32 where they are in half precision."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(a, b.mT, out_dtype=torch.float32)
    return upcast_half(a) @ upcast_half(b).mT


def _attend(scores: Float[Tensor, "H B S"], state: Cache) -> Float[Tensor, "B H 1 V"]:
    """Returns softmax(scores) over the values that each row has written so far."""
    values = state.v[:, :, : state.used]
    if not state.even:
        scores = scores.masked_fill(torch.arange(state.used, device=scores.device) >= state.tokens[:, None], -math.inf)
    weights = scores.softmax(-1).transpose(0, 1)[:, :, None]
    if values.is_cuda:
        return mix(weights.to(values.dtype), values)
    return mix(weights, upcast_half(values)).to(values.dtype)  # a CPU may sum products of float16 in float16
