"""The Triton programs of linear attention: sums of segments, their running totals, and the scan within each segment.

A sequence is cut into segments, so that even one sequence fills the device. `sums` adds up the keys of each segment,
`combine` turns these sums into what each segment starts from, and `scan` goes through a segment chunk by chunk: pairs
within a chunk, the sums for all before it. Features are made where they are needed and never touch memory. A program
has a block of FB features and a block of VB values; what several of them find of one number, `merge` adds up.

Exponents and peaks (the running maximum m of c) are powers of two. They only scale: no gradient passes through them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

TAU: tl.constexpr = tl.constexpr(6.283185307179586)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
SCALE: tl.constexpr = tl.constexpr(2.0**-6)  # of inputs in float16, and its inverse of w
ZERO: tl.constexpr = tl.constexpr(2.0**-103)  # a smaller total has lost digits to underflow: tiny / eps of float32


@triton.jit
def dot(a, b, acc, MODE: tl.constexpr):
    """acc + a b, as precise as the mode says: bfloat16, three products of bfloat16, or three of tf32."""
    if MODE == "half":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    elif MODE == "split":
        a, b = a.to(tl.float32), b.to(tl.float32)
        a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
        acc = tl.dot((a - a_high.to(tl.float32)).to(tl.bfloat16), b_high, acc)
        acc = tl.dot(a_high, (b - b_high.to(tl.float32)).to(tl.bfloat16), acc)
        return tl.dot(a_high, b_high, acc)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32x3")


@triton.jit
def tile(x, stride, there, wide, W: tl.constexpr):
    """One row of W numbers for each token that is there, zeros for the others; x points to the first token."""
    rows = tl.arange(0, there.shape[0])
    return tl.load(x + rows[:, None] * stride + wide[None, :], mask=there[:, None] & (wide[None, :] < W), other=0.0)


@triton.jit
def put(x, stride, there, wide, values, W: tl.constexpr):
    """The opposite of `tile`."""
    rows = tl.arange(0, there.shape[0])
    tl.store(x + rows[:, None] * stride + wide[None, :], values, mask=there[:, None] & (wide[None, :] < W))


@triton.jit
def finite(peak):
    """−inf (nothing seen yet) as 0, so that −inf − peak stays −inf."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def place(P, NV):
    """(row, block of features, block of values) of this program; the blocks of a row run side by side."""
    at = tl.program_id(0)
    return at // P, (at % P) // NV, at % NV


@triton.jit
def directions(w, low, block, K: tl.constexpr, F: tl.constexpr, KP: tl.constexpr, FB: tl.constexpr, MAP: tl.constexpr):
    """A block of the directions of random features, [KP,FB], and what rounding took from it."""
    if MAP == "performer" or MAP == "fourier":
        kk, ff = tl.arange(0, KP), block * FB + tl.arange(0, FB)
        there = (kk[:, None] < K) & (ff[None, :] < F)
        at = kk[:, None] * F + ff[None, :]
        high = tl.load(w + at, mask=there, other=0.0)
        return high, tl.load(low + at, mask=there, other=0.0) if MAP == "fourier" else 0.0
    else:
        return 0.0, 0.0


@triton.jit
def project(x, w, low, MAP: tl.constexpr):
    """x w. Inputs in bfloat16 are exact in float16 (scaled, for its range); w has 11 bits, or 22 where phases need it:
    an error below that of rounding ψ."""
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.float32) * SCALE).to(tl.float16)
        if MAP == "fourier":
            return tl.dot(x, w, tl.dot(x, low))
        else:
            return tl.dot(x, w)
    else:
        return tl.dot(x.to(tl.float32), w, input_precision="tf32x3")


@triton.jit
def sine(turns):
    """sin(2π·turns) in plain multiplications, correct to a few units in the last place of float32."""
    r = turns - tl.floor(turns + 0.5)
    r = tl.where(r > 0.25, 0.5 - r, tl.where(r < -0.25, -0.5 - r, r))
    x = r * TAU
    s = x * x
    p = -1 / 6 + s * (1 / 120 + s * (-1 / 5040 + s * (1 / 362880 - s * (1 / 39916800))))
    return x + x * s * p


@triton.jit
def vectors(x, stride, there, block, K: tl.constexpr, KP: tl.constexpr, FB: tl.constexpr, MAPPED: tl.constexpr):
    """What a block of features is made from: the whole vectors, or their columns of the same numbers."""
    if MAPPED:
        return tile(x, stride, there, tl.arange(0, KP), K)
    else:
        return tile(x, stride, there, block * FB + tl.arange(0, FB), K)


@triton.jit
def features(
    x, there, lift, w, low, block, F: tl.constexpr, FB: tl.constexpr, MAP: tl.constexpr, MODE: tl.constexpr
):  # fmt: skip
    """A block of (ψ, ∂ψ) of a tile of vectors; ∂ψ with respect to x, or to its projections. ψ comes 2⁻ˡⁱᶠᵗ as large."""
    ff = block * FB + tl.arange(0, FB)
    if MAP == "given":
        psi, slope = x.to(tl.float32), 1.0
    elif MAP == "elu":
        wide = x.to(tl.float32)
        slope = tl.exp2(tl.minimum(wide, 0.0) * LOG2E)
        psi = tl.where(wide > 0, wide + 1, slope)
    elif MAP == "performer":
        psi = tl.exp2(project(x, w, low, MAP) - lift[:, None])
        slope = psi * LN2
    else:
        p = (
            project(x, w, low, MAP) + tl.where(ff < F // 2, 0.0, 0.25)[None, :]
        )  # the second half of the sines are cosines
        size = tl.exp2(-lift)[:, None] * (2 / F) ** 0.5
        psi, slope = sine(p) * size, sine(p + 0.25) * (size * TAU)
    psi = tl.where(there[:, None] & (ff[None, :] < F), psi, 0.0)
    if MODE == "half":
        return psi.to(tl.bfloat16), slope
    else:
        return psi, slope


@triton.jit
def crests(
    x, w, lifts, peaks, x_b, x_h, x_t, T, H, P, NV,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, KP: tl.constexpr, FB: tl.constexpr, VB: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, MODE: tl.constexpr, PEAKED: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """c of each vector, rounded up to a whole number: scaling by 2ᶜ is exact then. And the lift that sizes ψ."""
    if tl.program_id(0) % P > 0:  # one block of each row finds the maximum over all of them
        return
    row, t = (tl.program_id(0) // P).to(tl.int64), tl.program_id(1) * C + tl.arange(0, C)
    there = t < T
    base = x + (row // H) * x_b + (row % H) * x_h + tl.program_id(1).to(tl.int64) * C * x_t
    xs = tile(base, x_t, there, tl.arange(0, KP), K)
    wide = xs.to(tl.float32)
    squares = tl.sum(wide * wide, 1) * (0.5 * K**-0.5 * LOG2E)
    if MAP == "performer":
        top = tl.full([C], float("-inf"), tl.float32)
        for i in tl.static_range((F + FB - 1) // FB):
            kk, ff = tl.arange(0, KP), i * FB + tl.arange(0, FB)
            ws = tl.load(w + kk[:, None] * F + ff[None, :], mask=(kk[:, None] < K) & (ff[None, :] < F), other=0.0)
            top = tl.maximum(top, tl.max(tl.where(ff[None, :] < F, project(xs, ws, ws, MAP), float("-inf")), 1))
        c = tl.ceil(top - squares)
        lift = c + squares
    else:
        c = tl.ceil(squares)
        lift = c - squares
    tl.store(lifts + row * T + t, lift, mask=there)
    tl.store(peaks + row * T + t, c, mask=there)


@triton.jit
def kept(sums, slot, block, part, V: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, VB: tl.constexpr):
    """A block of S, [FB,VB], and of Z, [FB], of one slot."""
    here = sums + slot.to(tl.int64) * (F * V + F)
    ff, vv = block * FB + tl.arange(0, FB), part * VB + tl.arange(0, VB)
    S = tl.load(here + ff[:, None] * V + vv[None, :], mask=(ff[:, None] < F) & (vv[None, :] < V), other=0.0)
    return S, tl.load(here + F * V + ff, mask=ff < F, other=0.0)


@triton.jit
def sums(
    x, y, w, low, visible, lifts, c, den, delta, out, tops,
    x_b, x_h, x_t, y_b, y_h, y_t, c_row, c_t, T, span, slots, first, G, P, NV,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, KP: tl.constexpr, FB: tl.constexpr, VB: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, MODE: tl.constexpr, PEAKED: tl.constexpr, MAPPED: tl.constexpr,
    GROUP: tl.constexpr, MASKED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Σ 2ᶜ⁻ᵐ ψ(x) [y, 1]ᵀ of one segment and one block of y's columns.

    Forward, x and y are keys and values. Backward, they are queries and ∂out / total, of all heads of a group; δ takes
    the place of the one, and −m that of c."""
    row, block, part = place(P, NV)
    segment = tl.program_id(1)
    b, g = (row // G).to(tl.int64), (row % G).to(tl.int64)
    vv = part * VB + tl.arange(0, VB)
    high, rest = directions(w, low, block, K, F, KP, FB, MAP)
    start = segment * span
    end = tl.minimum(start + span, T)
    S, Z = tl.zeros([FB, VB], tl.float32), tl.zeros([FB], tl.float32)
    m = tl.full((), float("-inf"), tl.float32)
    for r in range(GROUP):
        head = row.to(tl.int64) * GROUP + r
        x_head = x + b * x_b + (g * GROUP + r) * x_h
        y_head = y + b * y_b + (g * GROUP + r) * y_h
        for at in range(start, end, C):
            far, t = tl.cast(at, tl.int64), at + tl.arange(0, C)
            there = t < end
            if MASKED:
                there = there & (tl.load(visible + b * T + t, mask=there, other=0) != 0)
            xs = vectors(x_head + far * x_t, x_t, there, block, K, KP, FB, MAPPED)
            ys = tile(y_head + far * y_t, y_t, there, vv, V)
            one = tl.where(there, 1.0, 0.0)
            lift = tl.load(lifts + head * T + t, mask=there, other=0.0) if PEAKED else 0.0
            if BACK:
                total = tl.load(den + head * T + t, mask=there, other=0.0)
                ys = ys.to(tl.float32) * tl.where(total == 0, 0.0, 1 / total)[:, None]
                one = tl.load(delta + head * T + t, mask=there, other=0.0)
            fade = 1.0
            if PEAKED:
                higher = tl.load(c + row.to(tl.int64) * c_row + t * c_t, mask=there, other=float("-inf"))
                if BACK:
                    higher = tl.where(higher == float("-inf"), higher, -higher)
                m_new = tl.maximum(m, tl.max(higher, 0))
                fade, share = tl.exp2(m - finite(m_new)), tl.exp2(higher - finite(m_new))
                ys, one = ys.to(tl.float32) * share[:, None], one * share
                m = m_new
            psi = features(xs, there, lift, high, rest, block, F, FB, MAP, MODE)[0]
            S = dot(tl.trans(psi), ys, S * fade, MODE)
            Z = Z * fade + tl.sum(psi.to(tl.float32) * one[:, None], 0)
    slot = row * slots + first + segment
    here = out + slot.to(tl.int64) * (F * V + F)
    ff = block * FB + tl.arange(0, FB)
    tl.store(here + ff[:, None] * V + vv[None, :], S, mask=(ff[:, None] < F) & (vv[None, :] < V))
    if part == 0:
        tl.store(here + F * V + ff, Z, mask=ff < F)
        if block == 0:
            tl.store(tops + slot, m)


@triton.jit
def combine(
    sums, tops, peaks, slots, first, last, N,
    SP: tl.constexpr, BLOCK: tl.constexpr, PEAKED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Running totals over the slots, in place: of each slot and all before it, or (BACK) all after it. Only the slots
    from `first` to before `last` have anything in them."""
    row, s = tl.program_id(0), tl.arange(0, SP)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = (s >= first) & (s < last)
    adds = there[None, :] & ((s[:, None] <= s[None, :]) if BACK else (s[:, None] >= s[None, :]))
    share = tl.where(adds, 1.0, 0.0)
    if PEAKED:
        top = tl.load(tops + row * slots + s, mask=there, other=float("-inf"))
        peak = tl.max(tl.where(adds, top[None, :], float("-inf")), 1)
        share = tl.where(adds, tl.exp2(top[None, :] - finite(peak)[:, None]), 0.0)
        if tl.program_id(1) == 0:
            tl.store(peaks + row * slots + s, peak, mask=s < slots)
    here = sums + (row * slots + s).to(tl.int64)[:, None] * N + at[None, :]
    x = tl.load(here, mask=there[:, None] & (at[None, :] < N), other=0.0)
    total = tl.dot(share, x, input_precision="ieee")
    tl.store(here, total, mask=(s[:, None] < slots) & (at[None, :] < N))


@triton.jit
def scan(
    q, k, v, w, low, visible, lifts_q, lifts, c, states, tops, out, den, peaks,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_p, o_b, o_h, o_t, T, span, slots, H, P, NV,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, KP: tl.constexpr, FB: tl.constexpr, VB: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, MODE: tl.constexpr, PEAKED: tl.constexpr, MAPPED: tl.constexpr,
    GROUP: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """out = ψ(q)ᵀS / ψ(q)ᵀZ for the queries of one segment and one head; with several blocks of features, the parts of
    both that `merge` will add up and divide."""
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
        qs = vectors(q + b * q_b + h * q_h + far * q_t, q_t, there, block, K, KP, FB, MAPPED)
        lift = tl.load(lifts_q + row_q * T + t, mask=there, other=0.0) if PEAKED else 0.0
        psi_q = features(qs, there, lift, high, rest, block, F, FB, MAP, MODE)[0]
        result = dot(psi_q, S, tl.zeros([C, VB], tl.float32), MODE)
        total = tl.sum(psi_q.to(tl.float32) * Z[None, :], 1)
        if CAUSAL:
            seen = there
            if MASKED:
                seen = there & (tl.load(visible + b * T + t, mask=there, other=0) != 0)
            ks = vectors(k + b * k_b + g * k_h + far * k_t, k_t, seen, block, K, KP, FB, MAPPED)
            values = tile(v + b * v_b + g * v_h + far * v_t, v_t, seen, vv, V)
            lift_k = tl.load(lifts + row_k * T + t, mask=seen, other=0.0) if PEAKED else 0.0
            psi_k = features(ks, seen, lift_k, high, rest, block, F, FB, MAP, MODE)[0]
            pairs = dot(psi_q, tl.trans(psi_k), tl.zeros([C, C], tl.float32), MODE)
            before = tl.arange(0, C)[:, None] >= tl.arange(0, C)[None, :]
            added, one = values, tl.where(seen, 1.0, 0.0)
            if PEAKED:
                higher = tl.load(c + row_k * T + t, mask=seen, other=float("-inf"))
                c_seen = tl.where(before, higher[None, :], float("-inf"))
                m_row = tl.maximum(tl.max(c_seen, 1), m)
                pairs = pairs * tl.exp2(c_seen - finite(m_row)[:, None])
                past = tl.exp2(m - finite(m_row))
                result, total = result * past[:, None], total * past
                if (tl.program_id(0) % P == 0) & (h % GROUP == 0):
                    tl.store(peaks + row_k * T + t, m_row, mask=there)
                m_new = tl.maximum(m, tl.max(higher, 0))
                fade, one = tl.exp2(m - finite(m_new)), tl.exp2(higher - finite(m_new))
                added = values.to(tl.float32) * one[:, None]
                S, Z = S * fade, Z * fade
                m = m_new
            else:
                pairs = tl.where(before, pairs, 0.0)
            if MODE == "half":
                pairs = pairs.to(tl.bfloat16)
            result = dot(pairs, values, result, MODE)
            total += tl.sum(pairs.to(tl.float32), 1)
            S = dot(tl.trans(psi_k), added, S, MODE)
            Z += tl.sum(psi_k.to(tl.float32) * one[:, None], 0)
        if FB >= F:
            total = tl.where(tl.abs(total) < ZERO, 0.0, total)
            result = result * tl.where(total == 0, 0.0, 1 / total)[:, None]
        put(out + block * o_p + b * o_b + h * o_h + far * o_t, o_t, there, vv, result, V)
        if part == 0:
            rows = tl.num_programs(0) // P
            tl.store(den + (block * rows + row).to(tl.int64) * T + t, total, mask=there)


@triton.jit
def merge(
    parts, dens, out, den, o_b, o_h, o_t, H, T, P, far,
    W: tl.constexpr, WP: tl.constexpr, C: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    """Σ parts over the first of [P,B,H,T,W], in its order; divided by Σ dens, [P,B,H,T], which is kept."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1).to(tl.int64) * C
    t, ww = at + tl.arange(0, C), tl.arange(0, WP)
    there = t < T
    result, total = tl.zeros([C, WP], tl.float32), tl.zeros([C], tl.float32)
    for p in range(P):
        result += tile(parts + p * far * W + (row * T + at) * W, W, there, ww, W)
        if DIVIDE:
            total += tl.load(dens + p * far + row * T + t, mask=there, other=0.0)
    if DIVIDE:
        total = tl.where(tl.abs(total) < ZERO, 0.0, total)
        result = result * tl.where(total == 0, 0.0, 1 / total)[:, None]
        tl.store(den + row * T + t, total, mask=there)
    put(out + (row // H) * o_b + (row % H) * o_h + at * o_t, o_t, there, ww, result, W)
