"""One decoding step of a synthesizer: what it has learned is multiplied where it lies.

The parallel face makes keys of all that was learned, in the order of the tokens and as wide as fused attention wants
them. For one query that would move far more than the step reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.kernels.decode_cpu import plain_step
from regard.kernels.registry import kernel
from regard.mechanisms import Cache, RandomSynthesizer, Synthesizer
from regard.mechanisms.pairwise import append, mix
from regard.mechanisms.synthesizer import Positional
from regard.shapes import Mask


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
    mechanism.fits(q, mechanism.width)
    state = _written(mechanism, v, state)
    keys, offset = mechanism.keys[:, : state.used], mechanism.offset[:, None, : state.used]
    scores = torch.baddbmm(offset, q[:, :, 0].relu().transpose(0, 1), keys.mT)
    return _mixed(scores, state), state


@kernel(RandomSynthesizer, "extend", name="in-place", when=_when)
def random_synthesizer(
    mechanism: RandomSynthesizer, q: Tensor | None, k: Tensor | None, v: Tensor, state: Cache,
    visible: Tensor | None = None,
) -> tuple[Tensor, Cache]:  # fmt: skip
    mechanism.fits(q)
    state = _written(mechanism, v, state)
    row = mechanism.left[:, state.used - 1 : state.used]
    scores = row[:, :, : state.used] if mechanism.right is None else row @ mechanism.right[:, : state.used].mT
    return _mixed(scores.expand(-1, v.shape[0], -1), state), state


def _written(mechanism: Positional, v: Tensor, state: Cache) -> Cache:
    state = append(state, None, v, None)
    mechanism.columns(state.used, Mask(), v.device)  # an error where it is longer than what was learned
    return state


def _mixed(scores: Tensor, state: Cache) -> Tensor:
    """softmax(scores [H,B,S]) over the values written so far."""
    return mix(scores.softmax(-1).transpose(0, 1)[:, :, None], state.v[:, :, : state.used])
