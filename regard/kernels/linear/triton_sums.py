"""The Triton programs that sum up: the stabiliser of each vector, sums at each chunk, running totals over segments.

A sequence is cut into segments, so that even one sequence fills the device, and these into chunks of C tokens.
Exponents and peaks (the running maximum m of c) are powers of two. They only scale: no gradient passes through them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.linear.triton_features import (
    LOG2E,
    directions,
    dot,
    features,
    finite,
    product,
    project_across,
    rounded,
    scaled,
    short,
    tile,
    unit,
    vectors,
    visible_at,
    waves,
)


@triton.jit
def highest(xs, ws, block, K: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, MAP: tl.constexpr):
    """The largest projection of each vector on a block of directions. A few bits will do: it is rounded up."""
    along = product(xs, tl.trans(ws), tl.zeros([xs.shape[0], FB], tl.float32))
    if F % FB != 0:
        along = tl.where((block * FB + tl.arange(0, FB))[None, :] < F, along, float("-inf"))
    return scaled(tl.max(along, 1), K, MAP)


@triton.jit
def crests(
    x, w, visible, v, lifts, peaks, tops, heights, x_b, x_h, x_t, v_b, v_h, v_t, T, H, rows, programs,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, KP: tl.constexpr, FB: tl.constexpr, VB: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, MODE: tl.constexpr, PEAKED: tl.constexpr, PARTS: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """c of each key, rounded up to a whole number, so that scaling by 2ᶜ is exact; the lift that sizes its ψ, less c;
    and the largest c of each chunk. Of queries, for which c cancels, the lift alone. A program does one chunk after the
    other with the same directions. In units (MODE fine): a bound for what a chunk adds to the sums, relative to 2ᶜ."""
    chunks = tl.cdiv(T, C)
    first, second = directions(w, 0, K, F, KP, FB, MAP, 1)[0], directions(w, 1, K, F, KP, FB, MAP, 1)[0]
    for at in range(tl.program_id(0), chunks * rows, programs):
        row, n = (at // chunks).to(tl.int64), at % chunks
        far, t = n.to(tl.int64) * C, n * C + tl.arange(0, C)
        there = visible_at(visible, row // H, t, T, MASKED)
        xs = tile(x + (row // H) * x_b + (row % H) * x_h + far * x_t, x_t, there, tl.arange(0, KP), K)
        c = tl.zeros([C], tl.float32)
        if MAP == "performer":
            c = highest(xs, first, 0, K, F, FB, MAP)
            if F > FB:
                c = tl.maximum(c, highest(xs, second, 1, K, F, FB, MAP))
            for block in range(2, (F + FB - 1) // FB):
                c = tl.maximum(c, highest(xs, directions(w, block, K, F, KP, FB, MAP, 1)[0], block, K, F, FB, MAP))
        if KEYS:
            wide = xs.to(tl.float32)
            rest = tl.sum(wide * wide, 1) * (0.5 * K**-0.5 * LOG2E)
            rest = rest if MAP == "performer" else -rest
            c = tl.ceil(c - rest)
            tl.store(lifts + row * T + t, rest, mask=there)
            tl.store(peaks + row * T + t, c, mask=there)
            top = tl.max(tl.where(there, c, float("-inf")), 0)
            tl.store(tops + row * chunks + n, top)
            if MODE == "fine":
                size = tl.zeros([C], tl.float32)
                for part in range((V + VB - 1) // VB):
                    vv = part * VB + tl.arange(0, VB)
                    ys = tile(v + (row // H) * v_b + (row % H) * v_h + far * v_t, v_t, there, vv, V)
                    size = tl.maximum(size, tl.max(tl.abs(ys.to(tl.float32)), 1))
                size = tl.where(there, size * tl.exp2(-rest - finite(top)), 0.0)
                tl.store(heights + row * chunks + n, tl.sum(size, 0))
        else:
            tl.store(lifts + row * T + t, c, mask=there)


@triton.jit
def before(
    rises, heights, tops, row, begin, chunks, N, slots, BACK: tl.constexpr, EDGE: tl.constexpr, UNITS: tl.constexpr
):  # fmt: skip
    """The peak of all that comes before a segment, or (BACK) after it: its sums are relative to that from the start, so
    that no chunk has to lower them. And a bound for these sums."""
    m, height = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    edge = (row * slots + (slots - 1 if BACK else 0)) * 2
    if EDGE:  # of what comes from outside
        m = tl.load(tops + edge)
    low, high = (begin + chunks, N) if BACK else (0, begin)
    for n in range(low, high, 128):
        at = n + tl.arange(0, 128)
        m = tl.maximum(m, tl.max(tl.load(rises + row * N + at, mask=at < high, other=float("-inf")), 0))
    if UNITS:
        if EDGE:
            height = tl.exp2(tl.load(tops + edge + 1) + tl.load(tops + edge) - finite(m))
        for n in range(low, high, 128):
            at = n + tl.arange(0, 128)
            by = tl.exp2(tl.load(rises + row * N + at, mask=at < high, other=float("-inf")) - finite(m))
            height += tl.sum(tl.load(heights + row * N + at, mask=at < high, other=0.0) * by, 0)
    return m, height


@triton.jit
def keep(
    S_at, Z_at, S, Z, ff, vv, more, WAVE: tl.constexpr, V: tl.constexpr, F: tl.constexpr, MAP: tl.constexpr
):  # fmt: skip
    """S and Z of the directions ff, where there are more: their sines or all (WAVE 0), or their cosines (1)."""
    N: tl.constexpr = F // waves(MAP)
    inside, at = (ff < N) & more, WAVE * N + ff
    tl.store(S_at + at[:, None] * V + vv[None, :], S, mask=inside[:, None] & (vv[None, :] < V))
    tl.store(Z_at + at, Z, mask=inside & (tl.min(vv, 0) == 0))


@triton.jit
def states(
    x, y, w, visible, lifts, rises, heights, inverses, delta, local, marks, out, tops,
    x_b, x_h, x_t, y_b, y_h, y_t, T, span, slots, first, N, P, NV,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, KP: tl.constexpr, FB: tl.constexpr, VB: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, MODE: tl.constexpr, PEAKED: tl.constexpr, PARTS: tl.constexpr,
    MASKED: tl.constexpr, BACK: tl.constexpr, EDGE: tl.constexpr, LOCAL: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Σ 2ᶜ⁻ᵐ ψ(x) [y, 1]ᵀ over one segment, for one block of directions and one of y's columns: before each chunk but
    the first (LOCAL), and of all (STATES). The lifts are less c, and `rises` are the peaks of the chunks. EDGE: there
    are sums from outside the sequence, whose peak is in their slot already. In units (MODE fine, forward) sums at
    chunks are parts of a bound for all that came before, which follows from the `heights` of the chunks.

    Forward, x and y are keys and values. Backward, from the end, they are queries and ∂out, divided by the totals (in
    the lifts where there are any); −∂out·out takes the place of the one, and −m that of c."""
    at = tl.program_id(0)
    row, block, part = (at // P).to(tl.int64), (at % P) // NV, at % NV
    segment = tl.program_id(1)
    b, h = row // N, row % N
    ff, vv = block * FB + tl.arange(0, FB), part * VB + tl.arange(0, VB)
    ws = directions(w, block, K, F, KP, FB, MAP, PARTS)
    start = segment * span
    chunks = tl.cdiv(tl.minimum(start + span, T) - start, C)
    S, Z = tl.zeros([FB, VB], tl.float32), tl.zeros([FB], tl.float32)
    S_cos, Z_cos = S, Z  # of cosines, where S is of sines
    UNITS: tl.constexpr = MODE == "fine" and not BACK
    PRODUCT: tl.constexpr = "split" if UNITS else "half" if MODE == "fine" else MODE
    m, height = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    if PEAKED and STATES:
        m, height = before(
            rises, heights, tops, row, start // C, chunks, tl.cdiv(T, C), slots, BACK, EDGE, UNITS
        )  # fmt: skip
    for step in range(chunks):
        n = start // C + (chunks - 1 - step if BACK else step)
        slot = row * tl.cdiv(T, C) + n
        if LOCAL:
            more = step > 0  # nothing comes before the first: its slot is not read
            S_at, Z_at, by = local + slot * (F * V), marks + slot * (F + 2), 1.0
            if UNITS:
                by = tl.exp2(-unit(height))
                tl.store(Z_at + F + 1, unit(height), mask=more & (at % P == 0))
            keep(S_at, Z_at, S * by if UNITS else S, Z, ff, vv, more, 0, V, F, MAP)
            if waves(MAP) == 2:
                keep(S_at, Z_at, S_cos * by if UNITS else S_cos, Z_cos, ff, vv, more, 1, V, F, MAP)
            tl.store(Z_at + F, m, mask=more & (at % P == 0))
        far, t = n.to(tl.int64) * C, n * C + tl.arange(0, C)
        there = visible_at(visible, b, t, T, MASKED)
        xs = vectors(x + b * x_b + h * x_h + far * x_t, x_t, there, block, K, KP, FB, PARTS)
        ys = tile(y + b * y_b + h * y_h + far * y_t, y_t, there, vv, V)
        one = tl.load(delta + row * T + t, mask=there, other=0.0) if BACK else tl.where(there, 1.0, 0.0)
        lift = tl.where(there, 0.0, float("inf"))  # of a token that is not there no feature is left
        if PEAKED:
            rise = tl.load(rises + slot)
            m_new = tl.maximum(m, rise)
            fade = tl.exp2(m - finite(m_new))
            S, Z, m = S * fade, Z * fade, m_new
            if waves(MAP) == 2:
                S_cos, Z_cos = S_cos * fade, Z_cos * fade
            if UNITS:
                height = height * fade + tl.load(heights + slot) * tl.exp2(rise - finite(m))
            lift = tl.load(lifts + row * T + t, mask=there, other=float("inf")) + finite(m)
        if PARTS:  # features by tokens, as the sum over tokens wants them
            p, by = project_across(xs, ws, K, MAP, PARTS), tl.exp2(-lift)
            if BACK and MAP != "performer":
                inverse = tl.load(inverses + row * T + t, mask=there, other=0.0)
                by = tl.where(inverse < 0, -by, by) if MAP == "fourier" else inverse
            for wave in tl.static_range(waves(MAP)):
                psi = features(p, lift[None, :], ff[:, None], K, F, FB, MAP, wave, not BACK)[0]
                if MAP == "fourier" or (BACK and MAP != "performer"):
                    psi = psi * by[None, :]
                psi = psi if BACK and PEAKED else short(psi, MODE)
                if wave == 0:
                    S = dot(psi, ys, S, PRODUCT)
                    Z += tl.sum(psi * one[None, :] if BACK else psi, 1)
                else:
                    S_cos = dot(psi, ys, S_cos, PRODUCT)
                    Z_cos += tl.sum(psi * one[None, :] if BACK else psi, 1)
        else:
            psi = features(xs, lift[:, None], ff[None, :], K, F, FB, MAP, 0, not BACK)[0]
            if BACK:
                psi = psi * tl.load(inverses + row * T + t, mask=there, other=0.0)[:, None]
            S = dot(tl.trans(rounded(psi, MODE)), ys, S, MODE)
            Z += tl.sum(short(psi, MODE) * one[:, None], 0)
    if STATES:
        slot = row * slots + first + segment
        S_at = out + slot * (F * V + F)
        keep(S_at, S_at + F * V, S, Z, ff, vv, True, 0, V, F, MAP)
        if waves(MAP) == 2:
            keep(S_at, S_at + F * V, S_cos, Z_cos, ff, vv, True, 1, V, F, MAP)
        tl.store(tops + slot * 2, m, mask=at % P == 0)
        tl.store(tops + slot * 2 + 1, unit(height), mask=at % P == 0)


@triton.jit
def combine(
    sums, tops, outer, peaks, slots, first, last, N, SV,
    BLOCK: tl.constexpr, PEAKED: tl.constexpr, BACK: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Running totals over the slots, in place: of each slot and all before it, or (BACK) all after it. Only the slots
    from `first` to before `last` have anything in them. `outer` are the first SV numbers, as the products take them."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total, peak = tl.zeros([BLOCK], tl.float32), tl.full((), float("-inf"), tl.float32)
    for step in tl.range(0, slots, num_stages=4):
        s = slots - 1 - step if BACK else step
        slot, there = row * slots + s, (s >= first) & (s < last)
        x = tl.load(sums + slot * N + at, mask=there & (at < N), other=0.0)
        if PEAKED:
            top = tl.load(tops + slot * 2, mask=there, other=float("-inf"))
            higher = tl.maximum(peak, top)
            total = total * tl.exp2(peak - finite(higher)) + x * tl.exp2(top - finite(higher))
            peak = higher
            tl.store(peaks + slot * 2, peak, mask=tl.program_id(1) == 0)
        else:
            total += x
        tl.store(sums + slot * N + at, total, mask=at < N)
        kept = total
        if UNITS:
            size = tl.load(tops + slot * 2 + 1, mask=there, other=0.0)
            tl.store(peaks + slot * 2 + 1, size, mask=tl.program_id(1) == 0)
            kept = total * tl.exp2(-size)
        tl.store(outer + slot * SV + at, kept, mask=at < SV)
