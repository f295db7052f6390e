"""The Triton kernel that computes ∂q, for all chunks in parallel.

With s_i the normaliser of query i, δ_i = −∂out_i·out_i and all sums relative to their peaks:

    ∂ψ(q_i) = Σ_{j≤i} ψ(k_j) (∂out_i·v_j + δ_i) / s_i

Keys of the same chunk contribute through the gradients of explicit scores [C,C]; all earlier keys through S and Z of
the forward pass, as (S ∂out_i + Z δ_i) / s_i.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.linear.triton_chunk import causal_mask, dot_scaled, load_preceding_sums, load_scales, locate_chunk
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


@triton.constexpr_function
def project_backward_precision(PRECISION):
    """Returns the precision of the product ∂p w with directions w in bfloat16. In bf16x3 only ∂p is split into a high
    and a low part, because `dot` does not split bfloat16. Modes bf16 and fp16 take one product of bfloat16, because
    gradients may exceed the range of float16."""
    if PRECISION == "bf16x3":
        return "bf16x3"
    return "bf16"


@triton.jit
def project_backward(d_p, ws, acc, PRECISION: tl.constexpr):
    """Returns acc + ∂p w [C,BK]: the gradient of the vectors that were projected, without the factor K^(−1/4).

    d_p [C,BF]: the gradient of projections. ws: the parts of `load_directions`, [BF,BK], of which the first is used.
    """
    # [C,BF] @ [BF,BK] -> [C,BK]
    if ws[0].dtype != tl.bfloat16:
        return dot(d_p, ws[0], acc, "tf32x3")
    else:
        return dot(d_p, ws[0], acc, project_backward_precision(PRECISION))


@triton.jit
def store_back_scales(back_shift, back_chunk_max, m_query, shift_q, inverse, present, value_block):
    """Writes the exponents with which `chunk_sums_kernel` (REVERSE) sums over queries, for one chunk.

    back_shift: pointers [C] to where shift_q + m_query − log₂|1/s| goes, or inf where 1/s = 0. 2^p (for `fourier` the
        sine or cosine) divided by 2^back_shift is 2^(−m_query) ψ(q) / |s|.
    back_chunk_max: pointer to where the largest −m_query of the chunk goes.
    m_query, shift_q, inverse, present [C]: of each query, its peak, its shift, 1/s, and whether it exists.
    """
    shift = tl.where(inverse == 0, float("inf"), shift_q + finite_or_zero(m_query) - tl.log2(tl.abs(inverse)))
    tl.store(back_shift, shift, mask=present & (value_block == 0))
    tl.store(back_chunk_max, tl.max(tl.where(m_query == float("-inf"), m_query, -m_query), 0), mask=value_block == 0)


@triton.jit
def query_grad_kernel(
    q, k, v, w, visible, q_shift, k_shift, stabiliser, chunk_S, chunk_Z_scales, segment_sums, segment_S_cast,
    running_scales, out, inv_norm, query_peak, d_out, d_q, delta, back_shift, back_chunk_max,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, d_b, d_h, d_t, dq_p, dq_b, dq_h, dq_t,
    T, span, slots, H, BH, value_blocks,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, PRECISION: tl.constexpr, STABILISED: tl.constexpr, W_PARTS: tl.constexpr,
    GROUP: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, CHUNK_SUMS: tl.constexpr,
    SEGMENT_SUMS: tl.constexpr,
):  # fmt: skip
    """Computes ∂q. One program does the queries of one chunk and one head, from one block of value columns:

        ∂ψ(q_i) = (2^(m − m_i) (S ∂out_i + Z δ_i) + Σ_{j≤i in chunk} 2^(c_j − m_i) ψ(k_j) (∂out_i·v_j + δ_i)) / s_i

    ∂q_i follows through ψ's derivative and the directions. The dot products ∂out_i·v_j and δ_i = −∂out_i·out_i are sums
    over this block's columns only, so that ∂q is the sum of what all blocks write.

    Reads:
        q [B,H,T,K], k [B,G,T,K], v [B,G,T,V]: inputs; strides q_b, q_h, q_t and so on. k and v only if CAUSAL.
        w [W_PARTS·D,K]: directions.
        visible [B,T]: the mask over keys, if MASKED and CAUSAL.
        q_shift [B,H,T]: shift of each query; `performer` alone.
        k_shift, stabiliser [B,G,T]: shift and c of each key; if STABILISED and CAUSAL.
        chunk_S [B·G,chunks,F,V], chunk_Z_scales [B·G,chunks,F+2]: sums before each chunk, from the forward pass; if
            CHUNK_SUMS.
        segment_sums [B·G,slots,F·V+F], segment_S_cast [B·G,slots,F,V], running_scales [B·G,slots,2]: running totals
            over the segments, from the forward pass; if SEGMENT_SUMS.
        out [B,H,T,V]: outputs; strides o_b, o_h, o_t. inv_norm [B,H,T]: 1/s.
        query_peak [B,G,T]: m_i; if STABILISED and CAUSAL.
        d_out [B,H,T,V]: ∂out; strides d_b, d_h, d_t.
    Writes:
        d_q [value_blocks,B,H,T,K]: partial sums of ∂q; strides dq_p, dq_b, dq_h, dq_t.
        delta [value_blocks,B,H,T]: partial sums of δ.
        back_shift [B,H,T], back_chunk_max [B·H,chunks]: exponents for the sums over queries; if STABILISED.
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
    dq_rows = d_q + value_block.to(tl.int64) * dq_p + b * dq_b + h * dq_h + token * dq_t
    shift_q = tl.zeros([C], tl.float32)
    if MAP == "performer":
        shift_q = tl.load(q_shift + bh * T + t, mask=present, other=0.0)
    inverse = tl.load(inv_norm + bh * T + t, mask=present, other=0.0)
    d_outputs = load_rows(d_out + b * d_b + h * d_h + token * d_t, d_t, present, vv, V).to(tl.float32)
    outputs = load_rows(out + b * o_b + h * o_h + token * o_t, o_t, present, vv, V).to(tl.float32)
    # [C,BV] · [C,BV] -> [C]
    delta_query = -tl.sum(d_outputs * outputs, 1)
    tl.store(delta + value_block.to(tl.int64) * BH * T + bh * T + t, delta_query, mask=present)
    if STABILISED:
        m_query = m + tl.zeros_like(inverse)
        if CAUSAL:
            m_query = tl.load(query_peak + bg * T + t, mask=present, other=float("-inf"))
        store_back_scales(
            back_shift + bh * T + t, back_chunk_max + bh * tl.cdiv(T, C) + chunk, m_query, shift_q, inverse,
            present, value_block,
        )  # fmt: skip
    # The gradients of the chunk's scores ψ(q_i)·ψ(k_j), keys in columns: 2^(c_j − m_i) (∂out_i·v_j + δ_i), still to be
    # divided by s_i.
    seen = present
    shift_k = 0.0  # the shift of ψ(k) is k_shift + c, that of φ(k) is k_shift
    preceding_scale = tl.full([C], 1.0, tl.float32)
    if CAUSAL:
        seen = load_visible(visible, b, t, T, MASKED)
        values = load_rows(v + b * v_b + g * v_h + token * v_t, v_t, seen, vv, V)
        # [C,BV] @ [BV,C] -> [C,C]
        d_scores = dot(d_outputs, tl.trans(values), tl.zeros([C, C], tl.float32) + delta_query[:, None], PRECISION)
        allowed = causal_mask(seen)
        if STABILISED:
            c = tl.load(stabiliser + bg * T + t, mask=seen, other=float("-inf"))
            weight_exponent = c
            if MAP == "fourier":  # sine and cosine are not divided by 2ᶜ, so the factor is 2^(−k_shift)
                weight_exponent = -tl.load(k_shift + bg * T + t, mask=seen, other=float("inf"))
            else:
                shift_k = (tl.load(k_shift + bg * T + t, mask=seen, other=0.0) + finite_or_zero(c))[:, None]
            masked_exponent = tl.where(allowed, weight_exponent[None, :], float("-inf"))
            d_scores *= tl.exp2(masked_exponent - (finite_or_zero(m_query) + exponent)[:, None])
            preceding_scale = tl.exp2(m - finite_or_zero(m_query))
            delta_query *= preceding_scale
        else:
            d_scores = tl.where(allowed, d_scores, 0.0)
    if SHARED_EXPONENT:  # each query's row of d_scores and ∂out gets an exponent of its own, besides that of S
        largest = tl.max(tl.abs(d_outputs), 1) * preceding_scale
        delta_query = delta_query * tl.exp2(-exponent)
        if CAUSAL:
            largest = tl.maximum(largest, tl.max(tl.abs(d_scores), 1))
        inv_scale = tl.exp2(-shared_exponent(largest))
        preceding_scale = preceding_scale * inv_scale
        delta_query = delta_query * inv_scale
        inverse = inverse * tl.exp2(shared_exponent(largest) + exponent)
        if CAUSAL:
            d_scores = d_scores * inv_scale[:, None]
    if CAUSAL:
        d_scores = cast_operand(d_scores, PRECISION)
    if STABILISED:
        d_outputs = d_outputs * preceding_scale[:, None]
    # ∂out has only been multiplied by powers of two so far, and the factor 1/s comes last, so the cast loses no digits
    # (without an initial state); in fp16 elements far smaller than the largest of their row may underflow.
    d_outputs = cast_operand(d_outputs, PRECISION)
    # Block by block of features: ∂ψ(q) from preceding sums and from d_scores, then back through ψ and the directions.
    d_x = tl.zeros([C, BK], tl.float32)
    D: tl.constexpr = F // features_per_direction(MAP)
    for block in range((D + BF - 1) // BF):
        ff = block * BF + tl.arange(0, BF)
        ws = load_directions(w, block, K, F, BK, BF, MAP, W_PARTS)
        # In bf16x3 and tf32x3 the high and low parts of q and k would take too many registers if the compiler hoisted
        # them out of the loop. This zero depends on the loop variable, which prevents that.
        zero = 0
        if W_PARTS and (PRECISION == "bf16x3" or PRECISION == "tf32x3"):
            zero = block >> 20
        if CAUSAL:
            ks = load_vectors(k_rows + zero, k_t, seen, block, K, BK, BF, W_PARTS)
        qs = load_vectors(q_rows + zero, q_t, present, block, K, BK, BF, W_PARTS)
        d_p = tl.zeros([C, BF], tl.float32)
        for trig in tl.static_range(features_per_direction(MAP)):
            S_chunk, S_segment, Z = load_preceding_sums(
                chunk_S, chunk_Z_scales, segment_sums, segment_S_cast, chunk_row, slot_row, has_chunk_sum,
                has_segment_sum, segment_factor, ff, value_block, trig, V, F, BV, MAP, CHUNK_SUMS, SEGMENT_SUMS,
            )  # fmt: skip
            # [C,1] · [1,BF] -> [C,BF]
            d_psi = delta_query[:, None] * Z[None, :]
            # [C,BV] @ [BV,BF] -> [C,BF]
            if CHUNK_SUMS:
                d_psi = dot(d_outputs, tl.trans(S_chunk), d_psi, PRECISION)
            if SEGMENT_SUMS:
                d_psi = dot_scaled(
                    d_outputs, tl.trans(S_segment), segment_S_factor, d_psi, PRECISION, STABILISED and CHUNK_SUMS
                )  # fmt: skip
            if CAUSAL:
                p_k = project(ks, ws, K, MAP, W_PARTS)
                psi_k = feature_map(p_k, shift_k, ff[None, :], K, F, BF, MAP, trig, False)[0]
                # [C,C] @ [C,BF] -> [C,BF]
                d_psi = dot(d_scores, psi_k, d_psi, PRECISION)
            p_q = project(qs, ws, K, MAP, W_PARTS)
            d_p += d_psi * feature_map(p_q, shift_q[:, None], ff[None, :], K, F, BF, MAP, trig, False)[1]
        if STABILISED:
            d_x = project_backward(d_p, ws, d_x, PRECISION)
        else:
            store_rows(dq_rows, dq_t, present, ff, d_p * inverse[:, None], K)
    if STABILISED:  # ‖q‖² cancels in the ratio, and has no gradient
        store_rows(dq_rows, dq_t, present, tl.arange(0, BK), d_x * (inverse * K**-0.25)[:, None], K)
