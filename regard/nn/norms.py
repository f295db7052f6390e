"""Norms by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from regard.registry import Registry
from regard.shapes import upcast_half

NORMS: Registry[Callable[..., nn.Module]] = Registry("norm")


@NORMS.add("layer")
def layer_norm(D: int, eps: float = 1e-5, bias: bool = True) -> nn.Module:
    """Returns layer norm: (x − mean)/√(variance + ε) · weight + bias."""
    return nn.LayerNorm(D, eps, bias=bias)


@NORMS.add("rms")
def rms_norm(D: int, eps: float = 1e-5) -> nn.Module:
    """Returns RMS norm: x/√(mean of squares + ε) · weight."""
    return _RMSNorm(D, eps)


class _RMSNorm(nn.RMSNorm):
    """RMS norm in the dtype of its weight, as autocast does for layer norm: mixed dtypes have no fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


@NORMS.add("rms_zero_centred")
class ZeroCentredRMSNorm(nn.Module):
    """RMS norm with the factor 1 + weight: x/√(mean of squares + ε) · (1 + weight), as in Qwen3-Next.

    Weight decay then pulls the factor toward 1.
    """

    def __init__(self, D: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(D))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*any D"]) -> Float[Tensor, "*any D"]:
        exact = upcast_half(x)
        factor = 1 + self.weight.to(exact.dtype)
        return functional.rms_norm(exact, self.weight.shape, factor, self.eps).to(self.weight.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class UnitLength(nn.Module):
    """x/√(sum of squares + ε), which makes the length of queries and keys 1; it has no weight, and ε = 1e-6."""

    def forward(self, x: Float[Tensor, "*any K"]) -> Float[Tensor, "*any K"]:
        exact = upcast_half(x)
        return (exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
