"""Linear attention as PyTorch operators: `regard::linear_attention` and its gradient. Imported only where one runs.

Both are opaque to torch.compile and known to the FLOP counter by the cost that the mechanisms declare.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from regard.errors import KernelError
from regard.kernels.linear import launch
from regard.kernels.linear.launch import Results
from regard.kernels.linear.plan import planned
from regard.kernels.linear.triton_features import waves
from regard.mechanisms.linear import linear_flops
from regard.shapes import Size


@torch.library.custom_op("regard::linear_attention", mutates_args=())
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, visible: Tensor | None, sums: Tensor | None,
    peak: Tensor | None, map: str, causal: bool, final: bool, learns: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """All of `Results`.

    map: "given" (q and k are features), "elu", "performer", "fourier". w: its directions [F,K]. sums, peak: a state to
    start from. final: whether the state after the last token is wanted. learns: whether the gradient will be."""
    return (*launch.forward(q, k, v, w, visible, sums, peak, map, causal, final, learns),)


@linear_attention.register_fake
def _fake(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, visible: Tensor | None, sums: Tensor | None,
    peak: Tensor | None, map: str, causal: bool, final: bool, learns: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(launch.room(planned(q, k, v, w, map), q, v, sums, causal, final, learns))


@torch.library.custom_op("regard::linear_attention_backward", mutates_args=())
def linear_attention_backward(
    d_out: Tensor, d_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, visible: Tensor | None,
    peak: Tensor | None, out: Tensor, inverses: Tensor, peaks: Tensor, states: Tensor, outer: Tensor, tops: Tensor,
    local: Tensor, marks: Tensor, lifts_q: Tensor, lifts: Tensor, c: Tensor, map: str, causal: bool, started: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and, where it `started` from a state, of the sums of that state."""
    r = Results(out, out, out, inverses, peaks, states, outer, tops, local, marks, lifts_q, lifts, c)
    return launch.gradients(d_out, d_state, q, k, v, w, visible, peak, r, map, causal, started)


@linear_attention_backward.register_fake
def _fake_backward(
    d_out: Tensor, d_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, visible: Tensor | None,
    peak: Tensor | None, out: Tensor, inverses: Tensor, peaks: Tensor, states: Tensor, outer: Tensor, tops: Tensor,
    local: Tensor, marks: Tensor, lifts_q: Tensor, lifts: Tensor, c: Tensor, map: str, causal: bool, started: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return launch.gradient_room(planned(q, k, v, w, map), q, k, v, started)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, w, visible, sums, peak, ctx.map, ctx.causal, _, learns = inputs
    if not learns:
        raise KernelError("linear attention in Triton: a gradient was not announced. Pass learns=True.")
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
        dq, dk, dv, d_sums = launch.gradients(*inputs, Results(out, out, out, *rest), *options)
    return dq, dk, dv, None, None, d_sums if ctx.started else None, None, None, None, None, None


linear_attention.register_autograd(_backward, setup_context=_setup)


class _Attend(torch.autograd.Function):
    """The operator without PyTorch's dispatcher, which costs more time than the device needs for short sequences."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        results = launch.forward(*inputs)
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
    """(out, sums, peak) by the shortest way: arguments as of `linear_attention`, but for `learns`."""
    learns = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    inputs = (*inputs, learns)
    if _watched():
        results: tuple[Tensor, ...] = linear_attention(*inputs)
    elif learns:
        results = _Attend.apply(*inputs)  # type: ignore[no-untyped-call]
    else:
        results = launch.forward(*inputs)
    return results[0], results[1], results[2]


def _flops(q: Any, k: Any, v: Any, w: Any, map: str, causal: bool, per_vector: int | None = None) -> int:
    (B, H, T, K), (G, S, V) = q, v[1:]
    F = K if w is None else w[0] * waves(map)
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
    peaks: Any, states: Any, outer: Any, tops: Any, local: Any, marks: Any, lifts_q: Any, lifts: Any, c: Any,
    map: str, causal: bool, *_: Any, **__: Any,
) -> int:  # fmt: skip
    """Two products for each one forward, but one for a projection: its directions have no gradient."""
    return _flops(q, k, v, w, map, causal) + _flops(q, k, v, w, map, causal, 0)
