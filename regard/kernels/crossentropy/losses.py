"""The losses of logits and their gradient, by plain PyTorch or in one pass on a GPU."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from jaxtyping import Float, Int
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def losses_and_gradient(
    logits: Float[Tensor, "M N"], targets: Int[Tensor, " M"], ignore: int, smoothing: float, gradient: bool
) -> tuple[Float[Tensor, " M"], Float[Tensor, "M N"]]:
    """Returns the loss of each row in float32 or better, and where asked for the gradient of the logits in their dtype.

    The logits are used up: their gradient may take their place. Rows whose target is `ignore` have a loss and a
    gradient of zero, whatever their logits are.
    """
    if logits.is_cuda and logits.dtype in _DTYPES and not torch.compiler.is_compiling() and find_spec("triton"):
        from regard.kernels.crossentropy.triton_crossentropy import replace_by_gradient

        return replace_by_gradient(logits, targets, ignore, smoothing, gradient), logits
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = (targets != ignore)[:, None]
    normaliser = exact.logsumexp(-1, keepdim=True)
    losses = normaliser - (1 - smoothing) * exact.gather(-1, targets[:, None].where(counted, 0))
    if smoothing:
        losses = losses - smoothing * exact.mean(-1, keepdim=True)
    losses = losses.where(counted, 0.0)[:, 0]
    if not gradient:
        return losses, logits
    # A comparison and not a scatter: compiled, all of it is one pass over the logits.
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    found = (exact - normaliser).exp() - (1 - smoothing) * is_target.to(exact.dtype)
    if smoothing:
        found = found - smoothing / logits.shape[1]
    return losses, found.where(counted, 0.0).to(logits.dtype)
