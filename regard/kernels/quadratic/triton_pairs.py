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
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, FULL: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Returns a block of keys [N,BK] and values [N,BV], and q·k + 1 of queries with them [M,N], 0 for pairs that do not
    count.

    x [M,BK]: queries; i [M]: their positions. k, v: pointers to the first key and value of the block, which is at
    `start` of S; k_t, v_t: from one token to the next. visible [B,S]: the mask over keys of sequence b, if MASKED.
    FULL: every pair of the block counts, but for MASKED.
    """
    j = start + tl.arange(0, N)
    seen = load_visible(visible, b, j, S, MASKED)
    keys = load_rows(k, k_t, seen, tl.arange(0, BK), K)
    values = load_rows(v, v_t, seen, tl.arange(0, BV), V)
    # [M,BK] @ [BK,N] -> [M,N]
    s = dot_rows(x, keys) + 1
    if MASKED or not FULL:
        allowed = seen[None, :]
        if CAUSAL and not FULL:
            allowed = allowed & (j[None, :] <= i[:, None])
        # Masked before the products: ptxas of Triton 3.6 can drop columns of one whose result is masked after it.
        s = tl.where(allowed, s, 0.0)
    return keys, values, s


@triton.jit
def add_block(
    acc, norm, x, i, k, v, visible, b, start, S, k_t, v_t, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, FULL: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Returns acc [M,BV] + Σ_j a_ij v_j and norm [M] + Σ_j a_ij over one block of keys. All others as in `load_block`:
    x [M,BK]: queries; i [M]: their positions; k, v: pointers; visible [B,S]: the mask over keys of sequence b."""
    _, values, s = load_block(
        x, i, k, v, visible, b, start, S, k_t, v_t, K, V, BK, BV, CAUSAL, MASKED, FULL, N
    )  # fmt: skip
    # The normaliser sums what the product takes, rounded as it takes it.
    weights = cast_operand(s * s, PRECISION)
    # [M,N] @ [N,BV] -> [M,BV]
    return dot(weights, values, acc, PRECISION), norm + tl.sum(weights.to(tl.float32), 1)


@triton.jit
def add_query_grad(
    acc, grad, delta_row, x, i, k, v, visible, b, start, S, k_t, v_t, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    FULL: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Returns acc [M,BK] + Σ_j (q_i·k_j + 1) (∂out_i·v_j − δ_i) k_j over one block of keys.

    grad [M,BV]: ∂out; delta_row [M]: δ. All others as in `load_block`: x [M,BK]: queries; i [M]: their positions; k, v:
    pointers; visible [B,S]: the mask over keys of sequence b.
    """
    keys, values, s = load_block(
        x, i, k, v, visible, b, start, S, k_t, v_t, K, V, BK, BV, CAUSAL, MASKED, FULL, N
    )  # fmt: skip
    # [M,BV] @ [BV,N] -> [M,N]
    p = dot_rows(grad, values)
    # [M,N] @ [N,BK] -> [M,BK]
    return dot(s * (p - delta_row[:, None]), keys, acc, PRECISION)


@triton.jit
def add_key_value_grad(
    acc_k, acc_v, keys, values, j, q, d_out, inv_norm, delta, place, row, T, q_t, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, FULL: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Returns acc_k [N,BK] + Σ_i (q_i·k_j + 1) (∂out_i·v_j − δ_i) / s_i · q_i and
    acc_v [N,BV] + Σ_i (q_i·k_j + 1)² / s_i · ∂out_i, over one block of queries.

    keys [N,BK], values [N,BV]: those at the positions j [N]. q: pointer to the first query of the block, which is at
    `row` of T; q_t: from one query to the next. d_out [B,H,T,V], inv_norm [B,H,T], delta [B,H,T]: read from the head
    that begins at `place`. Unless FULL, a query sees no later key.
    """
    i = row + tl.arange(0, M)
    place += row
    x = load_rows(q, q_t, i < T, tl.arange(0, BK), K)
    grad = load_rows(d_out + place * V, V, i < T, tl.arange(0, BV), V)
    delta_row = tl.load(delta + place + tl.arange(0, M), mask=i < T, other=0.0)
    # Zero for queries beyond the last: these then add nothing.
    inverse = tl.load(inv_norm + place + tl.arange(0, M), mask=i < T, other=0.0)
    # [N,BK] @ [BK,M] -> [N,M]
    s = dot_rows(keys, x) + 1
    # [N,BV] @ [BV,M] -> [N,M]
    p = dot_rows(values, grad)
    if not FULL:
        # Masked before the products: ptxas of Triton 3.6 can drop columns of one whose result is masked after it.
        s = tl.where(i[None, :] >= j[:, None], s, 0.0)
    scaled = s * inverse[None, :]
    # [N,M] @ [M,BV] -> [N,BV]
    acc_v = dot(s * scaled, grad, acc_v, PRECISION)
    # [N,M] @ [M,BK] -> [N,BK]
    acc_k = dot(scaled * (p - delta_row[None, :]), x, acc_k, PRECISION)
    return acc_k, acc_v


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
    h = (head % H).to(tl.int64)  # a head may begin beyond 2³¹ numbers
    i = row + tl.arange(0, M)
    kk = tl.arange(0, BK)
    vv = tl.arange(0, BV)
    x = load_rows(q + b * q_b + h * q_h + row.to(tl.int64) * q_t, q_t, i < T, kk, K)
    k += b * k_b + (h // GROUP) * k_h
    v += b * v_b + (h // GROUP) * v_h
    acc = tl.zeros([M, BV], tl.float32)
    norm = tl.zeros([M], tl.float32)
    full = S // N * N
    end = S
    if CAUSAL:
        full = row // N * N
        end = tl.minimum(row + M, S)
    for start in range(0, full, N):
        acc, norm = add_block(
            acc, norm, x, i, k, v, visible, b, start, S, k_t, v_t, K, V, BK, BV, CAUSAL, MASKED, PRECISION, True, N
        )  # fmt: skip
        k += N * k_t
        v += N * v_t
    for start in range(full, end, N):
        acc, norm = add_block(
            acc, norm, x, i, k, v, visible, b, start, S, k_t, v_t, K, V, BK, BV, CAUSAL, MASKED, PRECISION, False, N
        )  # fmt: skip
        k += N * k_t
        v += N * v_t
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
    h = (head % H).to(tl.int64)  # a head may begin beyond 2³¹ numbers
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
    full = S // N * N
    end = S
    if CAUSAL:
        full = row // N * N
        end = tl.minimum(row + M, S)
    for start in range(0, full, N):
        acc = add_query_grad(
            acc, grad, delta_row, x, i, k, v, visible, b, start, S, k_t, v_t, K, V, BK, BV, CAUSAL, MASKED, PRECISION,
            True, N,
        )  # fmt: skip
        k += N * k_t
        v += N * v_t
    for start in range(full, end, N):
        acc = add_query_grad(
            acc, grad, delta_row, x, i, k, v, visible, b, start, S, k_t, v_t, K, V, BK, BV, CAUSAL, MASKED, PRECISION,
            False, N,
        )  # fmt: skip
        k += N * k_t
        v += N * v_t
    # 1 / s_i belongs to the row: it is multiplied once.
    acc *= 2 * inverse[:, None]
    store_rows(d_q + place * K, K, i < T, kk, acc, K)


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
    g = (head % G).to(tl.int64)  # a head may begin beyond 2³¹ numbers
    j = start + tl.arange(0, N)
    kk = tl.arange(0, BK)
    vv = tl.arange(0, BV)
    seen = load_visible(visible, b, j, S, MASKED)
    keys = load_rows(k + b * k_b + g * k_h + start.to(tl.int64) * k_t, k_t, seen, kk, K)
    values = load_rows(v + b * v_b + g * v_h + start.to(tl.int64) * v_t, v_t, seen, vv, V)
    acc_k = tl.zeros([N, BK], tl.float32)
    acc_v = tl.zeros([N, BV], tl.float32)
    first = start * 0  # zero as a tensor, which the cast below needs
    full = first
    if CAUSAL:
        first = start // M * M
        full = tl.minimum(tl.cdiv(start + N - 1, M) * M, tl.cdiv(T, M) * M)
    for r in range(GROUP):
        h = g * GROUP + r
        x_rows = q + b * q_b + h * q_h + first.to(tl.int64) * q_t
        for row in range(first, full, M):
            acc_k, acc_v = add_key_value_grad(
                acc_k, acc_v, keys, values, j, x_rows, d_out, inv_norm, delta, (b * H + h) * T, row, T, q_t, K, V, BK,
                BV, PRECISION, False, M,
            )  # fmt: skip
            x_rows += M * q_t
        for row in range(full, T, M):
            acc_k, acc_v = add_key_value_grad(
                acc_k, acc_v, keys, values, j, x_rows, d_out, inv_norm, delta, (b * H + h) * T, row, T, q_t, K, V, BK,
                BV, PRECISION, True, M,
            )  # fmt: skip
            x_rows += M * q_t
    # A hidden key was taken as zeros, which have similarities, too.
    counts = tl.where(seen, 1.0, 0.0)[:, None]
    acc_k *= 2 * counts
    acc_v *= counts
    place = head.to(tl.int64) * S + start
    store_rows(d_k + place * K, K, j < S, kk, acc_k, K)
    store_rows(d_v + place * V, V, j < S, vv, acc_v, V)
