"""The Triton programs behind `decode`. Imported only where one runs, since triton may be absent."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # slots that a program reads at a time
LOG2E = 1.4426950408889634


@triton.jit
def _attend(
    q, k_new, v_new, k, v, tokens, parts, peaks, totals,
    q_b, q_h, k_b, k_g, v_b, v_g, room, scale, H, G, splits,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    GROUP: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One share of the slots of one key/value head, for all query heads of its group."""
    row, split = tl.program_id(0), tl.program_id(1)
    b, g = row // G, row % G
    n = tl.load(tokens + b)
    share = tl.cdiv(tl.cdiv(n, BLOCK), splits) * BLOCK
    start = split * share
    end = tl.minimum(start + share, n)
    r, kk, vv = tl.arange(0, R), tl.arange(0, KP), tl.arange(0, VP)
    heads = g * GROUP + r
    queries = tl.load(q + b * q_b + heads[:, None] * q_h + kk, mask=(r[:, None] < GROUP) & (kk < K), other=0.0)
    peak = tl.full([R], float("-inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, VP], tl.float32)
    base = row.to(tl.int64) * room
    if split == 0:  # the new token: kept for later steps, and seen by this one
        key = tl.load(k_new + b * k_b + g * k_g + kk, mask=kk < K, other=0.0)
        value = tl.load(v_new + b * v_b + g * v_g + vv, mask=vv < V, other=0.0)
        tl.store(k + (base + n) * K + kk, key, mask=kk < K)
        tl.store(v + (base + n) * V + vv, value, mask=vv < V)
        peak = tl.sum(queries.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
        total += 1.0
        acc += value.to(tl.float32)[None, :]
    for at in range(start, end, BLOCK):
        slots = at + tl.arange(0, BLOCK)
        there = slots < end
        keys = tl.load(k + (base + slots)[:, None] * K + kk, mask=there[:, None] & (kk < K), other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        kept = tl.exp2(peak - higher)
        weights = tl.exp2(scores - higher[:, None])
        values = tl.load(v + (base + slots)[:, None] * V + vv, mask=there[:, None] & (vv < V), other=0.0)
        total = total * kept + tl.sum(weights, 1)
        acc = acc * kept[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        peak = higher
    place = (b * H + heads) * splits + split
    tl.store(peaks + place, peak, mask=r < GROUP)
    tl.store(totals + place, total, mask=r < GROUP)
    tl.store(parts + place[:, None] * V + vv, acc, mask=(r[:, None] < GROUP) & (vv < V))


@triton.jit
def _merge(parts, peaks, totals, out, tokens, counted, splits, H, V: tl.constexpr, VP: tl.constexpr, SP: tl.constexpr):
    """The shares of one query head as one output; and the new number of tokens."""
    row = tl.program_id(0)
    s, vv = tl.arange(0, SP), tl.arange(0, VP)
    peak = tl.load(peaks + row * splits + s, mask=s < splits, other=float("-inf"))
    factor = tl.exp2(peak - tl.max(peak, 0))
    total = tl.sum(factor * tl.load(totals + row * splits + s, mask=s < splits, other=0.0), 0)
    part = tl.load(parts + (row * splits + s)[:, None] * V + vv, mask=(s[:, None] < splits) & (vv < V), other=0.0)
    tl.store(out + row * V + vv, tl.sum(part * factor[:, None], 0) / total, mask=vv < V)
    if row % H == 0:
        tl.store(counted + row // H, tl.load(tokens + row // H) + 1)


def step(
    q: Tensor, k: Tensor, v: Tensor, k_room: Tensor, v_room: Tensor, tokens: Tensor, used: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of q [B,H,1,K] over the cache and the new k, v, which are written into it; and the new counts."""
    B, H, _, K = q.shape
    G, room, V = v_room.shape[1], v_room.shape[2], v_room.shape[3]
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    splits = _splits(B * G, used, q.device)
    wide: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    parts = torch.empty(B, H, splits, V, **wide)
    peaks, totals = torch.empty(B, H, splits, **wide), torch.empty(B, H, splits, **wide)
    # Heads side by side, as the layer merges them: its transpose back costs nothing.
    out = torch.empty(B, 1, H, V, dtype=v.dtype, device=v.device)
    counted = torch.empty_like(tokens)
    widths = {"K": K, "V": V, "KP": _padded(K), "VP": _padded(V)}
    _attend[(B * G, splits)](
        q, k, v, k_room, v_room, tokens, parts, peaks, totals,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), room, scale * LOG2E, H, G, splits,
        GROUP=H // G, R=_padded(H // G), BLOCK=BLOCK, **widths,
    )  # fmt: skip
    _merge[(B * H,)](
        parts, peaks, totals, out, tokens, counted, splits, H, V=V, VP=_padded(V), SP=triton.next_power_of_2(splits)
    )
    return out.transpose(1, 2), counted


def _padded(n: int) -> int:
    return max(16, int(triton.next_power_of_2(n)))  # a matrix product on the tensor cores has no side under 16


def _splits(rows: int, used: int, device: torch.device) -> int:
    """Enough programs to fill the device, each with at least one block to read."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return max(1, min(2 * processors // rows, -(-used // BLOCK), 64))
