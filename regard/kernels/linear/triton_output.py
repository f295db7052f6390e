"""The Triton kernel that computes the outputs, for all chunks in parallel, from the sums before each of them."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.linear.triton_chunk import (
    causal_mask,
    dot_scaled,
    load_preceding_sums,
    load_scales,
    locate_chunk,
)
from regard.kernels.linear.triton_features import (
    feature_map,
    features_per_direction,
    load_directions,
    load_vectors,
    project,
)
from regard.kernels.linear.triton_primitives import (
    SMALLEST_NORM,
    cast_operand,
    dot,
    finite_or_zero,
    is_positive,
    load_rows,
    load_visible,
    round_operand,
    store_rows,
)


@triton.jit
def maximum(a, b):
    """Returns the elementwise maximum of a and b: the combine function of a scan."""
    return tl.maximum(a, b)


@triton.constexpr_function
def score_precision(MAP, PRECISION):
    """Returns the precision of the scores ψ(q)·ψ(k) within a chunk. Those of `fourier` cancel in the normaliser, which
    may be far smaller than they are, so they need all digits."""
    if MAP == "fourier":
        return "fp16x3"
    return PRECISION


@triton.constexpr_function
def weighted_value_precision(MAP, PRECISION):
    """Returns the precision of the product of a chunk's weights and values. Weights of `fourier` cancel and need more
    digits."""
    if MAP == "fourier":
        return "bf16x3"
    return PRECISION


@triton.jit
def output_kernel(
    q, k, v, w, visible, q_shift, k_shift, stabiliser, chunk_S, chunk_Z_scales, segment_sums, segment_S_cast,
    running_scales, out, inv_norm, query_peak,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, T, span, slots, H, BH, value_blocks,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, PRECISION: tl.constexpr, STABILISED: tl.constexpr, W_PARTS: tl.constexpr,
    GROUP: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, CHUNK_SUMS: tl.constexpr,
    SEGMENT_SUMS: tl.constexpr,
):  # fmt: skip
    """Computes the outputs. One program does the queries of one chunk and one head, and one block of value columns:

        out_i = (2^(m − m_i) ψ(q_i)ᵀ S + Σ_{j≤i in chunk} a_ij v_j) / s_i
        s_i   =  2^(m − m_i) ψ(q_i)ᵀ Z + Σ_{j≤i in chunk} a_ij,          a_ij = 2^(c_j − m_i) ψ(q_i)·ψ(k_j)

    S and Z are the sums of all keys before the chunk, relative to their peak m; m_i = max(m, max_{j≤i} c_j) is the peak
    of the keys that query i sees. Unless CAUSAL, S and Z are the sums of all keys and there are no scores.

    Reads:
        q [B,H,T,K], k [B,G,T,K], v [B,G,T,V]: inputs; strides q_b, q_h, q_t and so on. k and v only if CAUSAL.
        w [W_PARTS·D,K]: directions.
        visible [B,T]: the mask over keys, if MASKED and CAUSAL.
        q_shift [B,H,T]: shift of each query; `performer` alone.
        k_shift, stabiliser [B,G,T]: shift and c of each key; if STABILISED and CAUSAL.
        chunk_S [B·G,chunks,F,V], chunk_Z_scales [B·G,chunks,F+2]: sums before each chunk in its segment; if CHUNK_SUMS.
        segment_sums [B·G,slots,F·V+F], segment_S_cast [B·G,slots,F,V], running_scales [B·G,slots,2]: running totals
            over the segments: slot n holds all before segment n, the last slot all; if SEGMENT_SUMS.
    Writes:
        out [B,H,T,V]: outputs; strides o_b, o_h, o_t.
        inv_norm [B,H,T]: 1 / s_i, or 0 where s_i has underflowed.
        query_peak [B,G,T]: m_i; if STABILISED and CAUSAL.
    span: tokens of a segment; BH = B·H; GROUP = H / G; value_blocks: blocks of value columns.
    """
    chunk, bh_32, value_block = locate_chunk(BH, value_blocks)
    bh = bh_32.to(tl.int64)
    bg = (bh_32 // GROUP).to(tl.int64)
    b = bh // H
    h = bh % H
    t = chunk * C + tl.arange(0, C)
    vv = value_block * BV + tl.arange(0, BV)
    g = h // GROUP
    token = chunk.to(tl.int64) * C
    present = t < T
    chunk_row = bg * tl.cdiv(T, C) + chunk
    has_chunk_sum = (chunk * C) % span > 0
    slot_row = bg * slots + (slots - 1)  # holds the sums of all keys
    if CAUSAL:
        slot_row = bg * slots + chunk * C // span
    SHARED_EXPONENT: tl.constexpr = PRECISION == "fp16"
    m, exponent, segment_factor, segment_S_factor = load_scales(
        chunk_Z_scales, running_scales, chunk_row, slot_row, has_chunk_sum, F, STABILISED, CHUNK_SUMS,
        SEGMENT_SUMS, SHARED_EXPONENT,
    )  # fmt: skip
    has_segment_sum = is_positive(segment_S_factor)
    q_rows = q + b * q_b + h * q_h + token * q_t
    k_rows = k + b * k_b + g * k_h + token * k_t
    seen = load_visible(visible, b, t, T, MASKED and CAUSAL)
    shift_q = 0.0
    shift_k = 0.0  # the shift of ψ(k) is k_shift + c, that of φ(k) is k_shift
    if MAP == "performer":
        shift_q = tl.load(q_shift + bh * T + t, mask=present, other=0.0)[:, None]
    if MAP == "performer" and CAUSAL:
        c = tl.load(stabiliser + bg * T + t, mask=seen, other=float("-inf"))
        shift_k = (tl.load(k_shift + bg * T + t, mask=seen, other=0.0) + finite_or_zero(c))[:, None]
    # Block by block of features: ψ(q)ᵀS, ψ(q)ᵀZ, and the scores ψ(q)·ψ(k) within the chunk.
    result = tl.zeros([C, BV], tl.float32)
    norm = tl.zeros([C], tl.float32)
    scores = tl.zeros([C, C], tl.float32)
    SCORE_PRECISION: tl.constexpr = score_precision(MAP, PRECISION)
    if CAUSAL:
        values = load_rows(v + b * v_b + g * v_h + token * v_t, v_t, seen, vv, V)
    D: tl.constexpr = F // features_per_direction(MAP)
    for block in range((D + BF - 1) // BF):
        ff = block * BF + tl.arange(0, BF)
        ws = load_directions(w, block, K, F, BK, BF, MAP, W_PARTS)
        qs = load_vectors(q_rows, q_t, present, block, K, BK, BF, W_PARTS)
        if CAUSAL:
            ks = load_vectors(k_rows, k_t, seen, block, K, BK, BF, W_PARTS)
        for trig in tl.static_range(features_per_direction(MAP)):
            # All loads come first, because the compiler does not move any of them ahead of a product.
            S_chunk, S_segment, Z = load_preceding_sums(
                chunk_S, chunk_Z_scales, segment_sums, segment_S_cast, chunk_row, slot_row, has_chunk_sum,
                has_segment_sum, segment_factor, ff, value_block, trig, V, F, BV, MAP, CHUNK_SUMS, SEGMENT_SUMS,
            )  # fmt: skip
            p_q = project(qs, ws, K, MAP, W_PARTS)
            psi_q = feature_map(p_q, shift_q, ff[None, :], K, F, BF, MAP, trig, True)[0]
            psi_q = round_operand(psi_q, PRECISION)
            # [C,BF] @ [BF,BV] -> [C,BV]
            if CHUNK_SUMS:
                result = dot(psi_q, S_chunk, result, PRECISION)
            if SEGMENT_SUMS:
                result = dot_scaled(
                    psi_q, S_segment, segment_S_factor, result, PRECISION, STABILISED and CHUNK_SUMS
                )  # fmt: skip
            # [C,BF] @ [BF] -> [C]
            if CHUNK_SUMS or SEGMENT_SUMS:
                norm += tl.sum(psi_q * Z[None, :], 1)
            if CAUSAL:
                p_k = project(ks, ws, K, MAP, W_PARTS)
                psi_k = feature_map(p_k, shift_k, ff[None, :], K, F, BF, MAP, trig, True)[0]
                # [C,BF] @ [BF,C] -> [C,C]
                scores = dot(psi_q, tl.trans(cast_operand(psi_k, SCORE_PRECISION)), scores, SCORE_PRECISION)
    # Scale and mask the scores, scale the preceding sums to the peak of each query, and add both.
    if SHARED_EXPONENT:
        result = result * tl.exp2(exponent)
    if CAUSAL:
        allowed = causal_mask(seen)
        if STABILISED:
            c = tl.load(stabiliser + bg * T + t, mask=seen, other=float("-inf"))
            m_query = tl.maximum(tl.associative_scan(c, 0, maximum), m)
            weight_exponent = c
            if MAP == "fourier":  # sine and cosine are not divided by 2ᶜ, so the factor is 2^(−k_shift)
                weight_exponent = -tl.load(k_shift + bg * T + t, mask=seen, other=float("inf"))
            masked_exponent = tl.where(allowed, weight_exponent[None, :], float("-inf"))
            scores = scores * tl.exp2(masked_exponent - finite_or_zero(m_query)[:, None])
            preceding_scale = tl.exp2(m - finite_or_zero(m_query))
            result = result * preceding_scale[:, None]
            norm = norm * preceding_scale
            tl.store(query_peak + bg * T + t, m_query, mask=present & (value_block == 0) & (h % GROUP == 0))
        else:
            scores = tl.where(allowed, scores, 0.0)
        scores = round_operand(scores, PRECISION)
        # [C,C] @ [C,BV] -> [C,BV]
        result = dot(scores, values, result, weighted_value_precision(MAP, PRECISION))
        norm += tl.sum(scores, 1)
    inverse = tl.where(tl.abs(norm) < SMALLEST_NORM, 0.0, 1 / norm)
    out_rows = out + b * o_b + h * o_h + token * o_t
    store_rows(out_rows, o_t, present, vv, result * inverse[:, None], V)
    tl.store(inv_norm + bh * T + t, inverse, mask=present & (value_block == 0))
