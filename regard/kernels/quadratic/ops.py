"""Quadratic attention as PyTorch operators: `regard::quadratic_attention` and its gradient. Imported where one runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from regard.kernels.linear.launch import launch
from regard.kernels.linear.plan import ceil_div, tile_side
from regard.kernels.linear.tensors import strides, with_unit_stride
from regard.kernels.quadratic import triton_pairs


class Tiles(NamedTuple):
    """The queries and keys of a block, and what the compiler is told."""

    queries: int
    keys: int
    warps: int
    stages: int


# For narrow heads in bfloat16: measured on an H200.
BEST_TILES = {
    "output_kernel": Tiles(64, 64, 4, 3),
    "query_grad_kernel": Tiles(64, 64, 4, 3),
    "key_value_grad_kernel": Tiles(64, 64, 4, 2),
}
PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "bf16x3"}  # of products with similarities
TINY = torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps


class QuadraticCall(NamedTuple):
    """The inputs of one call."""

    q: Tensor  # [B,H,T,K]
    k: Tensor  # [B,G,S,K]
    v: Tensor  # [B,G,S,V]
    visible: Tensor | None  # [B,S]
    causal: bool


@torch.library.custom_op("regard::quadratic_attention", mutates_args=())
def quadratic_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns outputs [B,H,T,V], the same in float32, and 1 / (the sum of similarities) of each row [B,H,T]."""
    call = QuadraticCall(q, k, v, visible, causal)
    written: tuple[Tensor, Tensor, Tensor] = _allocate(*call)
    _run(triton_pairs.output_kernel, call, written, tokens=q.shape[2], heads=q.shape[1], TINY=TINY)
    return written


@quadratic_attention.register_fake
def _allocate(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns uninitialised results of `quadratic_attention`."""
    B, H, T = q.shape[:3]
    out = torch.empty(B, H, T, v.shape[3], dtype=v.dtype, device=v.device)
    out_f32 = torch.empty(B, H, T, v.shape[3], dtype=torch.float32, device=v.device)
    return out, out_f32, torch.empty(B, H, T, dtype=torch.float32, device=v.device)


@torch.library.custom_op("regard::quadratic_attention_backward", mutates_args=())
def quadratic_attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, out_f32: Tensor, inv_norm: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, k and v."""
    call = QuadraticCall(q, k, v, visible, causal)
    d_q, d_k, d_v = _allocate_gradients(d_out, q, k, v, visible, out_f32, inv_norm, causal)
    d_out = d_out.contiguous()
    delta = torch.empty_like(inv_norm)
    tensors = (d_out, out_f32, inv_norm, d_q, delta)
    _run(triton_pairs.query_grad_kernel, call, tensors, tokens=q.shape[2], heads=q.shape[1])
    tensors = (d_out, inv_norm, delta, d_k, d_v)
    _run(triton_pairs.key_value_grad_kernel, call, tensors, tokens=k.shape[2], heads=k.shape[1])
    return d_q, d_k, d_v


@quadratic_attention_backward.register_fake
def _allocate_gradients(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, out_f32: Tensor, inv_norm: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns uninitialised results of `quadratic_attention_backward`."""
    d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return d_q, d_k, d_v


def _run(
    program: Any, call: QuadraticCall, tensors: tuple[Tensor, ...], *, tokens: int, heads: int, **constants: Any
) -> None:
    """Launches a program, one instance for each block of its tokens and each of its heads.

    tensors: what it reads or writes beside the inputs. tokens, heads: of queries, or of keys for their gradient.
    """
    q, k, v = (with_unit_stride(x) for x in call[:3])
    B, H, T, K = q.shape
    G, S, V = v.shape[1:]
    visible = k  # stands in where there is no mask
    if call.visible is not None:
        visible = call.visible.contiguous()
    tiles = _choose_tiles(program.__name__, narrow=max(K, V) <= 64, dtype=v.dtype)
    named = {
        "K": K, "V": V, "BK": tile_side(K), "BV": tile_side(V), "GROUP": H // G, "CAUSAL": call.causal,
        "MASKED": call.visible is not None, "PRECISION": PRECISIONS[v.dtype], **constants, "M": tiles.queries,
        "N": tiles.keys,
    }  # fmt: skip
    settings = [{"num_warps": tiles.warps, "num_stages": n} for n in sorted({tiles.stages, 1}, reverse=True)]
    numbers = (T, S, H, *strides(q, k, v))
    key = (program, q.device, numbers, *named.values())
    rows = tiles.queries
    if program is triton_pairs.key_value_grad_kernel:
        rows = tiles.keys
    grid = (ceil_div(tokens, rows), B * heads, 1)
    launch(key, program, grid, (q, k, v, visible, *tensors), numbers, lambda: named, lambda: settings)


def _choose_tiles(name: str, narrow: bool, dtype: torch.dtype) -> Tiles:
    """Returns the tiles of a program; wide heads and three products for one need more registers."""
    if narrow and dtype == torch.bfloat16:
        return BEST_TILES[name]
    if narrow:
        return Tiles(64, 64, 4, 1)
    return Tiles(64, 64, 8, 1)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keeps for the gradient what it reads."""
    call = QuadraticCall(*inputs)
    ctx.causal = call.causal
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(call.q, call.k, call.v, call.visible, *output[1:])


def _backward(ctx: Any, d_out: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the gradient of each input."""
    if d_out is None:
        return None, None, None, None, None
    return *quadratic_attention_backward(d_out, *ctx.saved_tensors, ctx.causal), None, None


quadratic_attention.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.regard.quadratic_attention)
def _forward_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of two products for each pair: q·k, and weight times value."""
    B, H, T, K = q
    S, V = v[2:]
    return int(2 * B * H * T * S * (K + V))


@register_flop_formula(torch.ops.regard.quadratic_attention_backward)
def _backward_flops(d_out: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of five products for forward's two: the similarities are made again."""
    B, H, T, K = q
    S, V = v[2:]
    return int(2 * B * H * T * S * (3 * K + 2 * V))
