"""The Triton programs of linear attention: features, sums at each chunk, and the outputs of each chunk.

A sequence is cut into segments, so that even one sequence fills the device, and these into chunks of C tokens.
`states` goes through a segment and leaves behind, for each chunk, the sums of what came before it in its segment;
`combine` makes running totals over the segments; `outputs` then does all chunks at once: pairs within the chunk, the
sums for all before it. Features are made block by block where they are needed and never touch memory.

Exponents and peaks (the running maximum m of c) are powers of two. They only scale: no gradient passes through them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

TAU: tl.constexpr = tl.constexpr(6.283185307179586)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
WHOLE: tl.constexpr = tl.constexpr(1.5 * 2.0**23)  # adding it rounds a float32 to a whole number
ZERO: tl.constexpr = tl.constexpr(2.0**-103)  # a smaller total has lost digits to underflow: tiny / eps of float32


@triton.jit
def dot(a, b, acc, MODE: tl.constexpr):
    """acc + a b, as precise as the mode says: bfloat16, three products of bfloat16, or three of tf32. What is bfloat16
    already needs no second part."""
    if MODE == "half":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    elif MODE == "split":
        a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
        if a.dtype != tl.bfloat16:
            acc = tl.dot((a.to(tl.float32) - a_high.to(tl.float32)).to(tl.bfloat16), b_high, acc)
        if b.dtype != tl.bfloat16:
            acc = tl.dot(a_high, (b.to(tl.float32) - b_high.to(tl.float32)).to(tl.bfloat16), acc)
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
def higher_of(a, b):
    return tl.maximum(a, b)


@triton.jit
def place(rows, NV):
    """(chunk, row, block of values) of this program."""
    at = tl.program_id(0)
    return at // NV // rows, (at // NV) % rows, at % NV


@triton.jit
def vectors(x, stride, there, block, K: tl.constexpr, KP: tl.constexpr, FB: tl.constexpr, MAPPED: tl.constexpr):
    """What a block of features is made from: the whole vectors, or their columns of the same numbers."""
    if MAPPED:
        return tile(x, stride, there, tl.arange(0, KP), K)
    else:
        return tile(x, stride, there, block * FB + tl.arange(0, FB), K)


@triton.jit
def directions(
    w, block, K: tl.constexpr, F: tl.constexpr, KP: tl.constexpr, FB: tl.constexpr, MAP: tl.constexpr
):  # fmt: skip
    """A block of the directions of random features, [FB,KP], and for bfloat16 what rounding took from them: one more
    part for 16 bits, two more for 24 where phases need them. Sines and cosines have the same directions."""
    if MAP == "performer" or MAP == "fourier":
        N: tl.constexpr = F if MAP == "performer" else F // 2
        ff, kk = block * FB + tl.arange(0, FB), tl.arange(0, KP)
        at = (ff % N)[:, None] * K + kk[None, :]
        there = kk[None, :] < K
        high = tl.load(w + at, mask=there, other=0.0)
        if w.dtype.element_ty != tl.bfloat16:
            return high, high, high
        elif MAP == "performer":
            return high, tl.load(w + N * K + at, mask=there, other=0.0), high
        else:
            return (
                high,
                tl.load(w + N * K + at, mask=there, other=0.0),
                tl.load(w + 2 * N * K + at, mask=there, other=0.0),
            )
    else:
        return 0.0, 0.0, 0.0


@triton.jit
def project(x, ws, MAP: tl.constexpr):
    """x wᵀ for a block of directions; or x itself where features are not mixed."""
    if MAP == "given" or MAP == "elu":
        return x
    elif x.dtype != tl.bfloat16:
        return tl.dot(x.to(tl.float32), tl.trans(ws[0]), input_precision="tf32x3")
    elif MAP == "performer":
        return tl.dot(x, tl.trans(ws[0]), tl.dot(x, tl.trans(ws[1])))
    else:
        return tl.dot(x, tl.trans(ws[0]), tl.dot(x, tl.trans(ws[1]), tl.dot(x, tl.trans(ws[2]))))


@triton.jit
def project_across(x, ws, MAP: tl.constexpr):
    """The transpose of `project`, features by tokens."""
    if x.dtype != tl.bfloat16:
        return tl.dot(ws[0], tl.trans(x.to(tl.float32)), input_precision="tf32x3")
    elif MAP == "performer":
        return tl.dot(ws[0], tl.trans(x), tl.dot(ws[1], tl.trans(x)))
    else:
        return tl.dot(ws[0], tl.trans(x), tl.dot(ws[1], tl.trans(x), tl.dot(ws[2], tl.trans(x))))


@triton.jit
def cosine(turns):
    """cos(2π·turns) in plain multiplications, correct to a few units in the last place of float32."""
    whole = (turns + WHOLE) - WHOLE
    x = (0.25 - tl.abs(turns - whole)) * TAU
    s = x * x
    p = -1 / 6 + s * (1 / 120 + s * (-1 / 5040 + s * (1 / 362880 - s * (1 / 39916800))))
    return x + x * s * p


@triton.jit
def features(p, lift, ff, F: tl.constexpr, FB: tl.constexpr, MAP: tl.constexpr):
    """(ψ, ∂ψ) of projections, or of vectors; ∂ψ but for a factor. ff are the features along p, ψ comes 2⁻ˡⁱᶠᵗ as
    large."""
    p = p.to(tl.float32)
    if MAP == "given":
        psi, slope = p, 1.0
    elif MAP == "elu":
        slope = tl.exp2(tl.minimum(p, 0.0) * LOG2E)
        psi = tl.where(p > 0, p + 1, slope)
    elif MAP == "performer":
        psi = tl.exp2(p - lift)
        slope = psi
    else:
        p = p - tl.where(ff < F // 2, 0.25, 0.0)  # the first half are sines
        size = tl.exp2(-lift) * (2 / F) ** 0.5
        psi, slope = cosine(p) * size, cosine(p + 0.25) * size
    if F % FB != 0:
        psi = tl.where(ff < F, psi, 0.0)
    return psi, slope


@triton.jit
def rounded(x, MODE: tl.constexpr):
    """x as the products of the mode take it: done once where several do."""
    return x.to(tl.bfloat16) if MODE == "half" else x


@triton.jit
def short(psi, MAP: tl.constexpr, MODE: tl.constexpr):
    """ψ with the 8 bits of bfloat16, still as float32: what the sums of v have of it, those of 1 must have too. Adding
    2¹⁶ψ rounds it."""
    if MAP == "performer" and MODE == "half":
        return (psi + psi * 65536.0) - psi * 65536.0
    else:
        return rounded(psi, MODE).to(tl.float32)


@triton.jit
def crests(
    x, w, visible, lifts, peaks, tops, x_b, x_h, x_t, T, H, rows, NV,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, KP: tl.constexpr, FB: tl.constexpr, VB: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, MODE: tl.constexpr, PEAKED: tl.constexpr, MAPPED: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """c of each key, rounded up to a whole number, so that scaling by 2ᶜ is exact; the lift that sizes its ψ, less c;
    and the largest c of the chunk. Of queries, for which c cancels, the lift alone."""
    n, row, _ = place(rows, NV)
    far, row, t = n.to(tl.int64) * C, row.to(tl.int64), n * C + tl.arange(0, C)
    there = t < T
    if MASKED:
        there = there & (tl.load(visible + (row // H) * T + t, mask=there, other=0) != 0)
    xs = tile(x + (row // H) * x_b + (row % H) * x_h + far * x_t, x_t, there, tl.arange(0, KP), K)
    wide = xs.to(tl.float32)
    rest = tl.sum(wide * wide, 1) * (0.5 * K**-0.5 * LOG2E)
    if MAP == "performer":
        c = tl.full([C], float("-inf"), tl.float32)
        for block in range((F + FB - 1) // FB):
            ws = directions(w, block, K, F, KP, FB, MAP)[0]  # a few bits will do: it is rounded up to a whole number
            if xs.dtype == tl.bfloat16:
                along = tl.dot(xs, tl.trans(ws))
            else:
                along = tl.dot(xs.to(tl.float32), tl.trans(ws), input_precision="tf32x3")
            if F % FB != 0:
                along = tl.where((block * FB + tl.arange(0, FB))[None, :] < F, along, float("-inf"))
            c = tl.maximum(c, tl.max(along, 1))
        c = tl.ceil(c - rest)
    else:
        c, rest = tl.ceil(rest), -rest
    if KEYS:
        tl.store(lifts + row * T + t, rest, mask=there)
        tl.store(peaks + row * T + t, c, mask=there)
        tl.store(tops + row * tl.cdiv(T, C) + n, tl.max(tl.where(there, c, float("-inf")), 0))
    else:
        tl.store(lifts + row * T + t, c + rest, mask=there)


@triton.jit
def states(
    x, y, w, visible, lifts, rises, inverses, delta, local, marks, out, tops,
    x_b, x_h, x_t, y_b, y_h, y_t, T, span, slots, first, N, P, NV,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, KP: tl.constexpr, FB: tl.constexpr, VB: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, MODE: tl.constexpr, PEAKED: tl.constexpr, MAPPED: tl.constexpr,
    MASKED: tl.constexpr, BACK: tl.constexpr, LOCAL: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Σ 2ᶜ⁻ᵐ ψ(x) [y, 1]ᵀ over one segment, for one block of features and one of y's columns: before each chunk but the
    first (LOCAL), and of all (STATES). The lifts are less c, and `rises` are the peaks of the chunks.

    Forward, x and y are keys and values. Backward, from the end, they are queries and ∂out, divided by the totals (in
    the lifts where there are any); −∂out·out takes the place of the one, and −m that of c."""
    at = tl.program_id(0)
    row, block, part = (at // P).to(tl.int64), (at % P) // NV, at % NV
    segment = tl.program_id(1)
    b, h = row // N, row % N
    ff, vv = block * FB + tl.arange(0, FB), part * VB + tl.arange(0, VB)
    inside = (ff[:, None] < F) & (vv[None, :] < V)
    ws = directions(w, block, K, F, KP, FB, MAP)
    start = segment * span
    chunks = tl.cdiv(tl.minimum(start + span, T) - start, C)
    S, Z = tl.zeros([FB, VB], tl.float32), tl.zeros([FB], tl.float32)
    m = tl.full((), float("-inf"), tl.float32)
    for step in range(chunks):
        n = start // C + (chunks - 1 - step if BACK else step)
        slot = row * tl.cdiv(T, C) + n
        if LOCAL:
            more = step > 0  # nothing comes before the first: its slot is not read
            tl.store(local + slot * (F * V) + ff[:, None] * V + vv[None, :], S, mask=inside & more)
            tl.store(marks + slot * (F + 1) + ff, Z, mask=(ff < F) & more & (part == 0))
            tl.store(marks + slot * (F + 1) + F, m, mask=more & (at % P == 0))
        far, t = n.to(tl.int64) * C, n * C + tl.arange(0, C)
        there = t < T
        if MASKED:
            there = there & (tl.load(visible + b * T + t, mask=there, other=0) != 0)
        xs = vectors(x + b * x_b + h * x_h + far * x_t, x_t, there, block, K, KP, FB, MAPPED)
        ys = tile(y + b * y_b + h * y_h + far * y_t, y_t, there, vv, V)
        one = tl.load(delta + row * T + t, mask=there, other=0.0) if BACK else tl.where(there, 1.0, 0.0)
        if PEAKED:  # features by tokens, as the sum over tokens wants them
            m_new = tl.maximum(m, tl.load(rises + slot))
            fade = tl.exp2(m - finite(m_new))
            S, Z, m = S * fade, Z * fade, m_new
            lift = tl.load(lifts + row * T + t, mask=there, other=float("inf")) + finite(m)
            psi = features(project_across(xs, ws, MAP), lift[None, :], ff[:, None], F, FB, MAP)[0]
            if BACK and MAP == "fourier":
                psi = psi * tl.where(tl.load(inverses + row * T + t, mask=there, other=0.0) < 0, -1.0, 1.0)[None, :]
            psi = psi if BACK else short(psi, MAP, MODE)
            S = dot(psi, ys, S, MODE)
            Z += tl.sum(psi * one[None, :] if BACK else psi, 1)
        else:
            psi = features(xs, 0.0, ff[None, :], F, FB, MAP)[0]
            if BACK:
                psi = psi * tl.load(inverses + row * T + t, mask=there, other=0.0)[:, None]
            S = dot(tl.trans(rounded(psi, MODE)), ys, S, MODE)
            Z += tl.sum(short(psi, MAP, MODE) * one[:, None], 0)
    if STATES:
        slot = row * slots + first + segment
        tl.store(out + slot * (F * V + F) + ff[:, None] * V + vv[None, :], S, mask=inside)
        tl.store(out + slot * (F * V + F) + F * V + ff, Z, mask=(ff < F) & (part == 0))
        tl.store(tops + slot, m, mask=at % P == 0)


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
def peak_of(
    marks, tops, near, slot, more, F: tl.constexpr, PEAKED: tl.constexpr, LOCAL: tl.constexpr, STATES: tl.constexpr
):  # fmt: skip
    """The peak of all that a chunk reads; and what its two parts, of the segment and from outside, scale by."""
    m = tl.full((), float("-inf"), tl.float32)
    if PEAKED:
        inner = tl.load(marks + near * (F + 1) + F, mask=more, other=float("-inf")) if LOCAL else m
        outer = tl.load(tops + slot) if STATES else m
        m = tl.maximum(inner, outer)
        return m, tl.exp2(inner - finite(m)), tl.exp2(outer - finite(m))
    else:
        return m, 1.0, 1.0


@triton.jit
def kept(
    local, marks, states, near, slot, more, fades, block, part, V: tl.constexpr, F: tl.constexpr,
    FB: tl.constexpr, VB: tl.constexpr, PEAKED: tl.constexpr, LOCAL: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """A block of S, [FB,VB], and of Z, [FB], of all that a chunk reads."""
    ff, vv = block * FB + tl.arange(0, FB), part * VB + tl.arange(0, VB)
    inside = (ff[:, None] < F) & (vv[None, :] < V)
    at = ff[:, None] * V + vv[None, :]
    if LOCAL:
        S = tl.load(local + near * (F * V) + at, mask=inside & more, other=0.0)
        Z = tl.load(marks + near * (F + 1) + ff, mask=(ff < F) & more, other=0.0)
    else:
        S, Z = tl.zeros([FB, VB], tl.float32), tl.zeros([FB], tl.float32)
    if STATES:
        here = states + slot * (F * V + F)
        S_out = tl.load(here + at, mask=inside, other=0.0)
        Z_out = tl.load(here + F * V + ff, mask=ff < F, other=0.0)
        S, Z = S.to(tl.float32) * fades[0] + S_out * fades[1], Z * fades[0] + Z_out * fades[1]
    return S, Z


@triton.jit
def outputs(
    q, k, v, w, visible, lifts_q, lifts, c, local, marks, states, tops, out, inverses, peaks,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, T, span, slots, H, rows, NV,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, KP: tl.constexpr, FB: tl.constexpr, VB: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, MODE: tl.constexpr, PEAKED: tl.constexpr, MAPPED: tl.constexpr,
    GROUP: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, LOCAL: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """out = ψ(q)ᵀS / ψ(q)ᵀZ for the queries of one chunk and one head, and one block of values."""
    n, row, part = place(rows, NV)
    row_q, row_k = row.to(tl.int64), (row // GROUP).to(tl.int64)
    b, h = row_q // H, row_q % H
    g = h // GROUP
    far, t, vv = n.to(tl.int64) * C, n * C + tl.arange(0, C), part * VB + tl.arange(0, VB)
    there = t < T
    near, more = row_k * tl.cdiv(T, C) + n, (n * C) % span > 0
    slot = row_k * slots + (n * C // span if CAUSAL else slots - 1)
    m, inner, outer = peak_of(marks, tops, near, slot, more, F, PEAKED, LOCAL, STATES)
    q_at, k_at = q + b * q_b + h * q_h + far * q_t, k + b * k_b + g * k_h + far * k_t
    seen = there
    if MASKED and CAUSAL:
        seen = there & (tl.load(visible + b * T + t, mask=there, other=0) != 0)
    lift_q = tl.load(lifts_q + row_q * T + t, mask=there, other=0.0)[:, None] if PEAKED else 0.0
    lift_k = 0.0
    if PEAKED and CAUSAL:
        higher = tl.load(c + row_k * T + t, mask=seen, other=float("-inf"))
        lift_k = (tl.load(lifts + row_k * T + t, mask=seen, other=0.0) + finite(higher))[:, None]
    result, total = tl.zeros([C, VB], tl.float32), tl.zeros([C], tl.float32)
    pairs = tl.zeros([C, C], tl.float32)
    for block in range((F + FB - 1) // FB):
        qs = vectors(q_at, q_t, there, block, K, KP, FB, MAPPED)
        ff, ws = block * FB + tl.arange(0, FB)[None, :], directions(w, block, K, F, KP, FB, MAP)
        psi_q = features(project(qs, ws, MAP), lift_q, ff, F, FB, MAP)[0]
        if LOCAL or STATES:
            S, Z = kept(
                local, marks, states, near, slot, more, (inner, outer), block, part, V, F, FB, VB, PEAKED, LOCAL, STATES
            )
            result = dot(psi_q, S, result, MODE)
            total += tl.sum(short(psi_q, MAP, MODE) * Z[None, :], 1)
        if CAUSAL:
            ks = vectors(k_at, k_t, seen, block, K, KP, FB, MAPPED)
            psi_k = features(project(ks, ws, MAP), lift_k, ff, F, FB, MAP)[0]
            pairs = dot(psi_q, tl.trans(rounded(psi_k, MODE)), pairs, MODE)
    if CAUSAL:
        before = (tl.arange(0, C)[:, None] >= tl.arange(0, C)[None, :]) & seen[None, :]
        if PEAKED:
            higher = tl.load(c + row_k * T + t, mask=seen, other=float("-inf"))
            m_row = tl.maximum(tl.associative_scan(higher, 0, higher_of), m)
            pairs = pairs * tl.exp2(tl.where(before, higher[None, :], float("-inf")) - finite(m_row)[:, None])
            past = tl.exp2(m - finite(m_row))
            result, total = result * past[:, None], total * past
            tl.store(peaks + row_k * T + t, m_row, mask=there & (part == 0) & (h % GROUP == 0))
        else:
            pairs = tl.where(before, pairs, 0.0)
        pairs = rounded(pairs, MODE)
        values = tile(v + b * v_b + g * v_h + far * v_t, v_t, seen, vv, V)
        result = dot(pairs, values, result, MODE)
        total += tl.sum(pairs.to(tl.float32), 1)
    inverse = tl.where(tl.abs(total) < ZERO, 0.0, 1 / total)
    put(out + b * o_b + h * o_h + far * o_t, o_t, there, vv, result * inverse[:, None], V)
    tl.store(inverses + row_q * T + t, inverse, mask=there & (part == 0))
