"""What the Triton programs of linear attention are made of: products of a wanted precision, tiles, random features."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

PI: tl.constexpr = tl.constexpr(3.141592653589793)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LEAST: tl.constexpr = tl.constexpr(2.0**-60)  # that a unit may be: two of them together stay finite
WHOLE: tl.constexpr = tl.constexpr(1.5 * 2.0**23)  # adding it rounds a float32 to a whole number


@triton.jit
def dot(a, b, acc, MODE: tl.constexpr):
    """acc + a b, as precise as the mode says: one product of bfloat16 (half), or of float16 where one of them is
    (fine); three of split bfloat16, of split float16 (parted: for what is at most about one in size), or of tf32. What
    is bfloat16 already needs no second part."""
    if MODE == "half" or (MODE == "fine" and a.dtype != tl.float16 and b.dtype != tl.float16):
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    elif MODE == "fine":
        return tl.dot(a.to(tl.float16), b.to(tl.float16), acc)
    elif MODE == "split":
        a_high, b_high = a, b
        if a.dtype != tl.bfloat16:
            a_high = short(a.to(tl.float32), "half")
        if b.dtype != tl.bfloat16:
            b_high = short(b.to(tl.float32), "half")
            acc = tl.dot(a_high.to(tl.bfloat16), (b.to(tl.float32) - b_high).to(tl.bfloat16), acc)
        if a.dtype != tl.bfloat16:
            acc = tl.dot((a.to(tl.float32) - a_high).to(tl.bfloat16), b_high.to(tl.bfloat16), acc)
        return tl.dot(a_high.to(tl.bfloat16), b_high.to(tl.bfloat16), acc)
    elif MODE == "parted":
        a_high, b_high = a.to(tl.float16), b.to(tl.float16)
        acc = tl.dot((a - a_high.to(tl.float32)).to(tl.float16), b_high, acc)
        acc = tl.dot(a_high, (b - b_high.to(tl.float32)).to(tl.float16), acc)
        return tl.dot(a_high, b_high, acc)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32x3")


@triton.jit
def unit(size):
    """The exponent of a power of two that is at least `size`: in such units float16 has all digits that matter."""
    return tl.ceil(tl.log2(tl.maximum(size, LEAST)))


@triton.jit
def product(a, b, acc):
    """acc + a b, of bfloat16 where they are, else in float32."""
    return dot(a, b, acc, "half" if a.dtype == tl.bfloat16 else "tf32")


@triton.jit
def rounded(x, MODE: tl.constexpr):
    """x as the products of the mode take it: done once where several do."""
    if MODE == "half":
        return x.to(tl.bfloat16)
    else:
        return x.to(tl.float16) if MODE == "fine" else x


@triton.jit
def short(x, MODE: tl.constexpr):
    """x with the bits that the products of the mode take of it, still as float32: what the sums of v have of ψ, those
    of 1 must have too. Adding 2¹⁶x, which may not overflow, rounds to the 8 bits of bfloat16, and is much faster than
    to convert there and back."""
    return (x + x * 65536.0) - x * 65536.0 if MODE == "half" else x


@triton.constexpr_function
def waves(MAP):
    """Features of a direction: a sine and a cosine, or one."""
    return 2 if MAP == "fourier" else 1


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
        N: tl.constexpr = F // waves(MAP)
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
    """Projections as exponents of two, where they are exponents."""
    return p * (K**-0.25 * LOG2E) if MAP == "performer" else p


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
def waves_of(p, K: tl.constexpr, PRECISE: tl.constexpr):
    """(sin, cos) of projections: by the device, to 2⁻²⁰ of one, or to 2⁻²² by polynomials between −π/2 and π/2."""
    if PRECISE:
        t = p * (K**-0.25 / PI)  # half turns
        turned = t + WHOLE
        r = t - (turned - WHOLE)
        odd = turned.to(tl.int32, bitcast=True) << 31  # after each half turn the sign is another
        s = r * r
        sine = r * (3.1415925 + s * (-5.167707 + s * (2.5500314 + s * (-0.59804517 + s * 0.077220127))))
        cosine = 1.0 + s * (-4.9347954 + s * (4.0584512 + s * (-1.3320938 + s * 0.22008064)))
        sine = (sine.to(tl.int32, bitcast=True) ^ odd).to(tl.float32, bitcast=True)
        cosine = (cosine.to(tl.int32, bitcast=True) ^ odd).to(tl.float32, bitcast=True)
        return sine, cosine
    else:
        return libdevice.fast_sinf(p * K**-0.25), libdevice.fast_cosf(p * K**-0.25)


@triton.jit
def features(
    p, lift, ff, K: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, MAP: tl.constexpr, WAVE: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    """(ψ, ∂ψ) of projections, or of vectors; ∂ψ but for a factor. ff are the directions along p; ψ comes 2⁻ˡⁱᶠᵗ as
    large, but not that of `fourier`: sines (WAVE 0) or cosines (1), which a total needs PRECISE."""
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
        sine, cosine = waves_of(p, K, PRECISE)
        psi, slope = (sine, cosine) if WAVE == 0 else (cosine, -sine)
    N: tl.constexpr = F // waves(MAP)
    if N % FB != 0:
        psi = tl.where(ff < N, psi, 0.0)
    return psi, slope
