"""Runs the programs of the gradient: ∂q from the sums of forward, then sums from the end, then ∂k and ∂v from those.

Nothing is added up in an order that could change: the same inputs give the same bits.
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
from regard.kernels.linear.sums import scan_segments, sum_chunks, unpack_state, write_boundary_state
from regard.kernels.linear.tensors import BackwardSums, SavedTensors, size_if, strides, with_unit_stride


class Gradients(NamedTuple):
    """The gradients of a call's inputs."""

    q: Tensor  # [B,H,T,K]
    k: Tensor  # [B,G,T,K]
    v: Tensor  # [B,G,T,V]
    sums: Tensor  # [B,G,F,V+1] of the state that the call started from, if any


class BackwardCall(NamedTuple):
    """All that the programs of one gradient share."""

    plan: Plan
    saved: SavedTensors
    directions: Tensor  # w as the programs take it
    d_out: Tensor  # [B,H,T,V]
    d_state: Tensor | None  # [B,G,F,V+1], of the final state
    causal: bool
    started: bool  # whether the call started from a state

    @property
    def separate(self) -> Plan:
        """The plan for the programs of ∂q and of ∂k and ∂v. Their products wait for others anyway, so projecting on the
        identity does not pay."""
        if self.plan.projects_identity:
            return self.plan._replace(w_parts=0)
        return self.plan

    @property
    def visible(self) -> Tensor:
        """The mask, or values in its place: something has to be passed."""
        if self.saved.visible is None:
            return self.saved.v
        return self.saved.visible

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.plan.H // self.plan.G


def run_backward(
    d_out: Tensor, d_state: Tensor | None, saved: SavedTensors, map: str, causal: bool, started: bool
) -> Gradients:
    """Returns the gradients of q, k, v and, where the call started from a state, of its sums."""
    call = _prepare(d_out, d_state, saved, map, causal, started)
    plan = call.plan
    saved = call.saved
    B, H, T = saved.q.shape[:3]
    gradients = allocate_gradients(plan, saved.q, saved.k, saved.v, started)
    d_q = _allocate_shares(plan.blocks_v, gradients.q)
    d_k = _allocate_shares(plan.blocks_v * call.group, gradients.k)
    d_v = _allocate_shares(call.group, gradients.v)
    delta = saved.inv_norm.new_empty(plan.blocks_v, B, H, T)
    back_shift = saved.inv_norm.new_empty(B, H, size_if(plan.stabilised, T))
    back_chunk_max = saved.inv_norm.new_empty(B * H, size_if(plan.stabilised, ceil_div(T, CHUNK)))
    _run_query_grad(call, d_q, delta, back_shift, back_chunk_max)
    whole_delta = delta[0]
    if plan.blocks_v > 1:
        whole_delta = delta.sum(0)
    back = _sum_backward(call, back_shift, back_chunk_max, whole_delta)
    _run_key_value_grad(call, back, whole_delta, d_k, d_v)
    for shares, whole in ((d_q, gradients.q), (d_k, gradients.k), (d_v, gradients.v)):
        if shares.shape[0] > 1:
            whole.copy_(shares.sum(0))
    if started:
        _write_state_gradient(call, back, gradients.sums)
    return gradients


def allocate_gradients(plan: Plan, q: Tensor, k: Tensor, v: Tensor, started: bool) -> Gradients:
    """Returns uninitialised gradients, laid out as the inputs are: PyTorch would copy others."""
    dq, dk, dv = (torch.empty_like(with_unit_stride(x)) for x in (q, k, v))
    shape = (q.shape[0], plan.G, size_if(started, plan.F), plan.V + 1)
    return Gradients(dq, dk, dv, torch.empty(shape, dtype=torch.float32, device=q.device))


def _prepare(
    d_out: Tensor, d_state: Tensor | None, saved: SavedTensors, map: str, causal: bool, started: bool
) -> BackwardCall:
    """Returns the call with tensors laid out as the programs read them, and its plan."""
    q, k, v, d_out = (with_unit_stride(x) for x in (saved.q, saved.k, saved.v, d_out))
    plan = plan_shapes(q, v, saved.w, map)
    plan, directions = prepare_directions(plan, saved.w, v)
    visible = saved.visible
    if visible is not None:
        visible = visible.contiguous()
    saved = saved._replace(q=q, k=k, v=v, visible=visible)
    return BackwardCall(plan, saved, directions, d_out, d_state, causal, started)


def _allocate_shares(count: int, gradient: Tensor) -> Tensor:
    """Returns room [count,·] for several programs' shares of a gradient; the gradient itself where there is one."""
    if count == 1:
        return gradient[None]
    return torch.empty(count, *gradient.shape, dtype=torch.float32, device=gradient.device)


def _run_query_grad(
    call: BackwardCall, d_q: Tensor, delta: Tensor, back_shift: Tensor, back_chunk_max: Tensor
) -> None:  # fmt: skip
    """Launches `query_grad_kernel`, which writes all tensors that are passed."""
    plan = call.plan
    saved = call.saved
    q, k, v = saved[:3]
    B, H, T = q.shape[:3]
    span = plan.keys.span
    if plan.is_chained(call.causal, call.started, True):
        span = k.shape[2] + CHUNK  # its chunk sums are of the whole sequence, as if there were one segment
    launch_planned(
        triton_query_grad.query_grad_kernel, call.separate, (B * H * plan.blocks_v * ceil_div(T, CHUNK), 1),
        (q, k, v, call.directions, call.visible, saved.q_shift, saved.k_shift, saved.stabiliser, saved.chunk_S,
         saved.chunk_stats, saved.segment_sums, saved.segment_S_cast, saved.segment_stats, saved.out, saved.inv_norm,
         saved.row_peak, call.d_out, d_q, delta, back_shift, back_chunk_max),
        (*strides(q, k, v, saved.out, call.d_out), d_q.stride(0), *strides(d_q[0]), T, span, plan.keys.slots, H, B * H,
         plan.blocks_v),
        GROUP=call.group, MASKED=saved.visible is not None, CAUSAL=call.causal, CHUNK_SUMS=saved.chunk_S.numel() > 0,
        SEGMENT_SUMS=saved.segment_sums.numel() > 0,
    )  # fmt: skip


def _sum_backward(call: BackwardCall, back_shift: Tensor, back_chunk_max: Tensor, delta: Tensor) -> BackwardSums:
    """Returns R and ρ of each query head, summed from the end: running totals over the segments, and at each chunk."""
    plan = call.plan
    q = call.saved.q
    H, T = q.shape[1:3]
    rows = q.shape[0] * H
    slots = 0
    if plan.queries.slots > 2 or not call.causal or call.d_state is not None or call.started:
        slots = plan.queries.slots
    chunks = 0
    if call.causal and min(T, plan.queries.span) > CHUNK:
        chunks = ceil_div(T, CHUNK)
    stats = delta.new_empty(rows, slots, 2)  # before the scan
    back = BackwardSums(
        segment_sums=delta.new_empty(rows, slots, plan.state_size),
        segment_S_cast=q.new_empty(rows, slots, plan.F * plan.V, dtype=plan.backward_sum_dtype),
        segment_stats=torch.empty_like(stats),
        chunk_S=q.new_empty(rows, chunks, plan.F * plan.V, dtype=plan.backward_sum_dtype),
        chunk_stats=delta.new_empty(rows, chunks, plan.F + 2),
    )
    if not slots and not chunks:
        return back
    if call.d_state is not None:
        _write_final_gradient(call, call.d_state, back.segment_sums, stats)
    sum_chunks(
        plan, plan.queries, rows,
        (q, call.d_out, call.directions, q, back_shift, back_chunk_max, back_chunk_max, call.saved.inv_norm, delta,
         back.chunk_S, back.chunk_stats, back.segment_sums, stats),
        (*strides(q, call.d_out), T, plan.queries.span, plan.queries.slots, 0, H),
        REVERSE=True, BOUNDARY=call.d_state is not None, MASKED=False, CHUNK_SUMS=chunks > 0, SEGMENT_SUMS=slots > 0,
    )  # fmt: skip
    if slots:
        scan_segments(
            plan, back.segment_sums, stats, back.segment_S_cast, back.segment_stats,
            boundary=call.d_state is not None, reverse=True,
        )  # fmt: skip
    return back


def _write_final_gradient(call: BackwardCall, d_state: Tensor, segment_sums: Tensor, stats: Tensor) -> None:
    """Writes the gradient of the final state [B,G,F,V+1] into the last slot. It is of all heads of a group together, so
    it counts for the first of them."""
    by_head = d_state.new_zeros(d_state.shape[0], call.plan.G, call.group, *d_state.shape[2:])
    by_head[:, :, 0] = d_state
    peak = None
    if call.plan.stabilised:
        last = call.saved.segment_stats[:, -1:, 0].expand(-1, call.group)
        peak = torch.where(last == -math.inf, last, -last)
    write_boundary_state(segment_sums, stats, by_head.flatten(1, 2), peak, reverse=True)


def _run_key_value_grad(call: BackwardCall, back: BackwardSums, delta: Tensor, d_k: Tensor, d_v: Tensor) -> None:
    """Launches `key_value_grad_kernel`, which writes d_k and d_v."""
    plan = call.plan
    saved = call.saved
    q, k, v = saved[:3]
    B, H = q.shape[:2]
    S = k.shape[2]
    launch_planned(
        triton_key_value_grad.key_value_grad_kernel, call.separate, (B * H * plan.blocks_v * ceil_div(S, CHUNK), 1),
        (q, k, v, call.directions, call.visible, saved.q_shift, saved.k_shift, saved.stabiliser, back.chunk_S,
         back.chunk_stats, back.segment_sums, back.segment_S_cast, back.segment_stats, saved.inv_norm, saved.row_peak,
         call.d_out, delta, d_k, d_v),
        (*strides(q, k, v, call.d_out), d_k.stride(0), *strides(d_k[0]), d_v.stride(0), *strides(d_v[0]), S,
         plan.queries.span, plan.queries.slots, H, B * H, plan.blocks_v),
        GROUP=call.group, MASKED=saved.visible is not None, CAUSAL=call.causal, CHUNK_SUMS=back.chunk_S.numel() > 0,
        SEGMENT_SUMS=back.segment_sums.numel() > 0,
    )  # fmt: skip


def _write_state_gradient(call: BackwardCall, back: BackwardSums, d_sums: Tensor) -> None:
    """Writes the gradient [B,G,F,V+1] of the state that the call started from: R and ρ of all queries, summed over the
    heads of a group, relative to the state's own peak."""
    plan = call.plan
    B = call.saved.q.shape[0]
    by_head = unpack_state(plan, back.segment_sums[:, 0], B)
    d_sums.copy_(by_head.unflatten(1, (plan.G, call.group)).sum(2))
    if plan.stabilised and call.saved.peak is not None:
        # Heads of a group have the same peaks, so the first speaks for all.
        back_peak = back.segment_stats[:, 0, 0].view(B, plan.G, call.group)[..., 0]
        d_sums.mul_(torch.exp2(plan.peak_to_log2(call.saved.peak) + back_peak)[..., None, None])
