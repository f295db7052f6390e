"""The Triton kernel that computes ∂k and ∂v, for all chunks in parallel.

With s_i the normaliser of query i, g_i = ∂out_i / s_i, δ_i = −∂out_i·out_i and all sums relative to their peaks:

    ∂ψ(k_j) = Σ_{i≥j} ψ(q_i) (g_i·v_j + δ_i / s_i)
    ∂v_j    = Σ_{i≥j} (ψ(q_i)·ψ(k_j)) g_i

Queries of the same chunk contribute through explicit scores [C,C] and their gradients; all later queries through
R = Σ ψ(q_i) g_iᵀ and ρ = Σ ψ(q_i) δ_i / s_i, which `chunk_sums_kernel` sums from the end.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.linear.triton_chunk import load_preceding_sums, load_scales, locate_chunk
from regard.kernels.linear.triton_features import (
    feature_map,
    features_per_direction,
    load_directions,
    load_vectors,
    project,
)
from regard.kernels.linear.triton_primitives import (
    cast_operand,
    dot,
    finite_or_zero,
    is_positive,
    load_rows,
    load_visible,
    shared_exponent,
    store_rows,
)
from regard.kernels.linear.triton_query_grad import project_backward


@triton.constexpr_function
def backward_score_precision(PRECISION, CHUNK_SUMS, SEGMENT_SUMS):
    """Returns the precision of the scores ψ(k)·ψ(q) within a chunk. A query that is nearly orthogonal to all keys that
    it sees has a tiny normaliser, and its scores need all digits. That happens in short sequences: with one float16
    product, 2 of 200 sequences of two tokens missed the tolerance. So for `fourier` (mode fp16) three products are
    taken where there are neither chunk nor segment sums: for a causal sequence of a single chunk without states.
    """
    if PRECISION == "fp16" and not CHUNK_SUMS and not SEGMENT_SUMS:
        return "fp16x3"
    return PRECISION


@triton.constexpr_function
def squared_norm_slope(MAP, K):
    """Returns the number a with ∂(log φ_f) / ∂k = a k at fixed projections w·k. φ(k) has the factor exp(a ‖k‖² / 2),
    which grows with ‖k‖² for `fourier` and shrinks for `performer`."""
    if MAP == "fourier":
        return K**-0.5
    return -(K**-0.5)


@triton.jit
def scale_exactly(x, scale):
    """Returns each row of x [C,n] times its power of two, scale [C]: bfloat16 stays bfloat16, and other dtypes are
    returned as float32, since float16 could underflow. It is exact unless there is an initial state, whose peak need
    not
    be a whole number."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.float32) * scale[:, None]).to(tl.bfloat16)
    else:
        return x.to(tl.float32) * scale[:, None]


@triton.jit
def score_scale(
    k_offsets, q_offsets, stabiliser, query_peak, inv_norm, seen, present, STABILISED: tl.constexpr
):  # fmt: skip
    """Returns 2^(c_j − m_i) / s_i [C,C] for each key j (rows) and query i (columns) of a chunk, zero where i < j or the
    key is hidden.

    stabiliser, query_peak [B,G,T]: c and m, read at k_offsets [C] if STABILISED.
    inv_norm [B,H,T]: 1/s, read at q_offsets [C].
    seen, present [C]: which keys are visible, which tokens exist.
    """
    t = tl.arange(0, seen.shape[0])
    allowed = (t[:, None] <= t[None, :]) & seen[:, None]
    inverse = tl.load(inv_norm + q_offsets, mask=present, other=0.0)[None, :]
    if STABILISED:
        c = tl.load(stabiliser + k_offsets, mask=seen, other=float("-inf"))
        m_query = finite_or_zero(tl.load(query_peak + k_offsets, mask=present, other=float("-inf")))
        return tl.exp2(tl.where(allowed, c[:, None], float("-inf")) - m_query[None, :]) * inverse
    else:
        return tl.where(allowed, inverse, 0.0)


@triton.jit
def key_value_grad_kernel(
    q, k, v, w, visible, q_shift, k_shift, stabiliser, chunk_R, chunk_Z_scales, segment_sums, segment_R_cast,
    running_scales, inv_norm, query_peak, d_out, delta, d_k, d_v,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, d_b, d_h, d_t, dk_p, dk_b, dk_h, dk_t, dv_p, dv_b, dv_h, dv_t,
    T, span, slots, H, BH, value_blocks,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, PRECISION: tl.constexpr, STABILISED: tl.constexpr, W_PARTS: tl.constexpr,
    GROUP: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, CHUNK_SUMS: tl.constexpr,
    SEGMENT_SUMS: tl.constexpr,
):  # fmt: skip
    """Computes ∂k and ∂v. One program does the keys of one chunk, from one query head and one block of value columns:

        ∂ψ(k_j) = 2^(c_j + M) (R v_j + ρ) + Σ_{i≥j in chunk} 2^(c_j − m_i) ψ(q_i) (∂out_i·v_j + δ_i) / s_i
        ∂v_j    = 2^(c_j + M) Rᵀψ(k_j)    + Σ_{i≥j in chunk} 2^(c_j − m_i) (ψ(q_i)·ψ(k_j)) ∂out_i / s_i

    R and ρ are the sums of all queries after the chunk, relative to the peak M of their −m_i. ∂k_j follows from ∂ψ(k_j)
    through ψ's derivative, the directions and ‖k_j‖². Unless CAUSAL, R and ρ are the sums of all queries and there are
    no scores.

    Reads:
        q [B,H,T,K], k [B,G,T,K], v [B,G,T,V]: inputs; strides q_b, q_h, q_t and so on. q only if CAUSAL.
        w [W_PARTS·D,K]: directions.
        visible [B,T]: the mask over keys, if MASKED.
        q_shift [B,H,T]: shift of each query; `performer` alone, if CAUSAL.
        k_shift, stabiliser [B,G,T]: shift and c of each key; if STABILISED.
        chunk_R [B·H,chunks,F,V], chunk_Z_scales [B·H,chunks,F+2]: R, and ρ with its peak, after each chunk in its
            segment; if CHUNK_SUMS.
        segment_sums [B·H,slots,F·V+F], segment_R_cast [B·H,slots,F,V], running_scales [B·H,slots,2]: running totals
            from the end: slot n holds the total of segment n and all after it; if SEGMENT_SUMS.
        inv_norm [B,H,T]: 1/s. delta [B,H,T]: δ. d_out [B,H,T,V]: ∂out; strides d_b, d_h, d_t. All if CAUSAL.
        query_peak [B,G,T]: m_i; if CAUSAL and STABILISED.
    Writes:
        d_k [GROUP·value_blocks,B,G,T,K]: partial sums of ∂k; strides dk_p, dk_b, dk_h, dk_t.
        d_v [GROUP,B,G,T,V]: partial sums of ∂v; strides dv_p, dv_b, dv_h, dv_t.
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
    head_in_group = h % GROUP
    present = t < T
    seen = load_visible(visible, b, t, T, MASKED)
    chunk_row = bh * tl.cdiv(T, C) + chunk
    has_chunk_sum = ((chunk + 1) * C % span > 0) & ((chunk + 1) * C < T)
    slot_row = bh * slots  # holds the sums of all queries
    if CAUSAL:
        slot_row = bh * slots + (chunk * C // span + 1)
    M, _, segment_factor, _ = load_scales(
        chunk_Z_scales, running_scales, chunk_row, slot_row, has_chunk_sum, F, STABILISED, CHUNK_SUMS,
        SEGMENT_SUMS, False,
    )  # fmt: skip
    has_segment_sum = is_positive(segment_factor)
    delta_factor = tl.where(value_block == 0, 1.0, 0.0)  # δ and ρ are added by the first block of value columns alone
    q_rows = q + b * q_b + h * q_h + token * q_t
    k_rows = k + b * k_b + g * k_h + token * k_t
    dk_rows = d_k + (head_in_group * value_blocks + value_block) * dk_p + b * dk_b + g * dk_h + token * dk_t
    values = load_rows(v + b * v_b + g * v_h + token * v_t, v_t, seen, vv, V)
    shift_q = 0.0
    shift_k = tl.zeros([C], tl.float32)  # the shift of ψ(k) is k_shift + c, that of φ(k) is k_shift
    preceding_scale = tl.where(seen, 1.0, 0.0)
    if STABILISED:
        c = tl.load(stabiliser + bg * T + t, mask=seen, other=float("-inf"))
        shift_k = tl.load(k_shift + bg * T + t, mask=seen, other=0.0) + finite_or_zero(c)
        preceding_scale = tl.exp2(c + M)
    # The gradients of the chunk's scores ψ(k_j)·ψ(q_i), queries in columns: 2^(c_j − m_i) (∂out_i·v_j + δ_i) / s_i.
    exponent = tl.zeros([C], tl.float32)
    if CAUSAL:
        if MAP == "performer":
            shift_q = tl.load(q_shift + bh * T + t, mask=present, other=0.0)[:, None]
        delta_query = tl.load(delta + bh * T + t, mask=present, other=0.0) * delta_factor
        d_outputs = load_rows(d_out + b * d_b + h * d_h + token * d_t, d_t, present, vv, V)
        # [C,BV] @ [BV,C] -> [C,C], keys by queries
        d_scores = dot(values, tl.trans(d_outputs), tl.zeros([C, C], tl.float32) + delta_query[None, :], PRECISION)
        d_scores *= score_scale(bg * T + t, bh * T + t, stabiliser, query_peak, inv_norm, seen, present, STABILISED)
        if PRECISION == "fp16":  # each key's row of d_scores gets an exponent of its own
            largest = tl.max(tl.abs(d_scores), 1)
            exponent = tl.where(largest > 0, shared_exponent(largest), 0.0)
            d_scores = d_scores * tl.exp2(-exponent)[:, None]
        d_scores = cast_operand(d_scores, PRECISION)
    # preceding_scale is the factor 2^(c_j + M) of the preceding sums. In ∂ψ(k), where they are added to the products
    # with d_scores, they are divided by 2^exponent of their row, as d_scores was.
    preceding_row_scale = preceding_scale * tl.exp2(-exponent)
    values_for_R = values
    values_for_segment_R = values
    if STABILISED:
        values_for_R = scale_exactly(values, preceding_row_scale)
        values_for_segment_R = scale_exactly(values, preceding_row_scale * segment_factor)
    # Block by block of features: ∂ψ(k) and ∂v from the queries after the chunk, and the scores ψ(k)·ψ(q) for ∂v.
    scores = tl.zeros([C, C], tl.float32)
    d_values = tl.zeros([C, BV], tl.float32)
    d_x = tl.zeros([C, BK], tl.float32)
    d_log_phi = tl.zeros([C], tl.float32)  # Σ_f ∂ψ_f ψ_f: the gradient of log of a factor that all φ_f(k) share
    # In fp16 there are too few registers for products with both terms of R, so the terms are added first.
    ADD: tl.constexpr = CHUNK_SUMS and SEGMENT_SUMS and PRECISION == "fp16"
    SCORE_PRECISION: tl.constexpr = backward_score_precision(PRECISION, CHUNK_SUMS, SEGMENT_SUMS)
    D: tl.constexpr = F // features_per_direction(MAP)
    for block in range((D + BF - 1) // BF):
        ff = block * BF + tl.arange(0, BF)
        ws = load_directions(w, block, K, F, BK, BF, MAP, W_PARTS)
        ks = load_vectors(k_rows, k_t, seen, block, K, BK, BF, W_PARTS)
        if CAUSAL:
            qs = load_vectors(q_rows, q_t, present, block, K, BK, BF, W_PARTS)
        d_p = tl.zeros([C, BF], tl.float32)
        for trig in tl.static_range(features_per_direction(MAP)):
            R_chunk, R_segment, rho = load_preceding_sums(
                chunk_R, chunk_Z_scales, segment_sums, segment_R_cast, chunk_row, slot_row, has_chunk_sum,
                has_segment_sum, segment_factor, ff, value_block, trig, V, F, BV, MAP, CHUNK_SUMS, SEGMENT_SUMS, ADD,
            )  # fmt: skip
            R = R_segment
            if CHUNK_SUMS:
                R = R_chunk
            d_psi = tl.zeros([C, BF], tl.float32)
            if CAUSAL:
                p_q = project(qs, ws, K, MAP, W_PARTS)
                psi_q = feature_map(p_q, shift_q, ff[None, :], K, F, BF, MAP, trig, False)[0]
                psi_q = cast_operand(psi_q, SCORE_PRECISION)
                # [C,C] @ [C,BF] -> [C,BF]
                d_psi = dot(d_scores, psi_q, d_psi, PRECISION)
            p_k = project(ks, ws, K, MAP, W_PARTS)
            psi, slope = feature_map(p_k, shift_k[:, None], ff[None, :], K, F, BF, MAP, trig, False)
            if CAUSAL:
                # [C,BF] @ [BF,C] -> [C,C], keys by queries
                scores = dot(psi, tl.trans(psi_q), scores, SCORE_PRECISION)
            # ρ is added here, right before the products that nearly cancel it. [C,1] · [1,BF] -> [C,BF]
            d_psi += (delta_factor * preceding_row_scale)[:, None] * rho[None, :]
            if CHUNK_SUMS or SEGMENT_SUMS:
                # [C,BF] @ [BF,BV] -> [C,BV]
                d_values = dot(psi, R, d_values, PRECISION)
                # [C,BV] @ [BV,BF] -> [C,BF]
                d_psi = dot(values_for_R, tl.trans(R), d_psi, PRECISION)
            if CHUNK_SUMS and SEGMENT_SUMS and not ADD:
                # [C,BF] @ [BF,BV] -> [C,BV]
                d_values = dot(psi * segment_factor, R_segment, d_values, PRECISION)
                # [C,BV] @ [BV,BF] -> [C,BF]
                d_psi = dot(values_for_segment_R, tl.trans(R_segment), d_psi, PRECISION)
            if STABILISED:
                # [C,BF] · [C,BF] -> [C]
                d_log_phi += tl.sum(d_psi * psi, 1)
            d_p += d_psi * slope
        if STABILISED:
            d_x = project_backward(d_p, ws, d_x, PRECISION)
        else:
            store_rows(dk_rows, dk_t, present, ff, tl.where(seen[:, None], d_p, 0.0), K)
    d_values = d_values * preceding_scale[:, None]
    if CAUSAL:  # loaded and computed again: there are too few registers to keep them through the loop
        d_outputs = load_rows(d_out + b * d_b + h * d_h + token * d_t, d_t, present, vv, V)
        scores *= score_scale(bg * T + t, bh * T + t, stabiliser, query_peak, inv_norm, seen, present, STABILISED)
        # [C,C] @ [C,BV] -> [C,BV]
        if PRECISION == "fp16":  # cancelling weights need bf16x3; ∂out is exact in bfloat16
            d_values = dot(scores, d_outputs.to(tl.bfloat16), d_values, "bf16x3")
        else:
            d_values = dot(scores, d_outputs, d_values, PRECISION)
    if MAP == "fourier":  # its ψ = sin or cos lacked the factor 2^(−k_shift − c); and ∂ψ was divided by 2^exponent
        scale = tl.exp2(exponent - shift_k)
        d_values = d_values * tl.exp2(-shift_k)[:, None]
        d_x = d_x * scale[:, None]
        d_log_phi = d_log_phi * scale
    dv_rows = d_v + head_in_group * dv_p + b * dv_b + g * dv_h + token * dv_t
    store_rows(dv_rows, dv_t, present, vv, d_values, V)
    if STABILISED:
        d_log_phi = d_log_phi * squared_norm_slope(MAP, K)
        d_x = d_x * K**-0.25 + d_log_phi[:, None] * load_rows(k_rows, k_t, seen, tl.arange(0, BK), K)
        store_rows(dk_rows, dk_t, present, tl.arange(0, BK), tl.where(seen[:, None], d_x, 0.0), K)
