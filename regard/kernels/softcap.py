"""The softcap of a score within a compiled kernel: cap·tanh(score/cap) by the GPU's own instruction.

PyTorch's tanh takes branches and three times the time of all else in attention, an exact one by exponentials still as
much again. The instruction `tanh.approx.f32` is right to eleven bits, one more than half precision keeps of an output.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

_LARGEST_CAP = 1000  # beyond, eleven bits of the cap are more than a weight may be off by


def cap_score(score: Tensor, cap: float, fast: bool) -> Tensor:
    """Returns cap·tanh(score/cap); `fast`: by the instruction, where the function that calls this is compiled."""
    if not fast:
        return cap * torch.tanh(score / cap)
    capped: Tensor = FastTanh.apply(score * (1 / cap))  # type: ignore[no-untyped-call]
    return cap * capped


def has_fast_softcap(cap: float, device: torch.device) -> bool:
    """Returns whether scores on a device can be capped by the instruction."""
    return cap <= _LARGEST_CAP and device.type == "cuda" and torch.version.hip is None and _register_lowering()


@torch.library.custom_op("regard::fast_tanh", mutates_args=(), schema="(Tensor x) -> Tensor")
def fast_tanh(x: Tensor) -> Tensor:
    """Returns tanh(x); compiled for a GPU, by one instruction."""
    return torch.tanh(x)


@fast_tanh.register_fake
def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class FastTanh(torch.autograd.Function):
    """tanh by `fast_tanh`, with the derivative 1 − tanh²."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        y: Tensor = torch.ops.regard.fast_tanh(x)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        change: Tensor = gradient * (1 - y * y)
        return change

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return FastTanh.apply(x), 0  # type: ignore[no-untyped-call]


@lru_cache(1)
def _register_lowering() -> bool:
    """Tells PyTorch's compiler how `fast_tanh` is done on a GPU, and returns whether it could be told."""
    try:
        from torch._inductor.lowering import make_pointwise, register_lowering
        from torch._inductor.virtualized import ops
    except ImportError:
        return False
    asm = partial(ops.inline_asm_elementwise, asm="tanh.approx.f32 $0, $1;", constraints="=f,f", dtype=torch.float32)
    register_lowering(torch.ops.regard.fast_tanh.default, type_promotion_kind=None)(make_pointwise(asm))
    return True


# This is what torch.compiler.assume_constant_result sets; calling it would import the compiler.
_register_lowering._dynamo_marked_constant = True  # type: ignore[attr-defined]
