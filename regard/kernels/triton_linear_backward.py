"""The Triton programs of the gradients of linear attention.

With s_i the total of row i, g_i = ∂out_i / s_i and δ_i = −∂out_i·out_i / s_i, and all sums relative to their peaks:

    ∂ψ(q_i) = Σ_{j≤i} ψ(k_j) (g_i·v_j + δ_i)      a scan like the one forward, over the same S and Z
    ∂ψ(k_j) = Σ_{i≥j} ψ(q_i) (g_i·v_j + δ_i)      a scan from the end, over R = Σ ψ(q_i) g_iᵀ and ρ = Σ ψ(q_i) δ_i
    ∂v_j    = Σ_{i≥j} (ψ(q_i)·ψ(k_j)) g_i
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.triton_linear import (
    SCALE,
    directions,
    dot,
    features,
    finite,
    kept,
    place,
    put,
    tile,
    vectors,
)


@triton.jit
def unproject(d, w, acc):
    """acc + d wᵀ: the gradient of what was projected."""
    if w.dtype == tl.float16:  # in bfloat16, as gradients know no bounds; w carries the inverse of the inputs' scale
        return tl.dot(d.to(tl.bfloat16), tl.trans((w.to(tl.float32) * SCALE).to(tl.bfloat16)), acc)
    else:
        return tl.dot(d, tl.trans(w), acc, input_precision="tf32x3")


@triton.jit
def queries(
    q, k, v, w, low, visible, lifts_q, lifts, c, states, tops, out, den, peaks, d_out, d_q, delta,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, d_b, d_h, d_t, g_p, g_b, g_h, g_t,
    T, span, slots, H, P, NV,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, KP: tl.constexpr, FB: tl.constexpr, VB: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, MODE: tl.constexpr, PEAKED: tl.constexpr, MAPPED: tl.constexpr,
    GROUP: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """∂q of one segment and one head, from one block of features and one of values; and these values' share of δ."""
    row, block, part = place(P, NV)
    segment = tl.program_id(1)
    b, h = (row // H).to(tl.int64), (row % H).to(tl.int64)
    g = h // GROUP
    row_k, row_q = (row // GROUP).to(tl.int64), row.to(tl.int64)
    vv = part * VB + tl.arange(0, VB)
    high, rest = directions(w, low, block, K, F, KP, FB, MAP)
    m = tl.full((), float("-inf"), tl.float32)
    S, Z = tl.zeros([FB, VB], tl.float32), tl.zeros([FB], tl.float32)
    if STATES:
        slot = row_k * slots + (segment if CAUSAL else slots - 1)
        S, Z = kept(states, slot, block, part, V, F, FB, VB)
        if PEAKED:
            m = tl.load(tops + slot)
    start = segment * span
    for at in range(start, tl.minimum(start + span, T), C):
        far, t = tl.cast(at, tl.int64), at + tl.arange(0, C)
        there = t < T
        total = tl.load(den + row_q * T + t, mask=there, other=0.0)
        inverse = tl.where(total == 0, 0.0, 1 / total)
        grad = tile(d_out + b * d_b + h * d_h + far * d_t, d_t, there, vv, V).to(tl.float32) * inverse[:, None]
        along = -tl.sum(grad * tile(out + b * o_b + h * o_h + far * o_t, o_t, there, vv, V).to(tl.float32), 1)
        if block == 0:
            rows = tl.num_programs(0) // P
            tl.store(delta + (part * rows + row).to(tl.int64) * T + t, along, mask=there)
        d_psi = dot(grad, tl.trans(S), along[:, None] * Z[None, :], MODE)
        if CAUSAL:
            seen = there
            if MASKED:
                seen = there & (tl.load(visible + b * T + t, mask=there, other=0) != 0)
            ks = vectors(k + b * k_b + g * k_h + far * k_t, k_t, seen, block, K, KP, FB, MAPPED)
            values = tile(v + b * v_b + g * v_h + far * v_t, v_t, seen, vv, V)
            lift = tl.load(lifts + row_k * T + t, mask=seen, other=0.0) if PEAKED else 0.0
            psi_k = features(ks, seen, lift, high, rest, block, F, FB, MAP, MODE)[0]
            d_pairs = dot(grad, tl.trans(values), tl.zeros([C, C], tl.float32) + along[:, None], MODE)
            before = tl.arange(0, C)[:, None] >= tl.arange(0, C)[None, :]
            added, one = values, tl.where(seen, 1.0, 0.0)
            if PEAKED:
                higher = tl.load(c + row_k * T + t, mask=seen, other=float("-inf"))
                m_row = finite(tl.load(peaks + row_k * T + t, mask=there, other=float("-inf")))
                d_pairs = d_pairs * tl.exp2(tl.where(before, higher[None, :], float("-inf")) - m_row[:, None])
                d_psi = d_psi * tl.exp2(m - m_row)[:, None]
                m_new = tl.maximum(m, tl.max(higher, 0))
                fade, one = tl.exp2(m - finite(m_new)), tl.exp2(higher - finite(m_new))
                added = values.to(tl.float32) * one[:, None]
                S, Z = S * fade, Z * fade
                m = m_new
            else:
                d_pairs = tl.where(before, d_pairs, 0.0)
            d_psi = dot(d_pairs, psi_k, d_psi, MODE)
            S = dot(tl.trans(psi_k), added, S, MODE)
            Z += tl.sum(psi_k.to(tl.float32) * one[:, None], 0)
        qs = vectors(q + b * q_b + h * q_h + far * q_t, q_t, there, block, K, KP, FB, MAPPED)
        lift_q = tl.load(lifts_q + row_q * T + t, mask=there, other=0.0) if PEAKED else 0.0
        slope = features(qs, there, lift_q, high, rest, block, F, FB, MAP, MODE)[1]
        d_psi = d_psi * slope
        at_q = d_q + b * g_b + h * g_h + far * g_t
        if MAPPED:  # a query's length cancels in the ratio
            dx = unproject(d_psi, high, tl.zeros([C, KP], tl.float32))
            put(at_q + (block * NV + part) * g_p, g_t, there, tl.arange(0, KP), dx, K)
        else:
            put(at_q + part * g_p, g_t, there, block * FB + tl.arange(0, FB), d_psi, K)


@triton.jit
def keys_values(
    q, k, v, w, low, visible, lifts_q, lifts, c, states, tops, den, peaks, d_out, delta, d_k, d_v,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, d_b, d_h, d_t, gk_p, gk_b, gk_h, gk_t, gv_p, gv_b, gv_h, gv_t,
    T, span, slots, G, P, NV,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, KP: tl.constexpr, FB: tl.constexpr, VB: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, MODE: tl.constexpr, PEAKED: tl.constexpr, MAPPED: tl.constexpr,
    GROUP: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """∂k and ∂v of one segment and one key/value head, from its end to its start, from one block of each."""
    row, block, part = place(P, NV)
    segment = tl.program_id(1)
    b, g, row_k = (row // G).to(tl.int64), (row % G).to(tl.int64), row.to(tl.int64)
    vv = part * VB + tl.arange(0, VB)
    high, rest = directions(w, low, block, K, F, KP, FB, MAP)
    mine = tl.where(part == 0, 1.0, 0.0)  # δ and ρ belong to the first block of values
    n = tl.full((), float("-inf"), tl.float32)
    R, rho = tl.zeros([FB, VB], tl.float32), tl.zeros([FB], tl.float32)
    if STATES:
        slot = row * slots + (segment + 1 if CAUSAL else 0)
        R, rho = kept(states, slot, block, part, V, F, FB, VB)
        if PEAKED:
            n = tl.load(tops + slot)
    start = segment * span
    chunks = tl.cdiv(tl.minimum(start + span, T) - start, C)
    for back in range(chunks):
        at = start + (chunks - 1 - back) * C
        far, t = tl.cast(at, tl.int64), at + tl.arange(0, C)
        there = t < T
        seen = there
        if MASKED:
            seen = there & (tl.load(visible + b * T + t, mask=there, other=0) != 0)
        ks = vectors(k + b * k_b + g * k_h + far * k_t, k_t, seen, block, K, KP, FB, MAPPED)
        values = tile(v + b * v_b + g * v_h + far * v_t, v_t, seen, vv, V)
        lift = tl.load(lifts + row_k * T + t, mask=seen, other=0.0) if PEAKED else 0.0
        psi, slope = features(ks, seen, lift, high, rest, block, F, FB, MAP, MODE)
        dv = dot(psi, R, tl.zeros([C, VB], tl.float32), MODE)
        d_psi = dot(values, tl.trans(R), tl.zeros([C, FB], tl.float32) + (rho * mine)[None, :], MODE)
        if PEAKED:
            higher = tl.load(c + row_k * T + t, mask=seen, other=float("-inf"))
            past = tl.exp2(higher + n)[:, None]
            dv, d_psi = dv * past, d_psi * past
        if CAUSAL:
            after = tl.arange(0, C)[:, None] <= tl.arange(0, C)[None, :]
            counts = tl.where(after & seen[:, None], 1.0, 0.0)
            if PEAKED:
                m_row = tl.load(peaks + row_k * T + t, mask=there, other=float("-inf"))
                sunk = tl.where(m_row == float("-inf"), m_row, -m_row)
                n_new = tl.maximum(n, tl.max(sunk, 0))
                fade, share = tl.exp2(n - finite(n_new)), tl.exp2(sunk - finite(n_new))
                R, rho = R * fade, rho * fade
                n = n_new
                counts = tl.exp2(tl.where(after, higher[:, None], float("-inf")) - finite(m_row)[None, :])
            for r in range(GROUP):
                h = g * GROUP + r
                row_q = (row_k * GROUP + r) * T + t
                total = tl.load(den + row_q, mask=there, other=0.0)
                along = tl.load(delta + row_q, mask=there, other=0.0) * mine
                grad = tile(d_out + b * d_b + h * d_h + far * d_t, d_t, there, vv, V).to(tl.float32)
                grad = grad * tl.where(total == 0, 0.0, 1 / total)[:, None]
                qs = vectors(q + b * q_b + h * q_h + far * q_t, q_t, there, block, K, KP, FB, MAPPED)
                lift_q = tl.load(lifts_q + row_q, mask=there, other=0.0) if PEAKED else 0.0
                psi_q = features(qs, there, lift_q, high, rest, block, F, FB, MAP, MODE)[0]
                d_pairs = dot(values, tl.trans(grad), tl.zeros([C, C], tl.float32) + along[None, :], MODE) * counts
                d_psi = dot(d_pairs, psi_q, d_psi, MODE)
                pairs = dot(psi, tl.trans(psi_q), tl.zeros([C, C], tl.float32), MODE) * counts
                dv = dot(pairs, grad, dv, MODE)
                if PEAKED:
                    grad, along = grad * share[:, None], along * share
                R = dot(tl.trans(psi_q), grad, R, MODE)
                rho += tl.sum(psi_q.to(tl.float32) * along[:, None], 0)
        at_v = d_v + block * gv_p + b * gv_b + g * gv_h + far * gv_t
        put(at_v, gv_t, there, vv, tl.where(seen[:, None], dv, 0.0), V)
        at_k = d_k + b * gk_b + g * gk_h + far * gk_t
        if MAPPED:
            dx = unproject(d_psi * slope, high, tl.zeros([C, KP], tl.float32))
            length = tl.sum(d_psi * psi.to(tl.float32), 1) * K**-0.5
            length = length if MAP == "fourier" else -length
            dx = tl.where(seen[:, None], dx + length[:, None] * ks.to(tl.float32), 0.0)
            put(at_k + (block * NV + part) * gk_p, gk_t, there, tl.arange(0, KP), dx, K)
        else:
            columns_k = block * FB + tl.arange(0, FB)
            put(at_k + part * gk_p, gk_t, there, columns_k, tl.where(seen[:, None], d_psi * slope, 0.0), K)
