"""Gated attention and retention as a PyTorch operator, `regard::decayed_attention`, with its gradients.

This module imports Triton, so it is imported only when a kernel runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from regard.kernels.linear.launch import launch
from regard.kernels.linear.plan import ceil_div, sm_count, tile_side
from regard.kernels.linear.tensors import strides, with_unit_stride
from regard.kernels.recurrence.triton_decay import decayed_kernel
from regard.mechanisms import Gated
from regard.shapes import Size

CHUNK = 64  # tokens that a program takes at once
LEAST_SPAN = 512  # tokens of a segment, at the least: adding up what came before costs as much as some chunks
COLUMNS = 64  # of a program, at most: with more of them their memory leaves too few registers for the products
# Warps and stages to try, the best first: with four warps two programs share a multiprocessor, as the segments assume.
SETTINGS = [{"num_warps": 4, "num_stages": 2}, {"num_warps": 4, "num_stages": 1}]
SETTINGS_OF_THREE_PRODUCTS = [{"num_warps": 8, "num_stages": 2}, {"num_warps": 8, "num_stages": 1}]
PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "bf16x3", torch.float32: "tf32x3"}


class Sides(NamedTuple):
    """What a pass over the tokens reads at its start, and what it writes beside its outputs."""

    before: Tensor | None = None  # the memory that it begins with, [B,G,K,V]
    other: Tensor | None = None  # what the outputs are multiplied by, row by row, [B,·,T,V]
    ends: bool = False  # whether the memory that it ends with is wanted


class Passed(NamedTuple):
    """The results of a pass over the tokens of H heads."""

    out: Tensor  # [B,H,T,V]
    dots: Tensor  # other·out, [B,H,T]
    after: Tensor  # [B,H,K,V]


@torch.library.custom_op("regard::decayed_attention", mutates_args=())
def decayed_attention(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, visible: Tensor | None, memory: Tensor | None, scale: float, final: bool
) -> tuple[Tensor, Tensor]:
    """Returns the outputs [B,H,T,V] and, if it is wanted, the memory after the last token [B,G,K,V] in float32.

    q [B,I,T,K] and k [B,J,T,K] may have fewer heads than v [B,G,T,V], or q more. a [B,G,T] in float32 is 0 at hidden
    tokens; `memory` [B,G,K,V] is the one before the first token.
    """
    H = max(q.shape[1], v.shape[1])
    sides = Sides(memory, None, final)
    passed = run_pass(q, k, v, a, visible, H, scale, sides, dtype=v.dtype, mask_keys=True)
    if not final:
        return passed.out, passed.after
    return passed.out, passed.after[:, :: H // v.shape[1]].contiguous()


@decayed_attention.register_fake
def _allocate(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, visible: Tensor | None, memory: Tensor | None, scale: float, final: bool
) -> tuple[Tensor, Tensor]:
    """Returns uninitialised results of `decayed_attention`."""
    B, G, T, V = v.shape
    out = torch.empty(B, max(q.shape[1], G), T, V, dtype=v.dtype, device=v.device)
    after = torch.empty(B, G * final, k.shape[3], V, dtype=torch.float32, device=v.device)
    return out, after


@torch.library.custom_op("regard::decayed_attention_backward", mutates_args=())
def decayed_attention_backward(
    d_out: Tensor, d_after: Tensor | None, q: Tensor, k: Tensor, v: Tensor, a: Tensor, visible: Tensor | None,
    memory: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, k, v, a and the memory before the first token; the last is empty where there is none.

    The head of `triton_decay.py` has the formulas.
    """
    H = d_out.shape[1]
    G = v.shape[1]
    groups = (q.shape[1], k.shape[1], G)
    came = back = turned = None
    if memory is not None:
        came = memory.mT.contiguous()
    if d_after is not None:
        back = d_after / scale
        turned = back.mT.contiguous()
    dtype = torch.float32  # gradients of shared heads are added up before they are rounded
    if all(n == H for n in groups):
        dtype = q.dtype
    ends = memory is not None
    given = (a, visible, H, scale)
    from_end: Any = {"dtype": dtype, "mask_rows": True, "backwards": True}
    queries = run_pass(d_out, v, k, *given, Sides(came, q), dtype=dtype, mask_keys=True)
    keys = run_pass(v, d_out, q, *given, Sides(turned, k), **from_end)
    values = run_pass(k, q, d_out, *given, Sides(back, None, ends), **from_end)
    d_q, d_k, d_v = (_add_heads(x.out, n).to(q.dtype) for x, n in zip((queries, keys, values), groups, strict=True))
    d_c = _add_heads(queries.dots - keys.dots, G)
    if d_after is not None:
        after = run_pass(q, k, v, a, visible, H, scale, Sides(memory, None, True), dtype=v.dtype, mask_keys=True).after
        d_c[:, :, -1] += (after[:, :: H // G] * d_after).sum((-2, -1))
    d_a = d_c.flip(-1).cumsum(-1).flip(-1)
    d_memory = q.new_empty(0, dtype=torch.float32)
    if ends:
        d_memory = _add_heads(values.after, G) * scale
    return d_q, d_k, d_v, d_a, d_memory


@decayed_attention_backward.register_fake
def _allocate_gradients(
    d_out: Tensor, d_after: Tensor | None, q: Tensor, k: Tensor, v: Tensor, a: Tensor, visible: Tensor | None,
    memory: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns uninitialised results of `decayed_attention_backward`."""
    given = (q, k, v)
    d_q, d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given)
    d_memory = q.new_empty(0, dtype=torch.float32)
    if memory is not None:
        d_memory = torch.empty(memory.shape, dtype=torch.float32, device=q.device)
    return d_q, d_k, d_v, torch.empty(a.shape, dtype=torch.float32, device=q.device), d_memory


def run_pass(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, visible: Tensor | None, H: int, scale: float, sides: Sides, *,
    dtype: torch.dtype, mask_keys: bool = False, mask_rows: bool = False, backwards: bool = False,
) -> Passed:  # fmt: skip
    """Returns what one pass over the tokens gives each of H heads, forward or from the end.

    q, k [B,·,T,K] and v [B,·,T,V] are whatever stands in these roles, and outputs have `dtype`. A sequence is cut into
    segments where its heads alone would leave the GPU idle; what each adds to the memory is then summed first.
    """
    q, k, v = (with_unit_stride(x) for x in (q, k, v))
    B, _, T, K = q.shape
    V = v.shape[3]
    BV = min(tile_side(V), COLUMNS)
    blocks = ceil_div(V, BV)
    wanted = max(1, ceil_div(2 * sm_count(v.device), B * H * blocks))
    span = max(LEAST_SPAN, CHUNK * ceil_div(T, CHUNK * wanted))
    segments = ceil_div(T, span)
    new: Any = {"dtype": torch.float32, "device": v.device}
    out = torch.empty(B, H, T, V, dtype=dtype, device=v.device)
    dots = torch.empty(blocks * (sides.other is not None), B, H, T, **new)
    after = torch.empty(B, H * sides.ends, K, V, **new)
    sums = torch.empty(B, H, segments * (segments > 1), K, V, **new)
    left = torch.empty(B, H, segments * (segments > 1), **new)
    seen = a  # tensors that a call does not read
    other = v
    before = a
    if visible is not None:
        seen = visible.contiguous()
    if sides.other is not None:
        other = with_unit_stride(sides.other)
    if sides.before is not None:
        before = sides.before.contiguous()
    numbers = (T, H, span, *strides(q, k, v, other))
    named = {
        "K": K, "V": V, "BK": tile_side(K), "BV": BV, "C": CHUNK, "SCALE": scale, "Q_GROUP": H // q.shape[1],
        "K_GROUP": H // k.shape[1], "V_GROUP": H // v.shape[1], "A_GROUP": H // a.shape[1],
        "O_GROUP": H // other.shape[1], "PRECISION": PRECISIONS[q.dtype], "BACKWARDS": backwards,
        "SUMS_ONLY": False, "SEVERAL": segments > 1, "MASK_KEYS": mask_keys and visible is not None,
        "MASK_ROWS": mask_rows and visible is not None, "STARTS": sides.before is not None, "ENDS": sides.ends,
        "DOTS": sides.other is not None,
    }  # fmt: skip
    tensors = (q, k, v, a.contiguous(), seen, other, before, sums, left, out, dots, after)
    settings = SETTINGS
    if q.dtype != torch.bfloat16:
        settings = SETTINGS_OF_THREE_PRODUCTS
    grid = (segments * blocks, B * H, 1)
    for sums_only in (True, False):
        if sums_only and segments == 1:
            continue
        chosen = named | {"SUMS_ONLY": sums_only}
        key = (decayed_kernel, f"K = {K}, V = {V}, {q.dtype}", q.device, numbers, *chosen.values())
        launch(key, decayed_kernel, grid, tensors, numbers, lambda chosen=chosen: chosen, lambda: settings)  # type: ignore[misc]
    return Passed(out, dots.sum(0), after)


def _add_heads(x: Tensor, heads: int) -> Tensor:
    """Returns x [B,H,…] summed over the heads that share one of so many."""
    if x.shape[1] == heads:
        return x
    shared: Tensor = x.unflatten(1, (heads, -1))
    return shared.sum(2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keeps for the gradient what it reads."""
    *tensors, ctx.scale, ctx.final = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, d_out: Tensor | None, d_after: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the gradient of each input."""
    if d_out is None and d_after is None:
        return (None,) * 8
    if d_out is None:
        q = ctx.saved_tensors[0]
        v = ctx.saved_tensors[2]
        heads = max(q.shape[1], v.shape[1])
        d_out = v.new_zeros(v.shape[0], heads, *v.shape[2:])
    if not ctx.final:
        d_after = None
    *grads, d_memory = decayed_attention_backward(d_out, d_after, *ctx.saved_tensors, ctx.scale)
    first = None
    if ctx.saved_tensors[5] is not None:
        first = d_memory
    return (*grads, None, first, None, None)


decayed_attention.register_autograd(_backward, setup_context=_save)


def _size(q: Any, k: Any, v: Any) -> Size:
    """Returns the size of a call by the shapes of its tensors."""
    B, G, T, V = v
    return Size(B=B, T=T, S=T, H=max(q[1], G), G=G, K=k[3], V=V, causal=True)


@register_flop_formula(torch.ops.regard.decayed_attention)
def _forward_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of the outputs, as the mechanism declares them."""
    return Gated().cost(_size(q, k, v)).matmul


@register_flop_formula(torch.ops.regard.decayed_attention_backward)
def _backward_flops(d_out: Any, d_after: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of the gradients, as the mechanism declares them."""
    return Gated().gradient_cost(_size(q, k, v)).matmul
