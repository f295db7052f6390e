"""Norms by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from regard.registry import Registry

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
