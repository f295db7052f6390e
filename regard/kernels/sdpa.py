"""PyTorch's fused attention for everything that is a softmax: softmax itself and both synthesizers.

On a CPU it is not fused where weights are dropped; regard's own function then takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from regard.kernels.dropout import attention as dropout_attention
from regard.kernels.registry import kernel
from regard.mechanisms import Mechanism, RandomSynthesizer, Softmax, Synthesizer
from regard.shapes import Mask


def _when(mechanism: Mechanism, q: Tensor | None, k: Tensor | None, v: Tensor, mask: Mask) -> str | None:
    return "the fused call has no softcap" if mask.softcap is not None else None


@kernel(Softmax, "forward", name="sdpa", when=_when)
def softmax(mechanism: Softmax, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return fused(mechanism, q, mask.zero_hidden(k), v, mask, mechanism.score_scale(q.shape[-1]))


@kernel(Synthesizer, "forward", name="sdpa", when=_when)
def synthesizer(mechanism: Synthesizer, q: Tensor, k: Tensor | None, v: Tensor, mask: Mask) -> Tensor:
    dtype, v = v.dtype, _precise(v)
    queries, keys = (x.to(v.dtype) for x in mechanism.as_softmax(q, mask))
    return fused(mechanism, *_same_width(queries, keys, v, mask), mask, 1.0)[..., : v.shape[-1]].to(dtype)


@kernel(RandomSynthesizer, "forward", name="sdpa", when=_when)
def random_synthesizer(
    mechanism: RandomSynthesizer, q: Tensor | None, k: Tensor | None, v: Tensor, mask: Mask
) -> Tensor:
    dtype, v = v.dtype, _precise(v)
    if mechanism.right is not None:
        left, right = (x.expand(v.shape[0], -1, -1, -1).to(v.dtype) for x in mechanism.factors(mask, q))
        return fused(mechanism, *_same_width(left, right, v, mask), mask, 1.0)[..., : v.shape[-1]].to(dtype)
    # All of the score is a bias; a query and key of zeros leave it as it is.
    bias = mechanism.scores(mask, q).to(v.dtype)
    if mask.bias is not None:
        bias = mask.but(slopes=None, relative=None).adjusted_scores(bias)  # these two are added with the rest below
    B, H, T, S = v.shape[0], *bias.shape[1:]
    q, k = v.new_zeros(B, H, T, 8), v.new_zeros(B, H, S, 8)
    return fused(mechanism, *_same_width(q, k, v, mask), mask.but(bias=bias), 1.0)[..., : v.shape[-1]].to(dtype)


def _precise(v: Tensor) -> Tensor:
    """Values in float32 or better on a CPU, whose fused call rounds the gradients of scores: too much where these are
    learned numbers."""
    return v.float() if v.device.type == "cpu" and v.dtype.itemsize < 4 else v


def fused(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    """scaled_dot_product_attention under a structured mask, with zeros for a row that may see nothing."""
    if q.dtype is torch.float16 and q.device.type == "cpu":  # where some CPUs sum products in float16 too
        return fused(mechanism, q.float(), k.float(), v.float(), mask, scale).to(q.dtype)
    T, S = q.shape[2], k.shape[2]
    p = mechanism.dropout if mechanism.training else 0.0
    ours = p > 0 and dropout_attention.suits(q, mask)
    attention = dropout_attention.scaled_dot_product_attention if ours else functional.scaled_dot_product_attention
    call: Callable[..., Tensor] = partial(
        attention,
        q,
        k,
        mask.zero_hidden(v),
        dropout_p=p,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    simple = mask.visible is None and mask.window is None and mask.documents is None and mask.rows is None
    if simple and not mask.adjusts_scores and (not mask.causal or T in (1, S)):
        return call(is_causal=mask.causal and T > 1)
    allowed = mask.allowed(T, S, q.device)
    if not mask.adjusts_scores and allowed is not None:
        blind = ~allowed.any(-1, keepdim=True)
        added = allowed | blind
    else:
        heads = q.shape[1] if mask.depends_on_heads else 1
        added = mask.adjusted_scores(torch.zeros(1, heads, T, S, dtype=q.dtype, device=q.device))
        added = added if allowed is None else added.masked_fill(~allowed, float("-inf"))
        blind = added.amax(-1, keepdim=True) == float("-inf")
        added = added.masked_fill(blind, 0)
    return call(attn_mask=added).masked_fill(blind, 0)


def _same_width(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    """Zero-padded to one multiple of 8, which the flash kernels want; values repeated for each query head."""
    width = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
    v = mask.zero_hidden(v).repeat_interleave(q.shape[1] // v.shape[1], 1)
    return tuple(functional.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))  # type: ignore[return-value]
