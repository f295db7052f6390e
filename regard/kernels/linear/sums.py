"""Launches the kernels that sum over tokens: first by chunk and segment, then the scan over segments. Both the forward
and the backward pass use them.

The state that is *carried in* is the initial state in the forward pass, and the gradient of the final state in the
backward pass, which sums from the end (`reverse`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.kernels.linear import triton_sums
from regard.kernels.linear.launch import Tensors, launch, launch_planned
from regard.kernels.linear.plan import Plan, Segments, ceil_div
from regard.kernels.linear.triton_primitives import SMALLEST_BOUND

SCAN_BLOCK = 512  # elements of a state per program of the scan


def write_carry_in(
    segment_sums: Tensor, segment_scales: Tensor, state: Tensor, peak: Tensor | None, *, reverse: bool = False,
    shared_exponent: bool = False,
) -> None:  # fmt: skip
    """Writes the carried-in state [B,N,F,V+1] to its slot of segment_sums: the first, or the last if `reverse`. If it
    has a peak (to base two), this is written to the same slot of segment_scales, and, if `shared_exponent`, so is the
    shared exponent of its S."""
    slot = 0
    if reverse:
        slot = segment_sums.shape[1] - 1
    flat = state.float().flatten(0, 1)
    S = flat[..., :-1]
    segment_sums[:, slot] = torch.cat([S.flatten(1), flat[..., -1]], 1)
    if peak is None:
        return
    segment_scales[:, slot, 0] = peak.flatten()
    if shared_exponent:
        segment_scales[:, slot, 1] = S.abs().amax((1, 2)).clamp(min=SMALLEST_BOUND.value).log2().ceil()


def sum_chunks(
    plan: Plan, segments: Segments, BH: int, tensors: Tensors, scalars: tuple[int, ...], **flags: Any
) -> None:
    """Launches `chunk_sums_kernel` for BH pairs of a sequence and a head.

    tensors: all its tensors. scalars: strides, tokens, span, slots, first slot, heads.
    """
    blocks = plan.blocks_f * plan.blocks_v
    grid = (BH * blocks, segments.slots - 1)
    launch_planned(
        triton_sums.chunk_sums_kernel, plan, grid, tensors, (*scalars, blocks, plan.blocks_v), **flags
    )  # fmt: skip


def scan_segments(
    plan: Plan, segment_sums: Tensor, segment_scales: Tensor, segment_S_cast: Tensor, running_scales: Tensor, *,
    carry_in: bool, reverse: bool,
) -> None:  # fmt: skip
    """Replaces segment_sums [BH,slots,F·V+F] by running totals over the slots, from the end if `reverse`. Writes their
    S to segment_S_cast, and their peaks and shared exponents to running_scales. carry_in: whether there is a carried-in
    state."""
    BH, slots, state_size = segment_sums.shape
    first = 0
    last = slots
    if not carry_in:  # its slot, the first or the last, holds nothing
        if reverse:
            last = slots - 1
        else:
            first = 1
    scalars = (slots, first, last, state_size, segment_S_cast.shape[2])
    flags = {
        "STABILISED": plan.stabilised,
        "REVERSE": reverse,
        "SHARED_EXPONENT": plan.precision == "fp16" and not reverse,
    }
    kernel = triton_sums.scan_segments_kernel
    launch(
        (kernel, "scan_segments_kernel", segment_sums.device, scalars, *flags.values()), kernel,
        (BH, ceil_div(state_size, SCAN_BLOCK), 1), (segment_sums, segment_scales, segment_S_cast, running_scales),
        scalars,
        lambda: {"BLOCK": SCAN_BLOCK, **flags}, lambda: [{"num_warps": 4}],
    )  # fmt: skip


def unpack_state(plan: Plan, flat: Tensor, B: int) -> Tensor:
    """Returns the state [B,N,F,V+1] of flat sums [B·N,F·V+F], which hold S and then Z: Z becomes its last column."""
    S = flat[:, : plan.F * plan.V].view(B, -1, plan.F, plan.V)
    Z = flat[:, plan.F * plan.V :].reshape(B, -1, plan.F, 1)
    return torch.cat([S, Z], -1)
