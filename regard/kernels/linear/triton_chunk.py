"""What the Triton programs share that do one chunk each: where the chunk is, and the sums of all before it.

The past of a chunk comes in two terms: `chunk_S`, the sums from the beginning of its segment, and `segment_S_cast`, the
running totals of all segments before. Each is multiplied by itself: to add two matrices first takes longer than a
product.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.linear.triton_features import features_per_direction
from regard.kernels.linear.triton_primitives import cast_operand, dot, finite_or_zero


@triton.jit
def locate_chunk(rows, value_blocks):
    """Returns three scalars, what this program instance does: the number of its chunk, its row (sequence and query
    head) of `rows`, and its block of values of `value_blocks`."""
    at = tl.program_id(0)
    chunk = at // value_blocks // rows
    row = (at // value_blocks) % rows
    value_block = at % value_blocks
    return chunk, row, value_block


@triton.jit
def load_scales(
    chunk_stats, segment_stats, chunk_slot, segment_slot, has_chunk_sum, F: tl.constexpr, STABILISED: tl.constexpr,
    CHUNK_SUMS: tl.constexpr, SEGMENT_SUMS: tl.constexpr, SHARED_EXPONENT: tl.constexpr,
):  # fmt: skip
    """Returns four scalars about the past of a chunk, all powers of two or exponents of two:

        peak              the larger of the peaks of both terms, to which their sum is relative
        exponent          the shared exponent of chunk_S, or of segment_S_cast where there is no chunk_S
        segment_scale     what Z of the segments before is multiplied by: 2^(its peak − peak)
        segment_S_scale   the same for S, whose shared exponent is another; zero where nothing came before

    Both scales are one until the segment has found a higher peak.

    chunk_stats [rows,chunks,F+2]: the last two columns hold peak and exponent of chunk_S; at chunk_slot.
    segment_stats [rows,slots,2]: peak and exponent of segment_S_cast; at segment_slot.
    has_chunk_sum: whether the chunk is not the first of its segment.
    """
    peak = tl.full((), float("-inf"), tl.float32)
    segment_scale = tl.full((), 1.0, tl.float32)
    exponent = tl.full((), 0.0, tl.float32)
    if STABILISED:
        segment_peak = peak
        if SEGMENT_SUMS:
            segment_peak = tl.load(segment_stats + segment_slot * 2)
        if CHUNK_SUMS:
            peak = tl.load(chunk_stats + chunk_slot * (F + 2) + F, mask=has_chunk_sum, other=float("-inf"))
        peak = tl.maximum(peak, segment_peak)
        if CHUNK_SUMS and SEGMENT_SUMS:
            segment_scale = tl.exp2(segment_peak - finite_or_zero(peak))
    segment_S_scale = segment_scale
    if SHARED_EXPONENT:
        if SEGMENT_SUMS:
            exponent = tl.load(segment_stats + segment_slot * 2 + 1)
        if CHUNK_SUMS:
            chunk_exponent = tl.load(chunk_stats + chunk_slot * (F + 2) + F + 1, mask=has_chunk_sum, other=0.0)
            chunk_exponent = tl.where(has_chunk_sum, chunk_exponent, exponent)
            segment_S_scale = segment_scale * tl.exp2(exponent - chunk_exponent)
            exponent = chunk_exponent
    return peak, exponent, segment_scale, segment_S_scale


@triton.jit
def load_S(
    sums, slot, exists, ff, end, value_block, V: tl.constexpr, F: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    """Returns a block [BF,BV] of a matrix S, zeros where it does not exist.

    sums [slots,F,V]: chunk_S or segment_S_cast; slot: which matrix.
    ff [BF]: its rows, of which those from `end` on are zero. value_block: which columns.
    """
    vv = value_block * BV + tl.arange(0, BV)
    inside = (ff[:, None] < end) & (vv[None, :] < V) & exists
    return tl.load(sums + slot * (F * V) + ff[:, None] * V + vv[None, :], mask=inside, other=0.0)


@triton.jit
def load_past(
    chunk_S, chunk_stats, segment_sums, segment_S_cast, chunk_slot, segment_slot, has_chunk_sum, has_segment_sum,
    segment_scale, ff, value_block, TRIG: tl.constexpr, V: tl.constexpr, F: tl.constexpr, BV: tl.constexpr,
    MAP: tl.constexpr, CHUNK_SUMS: tl.constexpr, SEGMENT_SUMS: tl.constexpr, ADD: tl.constexpr = False,
):  # fmt: skip
    """Returns the past of a chunk for the directions ff [BF]: S from its segment [BF,BV], S of the segments before
    [BF,BV], and Z [BF] of both. With ADD the first is the sum of both, in bfloat16.

    chunk_S [rows,chunks,F,V], chunk_stats [rows,chunks,F+2]: S and Z before each chunk; at chunk_slot if has_chunk_sum.
    segment_sums [rows,slots,F·V+F]: running totals, of which Z is read; at segment_slot.
    segment_S_cast [rows,slots,F,V]: S of them; at segment_slot if has_segment_sum.
    segment_scale: of `load_scales`. TRIG: the features' sines or only features (0), or their cosines (1).
    """
    D: tl.constexpr = F // features_per_direction(MAP)
    at = TRIG * D + ff
    end = TRIG * D + D
    S_chunk = 0.0
    S_segment = 0.0
    if CHUNK_SUMS:
        S_chunk = load_S(chunk_S, chunk_slot, has_chunk_sum, at, end, value_block, V, F, BV)
    if SEGMENT_SUMS:
        S_segment = load_S(segment_S_cast, segment_slot, has_segment_sum, at, end, value_block, V, F, BV)
    if ADD:
        S_chunk = tl.cast(tl.cast(S_segment, tl.float32) * segment_scale + tl.cast(S_chunk, tl.float32), tl.bfloat16)
    Z = tl.zeros([ff.shape[0]], tl.float32)
    if CHUNK_SUMS:
        Z = tl.load(chunk_stats + chunk_slot * (F + 2) + at, mask=(at < end) & has_chunk_sum, other=0.0)
    if SEGMENT_SUMS:
        inside = at < end
        Z_segment = tl.load(segment_sums + segment_slot * (F * V + F) + F * V + at, mask=inside, other=0.0)
        Z += Z_segment * segment_scale
    return S_chunk, S_segment, Z


@triton.jit
def dot_scaled(a, S, scale, acc, PRECISION: tl.constexpr, SCALED: tl.constexpr):
    """Returns acc + scale · a S. Without SCALED the scale is one.

    a [m,k], S [k,n], acc [m,n]. scale: a scalar power of two. Mostly it is one, which saves the multiplication; it is
    zero where nothing came before, which saves the product.
    """
    # [m,k] @ [k,n] -> [m,n]
    if SCALED and (PRECISION == "bf16" or PRECISION == "fp16"):
        if scale == 1.0:
            acc = dot(a, S, acc, PRECISION)
        elif scale > 0:
            acc = dot(cast_operand(a.to(tl.float32) * scale, PRECISION), S, acc, PRECISION)
        return acc
    elif SCALED:
        return dot(a * scale, S, acc, PRECISION)
    else:
        return dot(a, S, acc, PRECISION)


@triton.jit
def causal_pairs(seen):
    """Returns which keys [1,C] each query [C,1] of the same chunk attends to: those not after it that are seen [C]."""
    t = tl.arange(0, seen.shape[0])
    return (t[:, None] >= t[None, :]) & seen[None, :]
