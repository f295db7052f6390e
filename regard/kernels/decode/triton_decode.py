"""The Triton programs behind `decode`. Imported only where one runs, since triton may be absent.

The package's docstring lists the tensors. Sizes padded for a program end in P: a matrix product on the tensor cores has
no side under 16, and blocks are powers of two. R is the padded number of query heads of a group, GROUP = H/G.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # slots that a program reads at a time
LOG2E = 1.4426950408889634


@triton.jit
def _attend_split(
    q, k_new, v_new, k, v, tokens, parts, peaks, totals,
    q_b, q_h, k_b, k_g, v_b, v_g, room, scale, H, G, splits,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    GROUP: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attends over one split of the slots of one key/value head, for all query heads of its group.

    Program (b·G + g, split). The first split writes the new token into the cache as well.

    q          [B,H,1,K]        queries, read with the strides q_b (batch) and q_h (head)
    k_new      [B,G,1,K]        key of the new token, strides k_b and k_g
    v_new      [B,G,1,V]        value of the new token, strides v_b and v_g
    k, v       [B,G,room,K|V]   the cache, contiguous: read, and written at slot tokens[b] mod room
    tokens     [B]              tokens so far; of more than `room`, a ring holds the last ones
    parts      [B,H,splits,V]   written: Σ 2^(score − peak)·value of this split
    peaks      [B,H,splits]     written: its largest score, in units of log 2
    totals     [B,H,splits]     written: Σ 2^(score − peak)

    `scale` holds log₂e: exp2 is one instruction, exp is two.
    """
    row = tl.program_id(0)
    split = tl.program_id(1)
    b = row // G
    g = row % G
    n = tl.load(tokens + b)
    held = tl.minimum(n, room)
    new_slot = n % room  # of a full ring, the slot of the oldest token, which nobody may read any more
    share = tl.cdiv(tl.cdiv(held, BLOCK), splits) * BLOCK
    start = split * share
    end = tl.minimum(start + share, held)
    r = tl.arange(0, R)
    kk = tl.arange(0, KP)
    vv = tl.arange(0, VP)
    heads = g * GROUP + r
    queries = tl.load(q + b * q_b + heads[:, None] * q_h + kk, mask=(r[:, None] < GROUP) & (kk < K), other=0.0)
    peak = tl.full([R], float("-inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, VP], tl.float32)
    base = row.to(tl.int64) * room  # in 64 bits: a cache may have more than 2³¹ numbers
    if split == 0:  # the new token: kept for later steps, and seen by this one
        key = tl.load(k_new + b * k_b + g * k_g + kk, mask=kk < K, other=0.0)
        value = tl.load(v_new + b * v_b + g * v_g + vv, mask=vv < V, other=0.0)
        tl.store(k + (base + new_slot) * K + kk, key, mask=kk < K)
        tl.store(v + (base + new_slot) * V + vv, value, mask=vv < V)
        # [R,KP] · [KP], as a sum of products: its score is the first peak, and its weight 2⁰ = 1.
        peak = tl.sum(queries.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
        total += 1.0
        acc += value.to(tl.float32)[None, :]
    for at in range(start, end, BLOCK):
        slots = at + tl.arange(0, BLOCK)
        in_split = (slots < end) & (slots != new_slot)
        keys = tl.load(k + (base + slots)[:, None] * K + kk, mask=in_split[:, None] & (kk < K), other=0.0)
        # [R,KP] @ [KP,BLOCK]
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(in_split[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # The running softmax: what was summed relative to the old peak becomes relative to the new one.
        # A block may hold nothing but the slot of the new token: then all is −inf, and its weights are 0.
        base_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        rescale = tl.exp2(peak - base_peak)
        weights = tl.exp2(scores - base_peak[:, None])
        values = tl.load(v + (base + slots)[:, None] * V + vv, mask=in_split[:, None] & (vv < V), other=0.0)
        total = total * rescale + tl.sum(weights, 1)
        # [R,BLOCK] @ [BLOCK,VP]
        acc = acc * rescale[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        peak = new_peak
    place = (b * H + heads) * splits + split
    tl.store(peaks + place, peak, mask=r < GROUP)
    tl.store(totals + place, total, mask=r < GROUP)
    tl.store(parts + place[:, None] * V + vv, acc, mask=(r[:, None] < GROUP) & (vv < V))


@triton.jit
def _merge_splits(
    parts, peaks, totals, out, tokens, counted, splits, H, V: tl.constexpr, VP: tl.constexpr, SP: tl.constexpr
):
    """Merges the splits of one query head into its output, and counts the new token.

    Program b·H + h.

    parts      [B,H,splits,V]   Σ 2^(score − peak)·value of each split
    peaks      [B,H,splits]     largest score of each split, −inf for an empty one
    totals     [B,H,splits]     Σ 2^(score − peak) of each split
    out        [B,1,H,V]        written: Σ parts·2^(peak − largest peak) / Σ totals·2^(peak − largest peak)
    tokens     [B]              tokens before the step
    counted    [B]              written: tokens after it
    """
    row = tl.program_id(0)
    s = tl.arange(0, SP)
    vv = tl.arange(0, VP)
    peak = tl.load(peaks + row * splits + s, mask=s < splits, other=float("-inf"))
    factor = tl.exp2(peak - tl.max(peak, 0))
    total = tl.sum(factor * tl.load(totals + row * splits + s, mask=s < splits, other=0.0), 0)
    part = tl.load(parts + (row * splits + s)[:, None] * V + vv, mask=(s[:, None] < splits) & (vv < V), other=0.0)
    # [SP] · [SP,VP], as a sum of products
    tl.store(out + row * V + vv, tl.sum(part * factor[:, None], 0) / total, mask=vv < V)
    if row % H == 0:
        tl.store(counted + row // H, tl.load(tokens + row // H) + 1)


def step(
    q: Tensor, k: Tensor, v: Tensor, k_room: Tensor, v_room: Tensor, tokens: Tensor, used: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns the attention of q [B,H,1,K] over the cache and the new token, [B,H,1,V], and the new counts [B].

    The new k [B,G,1,K] and v [B,G,1,V] are written into k_room and v_room; no row has more than `used` tokens before.
    """
    B, H, _, K = q.shape
    _, G, room, V = v_room.shape
    # The programs take any stride but that of the last dimension, which must be 1.
    q = _contiguous_last(q)
    k = _contiguous_last(k)
    v = _contiguous_last(v)
    splits = _count_splits(B * G, min(used, room), q.device)
    float32: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    parts = torch.empty(B, H, splits, V, **float32)
    peaks = torch.empty(B, H, splits, **float32)
    totals = torch.empty(B, H, splits, **float32)
    # Heads side by side, as the layer merges them: its transpose back costs nothing.
    out = torch.empty(B, 1, H, V, dtype=v.dtype, device=v.device)
    counted = torch.empty_like(tokens)
    widths = {"K": K, "V": V, "KP": _pad_side(K), "VP": _pad_side(V)}
    _attend_split[(B * G, splits)](
        q, k, v, k_room, v_room, tokens, parts, peaks, totals,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), room, scale * LOG2E, H, G, splits,
        GROUP=H // G, R=_pad_side(H // G), BLOCK=BLOCK, **widths,
    )  # fmt: skip
    _merge_splits[(B * H,)](
        parts, peaks, totals, out, tokens, counted, splits, H, V=V, VP=_pad_side(V), SP=triton.next_power_of_2(splits)
    )
    return out.transpose(1, 2), counted


def _contiguous_last(x: Tensor) -> Tensor:
    if x.stride(3) == 1:
        return x
    return x.contiguous()


def _pad_side(n: int) -> int:
    """Returns the side of a matrix product on the tensor cores that holds n: a power of two, at least 16."""
    return max(16, int(triton.next_power_of_2(n)))


def _count_splits(rows: int, used: int, device: torch.device) -> int:
    """Returns how many programs share a row: enough to fill the device, each with at least one block to read."""
    processors = 4
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(2 * processors // rows, -(-used // BLOCK), 64))
