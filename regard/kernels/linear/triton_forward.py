"""The Triton program of the outputs of linear attention, and what all that read sums have in common.

`states` (triton_linear_sums.py) goes through a segment and leaves behind, for each chunk, the sums of what came before
it in its segment; `combine` makes running totals over the segments; `outputs` then does all chunks at once: pairs
within the chunk, the sums for all before it. Features are made block by block where they are needed and never touch
memory.
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
    short,
    tile,
    vectors,
    visible_at,
    waves,
)

ZERO: tl.constexpr = tl.constexpr(2.0**-103)  # a smaller total has lost digits to underflow: tiny / eps of float32


@triton.jit
def higher_of(a, b):
    return tl.maximum(a, b)


@triton.jit
def chunk_of(rows, NV, H, C: tl.constexpr, VB: tl.constexpr, GROUP: tl.constexpr):
    """What a program does: a chunk of one head of queries, and a block of values. (number of the chunk, its block of
    values, rows of queries and of keys, sequence, both heads, tokens before it, its tokens, its columns)"""
    at = tl.program_id(0)
    n, row, part = at // NV // rows, (at // NV) % rows, at % NV
    row_q, row_k = row.to(tl.int64), (row // GROUP).to(tl.int64)
    b, h = row_q // H, row_q % H
    t, vv = n * C + tl.arange(0, C), part * VB + tl.arange(0, VB)
    return n, part, row_q, row_k, b, h, h // GROUP, n.to(tl.int64) * C, t, vv


@triton.jit
def scales(
    marks, tops, near, slot, more, F: tl.constexpr, PEAKED: tl.constexpr, LOCAL: tl.constexpr, STATES: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    """Of all that a chunk reads: its peak, which is that of its part in the segment, if there is one; the exponent of
    its units; what Z from outside scales by, and S: powers of two, one until the segment has found something higher;
    and whether there is anything outside."""
    m, by, size = tl.full((), float("-inf"), tl.float32), tl.full((), 1.0, tl.float32), tl.full((), 0.0, tl.float32)
    if PEAKED:
        outer = tl.load(tops + slot * 2) if STATES else m
        m = tl.load(marks + near * (F + 2) + F, mask=more, other=float("-inf")) if LOCAL else m
        m = tl.maximum(m, outer)
        by = tl.exp2(outer - finite(m)) if LOCAL and STATES else by
    by_unit = by
    if UNITS:
        if STATES:
            size = tl.load(tops + slot * 2 + 1)
        if LOCAL:
            size_near = tl.load(marks + near * (F + 2) + F + 1, mask=more, other=0.0)
            size_near = tl.where(more, size_near, size)
            by_unit = by * tl.exp2(size - size_near)
            size = size_near
    return m, size, by, by_unit, (by_unit > 0).to(tl.int32) > 0  # Triton's interpreter loses a comparison of floats


@triton.jit
def kept(
    sums, at, there, ff, last, part, V: tl.constexpr, F: tl.constexpr, VB: tl.constexpr
):  # fmt: skip
    """The features ff of S, up to the last, [FB,VB]. The parts of the segment and from outside are multiplied each for
    itself: to add them up takes longer than a product."""
    vv = part * VB + tl.arange(0, VB)
    inside = (ff[:, None] < last) & (vv[None, :] < V) & there
    return tl.load(sums + at * (F * V) + ff[:, None] * V + vv[None, :], mask=inside, other=0.0)


@triton.jit
def from_outside(a, S, by, acc, MODE: tl.constexpr, SCALED: tl.constexpr):
    """acc + by·a S. Mostly `by` is one; it is zero where nothing came before."""
    if SCALED and (MODE == "half" or MODE == "fine"):
        if by == 1.0:
            acc = dot(a, S, acc, MODE)
        elif by > 0:
            acc = dot(rounded(a.to(tl.float32) * by, MODE), S, acc, MODE)
        return acc
    else:
        return dot(a * by if SCALED else a, S, acc, MODE)


@triton.jit
def past_of(
    local, marks, states, outer, near, slot, more, outside, far_by, ff, part, WAVE: tl.constexpr, V: tl.constexpr,
    F: tl.constexpr, VB: tl.constexpr, MAP: tl.constexpr, LOCAL: tl.constexpr, STATES: tl.constexpr,
    ADDED: tl.constexpr = False,
):  # fmt: skip
    """Of all that a chunk reads, for the directions ff: S of its segment, S from outside (ADDED to the former), and Z
    of both."""
    N: tl.constexpr = F // waves(MAP)
    at, last = WAVE * N + ff, WAVE * N + N
    S_near = kept(local, near, more, at, last, part, V, F, VB) if LOCAL else 0.0
    S_far = kept(outer, slot, outside, at, last, part, V, F, VB) if STATES else 0.0
    if ADDED:
        S_near = tl.cast(tl.cast(S_far, tl.float32) * far_by + tl.cast(S_near, tl.float32), tl.bfloat16)
    Z = tl.zeros([ff.shape[0]], tl.float32)
    if LOCAL:
        Z = tl.load(marks + near * (F + 2) + at, mask=(at < last) & more, other=0.0)
    if STATES:
        Z += tl.load(states + slot * (F * V + F) + F * V + at, mask=at < last, other=0.0) * far_by
    return S_near, S_far, Z


@triton.jit
def outputs(
    q, k, v, w, visible, lifts_q, lifts, c, local, marks, states, outer, tops, out, inverses, peaks,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, T, span, slots, H, rows, NV,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, KP: tl.constexpr, FB: tl.constexpr, VB: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, MODE: tl.constexpr, PEAKED: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, LOCAL: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """out = ψ(q)ᵀS / ψ(q)ᵀZ for the queries of one chunk and one head, and one block of values."""
    n, part, row_q, row_k, b, h, g, far, t, vv = chunk_of(rows, NV, H, C, VB, GROUP)
    there = t < T
    near, more = row_k * tl.cdiv(T, C) + n, (n * C) % span > 0
    slot = row_k * slots + (n * C // span if CAUSAL else slots - 1)
    UNITS: tl.constexpr = MODE == "fine"
    m, size, far_by, far_unit, outside = scales(marks, tops, near, slot, more, F, PEAKED, LOCAL, STATES, UNITS)
    q_at, k_at = q + b * q_b + h * q_h + far * q_t, k + b * k_b + g * k_h + far * k_t
    seen = visible_at(visible, b, t, T, MASKED and CAUSAL)
    lift_q, lift_k = 0.0, 0.0
    if MAP == "performer":
        lift_q = tl.load(lifts_q + row_q * T + t, mask=there, other=0.0)[:, None]
    if MAP == "performer" and CAUSAL:
        higher = tl.load(c + row_k * T + t, mask=seen, other=float("-inf"))
        lift_k = (tl.load(lifts + row_k * T + t, mask=seen, other=0.0) + finite(higher))[:, None]
    result, total = tl.zeros([C, VB], tl.float32), tl.zeros([C], tl.float32)
    pairs = tl.zeros([C, C], tl.float32)
    PAIRS: tl.constexpr = "parted" if MAP == "fourier" else MODE
    if CAUSAL:
        values = tile(v + b * v_b + g * v_h + far * v_t, v_t, seen, vv, V)
    N: tl.constexpr = F // waves(MAP)
    for block in range((N + FB - 1) // FB):
        ff, ws = block * FB + tl.arange(0, FB), directions(w, block, K, F, KP, FB, MAP, PARTS)
        qs = vectors(q_at, q_t, there, block, K, KP, FB, PARTS)
        if CAUSAL:
            ks = vectors(k_at, k_t, seen, block, K, KP, FB, PARTS)
        for wave in tl.static_range(waves(MAP)):  # all that it reads first: no load is moved across a product
            S_near, S_far, Z = past_of(
                local, marks, states, outer, near, slot, more, outside, far_by, ff, part, wave, V, F, VB, MAP, LOCAL,
                STATES,
            )  # fmt: skip
            psi_q = features(project(qs, ws, K, MAP, PARTS), lift_q, ff[None, :], K, F, FB, MAP, wave, True)[0]
            psi_q = short(psi_q, MODE)
            if LOCAL:
                result = dot(psi_q, S_near, result, MODE)
            if STATES:
                result = from_outside(psi_q, S_far, far_unit, result, MODE, PEAKED and LOCAL)
            if LOCAL or STATES:
                total += tl.sum(psi_q * Z[None, :], 1)
            if CAUSAL:
                psi_k = features(project(ks, ws, K, MAP, PARTS), lift_k, ff[None, :], K, F, FB, MAP, wave, True)[0]
                # Where weights cancel, the total is a small sum of them: they need all digits.
                pairs = dot(psi_q, tl.trans(rounded(psi_k, PAIRS)), pairs, PAIRS)
    if UNITS:
        result = result * tl.exp2(size)
    if CAUSAL:
        earlier = (tl.arange(0, C)[:, None] >= tl.arange(0, C)[None, :]) & seen[None, :]
        if PEAKED:
            higher = tl.load(c + row_k * T + t, mask=seen, other=float("-inf"))
            m_row = tl.maximum(tl.associative_scan(higher, 0, higher_of), m)
            if MAP == "fourier":  # not rounded up, as ψ is not lifted
                higher = -tl.load(lifts + row_k * T + t, mask=seen, other=float("inf"))
            pairs = pairs * tl.exp2(tl.where(earlier, higher[None, :], float("-inf")) - finite(m_row)[:, None])
            past = tl.exp2(m - finite(m_row))
            result, total = result * past[:, None], total * past
            tl.store(peaks + row_k * T + t, m_row, mask=there & (part == 0) & (h % GROUP == 0))
        else:
            pairs = tl.where(earlier, pairs, 0.0)
        pairs = short(pairs, MODE)
        result = dot(pairs, values, result, "split" if MAP == "fourier" else MODE)
        total += tl.sum(pairs, 1)
    inverse = tl.where(tl.abs(total) < ZERO, 0.0, 1 / total)
    put(out + b * o_b + h * o_h + far * o_t, o_t, there, vv, result * inverse[:, None], V)
    tl.store(inverses + row_q * T + t, inverse, mask=there & (part == 0))
