"""The Triton kernel that computes the stabiliser and the shift of each vector, for `performer` and `fourier`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.linear.triton_features import load_directions, to_log2
from regard.kernels.linear.triton_primitives import LOG2E, dot_as_stored, finite_or_zero, load_rows, load_visible


@triton.jit
def max_projection(x, w, block, K: tl.constexpr, F: tl.constexpr, BF: tl.constexpr, MAP: tl.constexpr):
    """Returns the largest projection [C] of each vector on a block of directions, as an exponent to base two. Low
    precision is enough, because results do not depend on the exact stabiliser of a key or shift of a query.

    x [C,BK]: vectors. w [BF,BK]: the high part of the directions of the block.
    """
    # [C,BK] @ [BK,BF] -> [C,BF]
    p = dot_as_stored(x, tl.trans(w), tl.zeros([x.shape[0], BF], tl.float32))
    if F % BF != 0:
        p = tl.where((block * BF + tl.arange(0, BF))[None, :] < F, p, float("-inf"))
    return to_log2(tl.max(p, 1), K, MAP)


@triton.jit
def stabiliser_kernel(
    x, w, visible, v, shift, stabiliser, chunk_max, chunk_bound, x_b, x_h, x_t, v_b, v_h, v_t, T, heads, BH, programs,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, MAP: tl.constexpr, PRECISION: tl.constexpr, STABILISED: tl.constexpr, W_PARTS: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Computes the exponents that keep ψ and the sums in range. One program does the chunks program_id(0),
    program_id(0) + programs, … of all heads, so that it loads the first two blocks of directions only once.

        performer, keys      shift = ‖k‖² log₂e / 2√K,      c = ⌈max_f p_f − shift⌉     (log₂ φ_f = p_f − shift)
        performer, queries   shift = max_f p_f              (‖q‖² cancels in the ratio)
        fourier, keys        shift = −‖k‖² log₂e / 2√K,     c = ⌈−shift⌉                (|φ_f| ≤ 2^−shift)

    c is an integer, so that scaling by 2ᶜ is exact.

    Reads:
        x [B,heads,T,K]: keys if KEYS, else queries; strides x_b, x_h, x_t of batch, heads, tokens.
        w [W_PARTS·D,K]: directions, of which the first part is used.
        visible [B,T]: the mask over keys, if MASKED.
        v [B,heads,T,V]: values, for chunk_bound; strides v_b, v_h, v_t.
    Writes:
        shift [B,heads,T]: as above.
        stabiliser [B,heads,T]: c of each key; if KEYS.
        chunk_max [BH,chunks]: the largest c of each chunk; if KEYS.
        chunk_bound [BH,chunks]: Σ_j 2^(−shift_j − chunk_max) max_v |v_j|, a bound for what a chunk adds to an element
            of S, relative to 2^chunk_max; if KEYS and PRECISION is fp16.
    BH = B·heads; programs: the number of programs.
    """
    chunks = tl.cdiv(T, C)
    # The first two blocks of directions stay in registers over all chunks.
    w_first = load_directions(w, 0, K, F, BK, BF, MAP, 1)[0]
    w_second = load_directions(w, 1, K, F, BK, BF, MAP, 1)[0]
    for bh_chunk in range(tl.program_id(0), chunks * BH, programs):
        bh = (bh_chunk // chunks).to(tl.int64)
        chunk = bh_chunk % chunks
        token = chunk.to(tl.int64) * C
        t = chunk * C + tl.arange(0, C)
        seen = load_visible(visible, bh // heads, t, T, MASKED)
        x_rows = x + (bh // heads) * x_b + (bh % heads) * x_h + token * x_t
        xs = load_rows(x_rows, x_t, seen, tl.arange(0, BK), K)
        c = tl.zeros([C], tl.float32)
        if MAP == "performer":
            c = max_projection(xs, w_first, 0, K, F, BF, MAP)
            if F > BF:
                c = tl.maximum(c, max_projection(xs, w_second, 1, K, F, BF, MAP))
            for block in range(2, (F + BF - 1) // BF):
                w_block = load_directions(w, block, K, F, BK, BF, MAP, 1)[0]
                c = tl.maximum(c, max_projection(xs, w_block, block, K, F, BF, MAP))
        if KEYS:
            xs_float = xs.to(tl.float32)
            # [C,BK] · [C,BK] -> [C]
            key_shift = tl.sum(xs_float * xs_float, 1) * (0.5 * K**-0.5 * LOG2E)
            if MAP != "performer":
                key_shift = -key_shift
            c = tl.ceil(c - key_shift)
            tl.store(shift + bh * T + t, key_shift, mask=seen)
            tl.store(stabiliser + bh * T + t, c, mask=seen)
            largest = tl.max(tl.where(seen, c, float("-inf")), 0)
            tl.store(chunk_max + bh * chunks + chunk, largest)
            if PRECISION == "fp16":
                bound = tl.zeros([C], tl.float32)
                for value_block in range((V + BV - 1) // BV):
                    vv = value_block * BV + tl.arange(0, BV)
                    v_rows = v + (bh // heads) * v_b + (bh % heads) * v_h + token * v_t
                    values = load_rows(v_rows, v_t, seen, vv, V)
                    bound = tl.maximum(bound, tl.max(tl.abs(values.to(tl.float32)), 1))
                bound = tl.where(seen, bound * tl.exp2(-key_shift - finite_or_zero(largest)), 0.0)
                tl.store(chunk_bound + bh * chunks + chunk, tl.sum(bound, 0))
        else:
            tl.store(shift + bh * T + t, c, mask=seen)
