"""Launches the programs that sum over tokens: per chunk and segment, then the scan over segments. Forward and backward
both do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.kernels.linear import triton_sums
from regard.kernels.linear.launch import Tensors, launch, launch_planned
from regard.kernels.linear.plan import Plan, Segments, ceil_div
from regard.kernels.linear.triton_primitives import SMALLEST_BOUND

SCAN_BLOCK = 512  # numbers of a state that one program of the scan does


def write_boundary_state(
    segment_sums: Tensor, segment_stats: Tensor, state: Tensor, peak: Tensor | None, *, reverse: bool = False,
    shared_exponent: bool = False,
) -> None:  # fmt: skip
    """Writes a state [B,N,F,V+1] from outside the sequence into the slot that is kept for it: the first, or the last if
    `reverse`. Its peak (as an exponent of two) and the shared exponent of its S go into segment_stats."""
    slot = 0
    if reverse:
        slot = segment_sums.shape[1] - 1
    rows = state.float().flatten(0, 1)
    S = rows[..., :-1]
    segment_sums[:, slot] = torch.cat([S.flatten(1), rows[..., -1]], 1)
    if peak is None:
        return
    segment_stats[:, slot, 0] = peak.flatten()
    if shared_exponent:
        segment_stats[:, slot, 1] = S.abs().amax((1, 2)).clamp(min=SMALLEST_BOUND.value).log2().ceil()


def sum_chunks(
    plan: Plan, segments: Segments, rows: int, tensors: Tensors, numbers: tuple[int, ...], **flags: Any
) -> None:
    """Launches `chunk_sums_kernel`. tensors: its tensors; numbers: strides, tokens, span, slots, first slot, heads."""
    blocks = plan.blocks_f * plan.blocks_v
    grid = (rows * blocks, segments.slots - 1)
    launch_planned(
        triton_sums.chunk_sums_kernel, plan, grid, tensors, (*numbers, blocks, plan.blocks_v), **flags
    )  # fmt: skip


def scan_segments(
    plan: Plan, segment_sums: Tensor, segment_stats: Tensor, segment_S_cast: Tensor, running_stats: Tensor, *,
    boundary: bool, reverse: bool,
) -> None:  # fmt: skip
    """Replaces segment_sums [rows,slots,N] by running totals over the slots, from the end if `reverse`; writes S of
    them to segment_S_cast, and their peaks to running_stats. boundary: whether there is a state from outside."""
    rows, slots, N = segment_sums.shape
    first = 0
    last = slots
    if not boundary:  # its slot is the first one, or the last
        if reverse:
            last = slots - 1
        else:
            first = 1
    numbers = (slots, first, last, N, segment_S_cast.shape[2])
    flags = {
        "STABILISED": plan.stabilised,
        "REVERSE": reverse,
        "SHARED_EXPONENT": plan.precision == "fp16" and not reverse,
    }
    program = triton_sums.scan_segments_kernel
    launch(
        (program, "scan_segments_kernel", segment_sums.device, numbers, *flags.values()), program,
        (rows, ceil_div(N, SCAN_BLOCK), 1), (segment_sums, segment_stats, segment_S_cast, running_stats), numbers,
        lambda: {"BLOCK": SCAN_BLOCK, **flags}, lambda: [{"num_warps": 4}],
    )  # fmt: skip


def unpack_state(plan: Plan, flat: Tensor, B: int) -> Tensor:
    """Returns the state [B,N,F,V+1] of flat sums [B·N,F·V+F]: Z, which stands behind S, becomes its last column."""
    S = flat[:, : plan.F * plan.V].view(B, -1, plan.F, plan.V)
    Z = flat[:, plan.F * plan.V :].reshape(B, -1, plan.F, 1)
    return torch.cat([S, Z], -1)
