"""The Triton program of ∂k and ∂v, all chunks at once.

With s_i the normaliser of row i, g_i = ∂out_i / s_i, δ_i = −∂out_i·out_i and all sums relative to their peaks:

    ∂ψ(k_j) = Σ_{i≥j} ψ(q_i) (g_i·v_j + δ_i / s_i)
    ∂v_j    = Σ_{i≥j} (ψ(q_i)·ψ(k_j)) g_i

Queries of the same chunk are done as pairs; all after it through R = Σ ψ(q_i) g_iᵀ and ρ = Σ ψ(q_i) δ_i / s_i, which
`chunk_sums_kernel` sums up from the end.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.linear.triton_chunk import load_past, load_scales, locate_chunk
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
from regard.kernels.linear.triton_query_grad import unproject


@triton.constexpr_function
def grad_pair_precision(PRECISION, CHUNK_SUMS, SEGMENT_SUMS):
    """Returns the precision of ψ(k)·ψ(q) within a chunk. In a sequence of one chunk, a token that is nearly orthogonal
    to all that it sees needs all digits of its pairs."""
    if PRECISION == "fp16" and not CHUNK_SUMS and not SEGMENT_SUMS:
        return "fp16x3"
    return PRECISION


@triton.constexpr_function
def norm_slope(MAP, K):
    """Returns the derivative of log φ(k) by k through ‖k‖², as a multiple of k: φ grows with ‖k‖² for `fourier`, and
    shrinks for `performer`."""
    if MAP == "fourier":
        return K**-0.5
    return -(K**-0.5)


@triton.jit
def scale_exactly(x, scale):
    """Returns each row of x [C,w] times its power of two, scale [C]: exact in bfloat16, where x is, and in float32;
    float16 could underflow."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.float32) * scale[:, None]).to(tl.bfloat16)
    else:
        return x.to(tl.float32) * scale[:, None]


@triton.jit
def pair_scale(
    at_k, at_q, stabiliser, row_peak, inv_norm, seen, present, STABILISED: tl.constexpr
):  # fmt: skip
    """Returns 2^(c_j − m_i) / s_i [C,C] for each key j (rows) and query i (columns) of a chunk, zero where i < j or the
    key is hidden.

    stabiliser, row_peak [B,G,T]: c and m, read at at_k [C] if STABILISED. inv_norm [B,H,T]: 1/s, read at at_q [C].
    seen, present [C]: which keys are visible, which tokens exist.
    """
    t = tl.arange(0, seen.shape[0])
    allowed = (t[:, None] <= t[None, :]) & seen[:, None]
    inverse = tl.load(inv_norm + at_q, mask=present, other=0.0)[None, :]
    if STABILISED:
        c = tl.load(stabiliser + at_k, mask=seen, other=float("-inf"))
        m_row = finite_or_zero(tl.load(row_peak + at_k, mask=present, other=float("-inf")))
        return tl.exp2(tl.where(allowed, c[:, None], float("-inf")) - m_row[None, :]) * inverse
    else:
        return tl.where(allowed, inverse, 0.0)


@triton.jit
def key_value_grad_kernel(
    q, k, v, w, visible, q_shift, k_shift, stabiliser, chunk_R, chunk_stats, segment_sums, segment_R_cast,
    segment_stats, inv_norm, row_peak, d_out, delta, d_k, d_v,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, d_b, d_h, d_t, dk_p, dk_b, dk_h, dk_t, dv_p, dv_b, dv_h, dv_t,
    T, span, slots, H, rows, value_blocks,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, PRECISION: tl.constexpr, STABILISED: tl.constexpr, W_PARTS: tl.constexpr,
    GROUP: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, CHUNK_SUMS: tl.constexpr,
    SEGMENT_SUMS: tl.constexpr,
):  # fmt: skip
    """Computes ∂k and ∂v. One program instance does the keys of one chunk, from one query head and one block of values:

        ∂ψ(k_j) = 2^(c_j + M) (R v_j + ρ) + Σ_{i≥j in chunk} 2^(c_j − m_i) ψ(q_i) (∂out_i·v_j + δ_i) / s_i
        ∂v_j    = 2^(c_j + M) Rᵀψ(k_j)    + Σ_{i≥j in chunk} 2^(c_j − m_i) (ψ(q_i)·ψ(k_j)) ∂out_i / s_i

    with R, ρ of all queries after the chunk, relative to the peak M of their −m_i; and ∂k_j from ∂ψ(k_j) through ψ's
    derivative, the directions and ‖k_j‖². Unless CAUSAL, R and ρ are of all queries and there are no pairs.

    Reads:
        q [B,H,T,K], k [B,G,T,K], v [B,G,T,V]: inputs; strides q_b, q_h, q_t and so on. q only if CAUSAL.
        w [W_PARTS·D,K]: directions.
        visible [B,T]: the mask over keys, if MASKED.
        q_shift [B,H,T]: what projections of queries lose; `performer` alone.
        k_shift, stabiliser [B,G,T]: what projections of keys lose, less c; and c; if STABILISED.
        chunk_R [B·H,chunks,F,V], chunk_stats [B·H,chunks,F+2]: R, and ρ with its peak, after each chunk in its segment;
            if CHUNK_SUMS.
        segment_sums [B·H,slots,F·V+F], segment_R_cast [B·H,slots,F,V], segment_stats [B·H,slots,2]: running totals from
            the end; slot n holds segment n and all after it; if SEGMENT_SUMS.
        inv_norm [B,H,T]: 1/s. row_peak [B,G,T]: m_i. delta [B,H,T]: δ. d_out [B,H,T,V]: ∂out; strides d_b, d_h, d_t.
    Writes:
        d_k [GROUP·value_blocks,B,G,T,K]: the shares of ∂k; strides dk_p, dk_b, dk_h, dk_t.
        d_v [GROUP,B,G,T,V]: the shares of ∂v; strides dv_p, dv_b, dv_h, dv_t.
    span: tokens of a segment; rows = B·H; GROUP = H / G.
    """
    chunk, row, value_block = locate_chunk(rows, value_blocks)
    row_q = row.to(tl.int64)
    row_k = (row // GROUP).to(tl.int64)
    b = row_q // H
    h = row_q % H
    t = chunk * C + tl.arange(0, C)
    vv = value_block * BV + tl.arange(0, BV)
    g = h // GROUP
    token = chunk.to(tl.int64) * C
    head_in_group = h % GROUP
    present = t < T
    seen = load_visible(visible, b, t, T, MASKED)
    chunk_slot = row_q * tl.cdiv(T, C) + chunk
    has_chunk_sum = ((chunk + 1) * C % span > 0) & ((chunk + 1) * C < T)
    segment_slot = row_q * slots  # the sums of all queries
    if CAUSAL:
        segment_slot = row_q * slots + (chunk * C // span + 1)
    M, _, segment_scale, _ = load_scales(
        chunk_stats, segment_stats, chunk_slot, segment_slot, has_chunk_sum, F, STABILISED, CHUNK_SUMS, SEGMENT_SUMS,
        False,
    )  # fmt: skip
    has_segment_sum = is_positive(segment_scale)
    delta_share = tl.where(value_block == 0, 1.0, 0.0)  # δ and ρ belong to the first block of values
    q_rows = q + b * q_b + h * q_h + token * q_t
    k_rows = k + b * k_b + g * k_h + token * k_t
    dk_rows = d_k + (head_in_group * value_blocks + value_block) * dk_p + b * dk_b + g * dk_h + token * dk_t
    values = load_rows(v + b * v_b + g * v_h + token * v_t, v_t, seen, vv, V)
    shift_q = 0.0
    shift_k = tl.zeros([C], tl.float32)
    after_scale = tl.where(seen, 1.0, 0.0)
    if STABILISED:
        c = tl.load(stabiliser + row_k * T + t, mask=seen, other=float("-inf"))
        shift_k = tl.load(k_shift + row_k * T + t, mask=seen, other=0.0) + finite_or_zero(c)
        after_scale = tl.exp2(c + M)
    # The gradients of the pairs of the chunk: weight · (∂out·v + δ) / s.
    exponent = tl.zeros([C], tl.float32)
    if CAUSAL:
        if MAP == "performer":
            shift_q = tl.load(q_shift + row_q * T + t, mask=present, other=0.0)[:, None]
        delta_row = tl.load(delta + row_q * T + t, mask=present, other=0.0) * delta_share
        grad = load_rows(d_out + b * d_b + h * d_h + token * d_t, d_t, present, vv, V)
        # [C,BV] @ [BV,C] -> [C,C], keys by queries
        d_pairs = dot(values, tl.trans(grad), tl.zeros([C, C], tl.float32) + delta_row[None, :], PRECISION)
        d_pairs *= pair_scale(row_k * T + t, row_q * T + t, stabiliser, row_peak, inv_norm, seen, present, STABILISED)
        if PRECISION == "fp16":  # each row of ∂pairs has an exponent of its own
            largest = tl.max(tl.abs(d_pairs), 1)
            exponent = tl.where(largest > 0, shared_exponent(largest), 0.0)
            d_pairs = d_pairs * tl.exp2(-exponent)[:, None]
        d_pairs = cast_operand(d_pairs, PRECISION)
    after_row_scale = after_scale * tl.exp2(-exponent)
    values_chunk = values
    values_segment = values
    if STABILISED:
        values_chunk = scale_exactly(values, after_row_scale)
        values_segment = scale_exactly(values, after_row_scale * segment_scale)
    # Block by block of features: ∂ψ(k) and ∂v from what comes after the chunk, and the pairs ψ(k)·ψ(q) for ∂v.
    pairs = tl.zeros([C, C], tl.float32)
    grad_v = tl.zeros([C, BV], tl.float32)
    d_x = tl.zeros([C, BK], tl.float32)
    d_norm = tl.zeros([C], tl.float32)
    # In fp16 there are too few registers to multiply by both terms of R, so they are added first.
    ADD: tl.constexpr = CHUNK_SUMS and SEGMENT_SUMS and PRECISION == "fp16"
    PAIR_PRECISION: tl.constexpr = grad_pair_precision(PRECISION, CHUNK_SUMS, SEGMENT_SUMS)
    D: tl.constexpr = F // features_per_direction(MAP)
    for block in range((D + BF - 1) // BF):
        ff = block * BF + tl.arange(0, BF)
        ws = load_directions(w, block, K, F, BK, BF, MAP, W_PARTS)
        ks = load_vectors(k_rows, k_t, seen, block, K, BK, BF, W_PARTS)
        if CAUSAL:
            qs = load_vectors(q_rows, q_t, present, block, K, BK, BF, W_PARTS)
        d_p = tl.zeros([C, BF], tl.float32)
        for trig in tl.static_range(features_per_direction(MAP)):
            R_chunk, R_segment, rho = load_past(
                chunk_R, chunk_stats, segment_sums, segment_R_cast, chunk_slot, segment_slot, has_chunk_sum,
                has_segment_sum, segment_scale, ff, value_block, trig, V, F, BV, MAP, CHUNK_SUMS, SEGMENT_SUMS, ADD,
            )  # fmt: skip
            R = R_segment
            if CHUNK_SUMS:
                R = R_chunk
            d_psi = tl.zeros([C, BF], tl.float32)
            if CAUSAL:
                p_q = project(qs, ws, K, MAP, W_PARTS)
                psi_q = feature_map(p_q, shift_q, ff[None, :], K, F, BF, MAP, trig, False)[0]
                psi_q = cast_operand(psi_q, PAIR_PRECISION)
                # [C,C] @ [C,BF] -> [C,BF]
                d_psi = dot(d_pairs, psi_q, d_psi, PRECISION)
            p_k = project(ks, ws, K, MAP, W_PARTS)
            psi, slope = feature_map(p_k, shift_k[:, None], ff[None, :], K, F, BF, MAP, trig, False)
            if CAUSAL:
                # [C,BF] @ [BF,C] -> [C,C], keys by queries
                pairs = dot(psi, tl.trans(psi_q), pairs, PAIR_PRECISION)
            # [C,1] · [1,BF] -> [C,BF], right beside the products that it nearly cancels
            d_psi += (delta_share * after_row_scale)[:, None] * rho[None, :]
            if CHUNK_SUMS or SEGMENT_SUMS:
                # [C,BF] @ [BF,BV] -> [C,BV]
                grad_v = dot(psi, R, grad_v, PRECISION)
                # [C,BV] @ [BV,BF] -> [C,BF]
                d_psi = dot(values_chunk, tl.trans(R), d_psi, PRECISION)
            if CHUNK_SUMS and SEGMENT_SUMS and not ADD:
                # [C,BF] @ [BF,BV] -> [C,BV]
                grad_v = dot(psi * segment_scale, R_segment, grad_v, PRECISION)
                # [C,BV] @ [BV,BF] -> [C,BF]
                d_psi = dot(values_segment, tl.trans(R_segment), d_psi, PRECISION)
            if STABILISED:
                # [C,BF] · [C,BF] -> [C]
                d_norm += tl.sum(d_psi * psi, 1)
            d_p += d_psi * slope
        if STABILISED:
            d_x = unproject(d_p, ws, d_x, PRECISION)
        else:
            store_rows(dk_rows, dk_t, present, ff, tl.where(seen[:, None], d_p, 0.0), K)
    grad_v = grad_v * after_scale[:, None]
    if CAUSAL:  # loaded and scaled anew: kept through the loop they would not fit into registers
        grad = load_rows(d_out + b * d_b + h * d_h + token * d_t, d_t, present, vv, V)
        pairs *= pair_scale(row_k * T + t, row_q * T + t, stabiliser, row_peak, inv_norm, seen, present, STABILISED)
        # [C,C] @ [C,BV] -> [C,BV]
        if PRECISION == "fp16":  # weights that cancel have to be precise; ∂out is
            grad_v = dot(pairs, grad.to(tl.bfloat16), grad_v, "bf16x3")
        else:
            grad_v = dot(pairs, grad, grad_v, PRECISION)
    if MAP == "fourier":  # its ψ was not shifted
        scale = tl.exp2(exponent - shift_k)
        grad_v = grad_v * tl.exp2(-shift_k)[:, None]
        d_x = d_x * scale[:, None]
        d_norm = d_norm * scale
    dv_rows = d_v + head_in_group * dv_p + b * dv_b + g * dv_h + token * dv_t
    store_rows(dv_rows, dv_t, present, vv, grad_v, V)
    if STABILISED:
        d_norm = d_norm * norm_slope(MAP, K)
        d_x = d_x * K**-0.25 + d_norm[:, None] * load_rows(k_rows, k_t, seen, tl.arange(0, BK), K)
        store_rows(dk_rows, dk_t, present, tl.arange(0, BK), tl.where(seen[:, None], d_x, 0.0), K)
