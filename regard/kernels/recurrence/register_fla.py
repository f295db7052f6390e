"""Registers the kernels of flash-linear-attention for gated and delta attention, where it is installed (fla-core).

This module does not import it. What its functions take is checked without a GPU; whether they keep the laws of regard
has not been judged on one, so they run only where they are asked for: `fast(model, "fla")`.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from regard.kernels.registry import kernel
from regard.mechanisms import Delta, Gated, GatedDelta, Memory, Recurrence, Retention
from regard.mechanisms.cache import visible_counts
from regard.shapes import Mask

_NAME = "fla"
# In float32 its products are rounded to 10 bits (TF32), and those of the delta rule are refused.
_DTYPES = (torch.bfloat16, torch.float16)
_LIMITS = "K ≤ 256"
_INSTALLED = find_spec("fla") is not None  # evaluated at import: torch.compile cannot trace find_spec


def _runs_fla(x: Tensor) -> bool:
    """Returns whether flash-linear-attention can run on the device of x."""
    return x.is_cuda and _INSTALLED


def _refuses(mechanism: Recurrence, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Returns why a call cannot run here, or None."""
    if mechanism.use != _NAME:
        return "it has not been judged on a GPU yet"
    if not _runs_fla(v):
        return "it needs a CUDA device and flash-linear-attention (pip install fla-core)"
    if v.dtype not in _DTYPES or not q.dtype == k.dtype == v.dtype:
        return "it takes bfloat16 or float16, one of them for q, k and v"
    if k.shape[3] > 256:
        return f"K = {k.shape[3]} exceeds its limits: {_LIMITS}"
    return None


def _refuses_forward(
    mechanism: Recurrence, q: Tensor, k: Tensor, v: Tensor, mask: Mask, a: Tensor | None, b: Tensor | None
) -> str | None:
    if q.shape[2] != v.shape[2]:
        return "it takes as many queries as keys"
    return _refuses(mechanism, q, k, v)


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
    given = [x for x in (q, k, v, a, b, state.memory) if x is not None]
    if v.shape[2] == 1 and torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return "it has no gradient for one token at a time"
    return _refuses(mechanism, q, k, v)


def forward(
    mechanism: Recurrence, q: Tensor, k: Tensor, v: Tensor, mask: Mask, a: Tensor | None, b: Tensor | None
) -> Tensor:
    """Returns the outputs of a whole sequence [B,H,T,V]."""
    from regard.kernels.recurrence.fla import attend

    return attend(mechanism, q, k, v, mask.visible, a, b, documents=mask.document_ids())[0]


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
    from regard.kernels.recurrence.fla import attend

    out, memory = attend(mechanism, q, k, v, visible, a, b, memory=state.memory)
    assert memory is not None
    return out, Memory(memory, state.tokens + visible_counts(v, visible).sum(1))


for _mechanism in (Retention, Gated, Delta, GatedDelta):
    kernel(_mechanism, "forward", name=_NAME, when=_refuses_forward, device="cuda", limits=_LIMITS)(forward)
    kernel(_mechanism, "extend", name=_NAME, when=_refuses_extend, device="cuda", limits=_LIMITS)(extend)
