"""The Triton programs of the gradients of linear attention, each for all chunks at once.

With s_i the total of row i, g_i = ∂out_i / s_i and δ_i = −∂out_i·out_i / s_i, and all sums relative to their peaks:

    ∂ψ(q_i) = Σ_{j≤i} ψ(k_j) (g_i·v_j + δ_i)      pairs within the chunk, and the S and Z of forward
    ∂ψ(k_j) = Σ_{i≥j} ψ(q_i) (g_i·v_j + δ_i)      the same from the end, with R = Σ ψ(q_i) g_iᵀ and ρ = Σ ψ(q_i) δ_i
    ∂v_j    = Σ_{i≥j} (ψ(q_i)·ψ(k_j)) g_i
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.linear.triton_features import (
    directions,
    dot,
    features,
    finite,
    project,
    put,
    rounded,
    tile,
    unit,
    vectors,
    visible_at,
    waves,
)
from regard.kernels.linear.triton_forward import chunk_of, from_outside, past_of, scales


@triton.jit
def unproject(d, ws, acc, MODE: tl.constexpr):
    """acc + d w: the gradient of what was projected, but for K^(−1/4)."""
    if ws[0].dtype != tl.bfloat16:
        return dot(d, ws[0], acc, "tf32")
    else:
        return dot(d, ws[0], acc, "split" if MODE == "split" else "half")


@triton.jit
def after(at, at_q, c, peaks, inverses, seen, there, PEAKED: tl.constexpr):
    """How much each key of a chunk, [C,1], counts for each query of it, [1,C], divided by the query's total: nothing
    for those before it."""
    t = tl.arange(0, seen.shape[0])
    counts = (t[:, None] <= t[None, :]) & seen[:, None]
    inverse = tl.load(inverses + at_q, mask=there, other=0.0)[None, :]
    if PEAKED:
        higher = tl.load(c + at, mask=seen, other=float("-inf"))
        m = finite(tl.load(peaks + at, mask=there, other=float("-inf")))
        return tl.exp2(tl.where(counts, higher[:, None], float("-inf")) - m[None, :]) * inverse
    else:
        return tl.where(counts, inverse, 0.0)


@triton.jit
def leave(sizes, falls, m, lift, inverse, there, part):
    """For `states` BACK: what sizes ψ(q) divided by its total, and the peak of the chunk."""
    size = tl.where(inverse == 0, float("inf"), lift + finite(m) - tl.log2(tl.abs(inverse)))
    tl.store(sizes, size, mask=there & (part == 0))
    tl.store(falls, tl.max(tl.where(m == float("-inf"), m, -m), 0), mask=part == 0)


@triton.jit
def queries(
    q, k, v, w, visible, lifts_q, lifts, c, local, marks, states, outer, tops, out, inverses, peaks, d_out, d_q,
    delta, sizes, falls,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, d_b, d_h, d_t, g_p, g_b, g_h, g_t,
    T, span, slots, H, rows, NV,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, KP: tl.constexpr, FB: tl.constexpr, VB: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, MODE: tl.constexpr, PEAKED: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, LOCAL: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """∂q of one chunk and one head, from one block of values; and these values' share of δ."""
    n, part, row_q, row_k, b, h, g, far, t, vv = chunk_of(rows, NV, H, C, VB, GROUP)
    there = t < T
    near, more = row_k * tl.cdiv(T, C) + n, (n * C) % span > 0
    slot = row_k * slots + (n * C // span if CAUSAL else slots - 1)
    UNITS: tl.constexpr = MODE == "fine"
    m, size, far_by, far_unit, outside = scales(marks, tops, near, slot, more, F, PEAKED, LOCAL, STATES, UNITS)
    q_at, k_at = q + b * q_b + h * q_h + far * q_t, k + b * k_b + g * k_h + far * k_t
    q_grad = d_q + part.to(tl.int64) * g_p + b * g_b + h * g_h + far * g_t
    lift_q = tl.zeros([C], tl.float32)
    if MAP == "performer":
        lift_q = tl.load(lifts_q + row_q * T + t, mask=there, other=0.0)
    inverse = tl.load(inverses + row_q * T + t, mask=there, other=0.0)
    grad = tile(d_out + b * d_b + h * d_h + far * d_t, d_t, there, vv, V).to(tl.float32)
    along = -tl.sum(grad * tile(out + b * o_b + h * o_h + far * o_t, o_t, there, vv, V).to(tl.float32), 1)
    tl.store(delta + part.to(tl.int64) * rows * T + row_q * T + t, along, mask=there)
    if PEAKED:
        m_row = m + tl.zeros_like(inverse)
        if CAUSAL:
            m_row = tl.load(peaks + row_k * T + t, mask=there, other=float("-inf"))
        leave(sizes + row_q * T + t, falls + row_q * tl.cdiv(T, C) + n, m_row, lift_q, inverse, there, part)
    seen, lift_k, past = there, 0.0, tl.full([C], 1.0, tl.float32)
    if CAUSAL:
        seen = visible_at(visible, b, t, T, MASKED)
        values = tile(v + b * v_b + g * v_h + far * v_t, v_t, seen, vv, V)
        d_pairs = dot(grad, tl.trans(values), tl.zeros([C, C], tl.float32) + along[:, None], MODE)
        earlier = (tl.arange(0, C)[:, None] >= tl.arange(0, C)[None, :]) & seen[None, :]
        if PEAKED:
            higher = tl.load(c + row_k * T + t, mask=seen, other=float("-inf"))
            if MAP == "fourier":  # not rounded up, as ψ is not lifted
                higher = -tl.load(lifts + row_k * T + t, mask=seen, other=float("inf"))
            else:
                lift_k = (tl.load(lifts + row_k * T + t, mask=seen, other=0.0) + finite(higher))[:, None]
            d_pairs *= tl.exp2(tl.where(earlier, higher[None, :], float("-inf")) - (finite(m_row) + size)[:, None])
            past = tl.exp2(m - finite(m_row))
            along *= past
        else:
            d_pairs = tl.where(earlier, d_pairs, 0.0)
    if UNITS:  # each row has its own, too
        most, along = tl.max(tl.abs(grad), 1) * past, along * tl.exp2(-size)
        if CAUSAL:
            most = tl.maximum(most, tl.max(tl.abs(d_pairs), 1))
        by = tl.exp2(-unit(most))
        past, along, inverse = past * by, along * by, inverse * tl.exp2(unit(most) + size)
        if CAUSAL:
            d_pairs = d_pairs * by[:, None]
    if CAUSAL:
        d_pairs = rounded(d_pairs, MODE)
    if PEAKED:
        grad = grad * past[:, None]
    grad = rounded(grad, MODE)  # exactly: it is ∂out by a power of two, and is divided by the total at the end
    dx = tl.zeros([C, KP], tl.float32)
    N: tl.constexpr = F // waves(MAP)
    for block in range((N + FB - 1) // FB):
        ff, ws = block * FB + tl.arange(0, FB), directions(w, block, K, F, KP, FB, MAP, PARTS)
        # Split vectors do not fit beside all else. This zero keeps the compiler from making them before the loop.
        within = block >> 20 if PARTS and (MODE == "split" or MODE == "tf32") else 0
        if CAUSAL:
            ks = vectors(k_at + within, k_t, seen, block, K, KP, FB, PARTS)
        qs = vectors(q_at + within, q_t, there, block, K, KP, FB, PARTS)
        dp = tl.zeros([C, FB], tl.float32)
        for wave in tl.static_range(waves(MAP)):
            S_near, S_far, Z = past_of(
                local, marks, states, outer, near, slot, more, outside, far_by, ff, part, wave, V, F, VB, MAP, LOCAL,
                STATES,
            )  # fmt: skip
            d_psi = along[:, None] * Z[None, :]
            if LOCAL:
                d_psi = dot(grad, tl.trans(S_near), d_psi, MODE)
            if STATES:
                d_psi = from_outside(grad, tl.trans(S_far), far_unit, d_psi, MODE, PEAKED and LOCAL)
            if CAUSAL:
                psi_k = features(project(ks, ws, K, MAP, PARTS), lift_k, ff[None, :], K, F, FB, MAP, wave, False)[0]
                d_psi = dot(d_pairs, psi_k, d_psi, MODE)
            pq = project(qs, ws, K, MAP, PARTS)
            dp += d_psi * features(pq, lift_q[:, None], ff[None, :], K, F, FB, MAP, wave, False)[1]
        if PEAKED:
            dx = unproject(dp, ws, dx, MODE)
        else:
            put(q_grad, g_t, there, ff, dp * inverse[:, None], K)
    if PEAKED:  # a query's length cancels in the ratio
        put(q_grad, g_t, there, tl.arange(0, KP), dx * (inverse * K**-0.25)[:, None], K)


@triton.jit
def keys_values(
    q, k, v, w, visible, lifts_q, lifts, c, local, marks, states, outer, tops, inverses, peaks, d_out, delta, d_k,
    d_v,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, d_b, d_h, d_t, gk_p, gk_b, gk_h, gk_t, gv_p, gv_b, gv_h, gv_t,
    T, span, slots, H, rows, NV,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, KP: tl.constexpr, FB: tl.constexpr, VB: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, MODE: tl.constexpr, PEAKED: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, LOCAL: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """∂k and ∂v of one chunk, from one query head and one block of values; the sums are those of `states` BACK."""
    n, part, row_q, row_k, b, h, g, far, t, vv = chunk_of(rows, NV, H, C, VB, GROUP)
    r, there = h % GROUP, t < T
    seen = visible_at(visible, b, t, T, MASKED)
    near, more = row_q * tl.cdiv(T, C) + n, ((n + 1) * C % span > 0) & ((n + 1) * C < T)
    slot = row_q * slots + (n * C // span + 1 if CAUSAL else 0)
    past_peak, _, far_by, _, outside = scales(marks, tops, near, slot, more, F, PEAKED, LOCAL, STATES, False)
    mine = tl.where(part == 0, 1.0, 0.0)  # δ and ρ belong to the first block of values
    q_at, k_at = q + b * q_b + h * q_h + far * q_t, k + b * k_b + g * k_h + far * k_t
    k_grad = d_k + (r * NV + part) * gk_p + b * gk_b + g * gk_h + far * gk_t
    values = tile(v + b * v_b + g * v_h + far * v_t, v_t, seen, vv, V)
    lift_q, lift_k, past = 0.0, tl.zeros([C], tl.float32), tl.where(seen, 1.0, 0.0)
    if PEAKED:
        higher = tl.load(c + row_k * T + t, mask=seen, other=float("-inf"))
        lift_k = tl.load(lifts + row_k * T + t, mask=seen, other=0.0) + finite(higher)
        past = tl.exp2(higher + past_peak)
    size = tl.zeros([C], tl.float32)
    if CAUSAL:
        if MAP == "performer":
            lift_q = tl.load(lifts_q + row_q * T + t, mask=there, other=0.0)[:, None]
        along = tl.load(delta + row_q * T + t, mask=there, other=0.0) * mine
        grad = tile(d_out + b * d_b + h * d_h + far * d_t, d_t, there, vv, V)
        d_pairs = dot(values, tl.trans(grad), tl.zeros([C, C], tl.float32) + along[None, :], MODE)
        d_pairs *= after(row_k * T + t, row_q * T + t, c, peaks, inverses, seen, there, PEAKED)
        if MODE == "fine":
            most = tl.max(tl.abs(d_pairs), 1)
            size = tl.where(most > 0, unit(most), 0.0)  # the units of a row
            d_pairs = d_pairs * tl.exp2(-size)[:, None]
        d_pairs = rounded(d_pairs, MODE)
    reach = past * tl.exp2(-size)
    values_past, values_far = values, values
    if PEAKED:  # exactly: all of these are powers of two
        EXACT: tl.constexpr = tl.bfloat16 if values.dtype == tl.bfloat16 else tl.float32
        values_past = (values.to(tl.float32) * reach[:, None]).to(EXACT)
        values_far = (values.to(tl.float32) * (reach * far_by)[:, None]).to(EXACT)
    pairs, dv = tl.zeros([C, C], tl.float32), tl.zeros([C, VB], tl.float32)
    dx, length = tl.zeros([C, KP], tl.float32), tl.zeros([C], tl.float32)
    # In fine mode there are too few registers to multiply by both.
    ADDED: tl.constexpr = LOCAL and STATES and MODE == "fine"
    # A sequence of few tokens: one that is nearly orthogonal to all it sees needs all digits of its pairs.
    PAIRS: tl.constexpr = "parted" if MODE == "fine" and not LOCAL and not STATES else MODE
    N: tl.constexpr = F // waves(MAP)
    for block in range((N + FB - 1) // FB):
        ff, ws = block * FB + tl.arange(0, FB), directions(w, block, K, F, KP, FB, MAP, PARTS)
        ks = vectors(k_at, k_t, seen, block, K, KP, FB, PARTS)
        if CAUSAL:
            qs = vectors(q_at, q_t, there, block, K, KP, FB, PARTS)
        dp = tl.zeros([C, FB], tl.float32)
        for wave in tl.static_range(waves(MAP)):
            R_near, R_far, rho = past_of(
                local, marks, states, outer, near, slot, more, outside, far_by, ff, part, wave, V, F, VB, MAP, LOCAL,
                STATES, ADDED,
            )  # fmt: skip
            R = R_near if LOCAL else R_far
            d_psi = tl.zeros([C, FB], tl.float32)
            if CAUSAL:
                psi_q = features(project(qs, ws, K, MAP, PARTS), lift_q, ff[None, :], K, F, FB, MAP, wave, False)[0]
                psi_q = rounded(psi_q, PAIRS)
                d_psi = dot(d_pairs, psi_q, d_psi, MODE)
            pk = project(ks, ws, K, MAP, PARTS)
            psi, slope = features(pk, lift_k[:, None], ff[None, :], K, F, FB, MAP, wave, False)
            if CAUSAL:
                pairs = dot(psi, tl.trans(psi_q), pairs, PAIRS)
            d_psi += (mine * reach)[:, None] * rho[None, :]  # beside the products that it nearly cancels
            if LOCAL or STATES:
                dv = dot(psi, R, dv, MODE)
                d_psi = dot(values_past, tl.trans(R), d_psi, MODE)
            if LOCAL and STATES and not ADDED:
                dv = dot(psi * far_by, R_far, dv, MODE)
                d_psi = dot(values_far, tl.trans(R_far), d_psi, MODE)
            if PEAKED:
                length += tl.sum(d_psi * psi, 1)
            dp += d_psi * slope
        if PEAKED:
            dx = unproject(dp, ws, dx, MODE)
        else:
            put(k_grad, gk_t, there, ff, tl.where(seen[:, None], dp, 0.0), K)
    dv = dv * past[:, None]
    if CAUSAL:  # made anew: kept through the loop they would not fit into registers
        grad = tile(d_out + b * d_b + h * d_h + far * d_t, d_t, there, vv, V)
        pairs *= after(row_k * T + t, row_q * T + t, c, peaks, inverses, seen, there, PEAKED)
        # Where weights cancel they have to be precise; ∂out is.
        dv = dot(pairs, grad.to(tl.bfloat16), dv, "split") if MODE == "fine" else dot(pairs, grad, dv, MODE)
    if MAP == "fourier":  # its ψ was not lifted
        by = tl.exp2(size - lift_k)
        dv, dx, length = dv * tl.exp2(-lift_k)[:, None], dx * by[:, None], length * by
    v_grad = d_v + r * gv_p + b * gv_b + g * gv_h + far * gv_t
    put(v_grad, gv_t, there, vv, dv, V)
    if PEAKED:
        length = length * (K**-0.5 if MAP == "fourier" else -(K**-0.5))
        dx = dx * K**-0.25 + length[:, None] * tile(k_at, k_t, seen, tl.arange(0, KP), K)
        put(k_grad, gk_t, there, tl.arange(0, KP), tl.where(seen[:, None], dx, 0.0), K)
