"""One decoding step of linear attention in one launch: features of the new token, its place in the sums, the outputs.

Everything is computed as precisely as the sums are kept. They are written anew, so the state before the step stays what
it was.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.linear.triton_features import finite

ROOM = 1 << 16  # bytes of registers that the sums of one program, or the directions it holds at once, may take
FEW = 128  # heads of a batch that leave processors idle, so that several share one


@triton.jit
def _mapped(
    x, w, there, ff, K: tl.constexpr, F: tl.constexpr, KB: tl.constexpr, MAP: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """(ψ, c) of one vector with φ = eᶜ·ψ, or of nothing where it is not there."""
    c = tl.full([], 0.0, WIDE)
    if MAP == "given" or MAP == "elu":
        psi = tl.load(x + ff, mask=there & (ff < F), other=0.0).to(WIDE)
        if MAP == "elu":
            psi = tl.where(psi > 0, psi + 1, tl.exp(tl.minimum(psi, 0.0)))
    else:
        N: tl.constexpr = F if MAP == "performer" else F // 2
        p = tl.zeros([ff.shape[0]], WIDE)
        for start in range(0, K, KB):
            kk = start + tl.arange(0, KB)
            part = tl.load(x + kk, mask=there & (kk < K), other=0.0).to(WIDE) * K**-0.25
            at = (ff % N)[:, None] * K + kk[None, :]
            p += tl.sum(tl.load(w + at, mask=kk[None, :] < K, other=0.0).to(WIDE) * part[None, :], 1)
            c += tl.sum(part * part, 0) / 2
        if MAP == "performer":
            top = tl.max(tl.where(ff < F, p, float("-inf")), 0)
            psi = tl.exp(p - top)
            c = top - c - tl.log(tl.full([], F, WIDE)) / 2
        else:
            psi = tl.where(ff < N, tl.sin(p), tl.cos(p)) * (N**-0.5)
    return tl.where(there & (ff < F), psi, 0.0), c


@triton.jit
def _step(
    q, k, v, w, visible, sums, peak, tokens, out, new_sums, new_peak, new_tokens,
    q_b, q_h, k_b, k_g, v_b, v_g, H, G,
    K: tl.constexpr, V: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr,
    GROUP: tl.constexpr, MAP: tl.constexpr, MASKED: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """Some columns of one key/value head, for all query heads of its group."""
    row, block = tl.program_id(0), tl.program_id(1)
    b, g = row // G, row % G
    WIDE: tl.constexpr = sums.dtype.element_ty
    ff, vv = tl.arange(0, FP), block * VB + tl.arange(0, VB)
    there = tl.load(visible + b) != 0 if MASKED else b >= 0
    psi, c = _mapped(k + b * k_b + g * k_g, w, there, ff, K, F, KB, MAP, WIDE)
    value = tl.load(v + b * v_b + g * v_g + vv, mask=there & (vv < V), other=0.0).to(WIDE)
    at = row.to(tl.int64) * F * (V + 1) + ff * (V + 1)
    inside = (ff < F)[:, None] & (vv < V)[None, :]
    here = tl.load(sums + at[:, None] + vv[None, :], mask=inside, other=0.0)
    total = tl.load(sums + at + V, mask=ff < F, other=0.0)
    top = tl.load(peak + row)
    if MAP == "performer" or MAP == "fourier":
        before = top
        top = tl.maximum(top, tl.where(there, c, float("-inf")))
        kept = tl.exp(before - finite(top))
        psi *= tl.exp(tl.where(there, c, 0.0) - finite(top))
        here, total = here * kept, total * kept
    here += psi[:, None] * value[None, :]
    total += psi
    tl.store(new_sums + at[:, None] + vv[None, :], here, mask=inside)
    if block == 0:
        tl.store(new_sums + at + V, total, mask=ff < F)
        tl.store(new_peak + row, top)
        if g == 0:
            tl.store(new_tokens + b, tl.load(tokens + b) + there.to(tl.int64))
    for r in range(GROUP):
        h = g * GROUP + r
        psi, _ = _mapped(q + b * q_b + h * q_h, w, b >= 0, ff, K, F, KB, MAP, WIDE)
        over = tl.sum(psi * total, 0)
        zero = tl.abs(over) < TINY
        found = tl.where(zero, 0.0, tl.sum(psi[:, None] * here, 0) / tl.where(zero, 1.0, over))
        if out.dtype.element_ty != tl.float64:
            found = found.to(tl.float32)  # there is no rounding from float64 to bfloat16 at once
        tl.store(out + (b * H + h) * V + vv, found, mask=vv < V)


def step(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, visible: Tensor | None, sums: Tensor, peak: Tensor,
    tokens: Tensor, name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Outputs [B,H,1,V] after one more token, and the sums, peak and tokens with it."""
    (B, H, _, K), (G, V), F = q.shape, v.shape[1::2], sums.shape[2]
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    # Heads side by side, as the layer merges them: its transpose back costs nothing.
    out = torch.empty(B, 1, H, V, dtype=v.dtype, device=v.device)
    sums, peak, w = sums.contiguous(), peak.contiguous(), sums if w is None else w.contiguous()
    visible = None if visible is None else visible.contiguous()
    after = torch.empty_like(sums), torch.empty_like(peak), torch.empty_like(tokens)
    features, columns = max(16, triton.next_power_of_2(F)), triton.next_power_of_2(V)
    room = ROOM // (features * sums.element_size())
    block = min(columns, 16 if B * G < FEW else 64, room)
    _step[(B * G, triton.cdiv(V, block))](
        q, k, v, w, visible, sums, peak, tokens, out, *after,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), H, G,
        K=K, V=V, F=F, FP=features, KB=min(32, room, triton.next_power_of_2(K)), VB=block, GROUP=H // G,
        MAP=name, MASKED=visible is not None, TINY=torch.finfo(sums.dtype).tiny / torch.finfo(sums.dtype).eps,
        num_warps=8 if 4 * block > room else 4,
    )  # fmt: skip
    return out.transpose(1, 2), *after
