"""The Triton program of gated attention and retention with one decay a head, in both directions of time.

One program serves the outputs and all gradients, which are the same sum with other tensors in the three roles:

    out_i = scale · Σ_{j≤i} e^{c_i − c_j} (q_i·k_j) v_j          attend(q, k, v)
    ∂q_i  = scale · Σ_{j≤i} e^{c_i − c_j} (∂out_i·v_j) k_j       attend(∂out, v, k)
    ∂k_j  = scale · Σ_{i≥j} e^{c_i − c_j} (v_j·∂out_i) q_i       attend(v, ∂out, q), from the end
    ∂v_j  = scale · Σ_{i≥j} e^{c_i − c_j} (k_j·q_i) ∂out_i       attend(k, q, ∂out), from the end

The decays themselves have ∂c_i = q_i·∂q_i − k_i·∂k_i, whose two products are taken here before ∂q and ∂k are rounded.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.linear.triton_primitives import dot, load_rows, load_visible, store_rows


@triton.jit
def decayed_kernel(
    q, k, v, a, visible, other, before, sums, left, out, dots, after, T, H, span,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SCALE: tl.constexpr,
    Q_GROUP: tl.constexpr, K_GROUP: tl.constexpr, V_GROUP: tl.constexpr, A_GROUP: tl.constexpr, O_GROUP: tl.constexpr,
    PRECISION: tl.constexpr, BACKWARDS: tl.constexpr, SUMS_ONLY: tl.constexpr, SEVERAL: tl.constexpr,
    MASK_KEYS: tl.constexpr, MASK_ROWS: tl.constexpr, STARTS: tl.constexpr, ENDS: tl.constexpr, DOTS: tl.constexpr,
):  # fmt: skip
    """Goes through one segment of one head, C tokens at a time, with BV columns of the memory S in registers:

        out = scale · ((q ⊙ e^c) S + (q kᵀ ⊙ D) v),      S ← e^{c_C} S + (k ⊙ e^{c_C − c})ᵀ v,      c = cumsum(a)

    From the end (BACKWARDS) rows see later tokens: e^c and e^{c_C − c} change places, and D is transposed.

    Reads:
        q, k [B,·,T,K], v [B,·,T,V]: whatever stands in these roles; strides of batch, heads, tokens. Head h of H reads
            head h // Q_GROUP of q, and so on. a [B,H/A_GROUP,T]: logarithms of the decays, 0 at hidden tokens.
        visible [B,T]: hidden tokens are no keys (MASK_KEYS), or no rows (MASK_ROWS).
        before [B,H/A_GROUP,K,V]: S before the first token, or from the end after the last, if STARTS.
        sums [B,H,segments,K,V], left [B,H,segments]: what each segment alone adds to S, and its sum of a, if SEVERAL.
        other [B,·,T,V]: what each row of out is multiplied by, if DOTS.
    Writes:
        out [B,H,T,V]: outputs, zeros where MASK_ROWS hides them. dots [blocks,B,H,T]: other·out over the BV columns.
        after [B,H,K,V]: S when all tokens are passed, if ENDS. With SUMS_ONLY: sums and left, and nothing else.
    """
    blocks = tl.cdiv(V, BV)
    segments = tl.cdiv(T, span)
    segment = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    head = tl.program_id(1)
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)  # a head may begin beyond 2³¹ numbers
    kk = tl.arange(0, BK)
    vv = block * BV + tl.arange(0, BV)
    entries = kk[:, None] * V + vv[None, :]
    inside = (kk < K)[:, None] & (vv < V)[None, :]
    memory = b * (H // A_GROUP) + h // A_GROUP
    q += b * q_b + (h // Q_GROUP) * q_h
    k += b * k_b + (h // K_GROUP) * k_h
    v += b * v_b + (h // V_GROUP) * v_h
    other += b * o_b + (h // O_GROUP) * o_h
    a += memory * T
    place = head.to(tl.int64) * segments
    S = tl.zeros([BK, BV], tl.float32)
    passed = segment  # segments that time has gone through before this one
    if BACKWARDS:
        passed = segments - 1 - segment
    if STARTS and not SUMS_ONLY:
        # Results from the end are added up over the heads of a memory: what comes to it counts once.
        begins = inside
        if BACKWARDS:
            begins = inside & (h % A_GROUP == 0)
        S = tl.load(before + memory * K * V + entries, mask=begins, other=0.0)
    if SEVERAL and not SUMS_ONLY:
        for n in range(0, passed):
            s = n
            if BACKWARDS:
                s = segments - 1 - n
            added = tl.load(sums + (place + s) * K * V + entries, mask=inside, other=0.0)
            S = S * tl.exp(tl.load(left + place + s)) + added
    start = segment * span
    end = tl.minimum(start + span, T)
    chunks = tl.cdiv(end - start, C)
    i = tl.arange(0, C)
    logarithm = tl.zeros([1], tl.float32)
    for n in range(0, chunks):
        at = n
        if BACKWARDS:
            at = chunks - 1 - n
        row = start + at * C
        t = row + i
        first = row.to(tl.int64)
        decay = tl.load(a + t, mask=t < end, other=0.0)
        c = tl.cumsum(decay, 0)
        total = tl.sum(decay, 0)
        reading = tl.exp(c)
        keeping = tl.exp(total - c)
        if BACKWARDS:
            reading = tl.exp(total - c)
            keeping = tl.exp(c)
        keyed = load_visible(visible, b, t, T, MASK_KEYS) & (t < end)
        keys = load_rows(k + first * k_t, k_t, keyed, kk, K)
        values = load_rows(v + first * v_t, v_t, keyed, vv, V)
        if not SUMS_ONLY:
            asked = load_visible(visible, b, t, T, MASK_ROWS) & (t < end)
            rows = load_rows(q + first * q_t, q_t, asked, kk, K)
            apart = c[:, None] - c[None, :]
            allowed = i[None, :] <= i[:, None]
            if BACKWARDS:
                apart = c[None, :] - c[:, None]
                allowed = i[None, :] >= i[:, None]
            # Beyond what is allowed differences are positive, and would overflow.
            D = tl.where(allowed, tl.exp(tl.minimum(apart, 0.0)), 0.0)
            # [C,BK] @ [BK,C] -> [C,C]
            pairs = dot(rows, tl.trans(keys), tl.zeros([C, C], tl.float32), PRECISION) * D
            # [C,BK] @ [BK,BV] and [C,C] @ [C,BV] -> [C,BV]
            result = dot(rows.to(tl.float32) * reading[:, None], S, tl.zeros([C, BV], tl.float32), PRECISION)
            result = dot(pairs, values, result, PRECISION) * SCALE
            store_rows(out + (head.to(tl.int64) * T + first) * V, V, t < end, vv, result, V)
            if DOTS:
                beside = load_rows(other + first * o_t, o_t, asked, vv, V)
                product = tl.sum(beside.to(tl.float32) * result, 1)
                tl.store(dots + (block * tl.num_programs(1) + head).to(tl.int64) * T + t, product, mask=t < end)
        # [BK,C] @ [C,BV] -> [BK,BV]
        kept = keys.to(tl.float32) * keeping[:, None]
        S = dot(tl.trans(kept), values, S * tl.exp(total), PRECISION)
        logarithm += total
    if SUMS_ONLY:
        tl.store(sums + (place + segment) * K * V + entries, S, mask=inside)
        if block == 0:
            tl.store(left + place + segment + tl.arange(0, 1), logarithm)
    elif ENDS:
        tl.store(after + head.to(tl.int64) * K * V + entries, S, mask=inside & (passed == segments - 1))
