"""Linear attention as PyTorch operators: `regard::linear_attention` and its gradient. Imported only where one runs.

Both are opaque to torch.compile and known to the FLOP counter by the cost that the mechanisms declare. Nothing is
added up in an order that could change: the same inputs give the same bits.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula
from torch.utils.weak import WeakIdKeyDictionary

from regard.kernels import triton_linear, triton_linear_backward
from regard.kernels.linear_plan import CHUNK, LOG2E, Plan, launch, planned, run
from regard.mechanisms.linear import linear_flops
from regard.shapes import Size


class Results(NamedTuple):
    """What forward finds: the output; the state after the last token, where asked for; and what the gradient needs."""

    out: Tensor  # [B,H,T,V]
    sums: Tensor  # [B,G,F,V+1]
    peak: Tensor  # [B,G]
    inverses: Tensor  # of the totals of the rows
    peaks: Tensor  # and their peaks
    states: Tensor  # sums before each segment, [S, Z] side by side, and their peaks
    tops: Tensor
    local: Tensor  # sums before each chunk in its segment, [·,F,V]; marks: their Z and peak, [·,F+1]
    marks: Tensor
    lifts_q: Tensor
    lifts: Tensor
    c: Tensor


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(n for x in tensors for n in x.stride()[:3])


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _directions(plan: Plan, w: Tensor | None, x: Tensor) -> Tensor:
    """w [F,K] in the units of the programs; for bfloat16 in parts, one after the other. Kept while w is."""
    if w is None:
        return x
    which = (None if w.is_inference() else w._version, plan.map, x.dtype)
    known: tuple[Any, Tensor] | None = _KEPT.get(w)
    if known is not None and known[0] == which:
        return known[1]
    made: Tensor = w.detach().float() * (plan.K**-0.25 * (LOG2E if plan.map == "performer" else 1 / math.tau))
    if x.dtype == torch.bfloat16:
        parts = []
        for _ in range(2 if plan.map == "performer" else 3):
            parts.append(made.bfloat16())
            made = made - parts[-1].float()
        made = torch.cat(parts)
    made = made.contiguous()
    if which[0] is not None and not (w.is_cuda and torch.cuda.is_current_stream_capturing()):
        _KEPT[w] = which, made
    return made


_KEPT: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _crests(
    plan: Plan, x: Tensor, w: Tensor, visible: Tensor | None, lifts: Tensor, c: Tensor, tops: Tensor, keys: bool
) -> None:
    """Lift and c of each vector, [B,N,T], and the largest c of each chunk of keys."""
    B, N, T = x.shape[:3]
    seen = x if visible is None else visible
    run(
        triton_linear.crests, (B * N * -(-T // CHUNK), 1), plan, (x, w, seen, lifts, c, tops),
        *_strides(x), T, N, B * N, 1, KEYS=keys, MASKED=visible is not None,
    )  # fmt: skip


def _combined(
    plan: Plan, sums: Tensor, tops: Tensor, peaks: Tensor, edge: tuple[Tensor, Tensor | None] | None, causal: bool,
    back: bool,
) -> None:  # fmt: skip
    """Running totals in place of the sums of the segments, and their peaks. `edge`: sums and peak of what comes from
    outside."""
    rows, slots, N = sums.shape
    if slots == 2 and edge is None:  # one segment is all, and nothing comes from outside
        if causal:
            sums[:, int(back)].zero_()
            tops[:, int(back)].fill_(-math.inf)
        return
    if edge is not None:
        slot = slots - 1 if back else 0
        state = edge[0].float().flatten(0, 1)
        sums[:, slot] = torch.cat([state[..., :-1].flatten(1), state[..., -1]], 1)
        if edge[1] is not None:
            tops[:, slot] = edge[1].flatten()
    outside = int(edge is None)
    first, last = (0, slots - outside) if back else (outside, slots)
    numbers, flags = (slots, first, last, N), {"PEAKED": plan.peaked, "BACK": back}
    launch(
        (triton_linear.combine, "combine", sums.device, numbers, *flags.values()), triton_linear.combine,
        (rows, -(-N // 64), 1), (sums, tops, peaks), numbers,
        lambda: {"SP": max(16, triton.next_power_of_2(slots)), "BLOCK": 64, **flags}, lambda: [{"num_warps": 4}],
    )  # fmt: skip


def _as_state(plan: Plan, flat: Tensor, B: int) -> Tensor:
    """S and Z side by side, [B,N,F,V+1]."""
    S, Z = flat[:, : plan.F * plan.V], flat[:, plan.F * plan.V :]
    return torch.cat([S.view(B, -1, plan.F, plan.V), Z.reshape(B, -1, plan.F, 1)], -1)


@torch.library.custom_op("regard::linear_attention", mutates_args=())
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, visible: Tensor | None, sums: Tensor | None,
    peak: Tensor | None, map: str, causal: bool, final: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """All of `Results`.

    map: "given" (q and k are features), "elu", "performer", "fourier". w: its directions [F,K]. sums, peak: a state to
    start from."""
    return (*_forward(q, k, v, w, visible, sums, peak, map, causal, final),)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, visible: Tensor | None, sums: Tensor | None,
    peak: Tensor | None, map: str, causal: bool, final: bool,
) -> Results:  # fmt: skip
    q, k, v = _rows(q), _rows(k), _rows(v)
    plan = planned(q, k, v, w, map)
    r = _room(plan, q, v, sums, causal, final)
    (B, H, T, _), S, rows = q.shape, k.shape[2], q.shape[0] * plan.G
    ws = _directions(plan, w, v)
    visible = None if visible is None else visible.contiguous()
    rises = r.c.new_empty(rows, -(-S // CHUNK) if plan.peaked else 0)
    if plan.peaked:
        _crests(plan, k, ws, visible, r.lifts, r.c, rises, True)
        if plan.map == "performer":  # a query's c cancels in the ratio, but sizes ψ
            _crests(plan, q, ws, None, r.lifts_q, r.c, rises, False)
        else:
            r.lifts_q.zero_()
    seen = v if visible is None else visible
    flags = {"MASKED": visible is not None, "LOCAL": r.local.numel() > 0, "STATES": r.states.numel() > 0}
    raw = r.tops if plan.keys_slots == 2 and sums is None else torch.empty_like(r.tops)
    if flags["LOCAL"] or flags["STATES"]:
        _summed(
            plan, rows, (k, v, ws, seen, r.lifts, rises, v, v, r.local, r.marks, r.states, raw), *_strides(k, v), S,
            plan.keys_span, plan.keys_slots, 1, plan.G, BACK=False, **flags,
        )  # fmt: skip
    if flags["STATES"]:
        edge = None if sums is None else (sums, None if peak is None else plan.inward(peak))
        _combined(plan, r.states, raw, r.tops, edge, causal, False)
    narrow = plan.mode == "half" and max(plan.K, plan.V) <= 64
    chunk = 2 * CHUNK if narrow and not causal else CHUNK  # without pairs there is room for more tokens
    run(
        triton_linear.outputs, (B * H * plan.blocks[1] * -(-T // chunk), 1), plan,
        (q, k, v, ws, seen, r.lifts_q, r.lifts, r.c, r.local, r.marks, r.states, r.tops, r.out, r.inverses, r.peaks),
        *_strides(q, k, v, r.out), T, plan.keys_span, plan.keys_slots, H, B * H, plan.blocks[1],
        GROUP=H // plan.G, CAUSAL=causal, **flags, C=chunk,
    )  # fmt: skip
    if final:
        r.sums.copy_(_as_state(plan, r.states[:, -1], B))
        r.peak.copy_(plan.outward(r.tops[:, -1]).view_as(r.peak)) if plan.peaked else r.peak.fill_(-math.inf)
    return r


def _summed(plan: Plan, rows: int, tensors: tuple[Tensor, ...], *numbers: int, **flags: Any) -> None:
    """Sums of x and y, the first two tensors, before each chunk and of each segment."""
    features, values = plan.blocks
    segments = (plan.queries_slots if flags["BACK"] else plan.keys_slots) - 1
    grid = (rows * features * values, segments)
    run(triton_linear.states, grid, plan, tensors, *numbers, features * values, values, **flags)


@linear_attention.register_fake
def _fake(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, visible: Tensor | None, sums: Tensor | None,
    peak: Tensor | None, map: str, causal: bool, final: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(_room(planned(q, k, v, w, map), q, v, sums, causal, final))


def _room(plan: Plan, q: Tensor, v: Tensor, sums: Tensor | None, causal: bool, final: bool) -> Results:
    """Room for all results. Heads side by side, as the layer merges them: its transpose back costs nothing."""
    B, H, T = q.shape[:3]
    wide: dict[str, Any] = {"dtype": torch.float32, "device": v.device}
    slots = plan.keys_slots if final or sums is not None or not causal or plan.keys_slots > 2 else 0
    rows, S = B * plan.G, v.shape[2]
    chunks = -(-S // CHUNK) if causal and min(S, plan.keys_span) > CHUNK else 0
    return Results(
        torch.empty(B, T, H, plan.V, dtype=torch.float32 if plan.signed else v.dtype, device=v.device).transpose(1, 2),
        torch.empty(B, plan.G, plan.F if final else 0, plan.V + 1, **wide),
        torch.empty(B, plan.G if final else 0, **wide),
        torch.empty(B, H, T, **wide),
        torch.empty(B, plan.G, T if plan.peaked and causal else 0, **wide),
        torch.empty(rows, slots, plan.numbers, **wide),
        torch.empty(rows, slots, **wide),
        torch.empty(rows, chunks, plan.F * plan.V, dtype=plan.kept, device=v.device),
        torch.empty(rows, chunks, plan.F + 1, **wide),
        torch.empty(B, H, T if plan.peaked else 0, **wide),
        torch.empty(B, plan.G, S if plan.peaked else 0, **wide),
        torch.empty(B, plan.G, S if plan.peaked else 0, **wide),
    )


@torch.library.custom_op("regard::linear_attention_backward", mutates_args=())
def linear_attention_backward(
    d_out: Tensor, d_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, visible: Tensor | None,
    peak: Tensor | None, out: Tensor, inverses: Tensor, peaks: Tensor, states: Tensor, tops: Tensor, local: Tensor,
    marks: Tensor, lifts_q: Tensor, lifts: Tensor, c: Tensor, map: str, causal: bool, started: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and, where it `started` from a state, of the sums of that state."""
    r = Results(out, out, out, inverses, peaks, states, tops, local, marks, lifts_q, lifts, c)
    return _gradients(d_out, d_state, q, k, v, w, visible, peak, r, map, causal, started)


def _gradients(
    d_out: Tensor, d_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, visible: Tensor | None,
    peak: Tensor | None, r: Results, map: str, causal: bool, started: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, d_out = _rows(q), _rows(k), _rows(v), _rows(d_out)
    plan = planned(q, k, v, w, map)
    (B, H, T, _), S, values = q.shape, k.shape[2], plan.blocks[1]
    group = H // plan.G
    ws = _directions(plan, w, v)
    seen = v if visible is None else visible.contiguous()
    flags = {"GROUP": group, "MASKED": visible is not None, "CAUSAL": causal}
    dq, dk, dv, d_sums = _gradient_room(plan, q, k, v, started)
    dq_parts, dk_parts, dv_parts = _parts(values, dq), _parts(values * group, dk), _parts(group, dv)
    delta = r.inverses.new_empty(values, B, H, T)
    sizes = r.inverses.new_empty(B, H, T if plan.peaked else 0)
    falls = r.inverses.new_empty(B * H, -(-T // CHUNK) if plan.peaked else 0)
    run(
        triton_linear_backward.queries, (B * H * values * -(-T // CHUNK), 1), plan,
        (q, k, v, ws, seen, r.lifts_q, r.lifts, r.c, r.local, r.marks, r.states, r.tops, r.out, r.inverses, r.peaks,
         d_out, dq_parts, delta, sizes, falls),
        *_strides(q, k, v, r.out, d_out), dq_parts.stride(0), *_strides(dq_parts[0]),
        T, plan.keys_span, plan.keys_slots, H, B * H, values,
        **flags, LOCAL=r.local.numel() > 0, STATES=r.states.numel() > 0,
    )  # fmt: skip
    delta = delta[0] if values == 1 else delta.sum(0)
    found = (sizes, falls, r.inverses, delta)
    back, sunk, local, marks = _back_sums(plan, (q, d_out, ws), d_state, found, r.tops, causal, started)
    run(
        triton_linear_backward.keys_values, (B * H * values * -(-S // CHUNK), 1), plan,
        (q, k, v, ws, seen, r.lifts_q, r.lifts, r.c, local, marks, back, sunk, r.inverses, r.peaks, d_out, delta,
         dk_parts, dv_parts),
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
            d_sums.mul_(torch.exp2(plan.inward(peak) + sunk[:, 0].view(B, plan.G, group)[..., 0])[..., None, None])
    return dq, dk, dv, d_sums


def _back_sums(
    plan: Plan, inputs: tuple[Tensor, Tensor, Tensor], d_state: Tensor | None, found: tuple[Tensor, ...], tops: Tensor,
    causal: bool, started: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """R and ρ of each query head from the end: running totals over the segments, their peaks, and sums at chunks.
    inputs: q, ∂out and directions; found: sizes, falls and δ of `queries`, and the inverses."""
    q, d_out, ws = inputs
    (B, H, T), group = q.shape[:3], q.shape[1] // plan.G
    slots = plan.queries_slots if plan.queries_slots > 2 or not causal or d_state is not None or started else 0
    chunks = -(-T // CHUNK) if causal and min(T, plan.queries_span) > CHUNK else 0
    back, raw = tops.new_empty(B * H, slots, plan.numbers), tops.new_empty(B * H, slots)
    local = q.new_empty(B * H, chunks, plan.F * plan.V, dtype=plan.kept)
    marks = raw.new_empty(B * H, chunks, plan.F + 1)
    sunk = raw if slots == 2 and d_state is None else torch.empty_like(raw)
    if not slots and not chunks:
        return back, sunk, local, marks
    _summed(
        plan, B * H, (q, d_out, ws, q, *found, local, marks, back, raw), *_strides(q, d_out), T,
        plan.queries_span, plan.queries_slots, 0, H, BACK=True, MASKED=False, LOCAL=chunks > 0, STATES=slots > 0,
    )  # fmt: skip
    if slots:
        edge = None
        if d_state is not None:  # of all heads of a group, so it counts for the first
            first = d_state.new_zeros(B, plan.G, group, *d_state.shape[2:])
            first[:, :, 0] = d_state
            last = tops[:, -1:].expand(-1, group)
            edge = first.flatten(1, 2), torch.where(last == -math.inf, last, -last) if plan.peaked else None
        _combined(plan, back, raw, sunk, edge, causal, True)
    return back, sunk, local, marks


def _gradient_room(plan: Plan, q: Tensor, k: Tensor, v: Tensor, started: bool) -> tuple[Tensor, ...]:
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))  # laid out as they are: PyTorch copies others
    d_sums = torch.empty(q.shape[0], plan.G, plan.F if started else 0, plan.V + 1, dtype=torch.float32, device=q.device)
    return dq, dk, dv, d_sums


def _parts(shares: int, x: Tensor) -> Tensor:
    """Room for several programs' shares of a gradient; the gradient itself where there is one program."""
    return x[None] if shares == 1 else torch.empty(shares, *x.shape, dtype=torch.float32, device=x.device)


@linear_attention_backward.register_fake
def _fake_backward(
    d_out: Tensor, d_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, visible: Tensor | None,
    peak: Tensor | None, out: Tensor, inverses: Tensor, peaks: Tensor, states: Tensor, tops: Tensor, local: Tensor,
    marks: Tensor, lifts_q: Tensor, lifts: Tensor, c: Tensor, map: str, causal: bool, started: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _gradient_room(planned(q, k, v, w, map), _rows(q), _rows(k), _rows(v), started)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, w, visible, sums, peak, ctx.map, ctx.causal, _ = inputs
    out, _, _, *rest = output
    ctx.started = sums is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, w, visible, peak, out, *rest)


def _backward(ctx: Any, d_out: Tensor | None, d_state: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, w, visible, peak, out, *rest = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    inputs, options = (d_out, d_state, q, k, v, w, visible, peak), (ctx.map, ctx.causal, ctx.started)
    if _watched():
        dq, dk, dv, d_sums = linear_attention_backward(*inputs, out, *rest, *options)
    else:
        dq, dk, dv, d_sums = _gradients(*inputs, Results(out, out, out, *rest), *options)
    return dq, dk, dv, None, None, d_sums if ctx.started else None, None, None, None, None


linear_attention.register_autograd(_backward, setup_context=_setup)


class _Attend(torch.autograd.Function):
    """The operator without PyTorch's dispatcher, which costs more time than the device needs for short sequences."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        results = _forward(*inputs)
        _setup(ctx, inputs, results)
        return results[:3]

    backward = staticmethod(_backward)


def _watched() -> bool:
    """Whether someone looks at operators: a compiler, or a mode such as the FLOP counter."""
    if torch.compiler.is_compiling():
        return True
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    # A counter copies the formulas that are known when it is made, which may have been before this file was read.
    for counter in (getattr(mode, "counter", None) for mode in _get_current_dispatch_mode_stack()):
        if isinstance(counter, FlopCounterMode):
            for operator in (torch.ops.regard.linear_attention, torch.ops.regard.linear_attention_backward):
                counter.flop_registry.setdefault(operator, flop_registry[operator])
    return True


def attended(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(out, sums, peak) by the shortest way: arguments as of `linear_attention`."""
    if _watched():
        results: tuple[Tensor, ...] = linear_attention(*inputs)
    elif torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        results = _Attend.apply(*inputs)  # type: ignore[no-untyped-call]
    else:
        results = _forward(*inputs)
    return results[0], results[1], results[2]


def _flops(q: Any, k: Any, v: Any, w: Any, map: str, causal: bool, per_vector: int | None = None) -> int:
    (B, H, T, K), (G, S, V) = q, v[1:]
    F = K if w is None else w[0] * (2 if map == "fourier" else 1)
    mapped = 0 if w is None else 2 * K * w[0]
    return linear_flops(Size(B, T, S, H, G, K, V, causal), F, mapped if per_vector is None else per_vector)[0]


@register_flop_formula(torch.ops.regard.linear_attention)
def _forward_flops(
    q: Any, k: Any, v: Any, w: Any, visible: Any, sums: Any, peak: Any, map: str, causal: bool, *_: Any, **__: Any
) -> int:
    return _flops(q, k, v, w, map, causal)


@register_flop_formula(torch.ops.regard.linear_attention_backward)
def _backward_flops(
    d_out: Any, d_state: Any, q: Any, k: Any, v: Any, w: Any, visible: Any, peak: Any, out: Any, inverses: Any,
    peaks: Any, states: Any, tops: Any, local: Any, marks: Any, lifts_q: Any, lifts: Any, c: Any, map: str,
    causal: bool, *_: Any, **__: Any,
) -> int:  # fmt: skip
    """Two products for each one forward, but one for a projection: its directions have no gradient."""
    return _flops(q, k, v, w, map, causal) + _flops(q, k, v, w, map, causal, 0)
