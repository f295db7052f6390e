"""Linear attention as PyTorch operators: `regard::linear_attention` and its backward pass.

Both are opaque to torch.compile, and have FLOP formulas: forward the cost that the mechanisms declare, backward
twice that, with the projections counted once. This module imports
Triton, so it is imported only when a kernel runs.
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
    peak: Tensor | None, map: str, causal: bool, final: bool, needs_grad: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """Returns `ForwardResults` for the arguments of a `LinearCall`."""
    return (*run_forward(LinearCall(q, k, v, w, visible, sums, peak, map, causal, final, needs_grad)),)


@linear_attention.register_fake
def _allocate_fake(*arguments: Any) -> tuple[Tensor, ...]:
    """Returns uninitialised results of the right shapes, which is all that torch.compile needs."""
    call = LinearCall(*arguments)
    return tuple(allocate_results(plan_call(call), call))


@torch.library.custom_op("regard::linear_attention_backward", mutates_args=())
def linear_attention_backward(
    d_out: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, visible: Tensor | None,
    peak: Tensor | None, out: Tensor, inv_norm: Tensor, query_peak: Tensor, segment_sums: Tensor,
    segment_S_cast: Tensor, running_scales: Tensor, chunk_S: Tensor, chunk_Z_scales: Tensor, q_shift: Tensor,
    k_shift: Tensor, stabiliser: Tensor, map: str, causal: bool, has_initial_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, k, v and, where the call had an initial state, of its sums."""
    saved = SavedTensors(
        q, k, v, w, visible, peak, out, inv_norm, query_peak, segment_sums, segment_S_cast, running_scales, chunk_S,
        chunk_Z_scales, q_shift, k_shift, stabiliser,
    )  # fmt: skip
    return (*run_backward(d_out, d_final, saved, map, causal, has_initial_state),)


@linear_attention_backward.register_fake
def _allocate_fake_gradients(d_out: Tensor, d_final: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    """Returns uninitialised gradients of the right shapes, for torch.compile."""
    saved, (map, _, has_initial_state) = _split_arguments(arguments)
    plan = plan_shapes(saved.q, saved.v, saved.w, map)
    return tuple(allocate_gradients(plan, saved.q, saved.k, saved.v, has_initial_state))


def _split_arguments(arguments: tuple[Any, ...]) -> tuple[SavedTensors, tuple[Any, ...]]:
    """Splits the arguments of `linear_attention_backward` that follow d_final: returns the saved tensors (or their
    shapes), and the options (map, causal, has_initial_state)."""
    count = len(SavedTensors._fields)
    return SavedTensors(*arguments[:count]), arguments[count:]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Saves the tensors and options that the backward pass reads."""
    call = LinearCall(*inputs)
    if not call.needs_grad:
        raise KernelError("linear_attention: an input requires grad, but needs_grad is False. Pass needs_grad=True.")
    ctx.map = call.map
    ctx.causal = call.causal
    ctx.has_initial_state = call.sums is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*SavedTensors.of(call, ForwardResults(*output)))


def _backward(ctx: Any, d_out: Tensor | None, d_final: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the gradient of each field of `LinearCall`, None for fields that have none."""
    saved = SavedTensors(*ctx.saved_tensors)
    if d_out is None:
        d_out = torch.zeros_like(saved.out)
    options = (ctx.map, ctx.causal, ctx.has_initial_state)
    if _needs_dispatcher():
        dq, dk, dv, d_initial = linear_attention_backward(d_out, d_final, *saved, *options)
    else:
        dq, dk, dv, d_initial = run_backward(d_out, d_final, saved, *options)
    if not ctx.has_initial_state:
        d_initial = None
    return dq, dk, dv, None, None, d_initial, None, None, None, None, None


linear_attention.register_autograd(_backward, setup_context=_save)


class _LinearAttention(torch.autograd.Function):
    """The operator without PyTorch's dispatcher, which for short sequences takes more time than the kernels."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        """Returns the output, and the final sums and peak."""
        results = run_forward(LinearCall(*inputs))
        _save(ctx, inputs, results)
        return results[:3]

    backward = staticmethod(_backward)


def _needs_dispatcher() -> bool:
    """Returns whether calls must go through PyTorch's dispatcher: under torch.compile or an active TorchDispatchMode,
    such as the FLOP counter. A counter that was made before this module was imported is given the formulas below."""
    if torch.compiler.is_compiling():
        return True
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    # A counter copies the registry when it is constructed, which may have been before this module was imported.
    for counter in (getattr(mode, "counter", None) for mode in _get_current_dispatch_mode_stack()):
        if isinstance(counter, FlopCounterMode):
            for operator in (torch.ops.regard.linear_attention, torch.ops.regard.linear_attention_backward):
                counter.flop_registry.setdefault(operator, flop_registry[operator])
    return True


def attend(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (out, final_sums, final_peak), without PyTorch's dispatcher where it is not needed.

    inputs: the fields of `LinearCall` except `needs_grad`.
    """
    needs_grad = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    inputs = (*inputs, needs_grad)
    if _needs_dispatcher():
        results: tuple[Tensor, ...] = linear_attention(*inputs)
    elif needs_grad:
        results = _LinearAttention.apply(*inputs)  # type: ignore[no-untyped-call]
    else:
        results = run_forward(LinearCall(*inputs))
    return results[0], results[1], results[2]


def _count_flops(q: Any, v: Any, w: Any, map: str, causal: bool, with_projections: bool = True) -> int:
    """Returns the FLOPs of the forward pass for the shapes of q, v and w, as the mechanisms declare them."""
    B, H, T, K = q
    G, T_k, V = v[1:]
    F = K
    per_vector = 0
    if w is not None:
        F = w[0] * features_per_direction(map)
    if w is not None and with_projections:
        per_vector = 2 * K * w[0]
    return linear_flops(Size(B, T, T_k, H, G, K, V, causal), F, per_vector)[0]


@register_flop_formula(torch.ops.regard.linear_attention)
def _forward_flops(*shapes: Any, **_: Any) -> int:
    """Returns the FLOPs of the forward pass. shapes: the operator's arguments, with shapes in place of tensors."""
    call = LinearCall(*shapes)
    return _count_flops(call.q, call.v, call.w, call.map, call.causal)


@register_flop_formula(torch.ops.regard.linear_attention_backward)
def _backward_flops(d_out: Any, d_final: Any, *shapes: Any, **_: Any) -> int:
    """Returns the FLOPs of the backward pass: twice those of the forward pass, but only once those of projections,
    since directions get no gradient."""
    saved, (map, causal, _has_initial_state) = _split_arguments(shapes)
    forward = _count_flops(saved.q, saved.v, saved.w, map, causal)
    return forward + _count_flops(saved.q, saved.v, saved.w, map, causal, with_projections=False)
