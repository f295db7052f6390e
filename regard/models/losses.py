"""The loss of tokens, from their logits or from the vectors before the head.

With a large vocabulary the logits of all tokens are the largest tensor of a training step, and their gradient is
another one. `head_loss` takes some tokens at a time. It computes the gradients of x and W while the logits of those
tokens are there: a backward pass of its own would have to multiply by W once more.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from regard.data.batch import IGNORE
from regard.kernels.crossentropy import losses_and_gradient

CHUNK = 1 << 29  # logits that are held at a time: a GiB in bfloat16
SMALLEST_CHUNK = 256  # tokens: with fewer, products with the head do not occupy a GPU


def token_loss(
    logits: Float[Tensor, "*any N"],
    targets: Int[Tensor, "*any"],
    ignore: int = IGNORE,
    mean: bool = True,
    smoothing: float = 0.0,
) -> Float[Tensor, ""]:
    """Returns the mean (or sum) of −log p(target) over the targets that are not `ignore`; zero where all are.

    `smoothing` ε: −(1−ε)·log p(target) − ε·mean over all tokens of log p.
    """
    # Not reduction="mean", which is NaN where all targets are ignored.
    total = functional.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=ignore, reduction="sum", label_smoothing=smoothing
    )
    return _mean_or_sum(total, targets, ignore, mean)


def head_loss(
    x: Float[Tensor, "*any D"],
    weight: Float[Tensor, "N D"],
    targets: Int[Tensor, "*any"],
    ignore: int = IGNORE,
    mean: bool = True,
    smoothing: float = 0.0,
    chunk: int | None = None,
) -> Float[Tensor, ""]:
    """Returns `token_loss` of the logits x Wᵀ, computed for `chunk` tokens at a time.

    It has first derivatives only. `chunk` None: as many tokens as have CHUNK logits.
    """
    if chunk is None:
        chunk = chunk_tokens(weight.shape[0])
    learned = (torch.is_grad_enabled() and x.requires_grad, torch.is_grad_enabled() and weight.requires_grad)
    total: Tensor = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        x.flatten(0, -2), weight, targets.flatten(), ignore, smoothing, chunk, learned
    )
    return _mean_or_sum(total, targets, ignore, mean)


def chunk_tokens(vocabulary: int) -> int:
    """Returns how many tokens have about CHUNK logits: a power of two, which suits the tiles of matrix products."""
    return 1 << max(SMALLEST_CHUNK, CHUNK // vocabulary).bit_length() - 1


def _mean_or_sum(total: Tensor, targets: Tensor, ignore: int, mean: bool) -> Tensor:
    if not mean:
        return total
    return total / (targets != ignore).sum().clamp(min=1)


class _HeadLoss(torch.autograd.Function):
    """The sum of the losses of x [M,D] under a head W [N,D], computed by chunks of tokens together with its gradients.

    Products are in autocast's dtype; losses, and what is summed over chunks, are float32 or better.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignore: int,
        smoothing: float,
        chunk: int,
        learned: tuple[bool, bool],
    ) -> Tensor:
        """Returns the sum of the losses [], and keeps the gradients of x [M,D] and W [N,D] that are asked for."""
        dtype = weight.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            parts = zip(x.to(dtype).split(chunk), targets.split(chunk), strict=True)
            total, d_x, d_weight = _sum_chunks(list(parts), weight.to(dtype), ignore, smoothing, learned)
        ctx.save_for_backward(d_x, d_weight)
        ctx.dtypes = (x.dtype, weight.dtype)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of x and W: those of the sum, which were saved, times the incoming gradient."""
        gradients = []
        for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            if gradient is not None:
                gradient = (gradient * d_total).to(dtype)
            gradients.append(gradient)
        return *gradients, None, None, None, None, None


def _sum_chunks(
    parts: list[tuple[Tensor, Tensor]], weight: Tensor, ignore: int, smoothing: float, learned: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the sum of the losses of all chunks of (rows [c,D], targets [c]), and the gradients of all rows and of W.

    `learned` says which of the two gradients are needed; the others are None.
    """
    exact = torch.promote_types(weight.dtype, torch.float32)
    total = weight.new_zeros((), dtype=exact)
    d_rows = []
    d_weight: Tensor | None = None
    for rows, targets in parts:
        logits = rows @ weight.mT  # [c,D] @ [D,N]
        losses, d_logits = losses_and_gradient(logits, targets, ignore, smoothing, any(learned))
        total = total + losses.sum()
        if learned[0]:
            d_rows.append(d_logits @ weight)  # [c,N] @ [N,D]
        if learned[1]:
            d_chunk = d_logits.mT @ rows  # [N,c] @ [c,D]
            d_weight = d_chunk.to(exact) if d_weight is None else d_weight.add_(d_chunk)
        del logits, d_logits  # free them before the next ones are computed
    return total, torch.cat(d_rows) if d_rows else None, d_weight
