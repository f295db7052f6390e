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
from regard.kernels.linear.backward import allocate_gradients, run_backward
from regard.kernels.linear.forward import allocate_results, run_forward
from regard.kernels.linear.plan import plan_call, plan_shapes
from regard.kernels.linear.tensors import ForwardResults, LinearCall, SavedTensors
from regard.kernels.linear.triton_features import features_per_direction
from regard.mechanisms.linear import linear_flops
from regard.shapes import Size


@torch.library.custom_op("regard::linear_attention", mutates_args=())
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, visible: Tensor | None, sums: Tensor | None,
    peak: Tensor | None, map: str, causal: bool, final: bool, learns: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """Returns `ForwardResults` for the arguments of a `LinearCall`."""
    return (*run_forward(LinearCall(q, k, v, w, visible, sums, peak, map, causal, final, learns)),)


@linear_attention.register_fake
def _allocate_fake(*arguments: Any) -> tuple[Tensor, ...]:
    """Returns results of the right shapes, which is all that a compiler needs."""
    call = LinearCall(*arguments)
    return tuple(allocate_results(plan_call(call), call))


@torch.library.custom_op("regard::linear_attention_backward", mutates_args=())
def linear_attention_backward(
    d_out: Tensor, d_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, visible: Tensor | None,
    peak: Tensor | None, out: Tensor, inv_norm: Tensor, row_peak: Tensor, segment_sums: Tensor, segment_S_cast: Tensor,
    segment_stats: Tensor, chunk_S: Tensor, chunk_stats: Tensor, q_shift: Tensor, k_shift: Tensor, stabiliser: Tensor,
    map: str, causal: bool, started: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, k, v and, where the call started from a state, of its sums."""
    saved = SavedTensors(
        q, k, v, w, visible, peak, out, inv_norm, row_peak, segment_sums, segment_S_cast, segment_stats, chunk_S,
        chunk_stats, q_shift, k_shift, stabiliser,
    )  # fmt: skip
    return (*run_backward(d_out, d_state, saved, map, causal, started),)


@linear_attention_backward.register_fake
def _allocate_fake_gradients(d_out: Tensor, d_state: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    """Returns gradients of the right shapes."""
    saved, (map, _, started) = _split_arguments(arguments)
    plan = plan_shapes(saved.q, saved.v, saved.w, map)
    return tuple(allocate_gradients(plan, saved.q, saved.k, saved.v, started))


def _split_arguments(arguments: tuple[Any, ...]) -> tuple[SavedTensors, tuple[Any, ...]]:
    """Returns the saved tensors (or their shapes) and the options (map, causal, started) among the arguments of
    `linear_attention_backward` that follow d_state."""
    count = len(SavedTensors._fields)
    return SavedTensors(*arguments[:count]), arguments[count:]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keeps for the gradient what it reads."""
    call = LinearCall(*inputs)
    if not call.learns:
        raise KernelError("linear attention in Triton: a gradient was not announced. Pass learns=True.")
    ctx.map = call.map
    ctx.causal = call.causal
    ctx.started = call.sums is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*SavedTensors.of(call, ForwardResults(*output)))


def _backward(ctx: Any, d_out: Tensor | None, d_state: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the gradient of each field of `LinearCall`."""
    saved = SavedTensors(*ctx.saved_tensors)
    if d_out is None:
        d_out = torch.zeros_like(saved.out)
    options = (ctx.map, ctx.causal, ctx.started)
    if _is_observed():
        dq, dk, dv, d_sums = linear_attention_backward(d_out, d_state, *saved, *options)
    else:
        dq, dk, dv, d_sums = run_backward(d_out, d_state, saved, *options)
    if not ctx.started:
        d_sums = None
    return dq, dk, dv, None, None, d_sums, None, None, None, None, None


linear_attention.register_autograd(_backward, setup_context=_save)


class _LinearAttention(torch.autograd.Function):
    """The operator without PyTorch's dispatcher, which costs more time than the device needs for short sequences."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        """Returns the output, and the final sums and peak."""
        results = run_forward(LinearCall(*inputs))
        _save(ctx, inputs, results)
        return results[:3]

    backward = staticmethod(_backward)


def _is_observed() -> bool:
    """Returns whether someone looks at operators: a compiler, or a mode such as the FLOP counter."""
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


def attend(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (out, final_sums, final_peak) by the shortest way. inputs: the fields of `LinearCall` but `learns`."""
    learns = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    inputs = (*inputs, learns)
    if _is_observed():
        results: tuple[Tensor, ...] = linear_attention(*inputs)
    elif learns:
        results = _LinearAttention.apply(*inputs)  # type: ignore[no-untyped-call]
    else:
        results = run_forward(LinearCall(*inputs))
    return results[0], results[1], results[2]


def _count_flops(q: Any, v: Any, w: Any, map: str, causal: bool, with_projections: bool = True) -> int:
    """Returns the FLOPs of forward for the shapes of q, v and w, as the mechanisms declare them."""
    B, H, T, K = q
    G, S, V = v[1:]
    F = K
    per_vector = 0
    if w is not None:
        F = w[0] * features_per_direction(map)
    if w is not None and with_projections:
        per_vector = 2 * K * w[0]
    return linear_flops(Size(B, T, S, H, G, K, V, causal), F, per_vector)[0]


@register_flop_formula(torch.ops.regard.linear_attention)
def _forward_flops(*shapes: Any, **_: Any) -> int:
    """Returns the FLOPs of a call; tensors come as their shapes."""
    call = LinearCall(*shapes)
    return _count_flops(call.q, call.v, call.w, call.map, call.causal)


@register_flop_formula(torch.ops.regard.linear_attention_backward)
def _backward_flops(d_out: Any, d_state: Any, *shapes: Any, **_: Any) -> int:
    """Returns two products for each one forward, but one for a projection: its directions have no gradient."""
    saved, (map, causal, _started) = _split_arguments(shapes)
    forward = _count_flops(saved.q, saved.v, saved.w, map, causal)
    return forward + _count_flops(saved.q, saved.v, saved.w, map, causal, with_projections=False)
