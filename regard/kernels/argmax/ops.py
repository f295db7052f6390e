"""Argmax attention as PyTorch operators: `regard::argmax_attention` and its gradient. Imported where one runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from regard.kernels.argmax import triton_choice
from regard.kernels.linear.launch import launch
from regard.kernels.linear.plan import ceil_div, tile_side
from regard.kernels.linear.tensors import strides, with_unit_stride

QUERIES = 128  # of a program that chooses
KEYS = 64  # at a time
# Warps and stages to try, the best first.
SETTINGS = [{"num_warps": 8, "num_stages": 3}, {"num_warps": 8, "num_stages": 1}]


@torch.library.custom_op("regard::argmax_attention", mutates_args=())
def argmax_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """Returns outputs [B,H,T,V], and which key each query chose [B,H,T], −1 for none."""
    out, chosen = _allocate(q, k, v, visible, causal, window)
    q, k, v = (with_unit_stride(x) for x in (q, k, v))
    B, H, T, K = q.shape
    G, S, V = v.shape[1:]
    seen = k  # stands in where there is no mask
    if visible is not None:
        seen = visible.contiguous()
    named = {
        "K": K, "V": V, "BK": tile_side(K), "BV": tile_side(V), "GROUP": H // G, "CAUSAL": causal,
        "WINDOWED": window is not None, "MASKED": visible is not None, "M": QUERIES, "N": KEYS,
    }  # fmt: skip
    numbers = (T, S, H, window or 0, *strides(q, k, v))
    key = (triton_choice.choose_kernel, q.device, numbers, *named.values())
    grid = (ceil_div(T, QUERIES), B * H, 1)
    tensors = (q, k, v, seen, out, chosen)
    launch(key, triton_choice.choose_kernel, grid, tensors, numbers, lambda: named, lambda: SETTINGS)
    return out, chosen


@argmax_attention.register_fake
def _allocate(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """Returns uninitialised results of `argmax_attention`."""
    B, H, T = q.shape[:3]
    out = torch.empty(B, H, T, v.shape[3], dtype=v.dtype, device=v.device)
    return out, torch.empty(B, H, T, dtype=torch.int32, device=v.device)


@torch.library.custom_op("regard::argmax_attention_backward", mutates_args=())
def argmax_attention_backward(d_out: Tensor, chosen: Tensor, G: int, S: int, causal: bool) -> Tensor:
    """Returns the gradient of v [B,G,S,V]."""
    d_v: Tensor = _allocate_gradient(d_out, chosen, G, S, causal)
    d_out = d_out.contiguous()
    B, H, T, V = d_out.shape
    named = {"V": V, "BV": tile_side(V), "GROUP": H // G, "CAUSAL": causal, "M": KEYS, "N": QUERIES}
    numbers = (T, S, H)
    key = (triton_choice.value_grad_kernel, d_out.device, numbers, *named.values())
    grid = (ceil_div(S, QUERIES), B * G, 1)
    tensors = (chosen, d_out, d_v)
    launch(key, triton_choice.value_grad_kernel, grid, tensors, numbers, lambda: named, lambda: SETTINGS)
    return d_v


@argmax_attention_backward.register_fake
def _allocate_gradient(d_out: Tensor, chosen: Tensor, G: int, S: int, causal: bool) -> Tensor:
    """Returns an uninitialised result of `argmax_attention_backward`."""
    B, _, _, V = d_out.shape
    return torch.empty(B, G, S, V, dtype=d_out.dtype, device=d_out.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keeps for the gradient what it reads."""
    ctx.groups = inputs[2].shape[1]
    ctx.keys = inputs[2].shape[2]
    ctx.causal = inputs[4]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, d_out: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the gradient of each input: of v alone, since the choice does not move with q or k."""
    if d_out is None:
        return None, None, None, None, None, None
    (chosen,) = ctx.saved_tensors
    d_v = argmax_attention_backward(d_out, chosen, ctx.groups, ctx.keys, ctx.causal)
    return None, None, d_v, None, None, None


argmax_attention.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.regard.argmax_attention)
def _forward_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of one product for each pair: q·k."""
    B, H, T, K = q
    return int(2 * B * H * T * v[2] * K)


@register_flop_formula(torch.ops.regard.argmax_attention_backward)
def _backward_flops(d_out: Any, chosen: Any, G: Any, S: Any, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of one product for each pair: zero or one, times ∂out."""
    B, H, T, V = d_out
    return int(2 * B * H * T * S * V)
