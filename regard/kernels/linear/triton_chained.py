"""Causal linear attention of narrow heads in one Triton kernel: one program per segment waits for the total of
all segments before it, adds its own sums, and hands the new total on.

Keys and values are read twice (those of the last segment once), and the sums of a segment stay in registers. Each
program draws a ticket when it starts, which decides its segment; so the program that it waits for has always started.
Deterministic: atomics only draw tickets and set flags, and sums are always added in the same order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.linear.triton_features import feature_map, load_directions, project, project_transposed
from regard.kernels.linear.triton_primitives import (
    SMALLEST_NORM,
    cast_operand,
    dot,
    load_rows,
    load_visible,
    round_operand,
    store_rows,
)


@triton.jit
def key_features(
    k_rows, stride, seen, ws, ff, K: tl.constexpr, BF: tl.constexpr, MAP: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Returns ψ(k)ᵀ [BF,C] of a chunk of keys, zero for keys that are not seen.

    k_rows: pointer to the first key; stride: elements from one token to the next; seen [C]: which keys are visible.
    ws: the identity [BF,BK], as `load_directions` returns it. ff [BF]: the indices of the features.
    """
    shift = tl.where(seen, 0.0, float("inf"))
    p = project_transposed(load_rows(k_rows, stride, seen, ff, K), ws, K, MAP, 1)
    return round_operand(feature_map(p, shift[None, :], ff[:, None], K, K, BF, MAP, 0, True)[0], PRECISION)


@triton.jit
def sum_segment(
    k_rows, v_rows, ws, visible, b, begin, chunks, T, k_t, v_t, K: tl.constexpr, V: tl.constexpr, BF: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Returns S = Σ ψ(k) vᵀ [BF,BV] and Z = Σ ψ(k) [BF] over `chunks` chunks from token `begin` of sequence b.

    k_rows, v_rows: pointers to the first key and value; k_t, v_t: elements from one token to the next.
    ws: the identity [BF,BK]. visible [B,T]: the mask over keys, if MASKED.
    """
    ff = tl.arange(0, BF)
    vv = tl.arange(0, BV)
    S = tl.zeros([BF, BV], tl.float32)
    Z = tl.zeros([BF], tl.float32)
    for n in range(chunks):
        seen = load_visible(visible, b, begin + n * C + tl.arange(0, C), T, MASKED)
        psi = key_features(k_rows + n * C * k_t, k_t, seen, ws, ff, K, BF, MAP, PRECISION)
        # [BF,C] @ [C,BV] -> [BF,BV]
        S = dot(psi, load_rows(v_rows + n * C * v_t, v_t, seen, vv, V), S, PRECISION)
        Z += tl.sum(psi, 1)
    return S, Z


@triton.jit
def state_pointers(sums, bg, ff, vv, K: tl.constexpr, V: tl.constexpr):
    """Returns the pointers to S [BF,BV] and Z [BF] of one sequence and key head, the bg-th, in a state.

    sums [BG,F,V+1]: the state, S with Z as its last column. ff [BF], vv [BV]: which features and columns.
    """
    feature = sums + bg * (K * (V + 1)) + ff * (V + 1)
    return feature[:, None] + vv[None, :], feature + V


@triton.jit
def wait_until_ready(flag):
    """Waits until the flag, a pointer to int32, is no longer zero. Whatever was written before it was set is then
    visible."""
    ready = tl.atomic_add(flag, 0, sem="acquire")
    while ready == 0:
        ready = tl.atomic_add(flag, 0, sem="acquire")


@triton.jit
def chained_kernel(
    q, k, v, w, visible, initial_sums, out, inv_norm, chunk_S, chunk_Z_scales, final_sums, handed_over,
    counter_and_flags, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, T, span, segments, H, BG,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, PRECISION: tl.constexpr, STABILISED: tl.constexpr, W_PARTS: tl.constexpr,
    GROUP: tl.constexpr, MASKED: tl.constexpr, HAS_INITIAL_STATE: tl.constexpr, FINAL: tl.constexpr,
    CHUNK_SUMS: tl.constexpr,
):  # fmt: skip
    """Computes causal outputs. One program does one segment of one key head, for all query heads of its group:

        out_i = (ψ(q_i)ᵀ S + Σ_{j≤i in chunk} (ψ(q_i)·ψ(k_j)) v_j) / s_i
        s_i   =  ψ(q_i)ᵀ Z + Σ_{j≤i in chunk} ψ(q_i)·ψ(k_j)

    It goes chunk by chunk, with S and Z of all keys before the chunk in registers. F = K here, and there are no
    stabilisers.

    Reads:
        q [B,H,T,K], k [B,G,T,K], v [B,G,T,V]: inputs; strides q_b, q_h, q_t and so on.
        w [K,K]: the identity (see `Plan.projects_identity`).
        visible [B,T]: the mask over keys, if MASKED.
        initial_sums [BG,F,V+1]: the state before the first token, if HAS_INITIAL_STATE.
    Writes:
        out [B,H,T,V]: outputs; strides o_b, o_h, o_t. inv_norm [B,H,T]: 1 / s_i, or 0 where s_i has underflowed.
        chunk_S [BG,chunks,F,V], chunk_Z_scales [BG,chunks,F+2]: S and Z of all keys before each chunk but the first,
            summed from the beginning of the sequence, not of the segment, for the backward pass; if CHUNK_SUMS.
        final_sums [BG,F,V+1]: the state after the last token, if FINAL.
    Reads and writes:
        handed_over [BG,segments−1,BF·BV+BF]: S and Z after each segment but the last.
        counter_and_flags [1+BG·segments]: zeros before the launch. [0]: the next ticket; [1 + ticket]: 1 once
            the program with that ticket has handed its sums over.
    span: tokens of a segment; BG = B·G; GROUP = H / G.
    """
    # Tickets are drawn as programs start: first the first segments of all BG heads, then the second ones, and so on.
    ticket = tl.atomic_add(counter_and_flags, 1, sem="relaxed")
    bg = (ticket % BG).to(tl.int64)
    segment = ticket // BG
    G = H // GROUP
    b = bg // G
    g = bg % G
    ff = tl.arange(0, BF)
    vv = tl.arange(0, BV)
    tt = tl.arange(0, C)
    inside = (ff[:, None] < K) & (vv[None, :] < V)
    inside_Z = ff < K
    begin = segment * span
    chunks = tl.cdiv(tl.minimum(begin + span, T) - begin, C)
    k_rows = k + b * k_b + g * k_h + begin.to(tl.int64) * k_t
    v_rows = v + b * v_b + g * v_h + begin.to(tl.int64) * v_t
    ws = load_directions(w, 0, K, F, BK, BF, MAP, 1)
    offset = (bg * (segments - 1) + segment) * (BF * BV + BF)
    is_last = segment + 1 == segments
    # Sum this segment, wait for the sums of all before it, and hand the total on.
    S = tl.zeros([BF, BV], tl.float32)
    Z = tl.zeros([BF], tl.float32)
    if not is_last:  # no program waits for the sums of the last segment
        S, Z = sum_segment(
            k_rows, v_rows, ws, visible, b, begin, chunks, T, k_t, v_t, K, V, BF, BV, C, MAP, PRECISION, MASKED
        )  # fmt: skip
    S_before = tl.zeros([BF, BV], tl.float32)
    Z_before = tl.zeros([BF], tl.float32)
    if segment > 0:
        wait_until_ready(counter_and_flags + ticket - BG + 1)
        previous = offset - (BF * BV + BF)
        S_before = tl.load(handed_over + previous + ff[:, None] * BV + vv[None, :], cache_modifier=".cg")
        Z_before = tl.load(handed_over + previous + BF * BV + ff, cache_modifier=".cg")
    elif HAS_INITIAL_STATE:
        S_in, Z_in = state_pointers(initial_sums, bg, ff, vv, K, V)
        S_before = tl.load(S_in, mask=inside, other=0.0)
        Z_before = tl.load(Z_in, mask=inside_Z, other=0.0)
    if not is_last:
        tl.store(handed_over + offset + ff[:, None] * BV + vv[None, :], S_before + S)
        tl.store(handed_over + offset + BF * BV + ff, Z_before + Z)
        tl.debug_barrier()  # the whole tile is written before the flag is set
        tl.atomic_xchg(counter_and_flags + ticket + 1, 1, sem="release")
    # Now go through the chunks, starting from the sums before the segment.
    S = S_before
    Z = Z_before
    for n in range(chunks):
        t = begin + n * C + tt
        present = t < T
        seen = load_visible(visible, b, t, T, MASKED)
        values = load_rows(v_rows + n * C * v_t, v_t, seen, vv, V)
        psi = key_features(k_rows + n * C * k_t, k_t, seen, ws, ff, K, BF, MAP, PRECISION)
        keys = cast_operand(psi, PRECISION)
        S_cast = cast_operand(S, PRECISION)
        if CHUNK_SUMS:
            chunk_row = bg * tl.cdiv(T, C) + begin // C + n
            wanted = begin + n * C > 0
            tl.store(chunk_S + chunk_row * (F * V) + ff[:, None] * V + vv[None, :], S_cast, mask=inside & wanted)
            tl.store(chunk_Z_scales + chunk_row * (F + 2) + ff, Z, mask=inside_Z & wanted)
        for r in range(GROUP):
            h = g * GROUP + r
            token = (begin + n * C).to(tl.int64)
            qs = load_rows(q + b * q_b + h * q_h + token * q_t, q_t, present, ff, K)
            p_q = project(qs, ws, K, MAP, 1)
            psi_q = round_operand(feature_map(p_q, 0.0, ff[None, :], K, K, BF, MAP, 0, True)[0], PRECISION)
            # [C,BF] @ [BF,C] -> [C,C]
            scores = dot(psi_q, keys, tl.zeros([C, C], tl.float32), PRECISION)
            scores = round_operand(tl.where(tt[:, None] >= tt[None, :], scores, 0.0), PRECISION)
            # [C,BF] @ [BF,BV] -> [C,BV]
            result = dot(psi_q, S_cast, tl.zeros([C, BV], tl.float32), PRECISION)
            # [C,C] @ [C,BV] -> [C,BV]
            result = dot(scores, values, result, PRECISION)
            # [C,BF] @ [BF] -> [C]
            norm = tl.sum(psi_q * Z[None, :], 1) + tl.sum(scores, 1)
            inverse = tl.where(tl.abs(norm) < SMALLEST_NORM, 0.0, 1 / norm)
            out_rows = out + b * o_b + h * o_h + token * o_t
            store_rows(out_rows, o_t, present, vv, result * inverse[:, None], V)
            tl.store(inv_norm + (b * H + h) * T + t, inverse, mask=present)
        # [BF,C] @ [C,BV] -> [BF,BV]
        S = dot(keys, values, S, PRECISION)
        Z += tl.sum(psi, 1)
    if FINAL and is_last:
        S_out, Z_out = state_pointers(final_sums, bg, ff, vv, K, V)
        tl.store(S_out, S, mask=inside)
        tl.store(Z_out, Z, mask=inside_Z)
