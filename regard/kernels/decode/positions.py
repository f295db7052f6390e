"""One decoding step of a synthesizer: what it has learned is multiplied where it lies.

The parallel face makes keys of all that was learned, in the order of the tokens and as wide as fused attention wants
them. For one query that would move far more than the step reads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.kernels.decode.cpu import plain_step
from regard.kernels.registry import kernel
from regard.mechanisms import Cache, RandomSynthesizer, Synthesizer
from regard.mechanisms.pairwise import append_to_cache, mix
from regard.mechanisms.synthesizer import Positional
from regard.shapes import upcast_half


def _when(
    mechanism: Positional, q: Tensor | None, k: Tensor | None, v: Tensor, state: Cache, visible: Tensor | None = None
) -> str | None:
    """Why it cannot run, or None."""
    if torch.is_grad_enabled():
        return "it has no gradient"
    if next(mechanism.parameters()).dtype != v.dtype:
        return "it takes values of the dtype in which it has learned"
    return plain_step(mechanism, v, state, visible)


@kernel(Synthesizer, "extend", name="in-place", when=_when)
def synthesizer(
    mechanism: Synthesizer, q: Tensor, k: Tensor | None, v: Tensor, state: Cache, visible: Tensor | None = None
) -> tuple[Tensor, Cache]:
    mechanism.check_queries(q, mechanism.width)
    state = _written(mechanism, v, state)
    keys, offset = mechanism.keys[:, : state.used], mechanism.offset[:, None, : state.used]
    return _mixed(_product(q[:, :, 0].relu().transpose(0, 1), keys) + offset, state), state


@kernel(RandomSynthesizer, "extend", name="in-place", when=_when)
def random_synthesizer(
    mechanism: RandomSynthesizer, q: Tensor | None, k: Tensor | None, v: Tensor, state: Cache,
    visible: Tensor | None = None,
) -> tuple[Tensor, Cache]:  # fmt: skip
    mechanism.check_queries(q)
    state = _written(mechanism, v, state)
    used, left, right = state.used, mechanism.left, mechanism.right
    rows = left[:, used - 1 : used] if state.even else left.index_select(1, state.tokens - 1)
    scores = upcast_half(rows[:, :, :used]) if right is None else _product(rows, right[:, :used])
    return _mixed(scores.expand(-1, v.shape[0], -1), state), state


def _written(mechanism: Positional, v: Tensor, state: Cache) -> Cache:
    mechanism.check_length(state.used + 1)
    return append_to_cache(state, None, v, None)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a [H,B,K] times b [H,S,K], in float32 where they are in half precision."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(a, b.mT, out_dtype=torch.float32)
    return upcast_half(a) @ upcast_half(b).mT


def _mixed(scores: Tensor, state: Cache) -> Tensor:
    """softmax(scores [H,B,S]) over the values that each row has written so far."""
    values = state.v[:, :, : state.used]
    if not state.even:
        scores = scores.masked_fill(torch.arange(state.used, device=scores.device) >= state.tokens[:, None], -math.inf)
    weights = scores.softmax(-1).transpose(0, 1)[:, :, None]
    if values.is_cuda:
        return mix(weights.to(values.dtype), values)
    return mix(weights, upcast_half(values)).to(values.dtype)  # a CPU may sum products of float16 in float16
