"""Registers argmax attention in Triton, which needs no matrix of scores: memory grows with N, not with N²."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from regard.kernels.registry import kernel
from regard.mechanisms import Argmax, Softmax
from regard.shapes import Mask

_LIMITS = "bfloat16 and float16, K and V ≤ 128"
_TRITON = find_spec("triton") is not None  # evaluated at import: torch.compile cannot trace find_spec
_FEW_QUERIES = 16  # below it a program, which takes 128, does little with each key that it reads
_SOFTMAX = Softmax()  # whose gradients straight-through ones are


def _when(mechanism: Argmax, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> str | None:
    """Returns why the kernel cannot run, or None."""
    if not (q.is_cuda and _TRITON):
        return "it needs a CUDA device and triton"
    if q.dtype not in (torch.bfloat16, torch.float16) or max(q.shape[3], v.shape[3]) > 128:
        return f"{q.dtype}, K = {q.shape[3]}, V = {v.shape[3]} exceed its limits: {_LIMITS}"
    if not q.dtype == k.dtype == v.dtype:
        return "q, k and v need one dtype"
    if q.shape[2] < _FEW_QUERIES and mechanism.use == "auto":
        return "so few queries have small scores, and one program would read all keys of a head"
    return unsupported_rules(mechanism, q, k, v, mask)


def unsupported_rules(mechanism: Argmax, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> str | None:
    """Returns which part of a call the kernel would leave out, or None."""
    if 0 in (*q.shape, *v.shape):
        return "there is nothing to attend to"
    if mechanism.training and mechanism.dropout > 0:
        return "it drops no weights"
    if mask.adjusts_scores:
        return "it knows no bias, slopes, relative positions or softcap"
    if mask.documents is not None or mask.rows is not None:
        return "it knows no packed documents and no queries at places of their own"
    if mask.window is not None and mask.visible is not None:
        return "it counts distances by index: a window with padding needs positions"
    if mask.window is not None and not mask.causal and q.shape[2] != k.shape[2]:
        return "without causal, a window needs as many queries as keys"
    return None


@kernel(Argmax, "forward", name="triton", when=_when, device="cuda", limits=_LIMITS)
def forward(mechanism: Argmax, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Returns the outputs [B,H,T,V] of q [B,H,T,K], k [B,G,S,K], v [B,G,S,V]."""
    from regard.kernels.argmax.ops import argmax_attention

    out: Tensor = argmax_attention(q.detach(), k.detach(), v, mask.visible, mask.causal, mask.window)[0]
    learns = mechanism.learns and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    if not learns:
        return out
    soft: Tensor = _SOFTMAX(q, k, v.detach(), mask)
    return out + (soft - soft.detach())
