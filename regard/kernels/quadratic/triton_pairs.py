"""The Triton programs of quadratic attention: similarities (q·k + 1)² of blocks of pairs, made where they are used."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.linear.triton_primitives import cast_operand, dot, load_rows, load_visible, store_rows


@triton.jit
def dot_rows(a, b):
    """Returns a bᵀ [m,n] in float32 for a [m,k], b [n,k]. Products of half precision are exact; only their sum is
    rounded."""
    # [m,k] @ [k,n] -> [m,n]
    return tl.dot(a, tl.trans(b))


@triton.jit
def load_block(
    x, i, k, v, visible, b, start, S, k_t, v_t, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Returns a block of keys [N,BK] and values [N,BV], q·k + 1 of queries with them [M,N], and which pairs count
    [M,N] (or [1,N] unless CAUSAL).

    x [M,BK]: queries; i [M]: their positions. k, v: pointers to the first key and value of the block, which is at
    `start` of S; k_t, v_t: from one token to the next. visible [B,S]: the mask over keys of sequence b, if MASKED.
    """
    j = start + tl.arange(0, N)
    seen = load_visible(visible, b, j, S, MASKED)
    keys = load_rows(k, k_t, seen, tl.arange(0, BK), K)
    values = load_rows(v, v_t, seen, tl.arange(0, BV), V)
    allowed = seen[None, :]
    if CAUSAL:
        allowed = allowed & (j[None, :] <= i[:, None])
    # [M,BK] @ [BK,N] -> [M,N]
    return keys, values, dot_rows(x, keys) + 1, allowed


@triton.jit
def output_kernel(
    q, k, v, visible, out, out_f32, inv_norm, T, S, H, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, TINY: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Computes outputs. One program instance does M queries of one head, over all keys, N at a time:

        out_i = Σ_j a_ij v_j / s_i,      a_ij = (q_i·k_j + 1)²,      s_i = Σ_j a_ij

    Long rows come first, so that short ones fill the gaps at the end.

    Reads:
        q [B,H,T,K], k [B,G,S,K], v [B,G,S,V]: inputs; strides q_b, q_h, q_t and so on of batch, heads, tokens.
        visible [B,S]: the mask over keys, if MASKED.
    Writes:
        out, out_f32 [B,H,T,V]: outputs in the dtype of v, and in float32.
        inv_norm [B,H,T]: 1 / s_i, or 0 for s_i < TINY.
    """
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    head = tl.program_id(1)
    b = (head // H).to(tl.int64)
    h = head % H
    i = row + tl.arange(0, M)
    kk = tl.arange(0, BK)
    vv = tl.arange(0, BV)
    x = load_rows(q + b * q_b + h * q_h + row.to(tl.int64) * q_t, q_t, i < T, kk, K)
    k += b * k_b + (h // GROUP) * k_h
    v += b * v_b + (h // GROUP) * v_h
    acc = tl.zeros([M, BV], tl.float32)
    norm = tl.zeros([M], tl.float32)
    end = S
    if CAUSAL:
        end = tl.minimum(row + M, S)
    for start in range(0, end, N):
        _, values, s, allowed = load_block(
            x, i, k, v, visible, b, start, S, k_t, v_t, K, V, BK, BV, CAUSAL, MASKED, N
        )  # fmt: skip
        k += N * k_t
        v += N * v_t
        # The normaliser sums what the product takes, rounded as it takes it.
        weights = cast_operand(tl.where(allowed, s * s, 0.0), PRECISION)
        norm += tl.sum(weights.to(tl.float32), 1)
        # [M,N] @ [N,BV] -> [M,BV]
        acc = dot(weights, values, acc, PRECISION)
    inverse = tl.where(norm < TINY, 0.0, 1 / norm)
    place = head.to(tl.int64) * T + row
    tl.store(inv_norm + place + tl.arange(0, M), inverse, mask=i < T)
    store_rows(out + place * V, V, i < T, vv, acc * inverse[:, None], V)
    store_rows(out_f32 + place * V, V, i < T, vv, acc * inverse[:, None], V)


@triton.jit
def query_grad_kernel(
    q, k, v, visible, d_out, out_f32, inv_norm, d_q, delta, T, S, H, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Computes ∂q and δ. One program instance does M queries of one head, over all keys, N at a time:

        ∂q_i = 2 Σ_j (q_i·k_j + 1) (∂out_i·v_j − δ_i) / s_i · k_j,      δ_i = ∂out_i·out_i

    Reads:
        q [B,H,T,K], k [B,G,S,K], v [B,G,S,V]: inputs; strides q_b, q_h, q_t and so on of batch, heads, tokens.
        visible [B,S]: the mask over keys, if MASKED.
        d_out [B,H,T,V]: ∂out.
        out_f32 [B,H,T,V]: outputs in float32: where all similarities are small, rounding δ would be a large share.
        inv_norm [B,H,T]: 1 / s_i.
    Writes:
        d_q [B,H,T,K]: ∂q. delta [B,H,T]: δ.
    """
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    head = tl.program_id(1)
    b = (head // H).to(tl.int64)
    h = head % H
    i = row + tl.arange(0, M)
    kk = tl.arange(0, BK)
    vv = tl.arange(0, BV)
    place = head.to(tl.int64) * T + row
    x = load_rows(q + b * q_b + h * q_h + row.to(tl.int64) * q_t, q_t, i < T, kk, K)
    grad = load_rows(d_out + place * V, V, i < T, vv, V)
    # [M,BV] · [M,BV] -> [M]
    delta_row = tl.sum(grad.to(tl.float32) * load_rows(out_f32 + place * V, V, i < T, vv, V), 1)
    tl.store(delta + place + tl.arange(0, M), delta_row, mask=i < T)
    inverse = tl.load(inv_norm + place + tl.arange(0, M), mask=i < T, other=0.0)
    k += b * k_b + (h // GROUP) * k_h
    v += b * v_b + (h // GROUP) * v_h
    acc = tl.zeros([M, BK], tl.float32)
    end = S
    if CAUSAL:
        end = tl.minimum(row + M, S)
    for start in range(0, end, N):
        keys, values, s, allowed = load_block(
            x, i, k, v, visible, b, start, S, k_t, v_t, K, V, BK, BV, CAUSAL, MASKED, N
        )  # fmt: skip
        k += N * k_t
        v += N * v_t
        # [M,BV] @ [BV,N] -> [M,N]
        p = dot_rows(grad, values)
        # [M,N] @ [N,BK] -> [M,BK]
        acc = dot(tl.where(allowed, s * (p - delta_row[:, None]) * inverse[:, None], 0.0), keys, acc, PRECISION)
    store_rows(d_q + place * K, K, i < T, kk, acc * 2, K)


@triton.jit
def key_value_grad_kernel(
    q, k, v, visible, d_out, inv_norm, delta, d_k, d_v, T, S, H, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Computes ∂k and ∂v. One program instance does N keys of one head, over the queries of all heads of its group, M
    at a time:

        ∂k_j = 2 Σ_i (q_i·k_j + 1) (∂out_i·v_j − δ_i) / s_i · q_i,      ∂v_j = Σ_i (q_i·k_j + 1)² / s_i · ∂out_i

    Reads:
        q [B,H,T,K], k [B,G,S,K], v [B,G,S,V]: inputs; strides q_b, q_h, q_t and so on of batch, heads, tokens.
        visible [B,S]: the mask over keys, if MASKED.
        d_out [B,H,T,V]: ∂out. inv_norm [B,H,T]: 1 / s_i. delta [B,H,T]: δ.
    Writes:
        d_k [B,G,S,K]: ∂k. d_v [B,G,S,V]: ∂v.
    """
    start = tl.program_id(0) * N
    head = tl.program_id(1)
    G = H // GROUP
    b = (head // G).to(tl.int64)
    g = head % G
    j = start + tl.arange(0, N)
    kk = tl.arange(0, BK)
    vv = tl.arange(0, BV)
    seen = load_visible(visible, b, j, S, MASKED)
    keys = load_rows(k + b * k_b + g * k_h + start.to(tl.int64) * k_t, k_t, seen, kk, K)
    values = load_rows(v + b * v_b + g * v_h + start.to(tl.int64) * v_t, v_t, seen, vv, V)
    acc_k = tl.zeros([N, BK], tl.float32)
    acc_v = tl.zeros([N, BV], tl.float32)
    first = start * 0  # zero as a tensor, which the cast below needs
    if CAUSAL:
        first = start // M * M
    for r in range(GROUP):
        h = g * GROUP + r
        x_rows = q + b * q_b + h * q_h + first.to(tl.int64) * q_t
        for row in range(first, T, M):
            i = row + tl.arange(0, M)
            place = (b * H + h) * T + row
            x = load_rows(x_rows, q_t, i < T, kk, K)
            grad = load_rows(d_out + place * V, V, i < T, vv, V)
            delta_row = tl.load(delta + place + tl.arange(0, M), mask=i < T, other=0.0)
            inverse = tl.load(inv_norm + place + tl.arange(0, M), mask=i < T, other=0.0)
            # [N,BK] @ [BK,M] -> [N,M]
            s = dot_rows(keys, x) + 1
            # [N,BV] @ [BV,M] -> [N,M]
            p = dot_rows(values, grad)
            allowed = seen[:, None]
            if CAUSAL:
                allowed = allowed & (i[None, :] >= j[:, None])
            # Masked before the products: ptxas of Triton 3.6 can drop columns of one whose result is masked after it.
            s = tl.where(allowed, s, 0.0)
            # [N,M] @ [M,BV] -> [N,BV]
            acc_v = dot(s * s * inverse[None, :], grad, acc_v, PRECISION)
            # [N,M] @ [M,BK] -> [N,BK]
            acc_k = dot(s * (p - delta_row[None, :]) * inverse[None, :], x, acc_k, PRECISION)
            x_rows += M * q_t
    place = head.to(tl.int64) * S + start
    store_rows(d_k + place * K, K, j < S, kk, acc_k * 2, K)
    store_rows(d_v + place * V, V, j < S, vv, acc_v, V)
