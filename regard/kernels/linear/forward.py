"""Runs the programs of forward: allocates what they write, then launches one after the other.

Nothing is added up in an order that could change: the same inputs give the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regard.kernels.linear import triton_chained, triton_output, triton_stabilisers
from regard.kernels.linear.directions import prepare_directions
from regard.kernels.linear.launch import launch_planned
from regard.kernels.linear.plan import BLOCK_F, CHUNK, Plan, ceil_div, plan_call, processors, tile_side
from regard.kernels.linear.sums import scan_segments, sum_chunks, unpack_state, write_boundary_state
from regard.kernels.linear.tensors import ForwardResults, LinearCall, size_if, strides, with_unit_stride


def run_forward(call: LinearCall) -> ForwardResults:
    """Returns the output [B,H,T,V] of a call, its final state, and what the gradient needs."""
    q, k, v = (with_unit_stride(x) for x in (call.q, call.k, call.v))
    visible = call.visible
    if visible is not None:
        visible = visible.contiguous()
    call = call._replace(q=q, k=k, v=v, visible=visible)
    plan = plan_call(call)
    results = allocate_results(plan, call)
    plan, directions = prepare_directions(plan, call.w, v)
    if plan.is_chained(call.causal, call.sums is not None, call.learns):
        _run_chained(plan, call, directions, results)
    else:
        _run_programs(plan, call, directions, results)
    return results


def allocate_results(plan: Plan, call: LinearCall) -> ForwardResults:
    """Returns uninitialised results; those that the call does not need are empty."""
    B, H, T = call.q.shape[:3]
    S = call.v.shape[2]
    rows = B * plan.G
    float32: dict[str, Any] = {"dtype": torch.float32, "device": call.v.device}
    summed: dict[str, Any] = {"dtype": plan.sum_dtype, "device": call.v.device}
    out_dtype = call.v.dtype
    if plan.signed:
        out_dtype = torch.float32
    slots, chunks = _count_sums(plan, call)
    stabilised_keys = size_if(plan.stabilised, S)
    return ForwardResults(
        # Heads side by side, as the layer merges them: its transpose back costs nothing.
        out=torch.empty(B, T, H, plan.V, dtype=out_dtype, device=call.v.device).transpose(1, 2),
        final_sums=torch.empty(B, plan.G, size_if(call.final, plan.F), plan.V + 1, **float32),
        final_peak=torch.empty(B, size_if(call.final, plan.G), **float32),
        inv_norm=torch.empty(B, H, T, **float32),
        row_peak=torch.empty(B, plan.G, size_if(plan.stabilised and call.causal, T), **float32),
        segment_sums=torch.empty(rows, slots, plan.state_size, **float32),
        segment_S_cast=torch.empty(rows, slots, plan.F * plan.V, **summed),
        segment_stats=torch.empty(rows, slots, 2, **float32),
        chunk_S=torch.empty(rows, chunks, plan.F * plan.V, **summed),
        chunk_stats=torch.empty(rows, chunks, plan.F + 2, **float32),
        q_shift=torch.empty(B, H, size_if(plan.map == "performer", T), **float32),
        k_shift=torch.empty(B, plan.G, stabilised_keys, **float32),
        stabiliser=torch.empty(B, plan.G, stabilised_keys, **float32),
    )


def _count_sums(plan: Plan, call: LinearCall) -> tuple[int, int]:
    """Returns how many slots of segment sums and how many chunk sums a call needs, zero where it does without."""
    S = call.v.shape[2]
    started = call.sums is not None
    if plan.is_chained(call.causal, started, call.learns):
        if call.learns and S > CHUNK:
            return 0, ceil_div(S, CHUNK)
        return 0, 0
    slots = 0
    if call.final or started or not call.causal or plan.keys.slots > 2:
        slots = plan.keys.slots
    chunks = 0
    if call.causal and min(S, plan.keys.span) > CHUNK:
        chunks = ceil_div(S, CHUNK)
    return slots, chunks


def _run_programs(plan: Plan, call: LinearCall, directions: Tensor, results: ForwardResults) -> None:
    """Runs the programs for stabilisers, for sums over chunks and segments, for their scan, and for outputs."""
    q, k, v = call[:3]
    B, H, T = q.shape[:3]
    S = k.shape[2]
    rows = B * plan.G
    shape = (rows, size_if(plan.stabilised, ceil_div(S, CHUNK)))
    chunk_max = results.stabiliser.new_empty(shape)
    chunk_bound = results.stabiliser.new_empty(shape)
    if plan.stabilised:
        written = (results.k_shift, results.stabiliser, chunk_max, chunk_bound)
        _stabilise(plan, k, v, directions, call.visible, written, keys=True)
    if plan.map == "performer":  # a query's stabiliser cancels in the ratio, but its ψ has to be of moderate size
        written = (results.q_shift, results.stabiliser, chunk_max, chunk_bound)
        _stabilise(plan, q, v, directions, None, written, keys=False)
    visible = v  # stands in where there is no mask
    if call.visible is not None:
        visible = call.visible
    flags = {
        "MASKED": call.visible is not None,
        "CHUNK_SUMS": results.chunk_S.numel() > 0,
        "SEGMENT_SUMS": results.segment_sums.numel() > 0,
    }
    boundary = call.sums is not None
    stats = torch.empty_like(results.segment_stats)  # before the scan
    if call.sums is not None:
        peak = None
        if call.peak is not None:
            peak = plan.peak_to_log2(call.peak)
        write_boundary_state(results.segment_sums, stats, call.sums, peak, shared_exponent=plan.precision == "fp16")
    if flags["CHUNK_SUMS"] or flags["SEGMENT_SUMS"]:
        sum_chunks(
            plan, plan.keys, rows,
            (k, v, directions, visible, results.k_shift, chunk_max, chunk_bound, v, v, results.chunk_S,
             results.chunk_stats, results.segment_sums, stats),
            (*strides(k, v), S, plan.keys.span, plan.keys.slots, 1, plan.G),
            REVERSE=False, BOUNDARY=boundary, **flags,
        )  # fmt: skip
    if flags["SEGMENT_SUMS"]:
        scan_segments(
            plan, results.segment_sums, stats, results.segment_S_cast, results.segment_stats, boundary=boundary,
            reverse=False,
        )  # fmt: skip
    chunk = CHUNK
    if plan.narrow and not call.causal:  # without pairs there is room for more tokens
        chunk = 2 * CHUNK
    launch_planned(
        triton_output.output_kernel, plan, (B * H * plan.blocks_v * ceil_div(T, chunk), 1),
        (q, k, v, directions, visible, results.q_shift, results.k_shift, results.stabiliser, results.chunk_S,
         results.chunk_stats, results.segment_sums, results.segment_S_cast, results.segment_stats, results.out,
         results.inv_norm, results.row_peak),
        (*strides(q, k, v, results.out), T, plan.keys.span, plan.keys.slots, H, B * H, plan.blocks_v),
        GROUP=H // plan.G, CAUSAL=call.causal, **flags, C=chunk,
    )  # fmt: skip
    if call.final:
        results.final_sums.copy_(unpack_state(plan, results.segment_sums[:, -1], B))
        if plan.stabilised:
            peak = plan.peak_from_log2(results.segment_stats[:, -1, 0])
            results.final_peak.copy_(peak.view_as(results.final_peak))
        else:
            results.final_peak.fill_(-math.inf)


def _stabilise(
    plan: Plan, x: Tensor, v: Tensor, directions: Tensor, visible: Tensor | None, written: tuple[Tensor, ...], *,
    keys: bool,
) -> None:  # fmt: skip
    """Launches `stabiliser_kernel` for x [B,N,T,K], keys or queries. written: shift, stabiliser, chunk_max,
    chunk_bound, of which queries write the first alone."""
    B, N, T = x.shape[:3]
    per_processor = 16
    if plan.map == "performer":  # a program loads directions once for all its chunks, so few do more each
        per_processor = 4
    programs = min(B * N * ceil_div(T, CHUNK), per_processor * processors(x.device))
    block_f = BLOCK_F
    if plan.narrow:
        block_f = min(tile_side(plan.F), 2 * BLOCK_F)
    mask = x  # stands in where there is none
    if visible is not None:
        mask = visible
    launch_planned(
        triton_stabilisers.stabiliser_kernel, plan, (programs, 1), (x, directions, mask, v, *written),
        (*strides(x, v), T, N, B * N, programs), KEYS=keys, MASKED=visible is not None, BF=block_f,
    )  # fmt: skip


def _run_chained(plan: Plan, call: LinearCall, identity: Tensor, results: ForwardResults) -> None:
    """Runs the one program that does all."""
    q, k, v = call[:3]
    H, T = q.shape[1:3]
    rows = q.shape[0] * plan.G
    segments = ceil_div(T, plan.chained_span)
    handed_over = results.inv_norm.new_empty(rows * (segments - 1) * (BLOCK_F * plan.block_v + BLOCK_F))
    tickets = torch.zeros(1 + rows * segments, dtype=torch.int32, device=v.device)
    initial_sums = results.inv_norm  # stands in where there is no state
    if call.sums is not None:
        initial_sums = call.sums.float().contiguous()
    visible = v  # stands in where there is no mask
    if call.visible is not None:
        visible = call.visible
    launch_planned(
        triton_chained.chained_kernel, plan, (rows * segments, 1),
        (q, k, v, identity, visible, initial_sums, results.out, results.inv_norm, results.chunk_S, results.chunk_stats,
         results.final_sums, handed_over, tickets),
        (*strides(q, k, v, results.out), T, plan.chained_span, segments, H, rows),
        GROUP=H // plan.G, MASKED=call.visible is not None, INITIAL=call.sums is not None, FINAL=call.final,
        CHUNK_SUMS=results.chunk_S.numel() > 0,
    )  # fmt: skip
    if call.final:
        results.final_peak.fill_(-math.inf)
