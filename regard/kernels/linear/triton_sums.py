"""The Triton kernels that sum over tokens: sums before each chunk and of each segment, then a scan over segments."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.linear.triton_features import (
    feature_map,
    features_per_direction,
    load_directions,
    load_vectors,
    project_transposed,
)
from regard.kernels.linear.triton_primitives import (
    cast_operand,
    dot,
    finite_or_zero,
    load_rows,
    load_visible,
    round_operand,
    shared_exponent,
)


@triton.constexpr_function
def sum_precision(PRECISION, REVERSE):
    """Returns the precision of the products in the sums over tokens. For `fourier` (mode fp16) these are bf16x3 in the
    forward pass, because its terms cancel, and bf16 in the backward pass, because gradients may exceed the range of
    float16."""
    if PRECISION != "fp16":
        return PRECISION
    if REVERSE:
        return "bf16"
    return "bf16x3"


@triton.jit
def scales_before_segment(
    chunk_max, chunk_bound, segment_scales, bh, first_chunk, segment_chunks, chunks, slots, REVERSE: tl.constexpr,
    CARRY_IN: tl.constexpr, SHARED_EXPONENT: tl.constexpr,
):  # fmt: skip
    """Returns two scalars about everything that precedes a segment, that is, the tokens before it (after it if REVERSE)
    and the carried-in state: their peak m, and a bound on the magnitude of the elements of their S relative to 2ᵐ (zero
    unless SHARED_EXPONENT). The sums of a segment are relative to this peak from the start, so that the totals of
    earlier segments need no rescaling unless the segment meets a higher peak.

    chunk_max, chunk_bound [BH,chunks]: of each chunk, its largest exponent and the bound for what it adds to S.
    segment_scales [BH,slots,2]: peak and exponent of the state that is carried in, in the first slot or (REVERSE) the
        last; read if CARRY_IN.
    bh: index of the sequence and head; first_chunk: index of the segment's first chunk; segment_chunks: the number of
        its chunks.
    """
    m = tl.full((), float("-inf"), tl.float32)
    bound = tl.full((), 0.0, tl.float32)
    slot_row = bh * slots
    if REVERSE:
        slot_row = bh * slots + (slots - 1)
    carry_offset = slot_row * 2
    if CARRY_IN:
        m = tl.load(segment_scales + carry_offset)
    begin = 0
    end = first_chunk
    if REVERSE:
        begin = first_chunk + segment_chunks
        end = chunks
    for n in range(begin, end, 128):
        chunk = n + tl.arange(0, 128)
        m = tl.maximum(m, tl.max(tl.load(chunk_max + bh * chunks + chunk, mask=chunk < end, other=float("-inf")), 0))
    if SHARED_EXPONENT:
        if CARRY_IN:
            exponent = tl.load(segment_scales + carry_offset + 1) + tl.load(segment_scales + carry_offset)
            bound = tl.exp2(exponent - finite_or_zero(m))
        for n in range(begin, end, 128):
            chunk = n + tl.arange(0, 128)
            largest = tl.load(chunk_max + bh * chunks + chunk, mask=chunk < end, other=float("-inf"))
            scale = tl.exp2(largest - finite_or_zero(m))
            # [128] · [128] -> scalar
            bound += tl.sum(tl.load(chunk_bound + bh * chunks + chunk, mask=chunk < end, other=0.0) * scale, 0)
    return m, bound


@triton.jit
def store_sums(
    S_out, Z_out, S, Z, ff, vv, wanted, TRIG: tl.constexpr, V: tl.constexpr, F: tl.constexpr, MAP: tl.constexpr
):  # fmt: skip
    """Writes one block of S and Z if `wanted`.

    S_out: pointer to a matrix [F,V]; Z_out: pointer to a vector [F].
    S [BF,BV], Z [BF]: sums for the directions ff [BF] and the columns vv [BV] of values. Only programs of the first
        block of columns write Z.
    TRIG: 0 for sines, or for the features of other maps; 1 for cosines, which are stored below the sines.
    """
    D: tl.constexpr = F // features_per_direction(MAP)
    inside = (ff < D) & wanted
    rows = TRIG * D + ff  # of S, which is [F,V]
    tl.store(S_out + rows[:, None] * V + vv[None, :], S, mask=inside[:, None] & (vv[None, :] < V))
    tl.store(Z_out + rows, Z, mask=inside & (tl.min(vv, 0) == 0))


@triton.jit
def add_tokens(S, Z, psi, ys, Z_weights, PRECISION: tl.constexpr, REVERSE: tl.constexpr):
    """Returns S [BF,BV] and Z [BF] with the tokens of one chunk added.

    psi [BF,C]: their features, relative to the peak of S and Z; if REVERSE, also divided by s. ys [C,BV]: values, or
    ∂out if REVERSE. Z_weights [C]: δ, read only if REVERSE.
    """
    # [BF,C] @ [C,BV] -> [BF,BV]
    S = dot(psi, ys, S, PRECISION)
    # [BF,C] @ [C] -> [BF]
    if REVERSE:
        Z += tl.sum(psi * Z_weights[None, :], 1)
    else:
        Z += tl.sum(psi, 1)
    return S, Z


@triton.jit
def chunk_sums_kernel(
    x, y, w, visible, shift, chunk_max, chunk_bound, inv_norm, delta, chunk_S, chunk_Z_scales, segment_sums,
    segment_scales, x_b, x_h, x_t, y_b, y_h, y_t, T, span, slots, first_slot, heads, blocks, value_blocks,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, PRECISION: tl.constexpr, STABILISED: tl.constexpr, W_PARTS: tl.constexpr,
    MASKED: tl.constexpr, REVERSE: tl.constexpr, CARRY_IN: tl.constexpr, CHUNK_SUMS: tl.constexpr,
    SEGMENT_SUMS: tl.constexpr,
):  # fmt: skip
    """Sums over the tokens of a segment. One program goes through the chunks of one segment of one sequence and head,
    for one block of directions and one block of value columns:

        forward             S = Σ_j 2^(c_j − m) ψ(k_j) v_jᵀ               Z = Σ_j 2^(c_j − m) ψ(k_j)
        REVERSE, from end   R = Σ_i 2^(−m_i − M) ψ(q_i) ∂out_iᵀ / s_i     ρ = Σ_i 2^(−m_i − M) ψ(q_i) δ_i / s_i

    m is the running maximum of the c_j. In the backward pass M, the running maximum of the −m_i, takes its place; s_i
    is the normaliser of query i and δ_i = −∂out_i·out_i. Below, S and Z stand for R and ρ if REVERSE, and "before" for
    "after".

    Reads:
        x [B,heads,T,K]: keys, or queries if REVERSE; strides x_b, x_h, x_t.
        y [B,heads,T,V]: values, or ∂out if REVERSE; strides y_b, y_h, y_t.
        w [W_PARTS·D,K]: directions.
        visible [B,T]: the mask over keys, if MASKED.
        shift [B,heads,T]: what is subtracted in the exponent of x's features besides the peak: k_shift, or back_shift
            if REVERSE; if STABILISED.
        chunk_max [BH,chunks]: the largest exponent (c, or −m) of each chunk, if STABILISED.
        chunk_bound [BH,chunks]: a bound for what each chunk adds to S, relative to 2^chunk_max; if PRECISION is
            fp16 and not REVERSE.
        inv_norm [B,heads,T]: 1/s, if REVERSE. back_shift includes log₂|s|, so `fourier` takes only the sign from here,
            and `performer` nothing.
        delta [B,heads,T]: δ, if REVERSE.
    Writes:
        chunk_S [BH,chunks,F,V]: S before each chunk, from the beginning of its segment; if CHUNK_SUMS. The first chunk
            of a segment has nothing before it: its row is neither written nor read.
        chunk_Z_scales [BH,chunks,F+2]: Z before each chunk, then the peak and the shared exponent of chunk_S.
        segment_sums [BH,slots,F·V+F]: S and Z of the whole segment, in slot first_slot + segment; if SEGMENT_SUMS.
        segment_scales [BH,slots,2]: the segment's peak, and the shared exponent for the running total through this
            segment; if SEGMENT_SUMS. If CARRY_IN, the slot of the carried-in state is read: it was written before the
            launch.
    span: tokens of a segment; heads: G, or H if REVERSE; blocks: blocks of directions times value_blocks; value_blocks:
    blocks of value columns.
    """
    pid = tl.program_id(0)
    bh = (pid // blocks).to(tl.int64)
    block = (pid % blocks) // value_blocks
    value_block = pid % value_blocks
    segment = tl.program_id(1)
    b = bh // heads
    h = bh % heads
    ff = block * BF + tl.arange(0, BF)
    vv = value_block * BV + tl.arange(0, BV)
    ws = load_directions(w, block, K, F, BK, BF, MAP, W_PARTS)
    start = segment * span
    segment_chunks = tl.cdiv(tl.minimum(start + span, T) - start, C)
    S = tl.zeros([BF, BV], tl.float32)
    Z = tl.zeros([BF], tl.float32)
    S_cos = S  # sums for cosines, where S and Z are those for sines
    Z_cos = Z
    # If SHARED_EXPONENT, chunk_S is float16, and divided by 2^⌈log₂(bound on the preceding sum)⌉.
    SHARED_EXPONENT: tl.constexpr = PRECISION == "fp16" and not REVERSE
    SUM_PRECISION: tl.constexpr = sum_precision(PRECISION, REVERSE)
    m = tl.full((), float("-inf"), tl.float32)
    bound = tl.full((), 0.0, tl.float32)
    if STABILISED and SEGMENT_SUMS:
        m, bound = scales_before_segment(
            chunk_max, chunk_bound, segment_scales, bh, start // C, segment_chunks, tl.cdiv(T, C), slots, REVERSE,
            CARRY_IN, SHARED_EXPONENT,
        )  # fmt: skip
    for step in range(segment_chunks):
        # Store the sums before this chunk.
        chunk = start // C + step
        if REVERSE:
            chunk = start // C + (segment_chunks - 1 - step)
        chunk_row = bh * tl.cdiv(T, C) + chunk
        if CHUNK_SUMS:
            wanted = step > 0  # nothing comes before the first chunk
            S_out = chunk_S + chunk_row * (F * V)
            Z_out = chunk_Z_scales + chunk_row * (F + 2)
            S_stored = S
            if SHARED_EXPONENT:
                inv_scale = tl.exp2(-shared_exponent(bound))
                tl.store(Z_out + F + 1, shared_exponent(bound), mask=wanted & (pid % blocks == 0))
                S_stored = S * inv_scale
            store_sums(S_out, Z_out, S_stored, Z, ff, vv, wanted, 0, V, F, MAP)
            if features_per_direction(MAP) == 2:
                S_stored = S_cos
                if SHARED_EXPONENT:
                    S_stored = S_cos * inv_scale
                store_sums(S_out, Z_out, S_stored, Z_cos, ff, vv, wanted, 1, V, F, MAP)
            tl.store(Z_out + F, m, mask=wanted & (pid % blocks == 0))
        # Then add its tokens: load them, rescale all sums to the new peak, and add.
        token = chunk.to(tl.int64) * C
        t = chunk * C + tl.arange(0, C)
        seen = load_visible(visible, b, t, T, MASKED)
        xs = load_vectors(x + b * x_b + h * x_h + token * x_t, x_t, seen, block, K, BK, BF, W_PARTS)
        ys = load_rows(y + b * y_b + h * y_h + token * y_t, y_t, seen, vv, V)
        Z_weights = tl.where(seen, 1.0, 0.0)
        if REVERSE:  # ρ sums ψ δ where Z sums ψ · 1
            Z_weights = tl.load(delta + bh * T + t, mask=seen, other=0.0)
        token_shift = tl.where(seen, 0.0, float("inf"))  # ψ of a hidden token is zero
        if STABILISED:
            largest = tl.load(chunk_max + chunk_row)
            m_new = tl.maximum(m, largest)
            rescale = tl.exp2(m - finite_or_zero(m_new))
            S = S * rescale
            Z = Z * rescale
            m = m_new
            if features_per_direction(MAP) == 2:
                S_cos = S_cos * rescale
                Z_cos = Z_cos * rescale
            if SHARED_EXPONENT:
                bound = bound * rescale + tl.load(chunk_bound + chunk_row) * tl.exp2(largest - finite_or_zero(m))
            token_shift = tl.load(shift + bh * T + t, mask=seen, other=float("inf")) + finite_or_zero(m)
        if W_PARTS:  # ψᵀ [BF,C], the first operand of the sum over tokens
            p = project_transposed(xs, ws, K, MAP, W_PARTS)
            scale = tl.exp2(-token_shift)
            if REVERSE and MAP == "fourier":  # the shift includes log₂|s|, but not the sign of s
                inverse = tl.load(inv_norm + bh * T + t, mask=seen, other=0.0)
                scale = tl.where(inverse < 0, -scale, scale)
            elif REVERSE and MAP != "performer":
                scale = tl.load(inv_norm + bh * T + t, mask=seen, other=0.0)
            for trig in tl.static_range(features_per_direction(MAP)):
                psi = feature_map(p, token_shift[None, :], ff[:, None], K, F, BF, MAP, trig, not REVERSE)[0]
                if MAP == "fourier" or (REVERSE and MAP != "performer"):
                    psi = psi * scale[None, :]
                # With stabilisers ρ sums ψ as it is: only `dot` rounds it, for R.
                if not (REVERSE and STABILISED):
                    psi = round_operand(psi, PRECISION)
                if trig == 0:
                    S, Z = add_tokens(S, Z, psi, ys, Z_weights, SUM_PRECISION, REVERSE)
                else:
                    S_cos, Z_cos = add_tokens(S_cos, Z_cos, psi, ys, Z_weights, SUM_PRECISION, REVERSE)
        else:
            psi = feature_map(xs, token_shift[:, None], ff[None, :], K, F, BF, MAP, 0, not REVERSE)[0]
            if REVERSE:
                psi = psi * tl.load(inv_norm + bh * T + t, mask=seen, other=0.0)[:, None]
            # [BF,C] @ [C,BV] -> [BF,BV]
            S = dot(tl.trans(cast_operand(psi, PRECISION)), ys, S, PRECISION)
            # [C,BF] · [C] -> [BF]
            Z += tl.sum(round_operand(psi, PRECISION) * Z_weights[:, None], 0)
    if SEGMENT_SUMS:
        slot_row = bh * slots + first_slot + segment
        S_out = segment_sums + slot_row * (F * V + F)
        store_sums(S_out, S_out + F * V, S, Z, ff, vv, True, 0, V, F, MAP)
        if features_per_direction(MAP) == 2:
            store_sums(S_out, S_out + F * V, S_cos, Z_cos, ff, vv, True, 1, V, F, MAP)
        tl.store(segment_scales + slot_row * 2, m, mask=pid % blocks == 0)
        tl.store(segment_scales + slot_row * 2 + 1, shared_exponent(bound), mask=pid % blocks == 0)


@triton.jit
def scan_segments_kernel(
    segment_sums, segment_scales, segment_S_cast, running_scales, slots, first, last, N, S_size,
    BLOCK: tl.constexpr, STABILISED: tl.constexpr, REVERSE: tl.constexpr, SHARED_EXPONENT: tl.constexpr,
):  # fmt: skip
    """Replaces the sums of the segments by their running totals. One program does BLOCK of the N elements of one
    sequence and head, over all slots:

        total_s = Σ_{r≤s} 2^(m_r − peak_s) sums_r,     peak_s = max_{r≤s} m_r     (r ≥ s if REVERSE)

    Reads:
        segment_sums [BH,slots,N]: S and Z of each segment, N = F·V+F. Only slots first ≤ s < last have been written.
        segment_scales [BH,slots,2]: the peak m_r of each slot, and the shared exponent for the total up to and with
            it, which `chunk_sums_kernel` found from bounds (that of the carried-in slot is from `write_carry_in`).
    Writes:
        segment_sums: the totals, in place.
        segment_S_cast [BH,slots,S_size]: S of the totals once more, in the dtype of the products; S_size = F·V.
            Divided by 2^(shared exponent) if SHARED_EXPONENT.
        running_scales [BH,slots,2]: peak_s if STABILISED; the shared exponent, copied, if SHARED_EXPONENT.
    """
    bh = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    peak = tl.full((), float("-inf"), tl.float32)
    for step in tl.range(0, slots, num_stages=4):
        s = step
        if REVERSE:
            s = slots - 1 - step
        slot_row = bh * slots + s
        filled = (s >= first) & (s < last)
        x = tl.load(segment_sums + slot_row * N + offset, mask=filled & (offset < N), other=0.0)
        if STABILISED:
            segment_peak = tl.load(segment_scales + slot_row * 2, mask=filled, other=float("-inf"))
            new_peak = tl.maximum(peak, segment_peak)
            rescaled = total * tl.exp2(peak - finite_or_zero(new_peak))
            total = rescaled + x * tl.exp2(segment_peak - finite_or_zero(new_peak))
            peak = new_peak
            tl.store(running_scales + slot_row * 2, peak, mask=tl.program_id(1) == 0)
        else:
            total += x
        tl.store(segment_sums + slot_row * N + offset, total, mask=offset < N)
        cast = total
        if SHARED_EXPONENT:
            exponent = tl.load(segment_scales + slot_row * 2 + 1, mask=filled, other=0.0)
            tl.store(running_scales + slot_row * 2 + 1, exponent, mask=tl.program_id(1) == 0)
            cast = total * tl.exp2(-exponent)
        tl.store(segment_S_cast + slot_row * S_size + offset, cast, mask=offset < S_size)
