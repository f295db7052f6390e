"""Causal linear attention of narrow heads in one Triton program: each segment of a sequence waits for the sums of the
one before it, and hands its own on.

Keys and values are read twice, and the sums of a segment stay in registers.
Programs take numbers as they start, so that the one a program waits for has always started; the order in which numbers
are added up never changes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.linear.triton_features import (
    directions,
    dot,
    features,
    project,
    project_across,
    put,
    rounded,
    short,
    tile,
    visible_at,
)
from regard.kernels.linear.triton_forward import ZERO


@triton.jit
def keys_of(k, stride, seen, ws, ff, K: tl.constexpr, FB: tl.constexpr, MAP: tl.constexpr, MODE: tl.constexpr):
    """ψ of a chunk of keys, features by tokens; of a key that is not seen none is left."""
    lift = tl.where(seen, 0.0, float("inf"))
    across = project_across(tile(k, stride, seen, ff, K), ws, K, MAP, 1)
    return short(features(across, lift[None, :], ff[:, None], K, K, FB, MAP, 0, True)[0], MODE)


@triton.jit
def summed(
    k, v, ws, visible, b, begin, chunks, T, k_t, v_t, K: tl.constexpr, V: tl.constexpr, FB: tl.constexpr,
    VB: tl.constexpr, C: tl.constexpr, MAP: tl.constexpr, MODE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """S and Z of some chunks; k and v point to the first."""
    ff, vv = tl.arange(0, FB), tl.arange(0, VB)
    S, Z = tl.zeros([FB, VB], tl.float32), tl.zeros([FB], tl.float32)
    for n in range(chunks):
        seen = visible_at(visible, b, begin + n * C + tl.arange(0, C), T, MASKED)
        psi = keys_of(k + n * C * k_t, k_t, seen, ws, ff, K, FB, MAP, MODE)
        S = dot(psi, tile(v + n * C * v_t, v_t, seen, vv, V), S, MODE)
        Z += tl.sum(psi, 1)
    return S, Z


@triton.jit
def sums_at(x, row, ff, vv, K: tl.constexpr, V: tl.constexpr):
    """Where S and Z of a row of [F,V+1] are."""
    here = x + row * (K * (V + 1)) + ff * (V + 1)
    return here[:, None] + vv[None, :], here + V


@triton.jit
def chained(
    q, k, v, w, visible, start, out, inverses, local, marks, final, handed, line,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, T, span, segments, H, rows,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, KP: tl.constexpr, FB: tl.constexpr, VB: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, MODE: tl.constexpr, PEAKED: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, MASKED: tl.constexpr, STARTED: tl.constexpr, FINAL: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """out of one segment for all queries of a group of heads; for the gradient the sums before each chunk but the first
    (LOCAL), which are those of the whole sequence here.

    handed: the sums after each segment; line: the next number, and whether each segment has handed over."""
    number = tl.atomic_add(line, 1, sem="relaxed")
    row, segment = (number % rows).to(tl.int64), number // rows
    G = H // GROUP
    b, g = row // G, row % G
    ff, vv, tt = tl.arange(0, FB), tl.arange(0, VB), tl.arange(0, C)
    inside, within = (ff[:, None] < K) & (vv[None, :] < V), ff < K
    begin = segment * span
    chunks = tl.cdiv(tl.minimum(begin + span, T) - begin, C)
    k_at = k + b * k_b + g * k_h + begin.to(tl.int64) * k_t
    v_at = v + b * v_b + g * v_h + begin.to(tl.int64) * v_t
    ws = directions(w, 0, K, F, KP, FB, MAP, 1)
    place = (row * (segments - 1) + segment) * (FB * VB + FB)
    last = segment + 1 == segments
    S, Z = tl.zeros([FB, VB], tl.float32), tl.zeros([FB], tl.float32)
    if not last:  # nobody waits for the sums of the last
        S, Z = summed(k_at, v_at, ws, visible, b, begin, chunks, T, k_t, v_t, K, V, FB, VB, C, MAP, MODE, MASKED)
    S_before, Z_before = tl.zeros([FB, VB], tl.float32), tl.zeros([FB], tl.float32)
    if segment > 0:
        ready = tl.atomic_add(line + number - rows + 1, 0, sem="acquire")
        while ready == 0:
            ready = tl.atomic_add(line + number - rows + 1, 0, sem="acquire")
        past = place - (FB * VB + FB)
        S_before = tl.load(handed + past + ff[:, None] * VB + vv[None, :], cache_modifier=".cg")
        Z_before = tl.load(handed + past + FB * VB + ff, cache_modifier=".cg")
    elif STARTED:
        S_at, Z_at = sums_at(start, row, ff, vv, K, V)
        S_before = tl.load(S_at, mask=inside, other=0.0)
        Z_before = tl.load(Z_at, mask=within, other=0.0)
    if not last:
        tl.store(handed + place + ff[:, None] * VB + vv[None, :], S_before + S)
        tl.store(handed + place + FB * VB + ff, Z_before + Z)
        tl.debug_barrier()  # all of it is written before anyone is told
        tl.atomic_xchg(line + number + 1, 1, sem="release")
    S, Z = S_before, Z_before
    for n in range(chunks):
        t = begin + n * C + tt
        there = t < T
        seen = visible_at(visible, b, t, T, MASKED)
        values = tile(v_at + n * C * v_t, v_t, seen, vv, V)
        psi = keys_of(k_at + n * C * k_t, k_t, seen, ws, ff, K, FB, MAP, MODE)
        keys, sums = rounded(psi, MODE), rounded(S, MODE)
        if LOCAL:
            slot, more = row * tl.cdiv(T, C) + begin // C + n, begin + n * C > 0
            tl.store(local + slot * (F * V) + ff[:, None] * V + vv[None, :], sums, mask=inside & more)
            tl.store(marks + slot * (F + 2) + ff, Z, mask=within & more)
        for r in range(GROUP):
            h, far = g * GROUP + r, (begin + n * C).to(tl.int64)
            qs = tile(q + b * q_b + h * q_h + far * q_t, q_t, there, ff, K)
            psi_q = short(features(project(qs, ws, K, MAP, 1), 0.0, ff[None, :], K, K, FB, MAP, 0, True)[0], MODE)
            pairs = dot(psi_q, keys, tl.zeros([C, C], tl.float32), MODE)
            pairs = short(tl.where(tt[:, None] >= tt[None, :], pairs, 0.0), MODE)
            result = dot(psi_q, sums, tl.zeros([C, VB], tl.float32), MODE)
            result = dot(pairs, values, result, MODE)
            total = tl.sum(psi_q * Z[None, :], 1) + tl.sum(pairs, 1)
            inverse = tl.where(tl.abs(total) < ZERO, 0.0, 1 / total)
            put(out + b * o_b + h * o_h + far * o_t, o_t, there, vv, result * inverse[:, None], V)
            tl.store(inverses + (b * H + h) * T + t, inverse, mask=there)
        S = dot(keys, values, S, MODE)
        Z += tl.sum(psi, 1)
    if FINAL and last:
        S_at, Z_at = sums_at(final, row, ff, vv, K, V)
        tl.store(S_at, S, mask=inside)
        tl.store(Z_at, Z, mask=within)
