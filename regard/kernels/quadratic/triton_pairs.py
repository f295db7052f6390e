"""The Triton programs behind `quadratic`: similarities (q·k + 1)² of blocks of pairs, made where they are used."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.linear.triton_features import dot, put, rounded, tile, visible_at


@triton.jit
def pairs(a, b):
    """a bᵀ. Products of half precision are exact; only their sum is rounded."""
    return tl.dot(a, tl.trans(b))


@triton.jit
def against(
    x, i, k, v, visible, b, start, S, k_t, v_t, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A block of keys and values from `start` on, where k and v point; what rows x have with them, q·k + 1; and which
    pairs count."""
    j = start + tl.arange(0, N)
    there = visible_at(visible, b, j, S, MASKED)
    keys, values = tile(k, k_t, there, tl.arange(0, KP), K), tile(v, v_t, there, tl.arange(0, VP), V)
    allowed = there[None, :] & (j[None, :] <= i[:, None]) if CAUSAL else there[None, :]
    return keys, values, pairs(x, keys) + 1, allowed


@triton.jit
def forward(
    q, k, v, visible, out, wide, inverses, T, S, H, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, MODE: tl.constexpr, TINY: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """M rows of one query head: outputs, also in float32, and the inverse of what their similarities sum to. Long rows
    come first."""
    row, head = (tl.num_programs(0) - 1 - tl.program_id(0)) * M, tl.program_id(1)
    b, h = (head // H).to(tl.int64), head % H
    i, kk, vv = row + tl.arange(0, M), tl.arange(0, KP), tl.arange(0, VP)
    x = tile(q + b * q_b + h * q_h + row.to(tl.int64) * q_t, q_t, i < T, kk, K)
    k += b * k_b + (h // GROUP) * k_h
    v += b * v_b + (h // GROUP) * v_h
    acc, total = tl.zeros([M, VP], tl.float32), tl.zeros([M], tl.float32)
    for start in range(0, tl.minimum(row + M, S) if CAUSAL else S, N):
        _, values, s, allowed = against(x, i, k, v, visible, b, start, S, k_t, v_t, K, V, KP, VP, CAUSAL, MASKED, N)
        k += N * k_t
        v += N * v_t
        p = rounded(tl.where(allowed, s * s, 0.0), MODE)
        total += tl.sum(p.to(tl.float32), 1)
        acc = dot(p, values, acc, MODE)
    inverse = tl.where(total < TINY, 0.0, 1 / total)
    place = head.to(tl.int64) * T + row
    tl.store(inverses + place + tl.arange(0, M), inverse, mask=i < T)
    put(out + place * V, V, i < T, vv, acc * inverse[:, None], V)
    put(wide + place * V, V, i < T, vv, acc * inverse[:, None], V)


@triton.jit
def queries(
    q, k, v, visible, d_out, wide, inverses, d_q, deltas, T, S, H, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, MODE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """∂q of M rows, and δ = ∂out·out of each: where all similarities are small, its rounding would be a large share."""
    row, head = (tl.num_programs(0) - 1 - tl.program_id(0)) * M, tl.program_id(1)
    b, h = (head // H).to(tl.int64), head % H
    i, kk, vv = row + tl.arange(0, M), tl.arange(0, KP), tl.arange(0, VP)
    place = head.to(tl.int64) * T + row
    x = tile(q + b * q_b + h * q_h + row.to(tl.int64) * q_t, q_t, i < T, kk, K)
    d = tile(d_out + place * V, V, i < T, vv, V)
    delta = tl.sum(d.to(tl.float32) * tile(wide + place * V, V, i < T, vv, V), 1)
    tl.store(deltas + place + tl.arange(0, M), delta, mask=i < T)
    inverse = tl.load(inverses + place + tl.arange(0, M), mask=i < T, other=0.0)
    k += b * k_b + (h // GROUP) * k_h
    v += b * v_b + (h // GROUP) * v_h
    acc = tl.zeros([M, KP], tl.float32)
    for start in range(0, tl.minimum(row + M, S) if CAUSAL else S, N):
        keys, values, s, allowed = against(x, i, k, v, visible, b, start, S, k_t, v_t, K, V, KP, VP, CAUSAL, MASKED, N)
        k += N * k_t
        v += N * v_t
        p = pairs(d, values)
        acc = dot(tl.where(allowed, s * (p - delta[:, None]) * inverse[:, None], 0.0), keys, acc, MODE)
    put(d_q + place * K, K, i < T, kk, acc * 2, K)


@triton.jit
def keys_values(
    q, k, v, visible, d_out, inverses, deltas, d_k, d_v, T, S, H, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, MODE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """∂k and ∂v of N keys, from all query heads of their group."""
    start, head = tl.program_id(0) * N, tl.program_id(1)
    G = H // GROUP
    b, g = (head // G).to(tl.int64), head % G
    j, kk, vv = start + tl.arange(0, N), tl.arange(0, KP), tl.arange(0, VP)
    there = visible_at(visible, b, j, S, MASKED)
    keys = tile(k + b * k_b + g * k_h + start.to(tl.int64) * k_t, k_t, there, kk, K)
    values = tile(v + b * v_b + g * v_h + start.to(tl.int64) * v_t, v_t, there, vv, V)
    acc_k, acc_v = tl.zeros([N, KP], tl.float32), tl.zeros([N, VP], tl.float32)
    first = start // M * M if CAUSAL else start * 0
    for r in range(GROUP):
        h = g * GROUP + r
        xs = q + b * q_b + h * q_h + first.to(tl.int64) * q_t
        for row in range(first, T, M):
            i, place = row + tl.arange(0, M), (b * H + h) * T + row
            x, d = tile(xs, q_t, i < T, kk, K), tile(d_out + place * V, V, i < T, vv, V)
            delta = tl.load(deltas + place + tl.arange(0, M), mask=i < T, other=0.0)
            inverse = tl.load(inverses + place + tl.arange(0, M), mask=i < T, other=0.0)
            s = pairs(keys, x) + 1
            p = pairs(values, d)
            allowed = there[:, None] & (i[None, :] >= j[:, None]) if CAUSAL else there[:, None]
            s = tl.where(allowed, s, 0.0)
            acc_v = dot(s * s * inverse[None, :], d, acc_v, MODE)
            acc_k = dot(s * (p - delta[None, :]) * inverse[None, :], x, acc_k, MODE)
            xs += M * q_t
    place = head.to(tl.int64) * S + start
    put(d_k + place * K, K, j < S, kk, acc_k * 2, K)
    put(d_v + place * V, V, j < S, vv, acc_v, V)
