"""Linear attention as PyTorch operators: `regard::linear_attention` and its gradient. Imported only where one runs.

Both are opaque to torch.compile and known to the FLOP counter by the cost that the mechanisms declare. Nothing is
added up in an order that could change: the same inputs give the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from regard.kernels import triton_linear, triton_linear_backward
from regard.kernels.linear_plan import LOG2E, Plan, launch, padded, planned, run
from regard.mechanisms.linear import linear_flops
from regard.shapes import Size

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(n for x in tensors for n in x.stride()[:3])


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _directions(plan: Plan, w: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """w [K,F] in the units of the programs, and what rounding took from it."""
    if w is None:
        return x, x
    unit = plan.K**-0.25 * (LOG2E if plan.map == "performer" else 1 / math.tau)
    w = w.float().mT * (unit if x.dtype != torch.bfloat16 else unit * 2**6)
    w = (torch.cat([w, w], 1) if plan.map == "fourier" else w).contiguous()
    if x.dtype != torch.bfloat16:
        return w, w
    high = w.half()
    return high, (w - high.float()).half() if plan.map == "fourier" else high


def _crests(plan: Plan, x: Tensor, high: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
    """Lift and c of each vector, [B,N,T]; where there are none, anything. A query's c cancels in the ratio."""
    if not plan.peaked:
        return x, x
    B, N, T = x.shape[:3]
    if plan.signed and not keys:
        return torch.zeros(B, N, T, dtype=torch.float32, device=x.device), x
    lifts, c = (torch.empty(B, N, T, dtype=torch.float32, device=x.device) for _ in range(2))
    run(triton_linear.crests, B * N, -(-T // 64), plan, (x, high, lifts, c), *_strides(x), T, N)
    return lifts, c


def _merged(parts: Tensor, out: Tensor, dens: Tensor | None = None, den: Tensor | None = None) -> None:
    """out = Σ parts / Σ dens, [P,B,H,T,W] and [P,B,H,T]."""
    P, B, H, T, W = parts.shape
    numbers = (*_strides(out), H, T, P, B * H * T)
    launch(
        (triton_linear.merge, "merge", out.device, out.dtype, W, numbers, dens is None), triton_linear.merge,
        (B * H, -(-T // 64), 1), (parts, parts if dens is None else dens, out, parts if den is None else den), numbers,
        lambda: {"W": W, "WP": padded(W), "C": 64, "DIVIDE": dens is not None}, lambda: [{"num_warps": 4}],
    )  # fmt: skip


def _combined(
    plan: Plan,
    sums: Tensor,
    tops: Tensor,
    peaks: Tensor,
    filled: int,
    edge: tuple[Tensor, Tensor | None] | None,
    back: bool,
) -> None:
    """Running totals in place of the sums of `filled` segments, and their peaks. `edge`: sums and peak of what comes
    from outside."""
    rows, slots, N = sums.shape
    if edge is not None:
        slot = slots - 1 if back else 0
        state = edge[0].float().flatten(0, 1)
        sums[:, slot] = torch.cat([state[..., :-1].flatten(1), state[..., -1]], 1)
        if edge[1] is not None:
            tops[:, slot] = edge[1].flatten()
    outside = int(edge is None)
    first, last = (0, slots - outside) if back else (outside, filled + 1)
    numbers, flags = (slots, first, last, N), {"PEAKED": plan.peaked, "BACK": back}
    launch(
        (triton_linear.combine, "combine", sums.device, numbers, *flags.values()), triton_linear.combine,
        (rows, -(-N // 64), 1), (sums, tops, peaks), numbers,
        lambda: {"SP": max(16, triton.next_power_of_2(slots)), "BLOCK": 64, **flags}, lambda: [{"num_warps": 4}],
    )  # fmt: skip


def _as_state(plan: Plan, flat: Tensor, B: int) -> Tensor:
    """S and Z side by side, [B,G,F,V+1]."""
    S, Z = flat[:, : plan.F * plan.V], flat[:, plan.F * plan.V :]
    return torch.cat([S.view(B, plan.G, plan.F, plan.V), Z.reshape(B, plan.G, plan.F, 1)], -1)


@torch.library.custom_op("regard::linear_attention", mutates_args=())
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, visible: Tensor | None, sums: Tensor | None,
    peak: Tensor | None, map: str, causal: bool, final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out; the state after the last token, its sums and peak, where `final`; and what the gradient needs: totals and
    peaks of the rows, sums before each segment and their peaks.

    map: "given" (q and k are features), "elu", "performer", "fourier". w: its directions [F,K]. sums, peak: a state to
    start from."""
    return _forward(q, k, v, w, visible, sums, peak, map, causal, final)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, visible: Tensor | None, sums: Tensor | None,
    peak: Tensor | None, map: str, causal: bool, final: bool,
) -> Results:  # fmt: skip
    q, k, v = _rows(q), _rows(k), _rows(v)
    plan = planned(q, k, v, w, map)
    out, state, top, den, peaks, states, tops = _room(plan, q, v, sums, causal, final)
    (B, H, T, _), S, rows = q.shape, k.shape[2], q.shape[0] * plan.G
    high, low = _directions(plan, w, v)
    (lifts_q, _), (lifts, c) = _crests(plan, q, high, False), _crests(plan, k, high, True)
    seen = v if visible is None else visible.contiguous()
    masked = visible is not None
    if states.numel():
        raw = torch.empty_like(tops)
        wanted = plan.keys_slots - (1 if final or not causal else 2)  # nothing starts from the last segment
        if wanted:
            run(
                triton_linear.sums, rows, wanted, plan, (k, v, high, low, seen, lifts, c, v, v, states, raw),
                *_strides(k, v), S, 1, S, plan.keys_span, plan.keys_slots, 1, plan.G,
                GROUP=1, MASKED=masked, BACK=False,
            )  # fmt: skip
        edge = None if sums is None else (sums, None if peak is None else plan.inward(peak))
        _combined(plan, states, raw, tops, wanted, edge, False)
    blocks = plan.blocks[0]
    parts, dens = out[None], den
    if blocks > 1:
        parts, dens = den.new_empty(blocks, B, H, T, plan.V), den.new_empty(blocks, B, H, T)
    run(
        triton_linear.scan, B * H, plan.queries_slots - 1, plan,
        (q, k, v, high, low, seen, lifts_q, lifts, c, states, tops, parts, dens, peaks),
        *_strides(q, k, v), parts.stride(0), *_strides(parts[0]), T, plan.queries_span, plan.keys_slots, H,
        GROUP=H // plan.G, MASKED=masked, CAUSAL=causal, STATES=states.numel() > 0,
    )  # fmt: skip
    if blocks > 1:
        _merged(parts, out, dens, den)
    if final:
        state.copy_(_as_state(plan, states[:, -1], B))
        top.copy_(plan.outward(tops[:, -1]).view_as(top)) if plan.peaked else top.fill_(-math.inf)
    return out, state, top, den, peaks, states, tops


@linear_attention.register_fake
def _fake(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, visible: Tensor | None, sums: Tensor | None,
    peak: Tensor | None, map: str, causal: bool, final: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _room(planned(q, k, v, w, map), q, v, sums, causal, final)


def _room(plan: Plan, q: Tensor, v: Tensor, sums: Tensor | None, causal: bool, final: bool) -> Results:
    """Room for all results. Heads side by side, as the layer merges them: its transpose back costs nothing."""
    B, H, T = q.shape[:3]
    wide: dict[str, Any] = {"dtype": torch.float32, "device": v.device}
    slots = plan.keys_slots if final or sums is not None or not causal or plan.keys_slots > 2 else 0
    return (
        torch.empty(B, T, H, plan.V, dtype=torch.float32 if plan.signed else v.dtype, device=v.device).transpose(1, 2),
        torch.empty(B, plan.G, plan.F if final else 0, plan.V + 1, **wide),
        torch.empty(B, plan.G if final else 0, **wide),
        torch.empty(B, H, T, **wide),
        torch.empty(B, plan.G, T if plan.peaked and causal else 0, **wide),
        torch.empty(B * plan.G, slots, plan.numbers, **wide),
        torch.empty(B * plan.G, slots, **wide),
    )


@torch.library.custom_op("regard::linear_attention_backward", mutates_args=())
def linear_attention_backward(
    d_out: Tensor, d_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, visible: Tensor | None,
    peak: Tensor | None, out: Tensor, den: Tensor, peaks: Tensor, states: Tensor, tops: Tensor, map: str,
    causal: bool, started: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and, where it `started` from a state, of the sums of that state."""
    return _gradients(d_out, d_state, q, k, v, w, visible, peak, out, den, peaks, states, tops, map, causal, started)


def _gradients(
    d_out: Tensor, d_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, visible: Tensor | None,
    peak: Tensor | None, out: Tensor, den: Tensor, peaks: Tensor, states: Tensor, tops: Tensor, map: str,
    causal: bool, started: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, d_out = _rows(q), _rows(k), _rows(v), _rows(d_out)
    plan = planned(q, k, v, w, map)
    (B, H, T, _), S, rows = q.shape, k.shape[2], q.shape[0] * plan.G
    high, low = _directions(plan, w, v)
    (lifts_q, _), (lifts, c) = _crests(plan, q, high, False), _crests(plan, k, high, True)
    seen = v if visible is None else visible.contiguous()
    flags = {"GROUP": H // plan.G, "MASKED": visible is not None, "CAUSAL": causal}
    dq, dk, dv, d_sums = _gradient_room(plan, q, k, v, started)
    dq_parts, dk_parts, dv_parts = _parts(plan.shares, dq), _parts(plan.shares, dk), _parts(plan.blocks[0], dv)
    delta = den.new_empty(plan.blocks[1], B, H, T)
    run(
        triton_linear_backward.queries, B * H, plan.queries_slots - 1, plan,
        (q, k, v, high, low, seen, lifts_q, lifts, c, states, tops, out, den, peaks, d_out, dq_parts, delta),
        *_strides(q, k, v, out, d_out), dq_parts.stride(0), *_strides(dq_parts[0]),
        T, plan.queries_span, plan.keys_slots, H, **flags, STATES=states.numel() > 0,
    )  # fmt: skip
    delta = delta[0] if delta.shape[0] == 1 else delta.sum(0)
    back, sunk = _back_sums(plan, q, d_out, d_state, high, low, lifts_q, den, delta, peaks, tops, causal, started)
    run(
        triton_linear_backward.keys_values, rows, plan.keys_slots - 1, plan,
        (q, k, v, high, low, seen, lifts_q, lifts, c, back, sunk, den, peaks, d_out, delta, dk_parts, dv_parts),
        *_strides(q, k, v, d_out), dk_parts.stride(0), *_strides(dk_parts[0]), dv_parts.stride(0),
        *_strides(dv_parts[0]), S, plan.keys_span, plan.queries_slots, plan.G, **flags, STATES=back.numel() > 0,
    )  # fmt: skip
    for parts, whole in ((dq_parts, dq), (dk_parts, dk), (dv_parts, dv)):
        if parts.shape[0] > 1:
            _merged(parts, whole)
    if started:
        d_sums.copy_(_as_state(plan, back[:, 0], B))
        if plan.peaked and peak is not None:
            d_sums.mul_(torch.exp2(plan.inward(peak) + sunk[:, 0].view_as(peak))[..., None, None])
    return dq, dk, dv, d_sums


def _back_sums(
    plan: Plan, q: Tensor, d_out: Tensor, d_state: Tensor | None, high: Tensor, low: Tensor, lifts: Tensor,
    den: Tensor, delta: Tensor, peaks: Tensor, tops: Tensor, causal: bool, started: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Running totals of R and ρ from the end, and their peaks."""
    B, H, T = q.shape[:3]
    slots = plan.queries_slots
    if slots == 2 and causal and d_state is None and not started:
        return den.new_empty(0), den.new_empty(0)
    back = den.new_empty(B * plan.G, slots, plan.numbers)
    raw = den.new_empty(B * plan.G, slots)
    row_peaks, strides = (peaks, (T, 1)) if causal or not plan.peaked else (tops[:, -1:], (tops.shape[1], 0))
    run(
        triton_linear.sums, B * plan.G, slots - 1, plan,
        (q, d_out, high, low, q, lifts, row_peaks, den, delta, back, raw),
        *_strides(q, d_out), *strides, T, plan.queries_span, slots, 0, plan.G,
        GROUP=H // plan.G, MASKED=False, BACK=True,
    )  # fmt: skip
    edge = None
    if d_state is not None:
        last = tops[:, -1]
        edge = (d_state, torch.where(last == -math.inf, last, -last) if plan.peaked else None)
    sunk = torch.empty_like(raw)
    _combined(plan, back, raw, sunk, slots - 1, edge, True)
    return back, sunk


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
    peak: Tensor | None, out: Tensor, den: Tensor, peaks: Tensor, states: Tensor, tops: Tensor, map: str,
    causal: bool, started: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _gradient_room(planned(q, k, v, w, map), _rows(q), _rows(k), _rows(v), started)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    q, k, v, w, visible, sums, peak, ctx.map, ctx.causal, _ = inputs
    out, _, _, den, peaks, states, tops = output
    ctx.started = sums is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, w, visible, peak, out, den, peaks, states, tops)


def _backward(ctx: Any, d_out: Tensor | None, d_state: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, w, visible, peak, out, *rest = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    way: Any = linear_attention_backward if _watched() else _gradients
    dq, dk, dv, d_sums = way(d_out, d_state, q, k, v, w, visible, peak, out, *rest, ctx.map, ctx.causal, ctx.started)
    return dq, dk, dv, None, None, d_sums if ctx.started else None, None, None, None, None


linear_attention.register_autograd(_backward, setup_context=_setup)


class _Attend(torch.autograd.Function):
    """The operator without PyTorch's dispatcher, which costs more time than the device needs for short sequences."""

    @staticmethod
    def forward(*inputs: Any) -> Results:
        return _forward(*inputs)

    setup_context = staticmethod(_setup)
    backward = staticmethod(_backward)


def _watched() -> bool:
    """Whether someone looks at operators: a compiler, or a mode such as the FLOP counter."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def attended(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(out, sums, peak) by the shortest way: arguments as of `linear_attention`."""
    if _watched():
        results: Results = linear_attention(*inputs)
    elif torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        results = _Attend.apply(*inputs)  # type: ignore[no-untyped-call]
    else:
        results = _forward(*inputs)
    return results[:3]


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
    d_out: Any, d_state: Any, q: Any, k: Any, v: Any, w: Any, visible: Any, peak: Any, out: Any, den: Any, peaks: Any,
    states: Any, tops: Any, map: str, causal: bool, *_: Any, **__: Any,
) -> int:  # fmt: skip
    """Two products for each one forward, but one for a projection: its directions have no gradient."""
    return _flops(q, k, v, w, map, causal) + _flops(q, k, v, w, map, causal, 0)
