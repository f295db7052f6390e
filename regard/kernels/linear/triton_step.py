"""One decoding step of linear attention in one launch: computes the new token's features, adds it to the sums, and
computes the outputs.

Everything is computed in the dtype of the sums. The step is out of place: the old state is not modified. Exponents are
to base e here, as in `regard.mechanisms`: φ = eᶜ ψ.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.devices import power_of_2
from regard.kernels.linear.launch import launch
from regard.kernels.linear.plan import ceil_div
from regard.kernels.linear.tensors import with_unit_stride
from regard.kernels.linear.triton_features import features_per_direction
from regard.kernels.linear.triton_primitives import finite_or_zero
from regard.mechanisms import Sums

REGISTER_BYTES = 1 << 16  # limit for the tile of sums of a program, and for its tile of directions
FEW_HEADS = 128  # with fewer pairs of sequence and key head, a program does 16 columns, not 64, to occupy all SMs


@triton.jit
def _feature_map(
    x, w, exists, ff, K: tl.constexpr, F: tl.constexpr, BK: tl.constexpr, MAP: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Returns (ψ [BF], c) of one vector with φ = eᶜ ψ, in DTYPE; ψ is zero if `exists` is false.

    x: pointer to the vector [K]. w [D,K]: directions of random features. ff [BF]: the indices of the features. BK:
    columns of w in a tile.
    """
    c = tl.full([], 0.0, DTYPE)
    if MAP == "precomputed" or MAP == "elu":
        psi = tl.load(x + ff, mask=exists & (ff < F), other=0.0).to(DTYPE)
        if MAP == "elu":
            c = tl.minimum(tl.max(tl.where(ff < F, psi, float("-inf")), 0), 0.0)
            psi = tl.where(psi > 0, psi + 1, tl.exp(psi - c))
    else:
        D: tl.constexpr = F // features_per_direction(MAP)
        p = tl.zeros([ff.shape[0]], DTYPE)
        for start in range(0, K, BK):
            kk = start + tl.arange(0, BK)
            part = tl.load(x + kk, mask=exists & (kk < K), other=0.0).to(DTYPE) * K**-0.25
            offset = (ff % D)[:, None] * K + kk[None, :]
            # [BF,BK] @ [BK] -> [BF]
            p += tl.sum(tl.load(w + offset, mask=kk[None, :] < K, other=0.0).to(DTYPE) * part[None, :], 1)
            # [BK] · [BK] -> scalar; c is ‖x‖² / 2√K after the loop, which `fourier` returns
            c += tl.sum(part * part, 0) / 2
        if MAP == "performer":
            largest = tl.max(tl.where(ff < F, p, float("-inf")), 0)
            psi = tl.exp(p - largest)
            c = largest - c - tl.log(tl.full([], F, DTYPE)) / 2
        else:
            psi = tl.where(ff < D, tl.sin(p), tl.cos(p)) * (D**-0.5)
    return tl.where(exists & (ff < F), psi, 0.0), c


@triton.jit
def decode_step_kernel(
    q, k, v, w, visible, sums, peak, tokens, out, new_sums, new_peak, new_tokens,
    q_b, q_h, k_b, k_h, v_b, v_h, H, G,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, BF: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GROUP: tl.constexpr, MAP: tl.constexpr, MASKED: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """Adds one token to a state and computes its outputs. One program does one key head, BV columns of its values, and
    all query heads of its group:

        m' = max(m, c),     [S, Z]' = e^(m − m') [S, Z] + e^(c − m') ψ(k) [v, 1]ᵀ,     out = ψ(q)ᵀS' / ψ(q)ᵀZ'

    Reads:
        q [B,H,1,K], k [B,G,1,K], v [B,G,1,V]: the token; strides q_b, q_h, k_b, k_h, v_b, v_h of batch and heads.
        w [D,K]: directions of random features.
        visible [B,1]: whether the token is visible, if MASKED; a hidden token leaves the state unchanged, but still
            gets an output.
        sums [B,G,F,V+1]: S, and Z as the last column. peak [B,G]: m. tokens [B]: the number of visible tokens so far.
    Writes:
        out [B,1,H,V]: outputs.
        new_sums, new_peak, new_tokens: the state after the token, of the same shapes.
    BF: F padded to a power of two. TINY: a smaller normaliser has underflowed, and the output is zero.
    """
    bg = tl.program_id(0)
    block = tl.program_id(1)
    b = bg // G
    g = bg % G
    DTYPE: tl.constexpr = sums.dtype.element_ty
    ff = tl.arange(0, BF)
    vv = block * BV + tl.arange(0, BV)
    seen = b >= 0  # always true, as a tensor
    if MASKED:
        seen = tl.load(visible + b) != 0
    psi, c = _feature_map(k + b * k_b + g * k_h, w, seen, ff, K, F, BK, MAP, DTYPE)
    value = tl.load(v + b * v_b + g * v_h + vv, mask=seen & (vv < V), other=0.0).to(DTYPE)
    offset = bg.to(tl.int64) * F * (V + 1) + ff * (V + 1)
    inside = (ff < F)[:, None] & (vv < V)[None, :]
    S = tl.load(sums + offset[:, None] + vv[None, :], mask=inside, other=0.0)
    Z = tl.load(sums + offset + V, mask=ff < F, other=0.0)
    m = tl.load(peak + bg)
    if MAP != "precomputed":
        m_before = m
        m = tl.maximum(m, tl.where(seen, c, float("-inf")))
        rescale = tl.exp(m_before - finite_or_zero(m))
        psi *= tl.exp(tl.where(seen, c, 0.0) - finite_or_zero(m))
        S = S * rescale
        Z = Z * rescale
    # [BF,1] · [1,BV] -> [BF,BV]
    S += psi[:, None] * value[None, :]
    Z += psi
    tl.store(new_sums + offset[:, None] + vv[None, :], S, mask=inside)
    if block == 0:
        tl.store(new_sums + offset + V, Z, mask=ff < F)
        tl.store(new_peak + bg, m)
        if g == 0:
            tl.store(new_tokens + b, tl.load(tokens + b) + seen.to(tl.int64))
    for r in range(GROUP):
        h = g * GROUP + r
        psi, _ = _feature_map(q + b * q_b + h * q_h, w, b >= 0, ff, K, F, BK, MAP, DTYPE)
        # [BF] · [BF] -> scalar
        norm = tl.sum(psi * Z, 0)
        is_zero = tl.abs(norm) < TINY
        # [BF] @ [BF,BV] -> [BV]
        result = tl.where(is_zero, 0.0, tl.sum(psi[:, None] * S, 0) / tl.where(is_zero, 1.0, norm))
        if out.dtype.element_ty != tl.float64:
            result = result.to(tl.float32)  # Triton cannot round from float64 to bfloat16 directly
        tl.store(out + (b * H + h) * V + vv, result, mask=vv < V)


def decode_step(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, visible: Tensor | None, state: Sums, map: str
) -> tuple[Tensor, Sums]:
    """Returns the outputs [B,H,1,V] of one more token, and the state after it.

    q [B,H,1,K], k [B,G,1,K], v [B,G,1,V]; w: directions of random features; visible [B,1]; map: the feature map.
    """
    B, H, _, K = q.shape
    G, V = v.shape[1::2]
    F = state.sums.shape[2]
    q, k, v = (with_unit_stride(x) for x in (q, k, v))
    # Laid out as [B,T,H,V], so that the layer merges heads without a copy.
    out = torch.empty(B, 1, H, V, dtype=v.dtype, device=v.device)
    sums = state.sums.contiguous()
    peak = state.peak.contiguous()
    directions = sums  # a placeholder if the map has none
    if w is not None:
        directions = w.contiguous()
    if visible is not None:
        visible = visible.contiguous()
    after = Sums(torch.empty_like(sums), torch.empty_like(peak), torch.empty_like(state.tokens))
    features = max(16, power_of_2(F))
    # The columns of S, and of w, that fit into the registers of a program.
    max_columns = REGISTER_BYTES // (features * sums.element_size())
    widest = 64
    if B * G < FEW_HEADS:
        widest = 16
    block = min(power_of_2(V), widest, max_columns)
    warps = 4
    if 4 * block > max_columns:  # S takes more than a quarter of the limit: spread it over more threads
        warps = 8
    limits = torch.finfo(sums.dtype)
    named = {
        "K": K, "V": V, "F": F, "BF": features, "BK": min(32, max_columns, power_of_2(K)), "BV": block,
        "GROUP": H // G, "MAP": map, "MASKED": visible is not None, "TINY": limits.tiny / limits.eps,
    }  # fmt: skip
    numbers = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), H, G)
    seen = sums  # a placeholder if there is no mask
    if visible is not None:
        seen = visible
    launch(
        (decode_step_kernel, "decode_step_kernel", v.device, numbers, *named.values(), warps), decode_step_kernel,
        (B * G, ceil_div(V, block), 1),
        (q, k, v, directions, seen, sums, peak, state.tokens, out, *after), numbers,
        lambda: named, lambda: [{"num_warps": warps}],
    )  # fmt: skip
    return out.transpose(1, 2), after
