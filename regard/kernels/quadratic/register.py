"""Registers quadratic attention in Triton: (q·k + 1)² of each pair, instead of thousands of features for each token.

It takes time N², as softmax does, and no memory beside its outputs. Features would win in theory from some ten thousand
tokens on, but they cancel, and need sums in float64. In float32 a gradient would need them, too: where all that a query
sees has q·k near −1, a small difference is divided by a smaller sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.kernels.linear import register as linear
from regard.kernels.registry import kernel
from regard.mechanisms import Quadratic
from regard.shapes import Mask

_WIDEST = {torch.bfloat16: 256, torch.float16: 128}
_LIMITS = "bfloat16 with K and V ≤ 256, float16 with ≤ 128"


def _when(mechanism: Quadratic, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> str | None:
    """Returns why the kernel cannot run, or None."""
    reason = linear.unsupported_inputs(mechanism, q, k, v)
    if reason is not None:
        return reason
    reason = linear.unsupported_rules(q, k, mask)
    if reason is not None:
        return reason
    K = k.shape[3]
    V = v.shape[3]
    if max(K, V) > _WIDEST.get(v.dtype, 0):
        return f"{v.dtype}, K = {K}, V = {V} exceed its limits: {_LIMITS}"
    return linear.unsupported_widths(K, V, v.device)


@kernel(Quadratic, "forward", name="triton", when=_when, device="cuda", limits=_LIMITS)
def forward(mechanism: Quadratic, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Returns the outputs [B,H,T,V] of q [B,H,T,K], k [B,G,S,K], v [B,G,S,V]."""
    from regard.kernels.quadratic.ops import quadratic_attention

    out: Tensor = quadratic_attention(q, k, v, mask.visible, mask.causal)[0]
    return out
