"""Runs the programs of linear attention: room for what they find, then one after the other, forward and backward.

Nothing is added up in an order that could change: the same inputs give the same bits.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from regard.kernels.linear import triton_backward, triton_chained, triton_forward, triton_sums
from regard.kernels.linear.plan import BLOCK, CHUNK, Plan, launch, padded, planned, processors, run
from regard.kernels.linear.triton_features import LEAST


class Results(NamedTuple):
    """What forward finds: the output; the state after the last token, where asked for; and what the gradient needs."""

    out: Tensor  # [B,H,T,V]
    sums: Tensor  # [B,G,F,V+1]
    peak: Tensor  # [B,G]
    inverses: Tensor  # of the totals of the rows
    peaks: Tensor  # and their peaks
    states: Tensor  # sums before each segment, [S, Z] side by side
    outer: Tensor  # S once more as the products take it
    tops: Tensor  # their peaks and units
    local: Tensor  # sums before each chunk in its segment, [·,F,V]; marks: their Z, peak and units, [·,F+2]
    marks: Tensor
    lifts_q: Tensor
    lifts: Tensor
    c: Tensor


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(n for x in tensors for n in x.stride()[:3])


def by_rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _directions(plan: Plan, w: Tensor | None, x: Tensor) -> tuple[Plan, Tensor]:
    """w [F,K]; beside bfloat16 in parts of 8 bits, one after the other: one where w is bfloat16 itself, in a model that
    is; else two, or three where phases need them. Kept while w is."""
    if w is None:
        return (plan._replace(parts=1), _unmixed(plan.K, x.device)) if plan.through else (plan, x)
    which = (None if w.is_inference() else w._version, plan.map, x.dtype)
    known: tuple[Any, Tensor] | None = _KEPT.get(w)
    if known is not None and known[0] == which:
        return plan._replace(parts=known[1].shape[0] // w.shape[0]), known[1]
    made: Tensor = w.detach()
    if x.dtype != torch.bfloat16:
        made = made.float()
    elif w.dtype != torch.bfloat16:
        rest, parts = made.float(), []
        for _ in range(2 if plan.map == "performer" else 3):
            parts.append(rest.bfloat16())
            rest = rest - parts[-1].float()
        made = torch.cat(parts)
    made = made.contiguous()
    if which[0] is not None and not _captured(w):
        _KEPT[w] = which, made
    return plan._replace(parts=made.shape[0] // w.shape[0]), made


_KEPT: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _captured(x: Tensor) -> bool:
    """Whether what is made now belongs to a CUDA graph, and may not be kept."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _unmixed(K: int, device: torch.device) -> Tensor:
    """The identity: what is projected on it stays as it is."""
    known = _IDENTITIES.get((K, device))
    if known is None:
        known = torch.eye(K, dtype=torch.bfloat16, device=device)
        if not _captured(known):
            _IDENTITIES[K, device] = known
    return known


_IDENTITIES: dict[tuple[int, torch.device], Tensor] = {}


def _crests(
    plan: Plan, x: Tensor, v: Tensor, w: Tensor, visible: Tensor | None, results: tuple[Tensor, ...], keys: bool
) -> None:
    """Lift and c of each vector, [B,N,T]; of each chunk of keys the largest c, and a bound for what it adds."""
    B, N, T = x.shape[:3]
    chunks = B * N * -(-T // CHUNK)
    programs = min(chunks, (4 if plan.map == "performer" else 16) * processors(x.device))
    run(
        triton_sums.crests, (programs, 1), plan, (x, w, x if visible is None else visible, v, *results),
        *_strides(x, v), T, N, B * N, programs, KEYS=keys, MASKED=visible is not None,
        FB=min(padded(plan.F), 2 * BLOCK) if plan.narrow else BLOCK,
    )  # fmt: skip


def _edge(
    sums: Tensor, tops: Tensor, edge: Tensor, peak: Tensor | None, back: bool = False, units: bool = False
) -> None:
    """Sums, peak and units of what comes from outside, in a slot of their own: the first or the last."""
    slot = sums.shape[1] - 1 if back else 0
    state = edge.float().flatten(0, 1)
    sums[:, slot] = torch.cat([state[..., :-1].flatten(1), state[..., -1]], 1)
    if peak is not None:
        tops[:, slot, 0] = peak.flatten()
        if units:
            tops[:, slot, 1] = state[..., :-1].abs().amax((1, 2)).clamp(min=LEAST.value).log2().ceil()


def _combined(
    plan: Plan, sums: Tensor, tops: Tensor, outer: Tensor, peaks: Tensor, edge: bool, back: bool
) -> None:  # fmt: skip
    """Running totals in place of the sums of the segments, and their peaks. `edge`: something came from outside."""
    rows, slots, N = sums.shape
    outside = int(not edge)
    first, last = (0, slots - outside) if back else (outside, slots)
    numbers, flags = (slots, first, last, N, outer.shape[2]), {"PEAKED": plan.peaked, "BACK": back}
    flags["UNITS"] = plan.mode == "fine" and not back
    block = 512
    launch(
        (triton_sums.combine, "combine", sums.device, numbers, *flags.values()), triton_sums.combine,
        (rows, -(-N // block), 1), (sums, tops, outer, peaks), numbers,
        lambda: {"BLOCK": block, **flags}, lambda: [{"num_warps": 4}],
    )  # fmt: skip


def _as_state(plan: Plan, flat: Tensor, B: int) -> Tensor:
    """S and Z side by side, [B,N,F,V+1]."""
    S, Z = flat[:, : plan.F * plan.V], flat[:, plan.F * plan.V :]
    return torch.cat([S.view(B, -1, plan.F, plan.V), Z.reshape(B, -1, plan.F, 1)], -1)


def forward(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, visible: Tensor | None, sums: Tensor | None,
    peak: Tensor | None, map: str, causal: bool, final: bool, learns: bool,
) -> Results:  # fmt: skip
    q, k, v = by_rows(q), by_rows(k), by_rows(v)
    plan = planned(q, k, v, w, map)
    r = room(plan, q, v, sums, causal, final, learns)
    (B, H, T, _), S, rows = q.shape, k.shape[2], q.shape[0] * plan.G
    plan, ws = _directions(plan, w, v)
    visible = None if visible is None else visible.contiguous()
    if _chains(plan, causal, sums is not None, learns):
        _chained(plan, (q, k, v, ws), visible, sums, r, final)
        return r
    rises, heights = (r.c.new_empty(rows, -(-S // CHUNK) if plan.peaked else 0) for _ in range(2))
    if plan.peaked:
        _crests(plan, k, v, ws, visible, (r.lifts, r.c, rises, heights), True)
        if plan.map == "performer":  # a query's c cancels in the ratio, but sizes ψ
            _crests(plan, q, v, ws, None, (r.lifts_q, r.c, rises, heights), False)
    seen = v if visible is None else visible
    flags = {"MASKED": visible is not None, "LOCAL": r.local.numel() > 0, "STATES": r.states.numel() > 0}
    raw = torch.empty_like(r.tops)
    if sums is not None:
        _edge(r.states, raw, sums, None if peak is None else plan.inward(peak), units=plan.mode == "fine")
    if flags["LOCAL"] or flags["STATES"]:
        _summed(
            plan, rows, (k, v, ws, seen, r.lifts, rises, heights, v, v, r.local, r.marks, r.states, raw),
            *_strides(k, v), S, plan.keys_span, plan.keys_slots, 1, plan.G, BACK=False, EDGE=sums is not None, **flags,
        )  # fmt: skip
    if flags["STATES"]:
        _combined(plan, r.states, raw, r.outer, r.tops, sums is not None, False)
    chunk = 2 * CHUNK if plan.narrow and not causal else CHUNK  # without pairs there is room for more tokens
    run(
        triton_forward.outputs, (B * H * plan.blocks[1] * -(-T // chunk), 1), plan,
        (q, k, v, ws, seen, r.lifts_q, r.lifts, r.c, r.local, r.marks, r.states, r.outer, r.tops, r.out, r.inverses,
         r.peaks),
        *_strides(q, k, v, r.out), T, plan.keys_span, plan.keys_slots, H, B * H, plan.blocks[1],
        GROUP=H // plan.G, CAUSAL=causal, **flags, C=chunk,
    )  # fmt: skip
    if final:
        r.sums.copy_(_as_state(plan, r.states[:, -1], B))
        r.peak.copy_(plan.outward(r.tops[:, -1, 0]).view_as(r.peak)) if plan.peaked else r.peak.fill_(-math.inf)
    return r


def _chains(plan: Plan, causal: bool, started: bool, learns: bool) -> bool:
    """Whether one program does all. The gradient does not look for a state before the first chunk."""
    return plan.through and causal and not (started and learns)


def _chained(
    plan: Plan, inputs: tuple[Tensor, ...], visible: Tensor | None, sums: Tensor | None, r: Results, final: bool
) -> None:
    q, k, v, ws = inputs
    (_, H, T, _), rows = q.shape, q.shape[0] * plan.G
    segments = -(-T // plan.chain_span)
    handed = r.inverses.new_empty(rows * (segments - 1) * (BLOCK * plan.values + BLOCK))
    line = torch.zeros(1 + rows * segments, dtype=torch.int32, device=v.device)
    start = r.inverses if sums is None else sums.float().contiguous()
    run(
        triton_chained.chained, (rows * segments, 1), plan,
        (q, k, v, ws, v if visible is None else visible, start, r.out, r.inverses, r.local, r.marks, r.sums, handed,
         line),
        *_strides(q, k, v, r.out), T, plan.chain_span, segments, H, rows,
        GROUP=H // plan.G, MASKED=visible is not None, STARTED=sums is not None, FINAL=final,
        LOCAL=r.local.numel() > 0,
    )  # fmt: skip
    if final:
        r.peak.fill_(-math.inf)


def _summed(plan: Plan, rows: int, tensors: tuple[Tensor, ...], *numbers: int, **flags: Any) -> None:
    """Sums of x and y, the first two tensors, before each chunk and of each segment."""
    features, values = plan.blocks
    segments = (plan.queries_slots if flags["BACK"] else plan.keys_slots) - 1
    grid = (rows * features * values, segments)
    run(triton_sums.states, grid, plan, tensors, *numbers, features * values, values, **flags)


def room(
    plan: Plan, q: Tensor, v: Tensor, sums: Tensor | None, causal: bool, final: bool, learns: bool
) -> Results:  # fmt: skip
    """Room for all results. Heads side by side, as the layer merges them: its transpose back costs nothing."""
    B, H, T = q.shape[:3]
    wide: dict[str, Any] = {"dtype": torch.float32, "device": v.device}
    rows, S = B * plan.G, v.shape[2]
    slots = plan.keys_slots if final or sums is not None or not causal or plan.keys_slots > 2 else 0
    chunks = -(-S // CHUNK) if causal and min(S, plan.keys_span) > CHUNK else 0
    if _chains(plan, causal, sums is not None, learns):
        slots, chunks = 0, -(-S // CHUNK) if learns and S > CHUNK else 0
    return Results(
        torch.empty(B, T, H, plan.V, dtype=torch.float32 if plan.signed else v.dtype, device=v.device).transpose(1, 2),
        torch.empty(B, plan.G, plan.F if final else 0, plan.V + 1, **wide),
        torch.empty(B, plan.G if final else 0, **wide),
        torch.empty(B, H, T, **wide),
        torch.empty(B, plan.G, T if plan.peaked and causal else 0, **wide),
        torch.empty(rows, slots, plan.numbers, **wide),
        torch.empty(rows, slots, plan.F * plan.V, dtype=plan.kept, device=v.device),
        torch.empty(rows, slots, 2, **wide),
        torch.empty(rows, chunks, plan.F * plan.V, dtype=plan.kept, device=v.device),
        torch.empty(rows, chunks, plan.F + 2, **wide),
        torch.empty(B, H, T if plan.map == "performer" else 0, **wide),
        torch.empty(B, plan.G, S if plan.peaked else 0, **wide),
        torch.empty(B, plan.G, S if plan.peaked else 0, **wide),
    )


def gradients(
    d_out: Tensor, d_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, visible: Tensor | None,
    peak: Tensor | None, r: Results, map: str, causal: bool, started: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, d_out = by_rows(q), by_rows(k), by_rows(v), by_rows(d_out)
    plan = planned(q, k, v, w, map)
    (B, H, T, _), S, values = q.shape, k.shape[2], plan.blocks[1]
    group = H // plan.G
    plan, ws = _directions(plan, w, v)
    alone = plan._replace(parts=0) if plan.through else plan  # of these two programs the products wait for others
    span = S + CHUNK if _chains(plan, causal, started, True) else plan.keys_span  # the sums are of all that came before
    seen = v if visible is None else visible.contiguous()
    flags = {"GROUP": group, "MASKED": visible is not None, "CAUSAL": causal}
    dq, dk, dv, d_sums = gradient_room(plan, q, k, v, started)
    dq_parts, dk_parts, dv_parts = _parts(values, dq), _parts(values * group, dk), _parts(group, dv)
    delta = r.inverses.new_empty(values, B, H, T)
    sizes = r.inverses.new_empty(B, H, T if plan.peaked else 0)
    falls = r.inverses.new_empty(B * H, -(-T // CHUNK) if plan.peaked else 0)
    run(
        triton_backward.queries, (B * H * values * -(-T // CHUNK), 1), alone,
        (q, k, v, ws, seen, r.lifts_q, r.lifts, r.c, r.local, r.marks, r.states, r.outer, r.tops, r.out, r.inverses,
         r.peaks, d_out, dq_parts, delta, sizes, falls),
        *_strides(q, k, v, r.out, d_out), dq_parts.stride(0), *_strides(dq_parts[0]),
        T, span, plan.keys_slots, H, B * H, values,
        **flags, LOCAL=r.local.numel() > 0, STATES=r.states.numel() > 0,
    )  # fmt: skip
    delta = delta[0] if values == 1 else delta.sum(0)
    found = (sizes, falls, r.inverses, delta)
    back, outer, sunk, local, marks = _back_sums(plan, (q, d_out, ws), d_state, found, r.tops, causal, started)
    run(
        triton_backward.keys_values, (B * H * values * -(-S // CHUNK), 1), alone,
        (q, k, v, ws, seen, r.lifts_q, r.lifts, r.c, local, marks, back, outer, sunk, r.inverses, r.peaks, d_out,
         delta, dk_parts, dv_parts),
        *_strides(q, k, v, d_out), dk_parts.stride(0), *_strides(dk_parts[0]), dv_parts.stride(0),
        *_strides(dv_parts[0]), S, plan.queries_span, plan.queries_slots, H, B * H, values,
        **flags, LOCAL=local.numel() > 0, STATES=back.numel() > 0,
    )  # fmt: skip
    for parts, whole in ((dq_parts, dq), (dk_parts, dk), (dv_parts, dv)):
        if parts.shape[0] > 1:
            whole.copy_(parts.sum(0))
    if started:
        d_sums.copy_(_as_state(plan, back[:, 0], B).unflatten(1, (plan.G, group)).sum(2))
        if plan.peaked and peak is not None:  # heads of a group have the same peaks
            d_sums.mul_(torch.exp2(plan.inward(peak) + sunk[:, 0, 0].view(B, plan.G, group)[..., 0])[..., None, None])
    return dq, dk, dv, d_sums


def _back_sums(
    plan: Plan, inputs: tuple[Tensor, Tensor, Tensor], d_state: Tensor | None, found: tuple[Tensor, ...], tops: Tensor,
    causal: bool, started: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """R and ρ of each query head from the end: running totals over the segments, R once more as the products take it,
    their peaks, and sums at chunks.
    inputs: q, ∂out and directions; found: sizes, falls and δ of `queries`, and the inverses."""
    q, d_out, ws = inputs
    (B, H, T), group = q.shape[:3], q.shape[1] // plan.G
    slots = plan.queries_slots if plan.queries_slots > 2 or not causal or d_state is not None or started else 0
    chunks = -(-T // CHUNK) if causal and min(T, plan.queries_span) > CHUNK else 0
    back, raw = tops.new_empty(B * H, slots, plan.numbers), tops.new_empty(B * H, slots, 2)
    local = q.new_empty(B * H, chunks, plan.F * plan.V, dtype=plan.kept_back)
    marks = raw.new_empty(B * H, chunks, plan.F + 2)
    outer, sunk = local.new_empty(B * H, slots, plan.F * plan.V), torch.empty_like(raw)
    if not slots and not chunks:
        return back, outer, sunk, local, marks
    if d_state is not None:  # of all heads of a group, so it counts for the first
        first = d_state.new_zeros(B, plan.G, group, *d_state.shape[2:])
        first[:, :, 0] = d_state
        peak = None
        if plan.peaked:
            last = tops[:, -1:, 0].expand(-1, group)
            peak = torch.where(last == -math.inf, last, -last)
        _edge(back, raw, first.flatten(1, 2), peak, back=True)
    _summed(
        plan, B * H, (q, d_out, ws, q, *found[:2], *found[1:], local, marks, back, raw), *_strides(q, d_out), T,
        plan.queries_span, plan.queries_slots, 0, H, BACK=True, EDGE=d_state is not None, MASKED=False,
        LOCAL=chunks > 0, STATES=slots > 0,
    )  # fmt: skip
    if slots:
        _combined(plan, back, raw, outer, sunk, d_state is not None, True)
    return back, outer, sunk, local, marks


def gradient_room(plan: Plan, q: Tensor, k: Tensor, v: Tensor, started: bool) -> tuple[Tensor, ...]:
    dq, dk, dv = (torch.empty_like(by_rows(x)) for x in (q, k, v))  # laid out as they are: PyTorch copies others
    d_sums = torch.empty(q.shape[0], plan.G, plan.F if started else 0, plan.V + 1, dtype=torch.float32, device=q.device)
    return dq, dk, dv, d_sums


def _parts(shares: int, x: Tensor) -> Tensor:
    """Room for several programs' shares of a gradient; the gradient itself where there is one program."""
    return x[None] if shares == 1 else torch.empty(shares, *x.shape, dtype=torch.float32, device=x.device)
