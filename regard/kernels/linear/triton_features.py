"""The feature maps ψ of the Triton kernels: projections on random directions, and ψ with its derivative.

Exponentials are taken to base two: `performer` computes 2^(p − shift) with p = (w·x) K^(−1/4) log₂e.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from regard.kernels.linear.triton_primitives import LOG2E, dot_as_stored, load_rows

PI: tl.constexpr = tl.constexpr(3.141592653589793)
ROUND_TO_INTEGER: tl.constexpr = tl.constexpr(1.5 * 2.0**23)  # adding it leaves a float32 no fractional bits


@triton.constexpr_function
def features_per_direction(MAP):
    """Returns how many features come from one direction: a sine and a cosine for `fourier`, else one."""
    if MAP == "fourier":
        return 2
    return 1


@triton.jit
def load_vectors(x, stride, present, block, K: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, W_PARTS: tl.constexpr):
    """Returns the tile from which a block of features is computed. Where vectors are projected (W_PARTS > 0), each
    feature depends on all of x, and the tile holds whole vectors, [C,BK]. Otherwise it holds the columns block·BF to
    block·BF + BF − 1 of x, [C,BF].

    x: pointer to the first token's vector; stride: elements from one token to the next; present [C]: which tokens to
    load.
    """
    if W_PARTS:
        return load_rows(x, stride, present, tl.arange(0, BK), K)
    else:
        return load_rows(x, stride, present, block * BF + tl.arange(0, BF), K)


@triton.jit
def load_directions(
    w, block, K: tl.constexpr, F: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, MAP: tl.constexpr,
    W_PARTS: tl.constexpr,
):  # fmt: skip
    """Returns a block of directions as three parts (high, middle, low), each [BF,BK], that sum to w. Parts beyond
    W_PARTS repeat the first and are not used. With W_PARTS = 0 there are no directions, and it returns three zeros.

    w [W_PARTS·D,K]: the parts stacked below each other, D = F / features_per_direction.
    """
    if W_PARTS:
        D: tl.constexpr = F // features_per_direction(MAP)
        ff = block * BF + tl.arange(0, BF)
        kk = tl.arange(0, BK)
        offset = (ff % D)[:, None] * K + kk[None, :]
        inside = kk[None, :] < K
        high = tl.load(w + offset, mask=inside, other=0.0)
        middle = high
        low = high
        if W_PARTS > 1:
            middle = tl.load(w + D * K + offset, mask=inside, other=0.0)
        if W_PARTS > 2:
            low = tl.load(w + 2 * D * K + offset, mask=inside, other=0.0)
        return high, middle, low
    else:
        return 0.0, 0.0, 0.0


@triton.jit
def to_log2(p, K: tl.constexpr, MAP: tl.constexpr):
    """Returns projections p as exponents to base two for `performer`, whose features are exponentials; else p
    itself."""
    if MAP == "performer":
        return p * (K**-0.25 * LOG2E)
    else:
        return p


@triton.jit
def project(x, ws, K: tl.constexpr, MAP: tl.constexpr, W_PARTS: tl.constexpr):
    """Returns the projections x wᵀ [C,BF] on a block of directions, for `performer` as exponents to base two
    (`to_log2`); x itself with W_PARTS = 0.

    x: [C,BK], or [C,BF] with W_PARTS = 0. ws: the parts of `load_directions`, each [BF,BK].
    """
    if W_PARTS == 0:
        return x
    else:
        p = tl.zeros([x.shape[0], ws[0].shape[0]], tl.float32)
        # [C,BK] @ [BK,BF] -> [C,BF], the smallest part first
        if W_PARTS > 2:
            p = dot_as_stored(x, tl.trans(ws[2]), p)
        if W_PARTS > 1:
            p = dot_as_stored(x, tl.trans(ws[1]), p)
        return to_log2(dot_as_stored(x, tl.trans(ws[0]), p), K, MAP)


@triton.jit
def project_transposed(x, ws, K: tl.constexpr, MAP: tl.constexpr, W_PARTS: tl.constexpr):
    """Returns the projections w xᵀ [BF,C], for `performer` as exponents to base two (`to_log2`). They are transposed
    because a sum over tokens takes ψᵀ as its first operand.

    x [C,BK]; ws: the parts of `load_directions`, each [BF,BK].
    """
    x = tl.trans(x)
    p = tl.zeros([ws[0].shape[0], x.shape[1]], tl.float32)
    # [BF,BK] @ [BK,C] -> [BF,C], the smallest part first
    if W_PARTS > 2:
        p = dot_as_stored(ws[2], x, p)
    if W_PARTS > 1:
        p = dot_as_stored(ws[1], x, p)
    return to_log2(dot_as_stored(ws[0], x, p), K, MAP)


@triton.jit
def sin_cos(p, K: tl.constexpr, PRECISE: tl.constexpr):
    """Returns (sin, cos) of K^(−1/4) p, each of the shape of p. If PRECISE they are computed by polynomials, with
    errors of about 2⁻²², else by the device's own instructions, with errors up to 2⁻²⁰. Both hold for angles within
    [−π, π]; errors grow beyond."""
    if PRECISE:
        # Reduce to r in [−½, ½] half turns, and count the half turns that were taken away. If their number is odd, sine
        # and cosine change sign. `whole` is so large that the lowest bit of its float32 pattern is the parity of that
        # number; shifted to the top, it is the sign bit.
        half_turns = p * (K**-0.25 / PI)
        whole = half_turns + ROUND_TO_INTEGER
        r = half_turns - (whole - ROUND_TO_INTEGER)
        sign = whole.to(tl.int32, bitcast=True) << 31
        s = r * r
        sine = r * (3.1415925 + s * (-5.167707 + s * (2.5500314 + s * (-0.59804517 + s * 0.077220127))))
        cosine = 1.0 + s * (-4.9347954 + s * (4.0584512 + s * (-1.3320938 + s * 0.22008064)))
        sine = (sine.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
        cosine = (cosine.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
        return sine, cosine
    else:
        return libdevice.fast_sinf(p * K**-0.25), libdevice.fast_cosf(p * K**-0.25)


@triton.jit
def feature_map(
    p, shift, ff, K: tl.constexpr, F: tl.constexpr, BF: tl.constexpr, MAP: tl.constexpr, TRIG: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    """Returns (ψ, slope), both of the shape of p (slope is the number 1 for `precomputed`). The slope is the derivative
    of ψ by w·x, without the factor K^(−1/4) of random features; for maps without directions, by p.

        precomputed  ψ = p
        elu          ψ = max(p, 0) + 2^(min(p, 0) log₂e − shift);
                     a shift of inf makes ψ zero for a hidden token, whose p is zero
        performer    ψ = 2^(p − shift)
        fourier      ψ = sin(K^(−1/4) p) (TRIG 0) or cos(K^(−1/4) p) (TRIG 1); shift is not used, and the caller
                     multiplies by the power of two that belongs to ψ of a key

    p: projections, or the vectors themselves for `precomputed` and `elu`; [C,BF] or [BF,C].
    shift: exponents that broadcast with p. ff: the direction of each element of p; ψ is zero for those beyond D.
    PRECISE: whether sines and cosines are computed by polynomials, which normalisers need.
    """
    p = p.to(tl.float32)
    if MAP == "precomputed":
        psi = p
        slope = 1.0
    elif MAP == "elu":
        slope = tl.exp2(tl.minimum(p, 0.0) * LOG2E - shift)
        psi = tl.maximum(p, 0.0, propagate_nan=tl.PropagateNan.ALL) + slope
    elif MAP == "performer":
        psi = tl.exp2(p - shift)
        slope = psi
    else:
        sine, cosine = sin_cos(p, K, PRECISE)
        if TRIG == 0:
            psi = sine
            slope = cosine
        else:
            psi = cosine
            slope = -sine
    D: tl.constexpr = F // features_per_direction(MAP)
    if D % BF != 0:
        psi = tl.where(ff < D, psi, 0.0)
    return psi, slope
