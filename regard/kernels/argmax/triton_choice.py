"""The Triton programs of argmax attention: the best key of each query, and the gradient of the values."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.linear.triton_primitives import load_rows, load_visible, store_rows


@triton.jit
def compare_block(
    x, i, best, chosen, total, k, visible, b, start, S, k_t, window, K: tl.constexpr, BK: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, FULL: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Returns best, chosen and total of queries [M] after one more block of keys.

    x [M,BK]: queries; i [M]: the keys that they stand at. best [M]: the highest score so far; chosen [M]: the key that
    has it, or −1; total [M]: the sum of all scores, which is finite where they all are.
    k: pointer to the first key of the block, which is at `start` of S; k_t: from one key to the next. visible [B,S]:
    the mask over keys of sequence b, if MASKED. FULL: every pair of the block counts, but for MASKED.
    """
    j = start + tl.arange(0, N)
    seen = load_visible(visible, b, j, S, MASKED)
    keys = load_rows(k, k_t, seen, tl.arange(0, BK), K)
    # [M,BK] @ [BK,N] -> [M,N]
    s = tl.dot(x, tl.trans(keys))
    if FULL and not MASKED:
        total += tl.sum(s, 1)
    else:
        allowed = seen[None, :]
        if CAUSAL and not FULL:
            allowed = allowed & (j[None, :] <= i[:, None])
        if WINDOWED and not FULL:
            apart = i[:, None] - j[None, :]
            allowed = allowed & (apart < window) & (apart > -window)
        total += tl.sum(tl.where(allowed, s, 0.0), 1)
        s = tl.where(allowed, s, float("-inf"))
    highest = tl.max(s, 1)
    first = tl.min(tl.where(s == highest[:, None], j[None, :], S), 1)
    better = highest > best
    return tl.where(better, highest, best), tl.where(better, first, chosen), total


@triton.jit
def choose_kernel(
    q, k, v, visible, out, chosen, T, S, H, window, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, MASKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Chooses a key for each query. One program instance does M queries of one head, over all keys, N at a time:

        c_i = argmax_j q_i·k_j,      out_i = v_{c_i}

    Long rows come first, so that short ones fill the gaps at the end. Causal queries are the last T keys.

    Reads:
        q [B,H,T,K], k [B,G,S,K], v [B,G,S,V]: inputs; strides q_b, q_h, q_t and so on of batch, heads, tokens.
        visible [B,S]: the mask over keys, if MASKED. window: keys at this distance are not seen, if WINDOWED.
    Writes:
        out [B,H,T,V]: the values chosen, zeros where nothing may be seen, NaN where a score is not finite.
        chosen [B,H,T]: the keys chosen, or −1.
    """
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    head = tl.program_id(1)
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)  # a head may begin beyond 2³¹ numbers
    t = row + tl.arange(0, M)
    i = t + (S - T)
    x = load_rows(q + b * q_b + h * q_h + row.to(tl.int64) * q_t, q_t, t < T, tl.arange(0, BK), K)
    k += b * k_b + (h // GROUP) * k_h
    v += b * v_b + (h // GROUP) * v_h
    best = tl.full([M], float("-inf"), tl.float32)
    index = tl.full([M], -1, tl.int32)
    total = tl.zeros([M], tl.float32)
    begin = row * 0  # zero as a tensor, which the cast below needs
    full = S // N * N
    end = S
    if CAUSAL:
        end = tl.minimum(row + M + S - T, S)
        full = (row + S - T + 1) // N * N
    if WINDOWED:
        begin = tl.maximum(row + S - T - window + 1, 0) // N * N
        end = tl.minimum(end, row + M + S - T + window)
        full = begin
    k += begin.to(tl.int64) * k_t
    for start in range(begin, full, N):
        best, index, total = compare_block(
            x, i, best, index, total, k, visible, b, start, S, k_t, window, K, BK, CAUSAL, WINDOWED, MASKED, True, N
        )  # fmt: skip
        k += N * k_t
    for start in range(full, end, N):
        best, index, total = compare_block(
            x, i, best, index, total, k, visible, b, start, S, k_t, window, K, BK, CAUSAL, WINDOWED, MASKED, False, N
        )  # fmt: skip
        k += N * k_t
    place = head.to(tl.int64) * T + row
    tl.store(chosen + place + tl.arange(0, M), index, mask=t < T)
    vv = tl.arange(0, BV)
    inside = (index >= 0)[:, None] & (vv[None, :] < V)
    values = tl.load(v + index.to(tl.int64)[:, None] * v_t + vv[None, :], mask=inside, other=0.0)
    # The difference is zero for finite numbers, and NaN for others.
    store_rows(out + place * V, V, t < T, vv, values.to(tl.float32) + (total - total)[:, None], V)


@triton.jit
def value_grad_kernel(
    chosen, d_out, d_v, T, S, H,
    V: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Computes ∂v. One program instance does N keys of one head, over the queries of all heads of its group, M at a
    time:

        ∂v_j = Σ_i ∂out_i over those i that chose j

    Reads:
        chosen [B,H,T]: the keys chosen. d_out [B,H,T,V]: ∂out.
    Writes:
        d_v [B,G,S,V]: ∂v.
    """
    start = tl.program_id(0) * N
    head = tl.program_id(1)
    G = H // GROUP
    b = (head // G).to(tl.int64)
    j = start + tl.arange(0, N)
    vv = tl.arange(0, BV)
    acc = tl.zeros([N, BV], tl.float32)
    first = start * 0
    if CAUSAL:
        first = tl.maximum(start - (S - T), 0) // M * M
    for r in range(GROUP):
        h = (head % G) * GROUP + r
        for row in range(first, T, M):
            t = row + tl.arange(0, M)
            place = (b * H + h) * T + row
            index = tl.load(chosen + place + tl.arange(0, M), mask=t < T, other=-1)
            grad = load_rows(d_out + place * V, V, t < T, vv, V)
            weights = tl.where(j[:, None] == index[None, :], 1.0, 0.0).to(grad.dtype)
            # [N,M] @ [M,BV] -> [N,BV]
            acc = tl.dot(weights, grad, acc)
    store_rows(d_v + (head.to(tl.int64) * S + start) * V, V, j < S, vv, acc, V)
