"""Code shared by the kernels whose programs handle one chunk each: which chunk that is, and its *preceding* sums, those
of all tokens before it (after it in `key_value_grad_kernel`).

Preceding sums come in two terms: `chunk_S`, the sums from the beginning of the chunk's segment, and `segment_S_cast`,
the running totals of all earlier segments. Each is multiplied separately, because adding the two matrices first takes
longer than a second product; only in mode fp16 `key_value_grad_kernel` adds them (ADD), to save registers. What is said
of S and Z here holds for R and ρ in `key_value_grad_kernel`, from the end.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.linear.triton_features import features_per_direction
from regard.kernels.linear.triton_primitives import cast_operand, dot, finite_or_zero


@triton.jit
def locate_chunk(BH, value_blocks):
    """Returns three scalars that say what this program does: the index of its chunk, the index bh of its sequence and
    query head (below BH), and the index of its block of value columns (below value_blocks)."""
    pid = tl.program_id(0)
    chunk = pid // value_blocks // BH
    bh = (pid // value_blocks) % BH
    value_block = pid % value_blocks
    return chunk, bh, value_block


@triton.jit
def load_scales(
    chunk_Z_scales, running_scales, chunk_row, slot_row, has_chunk_sum, F: tl.constexpr, STABILISED: tl.constexpr,
    CHUNK_SUMS: tl.constexpr, SEGMENT_SUMS: tl.constexpr, SHARED_EXPONENT: tl.constexpr,
):  # fmt: skip
    """Returns four scalars about the preceding sums of a chunk:

        peak               the larger of the peaks of both terms, to which their sum is relative
        exponent           the shared exponent of chunk_S, or of segment_S_cast where there is no chunk_S
        segment_factor     what Z of the earlier segments is multiplied by: 2^(its peak − peak)
        segment_S_factor   what S of the earlier segments is multiplied by: segment_factor, times a power of two because
                           its shared exponent is not that of chunk_S

    segment_factor is 1 unless all of STABILISED, CHUNK_SUMS and SEGMENT_SUMS are set. If they are, it is 0 where
    nothing came before the segment (and so is segment_S_factor), less than 1 where the segment has met a higher peak
    before this chunk, and 1 elsewhere.

    chunk_Z_scales [BH,chunks,F+2]: the last two columns hold peak and exponent of chunk_S; read at the row
        chunk_row = bh·chunks + chunk.
    running_scales [BH,slots,2]: peak and exponent of segment_S_cast; read at the row slot_row = bh·slots + slot.
    has_chunk_sum: whether chunk_S exists: the first chunk of a segment has none.
    """
    peak = tl.full((), float("-inf"), tl.float32)
    segment_factor = tl.full((), 1.0, tl.float32)
    exponent = tl.full((), 0.0, tl.float32)
    if STABILISED:
        segment_peak = peak
        if SEGMENT_SUMS:
            segment_peak = tl.load(running_scales + slot_row * 2)
        if CHUNK_SUMS:
            peak = tl.load(chunk_Z_scales + chunk_row * (F + 2) + F, mask=has_chunk_sum, other=float("-inf"))
        peak = tl.maximum(peak, segment_peak)
        if CHUNK_SUMS and SEGMENT_SUMS:
            segment_factor = tl.exp2(segment_peak - finite_or_zero(peak))
    segment_S_factor = segment_factor
    if SHARED_EXPONENT:
        if SEGMENT_SUMS:
            exponent = tl.load(running_scales + slot_row * 2 + 1)
        if CHUNK_SUMS:
            chunk_exponent = tl.load(chunk_Z_scales + chunk_row * (F + 2) + F + 1, mask=has_chunk_sum, other=0.0)
            chunk_exponent = tl.where(has_chunk_sum, chunk_exponent, exponent)
            segment_S_factor = segment_factor * tl.exp2(exponent - chunk_exponent)
            exponent = chunk_exponent
    return peak, exponent, segment_factor, segment_S_factor


@triton.jit
def load_S(
    sums, index, exists, ff, end, value_block, V: tl.constexpr, F: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    """Returns a block [BF,BV] of a matrix S, zeros if it does not exist.

    sums [·,F,V]: chunk_S or segment_S_cast, its first two dimensions taken as one; index: that of the matrix.
    ff [BF]: which rows of it; those from `end` on are zero. value_block: which block of its columns.
    """
    vv = value_block * BV + tl.arange(0, BV)
    inside = (ff[:, None] < end) & (vv[None, :] < V) & exists
    return tl.load(sums + index * (F * V) + ff[:, None] * V + vv[None, :], mask=inside, other=0.0)


@triton.jit
def load_preceding_sums(
    chunk_S, chunk_Z_scales, segment_sums, segment_S_cast, chunk_row, slot_row, has_chunk_sum, has_segment_sum,
    segment_factor, ff, value_block, TRIG: tl.constexpr, V: tl.constexpr, F: tl.constexpr, BV: tl.constexpr,
    MAP: tl.constexpr, CHUNK_SUMS: tl.constexpr, SEGMENT_SUMS: tl.constexpr, ADD: tl.constexpr = False,
):  # fmt: skip
    """Returns the preceding sums of a chunk, for the directions ff [BF]: S from its segment [BF,BV], S of the
    earlier segments [BF,BV], and Z [BF] of both together. With ADD the first is the sum of both, in bfloat16.

    chunk_S [BH,chunks,F,V], chunk_Z_scales [BH,chunks,F+2]: S and Z before each chunk; read at chunk_row if
        has_chunk_sum.
    segment_sums [BH,slots,F·V+F]: running totals, of which Z is read at slot_row.
    segment_S_cast [BH,slots,F,V]: S of the running totals; read at slot_row if has_segment_sum.
    segment_factor: from `load_scales`. TRIG: 0 for sines, or for the features of other maps; 1 for cosines.
    """
    D: tl.constexpr = F // features_per_direction(MAP)
    rows = TRIG * D + ff  # of S, which is [F,V]
    end = TRIG * D + D
    S_chunk = 0.0
    S_segment = 0.0
    if CHUNK_SUMS:
        S_chunk = load_S(chunk_S, chunk_row, has_chunk_sum, rows, end, value_block, V, F, BV)
    if SEGMENT_SUMS:
        S_segment = load_S(segment_S_cast, slot_row, has_segment_sum, rows, end, value_block, V, F, BV)
    if ADD:
        S_chunk = tl.cast(tl.cast(S_segment, tl.float32) * segment_factor + tl.cast(S_chunk, tl.float32), tl.bfloat16)
    Z = tl.zeros([ff.shape[0]], tl.float32)
    if CHUNK_SUMS:
        Z = tl.load(chunk_Z_scales + chunk_row * (F + 2) + rows, mask=(rows < end) & has_chunk_sum, other=0.0)
    if SEGMENT_SUMS:
        inside = rows < end
        Z_segment = tl.load(segment_sums + slot_row * (F * V + F) + F * V + rows, mask=inside, other=0.0)
        Z += Z_segment * segment_factor
    return S_chunk, S_segment, Z


@triton.jit
def dot_scaled(a, S, scale, acc, PRECISION: tl.constexpr, SCALED: tl.constexpr):
    """Returns acc + scale · a S. Without SCALED the scale is not read, and taken as 1.

    a [m,k], S [k,n], acc [m,n]. scale: a scalar, 0 where nothing came before, else a power of two (a whole one without
    an initial state). In modes bf16 and fp16 a scale of 1, the most frequent, saves the multiplication, and a scale of
    0 saves the product.
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
def causal_mask(seen):
    """Returns which keys (columns) each query (row) of the same chunk attends to, [C,C]: those not after it that are
    seen.

    seen [C]: which keys are visible.
    """
    t = tl.arange(0, seen.shape[0])
    return (t[:, None] >= t[None, :]) & seen[None, :]
