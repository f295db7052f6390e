"""Runs the kernels of the forward pass: allocates what they write, then launches one after the other.

Deterministic: sums use no atomics and are always added in the same order, so results are bitwise reproducible.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.kernels.linear import triton_chained, triton_output, triton_stabilisers
from regard.kernels.linear.directions import prepare_directions
from regard.kernels.linear.launch import launch_planned
from regard.kernels.linear.plan import BLOCK_F, CHUNK, Plan, ceil_div, plan_call, sm_count, tile_side
from regard.kernels.linear.sums import scan_segments, sum_chunks, unpack_state, write_carry_in
from regard.kernels.linear.tensors import ForwardResults, LinearCall, size_if, strides, with_unit_stride


def run_forward(call: LinearCall) -> ForwardResults:
    """Returns the output [B,H,T,V] of a call, its final state, and the tensors that the backward pass needs."""
    q, k, v = (with_unit_stride(x) for x in (call.q, call.k, call.v))
    visible = call.visible
    if visible is not None:
        visible = visible.contiguous()
    call = call._replace(q=q, k=k, v=v, visible=visible)
    plan = plan_call(call)
    results = allocate_results(plan, call)
    plan, directions = prepare_directions(plan, call.w, v)
    if plan.is_chained(call.causal, call.sums is not None, call.needs_grad):
        _run_chained(plan, call, directions, results)
    else:
        _run_kernels(plan, call, directions, results)
    return results


def allocate_results(plan: Plan, call: LinearCall) -> ForwardResults:
    """Returns uninitialised results; tensors that the call's kernels neither write nor read are empty."""
    B, H, T = call.q.shape[:3]
    T_k = call.v.shape[2]
    BG = B * plan.G
    float32: dict[str, Any] = {"dtype": torch.float32, "device": call.v.device}
    summed: dict[str, Any] = {"dtype": plan.sum_dtype, "device": call.v.device}
    out_dtype = call.v.dtype
    if plan.signed:
        out_dtype = torch.float32
    slots, chunks = _count_sums(plan, call)
    stabilised_keys = size_if(plan.stabilised, T_k)
    return ForwardResults(
        # Laid out as [B,T,H,V], so that the layer merges heads without a copy.
        out=torch.empty(B, T, H, plan.V, dtype=out_dtype, device=call.v.device).transpose(1, 2),
        final_sums=torch.empty(B, plan.G, size_if(call.final, plan.F), plan.V + 1, **float32),
        final_peak=torch.empty(B, size_if(call.final, plan.G), **float32),
        inv_norm=torch.empty(B, H, T, **float32),
        query_peak=torch.empty(B, plan.G, size_if(plan.stabilised and call.causal, T), **float32),
        segment_sums=torch.empty(BG, slots, plan.state_size, **float32),
        segment_S_cast=torch.empty(BG, slots, plan.F * plan.V, **summed),
        running_scales=torch.empty(BG, slots, 2, **float32),
        chunk_S=torch.empty(BG, chunks, plan.F * plan.V, **summed),
        chunk_Z_scales=torch.empty(BG, chunks, plan.F + 2, **float32),
        q_shift=torch.empty(B, H, size_if(plan.map == "performer", T), **float32),
        k_shift=torch.empty(B, plan.G, stabilised_keys, **float32),
        stabiliser=torch.empty(B, plan.G, stabilised_keys, **float32),
    )


def _count_sums(plan: Plan, call: LinearCall) -> tuple[int, int]:
    """Returns how many slots of segment sums and how many chunk sums a call needs; zero if it needs none."""
    T_k = call.v.shape[2]
    has_initial_state = call.sums is not None
    if plan.is_chained(call.causal, has_initial_state, call.needs_grad):
        if call.needs_grad and T_k > CHUNK:
            return 0, ceil_div(T_k, CHUNK)
        return 0, 0
    # Segment sums are needed if there are several segments, if attention is not causal (the sums of all keys), and if
    # there is an initial or a final state.
    slots = 0
    if call.final or has_initial_state or not call.causal or plan.key_segments.several:
        slots = plan.key_segments.slots
    chunks = 0  # sums before each chunk are needed where a segment has more than one
    if call.causal and min(T_k, plan.key_segments.span) > CHUNK:
        chunks = ceil_div(T_k, CHUNK)
    return slots, chunks


def _run_kernels(plan: Plan, call: LinearCall, directions: Tensor, results: ForwardResults) -> None:
    """Launches the kernels for stabilisers, for sums of chunks and segments, for their scan, and for outputs."""
    q, k, v = call[:3]
    B, H, T = q.shape[:3]
    T_k = k.shape[2]
    BG = B * plan.G
    shape = (BG, size_if(plan.stabilised, ceil_div(T_k, CHUNK)))
    chunk_max = results.stabiliser.new_empty(shape)
    chunk_bound = results.stabiliser.new_empty(shape)
    if plan.stabilised:
        written = (results.k_shift, results.stabiliser, chunk_max, chunk_bound)
        _stabilise(plan, k, v, directions, call.visible, written, keys=True)
    if plan.map == "performer":  # a query's scale cancels in the ratio, but its ψ must not overflow
        written = (results.q_shift, results.stabiliser, chunk_max, chunk_bound)
        _stabilise(plan, q, v, directions, None, written, keys=False)
    visible = v  # a placeholder if there is no mask
    if call.visible is not None:
        visible = call.visible
    flags = {
        "MASKED": call.visible is not None,
        "CHUNK_SUMS": results.chunk_S.numel() > 0,
        "SEGMENT_SUMS": results.segment_sums.numel() > 0,
    }
    has_initial_state = call.sums is not None
    segment_scales = torch.empty_like(results.running_scales)  # of the segments, before the scan
    if call.sums is not None:
        peak = None
        if call.peak is not None:
            peak = plan.peak_to_log2(call.peak)
        write_carry_in(results.segment_sums, segment_scales, call.sums, peak, shared_exponent=plan.precision == "fp16")
    if flags["CHUNK_SUMS"] or flags["SEGMENT_SUMS"]:
        # The second and the third v are placeholders for inv_norm and delta. The first segment has slot 1, because
        # slot 0 is the carried-in one.
        sum_chunks(
            plan, plan.key_segments, BG,
            (k, v, directions, visible, results.k_shift, chunk_max, chunk_bound, v, v, results.chunk_S,
             results.chunk_Z_scales, results.segment_sums, segment_scales),
            (*strides(k, v), T_k, plan.key_segments.span, plan.key_segments.slots, 1, plan.G),
            REVERSE=False, CARRY_IN=has_initial_state, **flags,
        )  # fmt: skip
    if flags["SEGMENT_SUMS"]:
        scan_segments(
            plan, results.segment_sums, segment_scales, results.segment_S_cast, results.running_scales,
            carry_in=has_initial_state, reverse=False,
        )  # fmt: skip
    chunk = CHUNK
    if plan.has_spare_registers and not call.causal:  # no scores [C,C], so there are registers for more tokens
        chunk = 2 * CHUNK
    launch_planned(
        triton_output.output_kernel, plan, (B * H * plan.blocks_v * ceil_div(T, chunk), 1),
        (q, k, v, directions, visible, results.q_shift, results.k_shift, results.stabiliser, results.chunk_S,
         results.chunk_Z_scales, results.segment_sums, results.segment_S_cast, results.running_scales, results.out,
         results.inv_norm, results.query_peak),
        (*strides(q, k, v, results.out), T, plan.key_segments.span, plan.key_segments.slots, H, B * H, plan.blocks_v),
        GROUP=H // plan.G, CAUSAL=call.causal, **flags, C=chunk,
    )  # fmt: skip
    if call.final:
        results.final_sums.copy_(unpack_state(plan, results.segment_sums[:, -1], B))
        if plan.stabilised:
            peak = plan.peak_from_log2(results.running_scales[:, -1, 0])
            results.final_peak.copy_(peak.view_as(results.final_peak))
        else:
            results.final_peak.zero_()


def _stabilise(
    plan: Plan, x: Tensor, v: Tensor, directions: Tensor, visible: Tensor | None, written: tuple[Tensor, ...], *,
    keys: bool,
) -> None:  # fmt: skip
    """Launches `stabiliser_kernel` for x [B,N,T,K], keys or queries.

    written: shift, stabiliser, chunk_max, chunk_bound; for queries only shift is written.
    """
    B, N, T = x.shape[:3]
    per_sm = 16
    if plan.map == "performer":  # directions are loaded once per program, so use fewer programs with more chunks each
        per_sm = 4
    programs = min(B * N * ceil_div(T, CHUNK), per_sm * sm_count(x.device))
    block_f = BLOCK_F
    if plan.has_spare_registers:
        block_f = min(tile_side(plan.F), 2 * BLOCK_F)
    mask = x  # a placeholder if there is no mask
    if visible is not None:
        mask = visible
    launch_planned(
        triton_stabilisers.stabiliser_kernel, plan, (programs, 1), (x, directions, mask, v, *written),
        (*strides(x, v), T, N, B * N, programs), KEYS=keys, MASKED=visible is not None, BF=block_f,
    )  # fmt: skip


def _run_chained(plan: Plan, call: LinearCall, identity: Tensor, results: ForwardResults) -> None:
    """Launches `chained_kernel`, which does the whole forward pass."""
    q, k, v = call[:3]
    H, T = q.shape[1:3]
    BG = q.shape[0] * plan.G
    segments = ceil_div(T, plan.chained_span)
    handed_over = results.inv_norm.new_empty(BG * (segments - 1) * (BLOCK_F * plan.block_v + BLOCK_F))
    counter_and_flags = torch.zeros(1 + BG * segments, dtype=torch.int32, device=v.device)
    initial_sums = results.inv_norm  # a placeholder if there is no initial state
    if call.sums is not None:
        initial_sums = call.sums.float().contiguous()
    visible = v  # a placeholder if there is no mask
    if call.visible is not None:
        visible = call.visible
    launch_planned(
        triton_chained.chained_kernel, plan, (BG * segments, 1),
        (q, k, v, identity, visible, initial_sums, results.out, results.inv_norm, results.chunk_S,
         results.chunk_Z_scales, results.final_sums, handed_over, counter_and_flags),
        (*strides(q, k, v, results.out), T, plan.chained_span, segments, H, BG),
        GROUP=H // plan.G, MASKED=call.visible is not None, HAS_INITIAL_STATE=call.sums is not None, FINAL=call.final,
        CHUNK_SUMS=results.chunk_S.numel() > 0,
    )  # fmt: skip
    if call.final:
        results.final_peak.zero_()
