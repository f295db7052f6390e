"""Runs the kernels of the backward pass: ∂q from the sums of the forward pass, then sums over queries from the end,
then ∂k and ∂v from those.

Deterministic: sums use no atomics and are always added in the same order, so results are bitwise reproducible.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.linear import triton_key_value_grad, triton_query_grad
from regard.kernels.linear.directions import prepare_directions
from regard.kernels.linear.launch import launch_planned
from regard.kernels.linear.plan import CHUNK, Plan, ceil_div, plan_shapes
from regard.kernels.linear.sums import scan_segments, sum_chunks, unpack_state, write_carry_in
from regard.kernels.linear.tensors import BackwardSums, SavedTensors, size_if, strides, with_unit_stride


class Gradients(NamedTuple):
    """The gradients of a call's inputs."""

    q: Tensor  # [B,H,T,K]
    k: Tensor  # [B,G,T,K]
    v: Tensor  # [B,G,T,V]
    sums: Tensor  # [B,G,F,V+1], of the initial state if there is one


class BackwardCall(NamedTuple):
    """What all kernels of one backward pass share."""

    plan: Plan
    saved: SavedTensors
    directions: Tensor  # w as `prepare_directions` returns it
    d_out: Tensor  # [B,H,T,V]
    d_final: Tensor | None  # gradient of the final state, [B,G,F,V+1]
    causal: bool
    has_initial_state: bool

    @property
    def plan_without_identity(self) -> Plan:
        """The plan for `query_grad_kernel` and `key_value_grad_kernel`, which load vectors without projecting them on
        the identity: their products depend on each other's results, so one more product in that chain costs more than
        it saves."""
        if self.plan.projects_identity:
            return self.plan._replace(w_parts=0)
        return self.plan

    @property
    def visible(self) -> Tensor:
        """The mask, or v as a placeholder if there is none: a kernel takes a tensor in any case."""
        if self.saved.visible is None:
            return self.saved.v
        return self.saved.visible

    @property
    def group(self) -> int:
        """The number of query heads per key head."""
        return self.plan.H // self.plan.G


def run_backward(
    d_out: Tensor, d_final: Tensor | None, saved: SavedTensors, map: str, causal: bool, has_initial_state: bool
) -> Gradients:
    """Returns the gradients of q, k, v and, where the call had an initial state, of its sums."""
    call = _prepare(d_out, d_final, saved, map, causal, has_initial_state)
    plan = call.plan
    saved = call.saved
    B, H, T = saved.q.shape[:3]
    gradients = allocate_gradients(plan, saved.q, saved.k, saved.v, has_initial_state)
    d_q = _allocate_partials(plan.blocks_v, gradients.q)
    d_k = _allocate_partials(plan.blocks_v * call.group, gradients.k)
    d_v = _allocate_partials(call.group, gradients.v)
    delta = saved.inv_norm.new_empty(plan.blocks_v, B, H, T)
    back_shift = saved.inv_norm.new_empty(B, H, size_if(plan.stabilised, T))
    back_chunk_max = saved.inv_norm.new_empty(B * H, size_if(plan.stabilised, ceil_div(T, CHUNK)))
    _run_query_grad(call, d_q, delta, back_shift, back_chunk_max)
    full_delta = delta[0]
    if plan.blocks_v > 1:
        full_delta = delta.sum(0)
    back = _sum_backward(call, back_shift, back_chunk_max, full_delta)
    _run_key_value_grad(call, back, full_delta, d_k, d_v)
    for partials, gradient in ((d_q, gradients.q), (d_k, gradients.k), (d_v, gradients.v)):
        if partials.shape[0] > 1:
            gradient.copy_(partials.sum(0))
    if has_initial_state:
        _write_initial_state_grad(call, back, gradients.sums)
    return gradients


def allocate_gradients(plan: Plan, q: Tensor, k: Tensor, v: Tensor, has_initial_state: bool) -> Gradients:
    """Returns uninitialised gradients, laid out like the inputs: from another layout PyTorch would copy them."""
    dq, dk, dv = (torch.empty_like(with_unit_stride(x)) for x in (q, k, v))
    shape = (q.shape[0], plan.G, size_if(has_initial_state, plan.F), plan.V + 1)
    return Gradients(dq, dk, dv, torch.empty(shape, dtype=torch.float32, device=q.device))


def _prepare(
    d_out: Tensor, d_final: Tensor | None, saved: SavedTensors, map: str, causal: bool, has_initial_state: bool
) -> BackwardCall:
    """Returns the call with its plan, and with tensors laid out as the kernels read them."""
    q, k, v, d_out = (with_unit_stride(x) for x in (saved.q, saved.k, saved.v, d_out))
    plan = plan_shapes(q, v, saved.w, map)
    plan, directions = prepare_directions(plan, saved.w, v)
    visible = saved.visible
    if visible is not None:
        visible = visible.contiguous()
    saved = saved._replace(q=q, k=k, v=v, visible=visible)
    return BackwardCall(plan, saved, directions, d_out, d_final, causal, has_initial_state)


def _allocate_partials(count: int, gradient: Tensor) -> Tensor:
    """Returns a tensor [count,·] for partial sums of a gradient that several programs write; if count is 1, the
    gradient itself."""
    if count == 1:
        return gradient[None]
    return torch.empty(count, *gradient.shape, dtype=torch.float32, device=gradient.device)


def _run_query_grad(
    call: BackwardCall, d_q: Tensor, delta: Tensor, back_shift: Tensor, back_chunk_max: Tensor
) -> None:  # fmt: skip
    """Launches `query_grad_kernel`, which writes d_q, delta, back_shift and back_chunk_max."""
    plan = call.plan
    saved = call.saved
    q, k, v = saved[:3]
    B, H, T = q.shape[:3]
    span = plan.key_segments.span
    if plan.is_chained(call.causal, call.has_initial_state, True):
        # `chained_kernel` sums from the beginning of the sequence, as if that were one segment. Any span that
        # exceeds the index of the last chunk's first token has this effect: every chunk but the first has a chunk sum.
        span = k.shape[2] + CHUNK
    grid = (B * H * plan.blocks_v * ceil_div(T, CHUNK), 1)
    launch_planned(
        triton_query_grad.query_grad_kernel, call.plan_without_identity, grid,
        (q, k, v, call.directions, call.visible, saved.q_shift, saved.k_shift, saved.stabiliser, saved.chunk_S,
         saved.chunk_Z_scales, saved.segment_sums, saved.segment_S_cast, saved.running_scales, saved.out,
         saved.inv_norm, saved.query_peak, call.d_out, d_q, delta, back_shift, back_chunk_max),
        (*strides(q, k, v, saved.out, call.d_out), d_q.stride(0), *strides(d_q[0]), T, span,
         plan.key_segments.slots, H, B * H, plan.blocks_v),
        GROUP=call.group, MASKED=saved.visible is not None, CAUSAL=call.causal, CHUNK_SUMS=saved.chunk_S.numel() > 0,
        SEGMENT_SUMS=saved.segment_sums.numel() > 0,
    )  # fmt: skip


def _sum_backward(call: BackwardCall, back_shift: Tensor, back_chunk_max: Tensor, delta: Tensor) -> BackwardSums:
    """Returns R and ρ of each query head, summed from the end: running totals over the segments, and sums after each
    chunk."""
    plan = call.plan
    q = call.saved.q
    H, T = q.shape[1:3]
    BH = q.shape[0] * H
    # Segment sums are needed if there are several segments, if attention is not causal, and for gradients of states.
    slots = 0
    if plan.query_segments.several or not call.causal or call.d_final is not None or call.has_initial_state:
        slots = plan.query_segments.slots
    chunks = 0  # sums after each chunk are needed where a segment has more than one
    if call.causal and min(T, plan.query_segments.span) > CHUNK:
        chunks = ceil_div(T, CHUNK)
    segment_scales = delta.new_empty(BH, slots, 2)  # of the segments, before the scan
    back = BackwardSums(
        segment_sums=delta.new_empty(BH, slots, plan.state_size),
        segment_R_cast=q.new_empty(BH, slots, plan.F * plan.V, dtype=plan.backward_sum_dtype),
        running_scales=torch.empty_like(segment_scales),
        chunk_R=q.new_empty(BH, chunks, plan.F * plan.V, dtype=plan.backward_sum_dtype),
        chunk_Z_scales=delta.new_empty(BH, chunks, plan.F + 2),
    )
    if not slots and not chunks:
        return back
    if call.d_final is not None:
        _write_final_state_grad(call, call.d_final, back.segment_sums, segment_scales)
    # Placeholders for what is not read here: q for the mask, the second back_chunk_max for chunk_bound. The first
    # segment has slot 0, because the last slot is the carried-in one.
    sum_chunks(
        plan, plan.query_segments, BH,
        (q, call.d_out, call.directions, q, back_shift, back_chunk_max, back_chunk_max, call.saved.inv_norm, delta,
         back.chunk_R, back.chunk_Z_scales, back.segment_sums, segment_scales),
        (*strides(q, call.d_out), T, plan.query_segments.span, plan.query_segments.slots, 0, H),
        REVERSE=True, CARRY_IN=call.d_final is not None, MASKED=False, CHUNK_SUMS=chunks > 0, SEGMENT_SUMS=slots > 0,
    )  # fmt: skip
    if slots:
        scan_segments(
            plan, back.segment_sums, segment_scales, back.segment_R_cast, back.running_scales,
            carry_in=call.d_final is not None, reverse=True,
        )  # fmt: skip
    return back


def _write_final_state_grad(call: BackwardCall, d_final: Tensor, segment_sums: Tensor, segment_scales: Tensor) -> None:
    """Writes the gradient of the final state [B,G,F,V+1] into the last slot. The state is shared by the query heads
    of a group, whose R are added later, so its gradient is given to the first head of the group and zeros to the
    others."""
    by_head = d_final.new_zeros(d_final.shape[0], call.plan.G, call.group, *d_final.shape[2:])
    by_head[:, :, 0] = d_final
    peak = None
    if call.plan.stabilised:
        # The state is relative to 2^state_peak, so its gradient has the exponent −state_peak, as a query has −m_i. A
        # state without keys has state_peak = −inf; its gradient gets −inf too, which makes its factor 0.
        state_peak = call.saved.running_scales[:, -1:, 0].expand(-1, call.group)
        peak = torch.where(state_peak == -math.inf, state_peak, -state_peak)
    write_carry_in(segment_sums, segment_scales, by_head.flatten(1, 2), peak, reverse=True)


def _run_key_value_grad(call: BackwardCall, back: BackwardSums, delta: Tensor, d_k: Tensor, d_v: Tensor) -> None:
    """Launches `key_value_grad_kernel`, which writes d_k and d_v."""
    plan = call.plan
    saved = call.saved
    q, k, v = saved[:3]
    B, H = q.shape[:2]
    T_k = k.shape[2]
    grid = (B * H * plan.blocks_v * ceil_div(T_k, CHUNK), 1)
    launch_planned(
        triton_key_value_grad.key_value_grad_kernel, call.plan_without_identity, grid,
        (q, k, v, call.directions, call.visible, saved.q_shift, saved.k_shift, saved.stabiliser, back.chunk_R,
         back.chunk_Z_scales, back.segment_sums, back.segment_R_cast, back.running_scales, saved.inv_norm,
         saved.query_peak, call.d_out, delta, d_k, d_v),
        (*strides(q, k, v, call.d_out), d_k.stride(0), *strides(d_k[0]), d_v.stride(0), *strides(d_v[0]), T_k,
         plan.query_segments.span, plan.query_segments.slots, H, B * H, plan.blocks_v),
        GROUP=call.group, MASKED=saved.visible is not None, CAUSAL=call.causal, CHUNK_SUMS=back.chunk_R.numel() > 0,
        SEGMENT_SUMS=back.segment_sums.numel() > 0,
    )  # fmt: skip


def _write_initial_state_grad(call: BackwardCall, back: BackwardSums, d_initial: Tensor) -> None:
    """Writes the gradient of the initial state into d_initial [B,G,F,V+1]: R and ρ of all queries, with the gradient
    of the final state if there is one, summed over the query heads of a group and scaled to the state's own peak."""
    plan = call.plan
    B = call.saved.q.shape[0]
    by_head = unpack_state(plan, back.segment_sums[:, 0], B)
    d_initial.copy_(by_head.unflatten(1, (plan.G, call.group)).sum(2))
    if plan.stabilised and call.saved.peak is not None:
        # All heads of a group have the same peaks: take those of the first.
        back_peak = back.running_scales[:, 0, 0].view(B, plan.G, call.group)[..., 0]
        d_initial.mul_(torch.exp2(plan.peak_to_log2(call.saved.peak) + back_peak)[..., None, None])
