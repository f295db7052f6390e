"""Building blocks of the Triton kernels: products of a chosen precision, rounding, loading and storing tiles.

PRECISION names how a product of two tiles is done. All of them accumulate in float32:

    bf16     one product of bfloat16 (8 bits)
    bf16x3   three products of bfloat16 parts, high·high + high·low + low·high (16 bits)
    fp16     one product of float16 (11 bits) if at least one operand is float16 already (stored so, or cast by
             `cast_operand`), else one product of bfloat16; operands that may leave the range of float16 have to be
             scaled before, by a power of two that all elements of a row or matrix share (`shared_exponent`)
    fp16x3   three products of float16 parts (22 bits), for operands of magnitude at most about 1
    tf32x3   three products of tf32 parts (21 bits), as Triton does them
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Smaller bounds are raised to this before a shared exponent is computed. An inverse scale 2^(−exponent) is then at most
# 2^60, and the product of two of them is finite.
SMALLEST_BOUND: tl.constexpr = tl.constexpr(2.0**-60)
# A normaliser smaller than this has lost digits to underflow. This is tiny / eps of float32.
SMALLEST_NORM: tl.constexpr = tl.constexpr(2.0**-103)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """Returns acc + a b in float32.

    a [m,k], b [k,n]: operands of any float dtype. In fp16 the product is done in float16 if at least one of them is
    float16 already, and in bfloat16 otherwise. In bf16x3, a bfloat16 operand has no low part, which saves a product.
    acc [m,n]: float32.
    """
    if PRECISION == "bf16" or (PRECISION == "fp16" and a.dtype != tl.float16 and b.dtype != tl.float16):
        # [m,k] @ [k,n] -> [m,n]
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    elif PRECISION == "fp16":
        # [m,k] @ [k,n] -> [m,n]
        return tl.dot(a.to(tl.float16), b.to(tl.float16), acc)
    elif PRECISION == "bf16x3":
        # The small terms come first, so that they are not lost beside the large one.
        a_high = a
        b_high = b
        if a.dtype != tl.bfloat16:
            a_high = round_operand(a.to(tl.float32), "bf16")
        if b.dtype != tl.bfloat16:
            b_high = round_operand(b.to(tl.float32), "bf16")
            # [m,k] @ [k,n] -> [m,n], high · low
            acc = tl.dot(a_high.to(tl.bfloat16), (b.to(tl.float32) - b_high).to(tl.bfloat16), acc)
        if a.dtype != tl.bfloat16:
            # [m,k] @ [k,n] -> [m,n], low · high
            acc = tl.dot((a.to(tl.float32) - a_high).to(tl.bfloat16), b_high.to(tl.bfloat16), acc)
        # [m,k] @ [k,n] -> [m,n], high · high
        return tl.dot(a_high.to(tl.bfloat16), b_high.to(tl.bfloat16), acc)
    elif PRECISION == "fp16x3":
        a_high = a.to(tl.float16)
        b_high = b.to(tl.float16)
        # [m,k] @ [k,n] -> [m,n], low · high, high · low, high · high
        acc = tl.dot((a - a_high.to(tl.float32)).to(tl.float16), b_high, acc)
        acc = tl.dot(a_high, (b - b_high.to(tl.float32)).to(tl.float16), acc)
        return tl.dot(a_high, b_high, acc)
    else:
        # [m,k] @ [k,n] -> [m,n]
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32x3")


@triton.jit
def dot_as_stored(a, b, acc):
    """Returns acc + a b: one product of bfloat16 if a [m,k] and b [k,n] are stored in bfloat16, else tf32x3."""
    # [m,k] @ [k,n] -> [m,n]
    if a.dtype == tl.bfloat16:
        return dot(a, b, acc, "bf16")
    else:
        return dot(a, b, acc, "tf32x3")


@triton.jit
def cast_operand(x, PRECISION: tl.constexpr):
    """Returns x cast to bfloat16 (bf16) or float16 (fp16), unchanged in other modes. This saves casts where several
    products share an operand; in fp16 it also makes `dot` take float16."""
    if PRECISION == "bf16":
        return x.to(tl.bfloat16)
    elif PRECISION == "fp16":
        return x.to(tl.float16)
    else:
        return x


@triton.jit
def round_operand(x, PRECISION: tl.constexpr):
    """Returns float32 x rounded to the 8 bits that `dot` keeps of it in mode bf16, still as float32; in other modes,
    x unchanged.

    In mode bf16 ψ must be rounded in Z exactly as `dot` rounds it in S, or numerator and normaliser disagree; other
    modes keep more bits. Adding 2¹⁶x and subtracting it again rounds x to the 8 bits of bfloat16, and is much faster
    than converting to bfloat16 and back. Requires that 2¹⁶x does not overflow.
    """
    if PRECISION == "bf16":
        return (x + x * 65536.0) - x * 65536.0
    else:
        return x


@triton.jit
def shared_exponent(bound):
    """Returns the smallest integer e ≥ −60 with 2ᵉ ≥ bound. Numbers up to `bound`, divided by 2ᵉ, have magnitude at
    most 1, so that float16 neither overflows nor loses digits that matter."""
    return tl.ceil(tl.log2(tl.maximum(bound, SMALLEST_BOUND)))


@triton.jit
def finite_or_zero(peak):
    """Returns the peak, or 0 if it is −inf (no key has been seen): then −inf − peak is −inf instead of NaN."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def is_positive(x):
    """Returns x > 0 for a scalar. The result is cast to an integer and compared again, because Triton's interpreter
    raises a TypeError where a scalar float comparison is combined with a mask by `&`."""
    return (x > 0).to(tl.int32) > 0


@triton.jit
def load_rows(x, stride, present, columns, WIDTH: tl.constexpr):
    """Returns a tile [C,n] with one row per token: zeros for tokens that are not present, and for columns ≥ WIDTH.

    x: pointer to the first token's row; stride: elements from one token to the next.
    present [C]: which tokens to load. columns [n]: the columns to load.
    """
    rows = tl.arange(0, present.shape[0])
    inside = present[:, None] & (columns[None, :] < WIDTH)
    return tl.load(x + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(x, stride, present, columns, tile, WIDTH: tl.constexpr):
    """Writes `tile` [C,n], with one row per token, to the addresses from which `load_rows` would read it."""
    rows = tl.arange(0, present.shape[0])
    inside = present[:, None] & (columns[None, :] < WIDTH)
    tl.store(x + rows[:, None] * stride + columns[None, :], tile, mask=inside)


@triton.jit
def load_visible(visible, b, t, T, MASKED: tl.constexpr):
    """Returns which of the tokens t [C] of sequence b exist and, if MASKED, are visible.

    visible [B,T]: the mask over keys; read only if MASKED.
    """
    present = t < T
    if MASKED:
        present = present & (tl.load(visible + b * T + t, mask=present, other=0) != 0)
    return present
