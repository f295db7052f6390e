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
from triton.language.extra import cuda

from regard.kernels.devices import count_processors, power_of_2
from regard.kernels.launch_step import launch_step
from regard.shapes import Mask

BLOCK = 64  # slots that a program reads at a time
MOST_SPLITS = 512
FILL = 2  # programs for each multiprocessor


@triton.jit
def _load_turned(x, cos, sin, kk, mask, K: tl.constexpr, ROTATED: tl.constexpr):
    """Returns the K numbers at x, turned as pairs (xᵢ, x_{i+K/2}) where ROTATED: x·cos + [−x₂, x₁]·sin."""
    found = tl.load(x + kk, mask=mask, other=0.0)
    if ROTATED:
        is_first = kk < K // 2
        partner = tl.where(is_first, kk + K // 2, kk - K // 2)
        other = tl.load(x + partner, mask=mask, other=0.0).to(tl.float32)
        cosines = tl.load(cos + kk, mask=kk < K, other=0.0).to(tl.float32)
        sines = tl.load(sin + kk, mask=kk < K, other=0.0).to(tl.float32)
        turned = found.to(tl.float32) * cosines + tl.where(is_first, -other, other) * sines
        found = turned.to(found.dtype)
    return found


@triton.jit
def _adjust(scores, penalty, softcap, SLOPED: tl.constexpr, CAPPED: tl.constexpr):
    """Returns the scores after softcap and slopes, in units of log 2: exp2 is one instruction, exp is two."""
    if CAPPED:
        # tanh(x) = sign(x)·(1 − e)/(1 + e) with e = exp(−2|x|), which cannot overflow.
        e = tl.exp(-2.0 * tl.abs(scores) / softcap)
        bent = softcap * (1.0 - e) / (1.0 + e)
        scores = tl.where(scores < 0, -bent, bent)
    if SLOPED:
        scores -= penalty
    return scores * 1.4426950408889634


@triton.jit
def _merge(parts, peaks, totals, row, splits, V: tl.constexpr, VP: tl.constexpr, SP: tl.constexpr):
    """Returns the output [VP] of one query head: Σ parts·2^(peak − largest peak) / Σ totals·2^(peak − largest peak)."""
    CHUNK: tl.constexpr = min(SP, 64)
    s = tl.arange(0, SP)
    vv = tl.arange(0, VP)
    # All that is read is asked for before anything is computed: each would wait for the memory by itself.
    peak = tl.load(peaks + row * splits + s, mask=s < splits, other=float("-inf"))
    total = tl.load(totals + row * splits + s, mask=s < splits, other=0.0)
    some = tl.arange(0, CHUNK)
    place = parts + (row * splits + some)[:, None] * V + vv[None, :]
    in_part = (some < splits)[:, None] & (vv < V)[None, :]
    part = tl.load(place, mask=in_part, other=0.0)
    first = tl.load(peaks + row * splits + some, mask=some < splits, other=float("-inf"))
    largest = tl.max(peak, 0)
    # [CHUNK] · [CHUNK,VP], as a sum of products
    acc = tl.sum(part * tl.exp2(first - largest)[:, None], 0)
    for at in range(CHUNK, splits, CHUNK):
        some = at + tl.arange(0, CHUNK)
        factor = tl.exp2(tl.load(peaks + row * splits + some, mask=some < splits, other=float("-inf")) - largest)
        place = parts + (row * splits + some)[:, None] * V + vv[None, :]
        in_part = (some < splits)[:, None] & (vv < V)[None, :]
        acc += tl.sum(tl.load(place, mask=in_part, other=0.0) * factor[:, None], 0)
    return acc / tl.sum(tl.exp2(peak - largest) * total, 0)


@triton.jit
def _attend_split(
    q, k_new, v_new, cos, sin, slopes, k, v, tokens, parts, arrived, out, counted,
    q_b, q_h, k_b, k_g, v_b, v_g, turn_b, room, window, scale, softcap, G, splits,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, SP: tl.constexpr,
    GROUP: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
    ROTATED: tl.constexpr, SLOPED: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    COUNTS: tl.constexpr, COUNTED_BEFORE: tl.constexpr, MERGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Attends over one split of the slots of one key/value head, for all query heads of its group.

    Program (b·G + g, split). The first split writes the new token into the cache as well.

    q          [B,H,1,K]        queries, read with the strides q_b (batch) and q_h (head)
    k_new      [B,G,1,K]        key of the new token, strides k_b and k_g
    v_new      [B,G,1,V]        value of the new token, strides v_b and v_g
    cos, sin   [#B,1,1,K]       how q and k_new are turned, stride turn_b; not read unless ROTATED
    slopes     [H]              ALiBi's slopes; not read unless SLOPED
    k, v       [B,G,room,K|V]   the cache, contiguous: read, and written at slot tokens[b] mod room
    tokens     [B]              tokens so far; of more than `room`, a ring holds the last ones
    parts      [B,H,splits,V]   written: Σ 2^(score − peak)·value of this split; then peaks and totals, [B,H,splits]
    arrived    [B,G]            splits that have ended, zero before and after; not used unless MERGES is "last"
    out        [B,1,H,V]        written: by the only split, or by the last one to end (MERGES "only" and "last")
    counted    [B]              written where COUNTS: tokens after this step
    """
    row = tl.program_id(0)
    split = tl.program_id(1)
    b = row // G
    g = row % G
    if EARLY:
        cuda.gdc_launch_dependents()
        if not COUNTED_BEFORE:
            cuda.gdc_wait()
    n = tl.load(tokens + b)
    if EARLY and COUNTED_BEFORE:
        cuda.gdc_wait()
    held = tl.minimum(n, room)
    new_slot = n % room  # of a full ring, the slot of the oldest token, which nobody may read any more
    share = tl.cdiv(tl.cdiv(held, BLOCK), splits) * BLOCK
    start = split * share
    end = tl.minimum(start + share, held)
    r = tl.arange(0, R)
    kk = tl.arange(0, KP)
    vv = tl.arange(0, VP)
    heads = g * GROUP + r
    in_q = (r < GROUP)[:, None] & (kk < K)[None, :]
    turn = b * turn_b
    queries = _load_turned(
        q + b * q_b + heads[:, None] * q_h, cos + turn, sin + turn, kk[None, :], in_q, K, ROTATED
    )  # fmt: skip
    slope = tl.zeros([R], tl.float32)
    if SLOPED:
        slope = tl.load(slopes + heads, mask=r < GROUP, other=0.0).to(tl.float32)
    peak = tl.full([R], float("-inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, VP], tl.float32)
    base = row.to(tl.int64) * room  # in 64 bits: a cache may have more than 2³¹ numbers
    # Read by every split, together with the queries, and used by the first one.
    key = _load_turned(k_new + b * k_b + g * k_g, cos + turn, sin + turn, kk, kk < K, K, ROTATED)
    value = tl.load(v_new + b * v_b + g * v_g + vv, mask=vv < V, other=0.0)
    if split == 0:  # the new token: kept for later steps, and seen by this one
        tl.store(k + (base + new_slot) * K + kk, key, mask=kk < K)
        tl.store(v + (base + new_slot) * V + vv, value, mask=vv < V)
        # [R,KP] · [KP], as a sum of products: its score is the first peak, and its weight 2⁰ = 1.
        score = tl.sum(queries.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
        peak = _adjust(score, slope * 0.0, softcap, SLOPED, CAPPED)
        total += 1.0
        acc += value.to(tl.float32)[None, :]
        if COUNTS and g == 0:
            tl.store(counted + b, n + 1)
    for at in range(start, end, BLOCK):
        slots = at + tl.arange(0, BLOCK)
        in_split = (slots < end) & (slots != new_slot)
        distance = new_slot - slots
        distance = tl.where(distance <= 0, distance + room, distance)  # round the ring
        if WINDOWED:
            in_split = in_split & (distance < window)
        in_k = in_split[:, None] & (kk < K)[None, :]
        in_v = in_split[:, None] & (vv < V)[None, :]
        keys = tl.load(k + (base + slots)[:, None] * K + kk[None, :], mask=in_k, other=0.0)
        values = tl.load(v + (base + slots)[:, None] * V + vv[None, :], mask=in_v, other=0.0)
        # [R,KP] @ [KP,BLOCK]
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = _adjust(scores, slope[:, None] * distance.to(tl.float32)[None, :], softcap, SLOPED, CAPPED)
        scores = tl.where(in_split[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # The running softmax: what was summed relative to the old peak becomes relative to the new one.
        # A block may hold nothing but the slot of the new token: then all is −inf, and its weights are 0.
        base_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        rescale = tl.exp2(peak - base_peak)
        weights = tl.exp2(scores - base_peak[:, None])
        total = total * rescale + tl.sum(weights, 1)
        # [R,BLOCK] @ [BLOCK,VP]
        acc = acc * rescale[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        peak = new_peak
    in_out = (r < GROUP)[:, None] & (vv < V)[None, :]
    if MERGES == "only":
        places = (row * GROUP + r)[:, None] * V + vv[None, :]
        tl.store(out + places, acc / total[:, None], mask=in_out)
    else:
        peaks = parts + tl.num_programs(0) * GROUP * splits * V
        totals = peaks + tl.num_programs(0) * GROUP * splits
        place = (row * GROUP + r) * splits + split
        tl.store(peaks + place, peak, mask=r < GROUP)
        tl.store(totals + place, total, mask=r < GROUP)
        tl.store(parts + place[:, None] * V + vv[None, :], acc, mask=in_out)
        if MERGES == "last":
            tl.debug_barrier()  # all threads have written before one of them says so
            if tl.atomic_add(arrived + row, 1) == splits - 1:
                for head in range(0, GROUP):
                    merged = _merge(parts, peaks, totals, row * GROUP + head, splits, V, VP, SP)
                    tl.store(out + (row * GROUP + head) * V + vv, merged, mask=vv < V)
                tl.store(arrived + row, 0)


@triton.jit
def _merge_splits(
    parts, out, splits, V: tl.constexpr, VP: tl.constexpr, SP: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Merges the splits of one query head into its output; program b·H + h.

    parts      [B,H,splits,V]   Σ 2^(score − peak)·value of each split; then peaks and totals, [B,H,splits]
    out        [B,1,H,V]        written
    """
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(0)
    vv = tl.arange(0, VP)
    peaks = parts + tl.num_programs(0) * splits * V
    totals = peaks + tl.num_programs(0) * splits
    tl.store(out + row * V + vv, _merge(parts, peaks, totals, row, splits, V, VP, SP), mask=vv < V)


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_room: Tensor,
    v_room: Tensor,
    tokens: Tensor,
    used: int,
    scale: float,
    rules: Mask = Mask(),
    *,
    rotation: tuple[Tensor, Tensor] | None = None,
    arrived: Tensor | None = None,
    counted: Tensor | None = None,
    counted_before: bool = False,
) -> Tensor:
    """Returns the attention of q [B,H,1,K] over the cache and the new token, [B,H,1,V].

    The new k [B,G,1,K] and v [B,G,1,V] are written into k_room and v_room; no row has more than `used` tokens before.
    Rules are window, slopes and softcap. `rotation` is cosines and sines [#B,1,1,K], by which q and k are turned.
    `arrived` [B·G] holds zeros, before and after: with it, few splits are merged in the same launch. `counted` [B] is
    given the number of tokens after the step. `counted_before`: `tokens` was written before the last program that did
    not start early, so that it may be read while the program before still runs.
    """
    B, H, _, K = q.shape
    _, G, room, V = v_room.shape
    # The programs take any stride but that of the last dimension, which must be 1.
    q = _contiguous_last(q)
    k = _contiguous_last(k)
    v = _contiguous_last(v)
    splits = _count_splits(B * G, min(used, room), q.device)
    merges = _choose_merge(splits, H // G, arrived)
    # Heads side by side, as the layer merges them: its transpose back costs nothing.
    out = torch.empty(B, 1, H, V, dtype=v.dtype, device=v.device)
    parts = out
    if merges != "only":
        parts = torch.empty(B * H * splits * (V + 2), dtype=torch.float32, device=q.device)
    cos, sin = rotation or (q, q)  # a program takes some pointer for what it does not read
    turn_b = cos.stride(0) if cos.shape[0] > 1 else 0
    tensors = (
        q, k, v, cos, sin, q if rules.slopes is None else rules.slopes, k_room, v_room, tokens, parts,
        tokens if arrived is None else arrived, out, tokens if counted is None else counted,
    )  # fmt: skip
    numbers = (
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), turn_b,
        room, rules.window or 0, scale, rules.softcap or 0.0, G, splits,
    )  # fmt: skip
    sizes: dict[str, Any] = {"V": V, "VP": _pad_side(V), "SP": power_of_2(_most_splits(B * G, q.device))}
    named = {
        "K": K, "KP": _pad_side(K), "GROUP": H // G, "R": _pad_side(H // G), "BLOCK": BLOCK,
        "ROTATED": rotation is not None, "SLOPED": rules.slopes is not None, "CAPPED": rules.softcap is not None,
        "WINDOWED": rules.window is not None and room > rules.window, "COUNTS": counted is not None,
        "COUNTED_BEFORE": counted_before, "MERGES": merges,
    } | sizes  # fmt: skip
    launch_step(_attend_split, (B * G, splits, 1), tensors, numbers, named)
    if merges == "later":
        launch_step(_merge_splits, (B * H, 1, 1), (parts, out), (splits,), sizes)
    return out.view(B, H, 1, V)


def _contiguous_last(x: Tensor) -> Tensor:
    if x.stride(3) == 1:
        return x
    return x.contiguous()


def _pad_side(n: int) -> int:
    """Returns the side of a matrix product on the tensor cores that holds n: a power of two, at least 16."""
    return max(16, power_of_2(n))


def _count_splits(rows: int, used: int, device: torch.device) -> int:
    """Returns how many programs share a row: enough to fill the device, each with at least one block to read."""
    return max(1, min(_most_splits(rows, device), -(-used // BLOCK)))


def _most_splits(rows: int, device: torch.device) -> int:
    """Returns how many programs share a long row. A program is built for it, so that it serves every length."""
    return max(1, min(FILL * count_processors(device) // rows, MOST_SPLITS))


def _choose_merge(splits: int, group: int, arrived: Tensor | None) -> str:
    """Returns who merges the splits of a head.

    Those of one head are merged by the program that ends last, which saves a launch; many by programs of their own.
    """
    if splits == 1:
        return "only"
    if arrived is not None and group == 1 and splits <= 64:
        return "last"
    return "later"
