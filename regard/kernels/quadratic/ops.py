"""Quadratic attention as PyTorch operators: `regard::quadratic_attention` and its gradient. Imported where one runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from regard.kernels.linear.plan import launch, padded
from regard.kernels.quadratic import triton_pairs as triton_quadratic

# Queries and keys at a time, warps and stages, for narrow heads in bfloat16: measured on an H200.
BEST = {"forward": (64, 64, 4, 3), "queries": (64, 64, 4, 3), "keys_values": (64, 64, 4, 2)}
MODES = {torch.bfloat16: "half", torch.float16: "split"}  # of products with similarities
TINY = torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps


@torch.library.custom_op("regard::quadratic_attention", mutates_args=())
def quadratic_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [B,H,T,V], the same in float32, and one over the sum of similarities of each row."""
    out, wide, inverses = _fake(q, k, v, visible, causal)
    _run(triton_quadratic.forward, q.shape[2], q.shape[1], (q, k, v, visible), (out, wide, inverses), causal, TINY=TINY)
    return out, wide, inverses


@quadratic_attention.register_fake
def _fake(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    B, H, T = q.shape[:3]
    out, wide = (torch.empty(B, H, T, v.shape[3], dtype=dtype, device=v.device) for dtype in (v.dtype, torch.float32))
    return out, wide, torch.empty(B, H, T, dtype=torch.float32, device=v.device)


@torch.library.custom_op("regard::quadratic_attention_backward", mutates_args=())
def quadratic_attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, wide: Tensor,
    inverses: Tensor, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    d_q, d_k, d_v = _fake_backward(d_out, q, k, v, visible, wide, inverses, causal)
    d_out, deltas, inputs = d_out.contiguous(), torch.empty_like(inverses), (q, k, v, visible)
    _run(triton_quadratic.queries, q.shape[2], q.shape[1], inputs, (d_out, wide, inverses, d_q, deltas), causal)
    given = (d_out, inverses, deltas, d_k, d_v)
    _run(triton_quadratic.keys_values, k.shape[2], k.shape[1], inputs, given, causal)
    return d_q, d_k, d_v


@quadratic_attention_backward.register_fake
def _fake_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, wide: Tensor,
    inverses: Tensor, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return d_q, d_k, d_v


def _run(
    program: Any, tokens: int, heads: int, inputs: tuple[Any, ...], made: tuple[Tensor, ...], causal: bool, **more: Any
) -> None:
    """A program over blocks of its tokens, for each head of its own."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in inputs[:3])
    visible = inputs[3]
    (B, H, T, K), (G, S, V) = q.shape, v.shape[1:]
    strides = [n for x in (q, k, v) for n in x.stride()[:3]]
    narrow = max(K, V) <= 64
    at_best = BEST[program.__name__] if narrow and v.dtype == torch.bfloat16 else (64, 64, 4 if narrow else 8, 1)
    M, N, warps, stages = at_best
    flags = {
        "K": K, "V": V, "KP": padded(K), "VP": padded(V), "GROUP": H // G, "CAUSAL": causal,
        "MASKED": visible is not None, "MODE": MODES[v.dtype], **more, "M": M, "N": N,
    }  # fmt: skip
    block = N if program is triton_quadratic.keys_values else M
    ways = [{"num_warps": warps, "num_stages": n} for n in dict.fromkeys((stages, 1))]
    tensors, numbers = (q, k, v, k if visible is None else visible.contiguous(), *made), (T, S, H, *strides)
    key = (program, q.device, numbers, *at_best, *flags.values())
    launch(key, program, (-(-tokens // block), B * heads, 1), tensors, numbers, lambda: flags, lambda: ways)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, visible, ctx.causal = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, visible, *output[1:])


def _backward(ctx: Any, d_out: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if d_out is None:
        return None, None, None, None, None
    return *quadratic_attention_backward(d_out, *ctx.saved_tensors, ctx.causal), None, None


quadratic_attention.register_autograd(_backward, setup_context=_setup)


@register_flop_formula(torch.ops.regard.quadratic_attention)
def _flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    (B, H, T, K), (_, S, V) = q, v[1:]
    return int(2 * B * H * T * S * (K + V))


@register_flop_formula(torch.ops.regard.quadratic_attention_backward)
def _backward_flops(d_out: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Five products for two: the similarities are made again."""
    (B, H, T, K), (_, S, V) = q, v[1:]
    return int(2 * B * H * T * S * (3 * K + 2 * V))
