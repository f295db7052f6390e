"""x Wᵀ + b for a single row, as most of a decoding step at batch 1 is. Its time is that of reading W once."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def linear(
    x: Float[Tensor, "... K"], weight: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None = None
) -> Float[Tensor, "... N"]:
    """Returns x Wᵀ + b by PyTorch, or by regard's kernel where x is one row on a GPU and no gradient is needed."""
    if not x.is_cuda or x.numel() != x.shape[-1] or not _is_supported(x, weight):
        return functional.linear(x, weight, bias)
    from regard.kernels.matvec.triton_project import project

    return project(x, weight, bias)


def _is_supported(x: Tensor, weight: Tensor) -> bool:
    """Returns whether the kernel takes these tensors here."""
    return (
        x.dtype == weight.dtype
        and x.dtype in _DTYPES
        and weight.is_contiguous()
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and not torch.is_autocast_enabled("cuda")
        and not torch.compiler.is_compiling()
        and find_spec("triton") is not None
    )
