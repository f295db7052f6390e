"""Registers gated and delta attention in Triton: whole sequences of one decay a head, and single tokens of all four.

This module does not import Triton. The programs are held to the reference by Triton's interpreter; on a GPU they have
neither been judged nor timed, so they run only where they are asked for: `fast(model, "triton")`.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from regard.kernels.registry import kernel
from regard.mechanisms import Delta, Gated, GatedDelta, Memory, Recurrence, Retention
from regard.mechanisms.base import without_autocast
from regard.mechanisms.cache import visible_counts
from regard.mechanisms.decays import STRONGEST
from regard.mechanisms.gates import prepare_gates
from regard.shapes import Mask

_NAME = "triton"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LIMITS = "K and V ≤ 128"
_TOKEN_LIMITS = "K ≤ 256"
_TRITON = find_spec("triton") is not None  # evaluated at import: torch.compile cannot trace find_spec
# e to this is zero in float32, and differences of sums of it over a chunk keep their digits there.
_STRONGEST = -100.0


def _runs_triton(x: Tensor) -> bool:
    """Returns whether Triton kernels can run on the device of x."""
    return x.is_cuda and _TRITON


def _refuses(mechanism: Recurrence, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Returns why neither program can run, or None."""
    if not _runs_triton(v):
        return "it needs a CUDA device and triton"
    if mechanism.use != _NAME:
        return "it has not been judged on a GPU yet"
    if v.dtype not in _DTYPES or not q.dtype == k.dtype == v.dtype:
        return "it takes bfloat16, float16 or float32, one of them for q, k and v"
    return None


def _refuses_sequence(mechanism: Recurrence, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Returns why the program for whole sequences cannot run, or None."""
    if mechanism.erases or mechanism.channels:
        return "it has one decay for each head, and nothing that erases"
    if max(k.shape[3], v.shape[3]) > 128:
        return f"K = {k.shape[3]}, V = {v.shape[3]} exceed its limits: {_LIMITS}"
    return _refuses(mechanism, q, k, v)


def _refuses_forward(
    mechanism: Recurrence, q: Tensor, k: Tensor, v: Tensor, mask: Mask, a: Tensor | None, b: Tensor | None
) -> str | None:
    if mask.documents is not None:
        return "it takes no packed documents"
    if q.shape[2] != v.shape[2]:
        return "it takes as many queries as keys"
    return _refuses_sequence(mechanism, q, k, v)


def _refuses_extend(
    mechanism: Recurrence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Memory,
    visible: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
) -> str | None:
    if v.shape[2] > 1:
        return _refuses_sequence(mechanism, q, k, v)
    given = [x for x in (q, k, v, a, b, state.memory) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return "it has no gradient for one token at a time"
    if k.shape[3] > 256:
        return f"K = {k.shape[3]} exceeds its limits: {_TOKEN_LIMITS}"
    return _refuses(mechanism, q, k, v)


def forward(
    mechanism: Recurrence, q: Tensor, k: Tensor, v: Tensor, mask: Mask, a: Tensor | None, b: Tensor | None
) -> Tensor:
    """Returns the outputs of a whole sequence [B,H,T,V]."""
    return _attend(mechanism, q, k, v, mask.visible, None, a, b)[0]


def extend(
    mechanism: Recurrence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Memory,
    visible: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
) -> tuple[Tensor, Memory]:
    """Returns the outputs of new tokens [B,H,T,V], and the memory after them."""
    if v.shape[2] == 1:
        from regard.kernels.recurrence.triton_token import decode_token

        decay, strength = prepare_gates(mechanism, k, v, visible, a, b)
        return decode_token(mechanism, q, k, v, decay, strength, visible, state)
    out, memory = _attend(mechanism, q, k, v, visible, state.memory, a, b)
    return out, Memory(memory, state.tokens + visible_counts(v, visible).sum(1))


def _attend(
    mechanism: Recurrence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    memory: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns the outputs [B,H,T,V], and the memory [B,G,K,V] if one is carried in."""
    from regard.kernels.recurrence.ops import decayed_attention

    with without_autocast(v):
        decay, strength = prepare_gates(mechanism, k, v, visible, a, b)
        # What is stronger counts as the strongest, and has no gradient below that of the reference.
        logarithms = decay[..., 0].float().clamp(min=STRONGEST)
        logarithms = logarithms + (logarithms.detach().clamp(min=_STRONGEST) - logarithms.detach())
        if strength is not None:
            v = Mask(visible=visible).zero_hidden(v) * strength.to(v.dtype)
        scale = mechanism.score_scale(k.shape[3])
        result: tuple[Tensor, Tensor] = decayed_attention(
            q, k, v, logarithms, visible, memory, scale, memory is not None
        )
    return result


for _mechanism in (Retention, Gated, Delta, GatedDelta):
    if not _mechanism.erases:
        kernel(_mechanism, "forward", name=_NAME, when=_refuses_forward, device="cuda", limits=_LIMITS)(forward)
    kernel(_mechanism, "extend", name=_NAME, when=_refuses_extend, device="cuda", limits=_LIMITS)(extend)
