"""What the Triton programs of linear attention are made of: products of a wanted precision, tiles, random features."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

TAU: tl.constexpr = tl.constexpr(6.283185307179586)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
WHOLE: tl.constexpr = tl.constexpr(1.5 * 2.0**23)  # adding it rounds a float32 to a whole number


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
def product(a, b, acc):
    """acc + a b, of bfloat16 where they are, else in float32."""
    return dot(a, b, acc, "half" if a.dtype == tl.bfloat16 else "tf32")


@triton.jit
def rounded(x, MODE: tl.constexpr):
    """x as the products of the mode take it: done once where several do."""
    return x.to(tl.bfloat16) if MODE == "half" else x


@triton.jit
def short(x, MODE: tl.constexpr):
    """x with the bits that the products of the mode take of it, still as float32: what the sums of v have of ψ, those
    of 1 must have too. Adding 2¹⁶x, which may not overflow, rounds to the 8 bits of bfloat16, and is much faster than
    to convert there and back."""
    return (x + x * 65536.0) - x * 65536.0 if MODE == "half" else x


@triton.jit
def tile(x, stride, there, wide, W: tl.constexpr):
    """One row of W numbers for each token that is there, zeros for the others; x points to the first token."""
    rows = tl.arange(0, there.shape[0])
    return tl.load(x + rows[:, None] * stride + wide[None, :], mask=there[:, None] & (wide[None, :] < W), other=0.0)


@triton.jit
def visible_at(visible, b, t, T, MASKED: tl.constexpr):
    """Which of the tokens t of a sequence of T there are to see."""
    there = t < T
    if MASKED:
        there = there & (tl.load(visible + b * T + t, mask=there, other=0) != 0)
    return there


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
def vectors(x, stride, there, block, K: tl.constexpr, KP: tl.constexpr, FB: tl.constexpr, PARTS: tl.constexpr):
    """What a block of features is made from: the whole vectors, or their columns of the same numbers."""
    if PARTS:
        return tile(x, stride, there, tl.arange(0, KP), K)
    else:
        return tile(x, stride, there, block * FB + tl.arange(0, FB), K)


@triton.jit
def directions(
    w, block, K: tl.constexpr, F: tl.constexpr, KP: tl.constexpr, FB: tl.constexpr, MAP: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """A block of the directions of random features, [FB,KP], and what rounding took from them, where it took anything.
    Sines and cosines have the same directions."""
    if PARTS:
        N: tl.constexpr = F // 2 if MAP == "fourier" else F
        ff, kk = block * FB + tl.arange(0, FB), tl.arange(0, KP)
        at = (ff % N)[:, None] * K + kk[None, :]
        there = kk[None, :] < K
        high = tl.load(w + at, mask=there, other=0.0)
        middle, low = high, high
        if PARTS > 1:
            middle = tl.load(w + N * K + at, mask=there, other=0.0)
        if PARTS > 2:
            low = tl.load(w + 2 * N * K + at, mask=there, other=0.0)
        return high, middle, low
    else:
        return 0.0, 0.0, 0.0


@triton.jit
def scaled(p, K: tl.constexpr, MAP: tl.constexpr):
    """Projections as exponents of two, or as turns."""
    if MAP == "elu" or MAP == "given":
        return p
    else:
        return p * (K**-0.25 * LOG2E if MAP == "performer" else K**-0.25 / TAU)


@triton.jit
def project(x, ws, K: tl.constexpr, MAP: tl.constexpr, PARTS: tl.constexpr):
    """x wᵀ for a block of directions; or x itself where features are not mixed."""
    if PARTS == 0:
        return x
    else:
        p = tl.zeros([x.shape[0], ws[0].shape[0]], tl.float32)
        if PARTS > 2:
            p = product(x, tl.trans(ws[2]), p)
        if PARTS > 1:
            p = product(x, tl.trans(ws[1]), p)
        return scaled(product(x, tl.trans(ws[0]), p), K, MAP)


@triton.jit
def project_across(x, ws, K: tl.constexpr, MAP: tl.constexpr, PARTS: tl.constexpr):
    """The transpose of `project`, features by tokens."""
    x = tl.trans(x)
    p = tl.zeros([ws[0].shape[0], x.shape[1]], tl.float32)
    if PARTS > 2:
        p = product(ws[2], x, p)
    if PARTS > 1:
        p = product(ws[1], x, p)
    return scaled(product(ws[0], x, p), K, MAP)


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
        slope = tl.exp2(tl.minimum(p, 0.0) * LOG2E - lift)
        psi = tl.maximum(p, 0.0, propagate_nan=tl.PropagateNan.ALL) + slope
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
