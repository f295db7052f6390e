"""Gated and delta attention as a function of q, k and v alone, as laws need it: decays and write strengths from keys.

A layer makes a and b from its tokens, and keeps every key from growing. So does this, by fixed random numbers: the laws
then change a token, hide it or poison it, and its decay and its write strength go with it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from regard.mechanisms import Cost, Face, Memory, Recurrence
from regard.mechanisms.base import Kernel, KernelRegistry, Mechanism
from regard.shapes import Mask, Size, upcast_half


class TokenGated(Mechanism):
    """A gated or delta mechanism that makes k/√(1+‖k‖²), a and b from each head's keys."""

    crosses = False
    causal_only = True
    normalised = False
    signed = True

    def __init__(self, inner: Recurrence, seed: int = 0) -> None:
        super().__init__()
        self.inner = inner
        self.seed = seed
        self.name = inner.name  # type: ignore[misc]
        self.kernels = self._own_kernels()  # type: ignore[misc]

    def _own_kernels(self) -> KernelRegistry:
        """Returns the kernels of the inner mechanism, whose `refuses` is called with the keys and gates made here."""
        registry = KernelRegistry(type(self.inner))
        for faces in self.inner.kernels.values():
            for face, kernel in faces.items():
                registry.add_kernel(face, kernel._replace(refuses=_refuses(kernel)))
        return registry

    def gates(self, k: Tensor, visible: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Returns keys of length below 1, and a and b where the mechanism needs them; hidden keys count as zeros."""
        exact = upcast_half(Mask(visible=visible).zero_hidden(k))
        finite = exact.nan_to_num(0.0, 0.0, 0.0)  # NaN reaches the output through the key itself
        # Not k/‖k‖ itself: where a key is nearly zero, its gradient would be nothing but magnified rounding.
        length = (1 + exact.square().sum(-1, keepdim=True)).sqrt()
        made = {}
        if "a" in self.inner.needs:
            wide = 1
            if self.inner.channels:
                wide = k.shape[3]
            # Some decays are nearly none and some clear the memory: softplus of numbers of either sign and any size.
            a = -functional.softplus(2 * self._mix(finite, wide, 1) - 2)
            if not self.inner.channels:
                a = a[..., 0]
            made["a"] = a
        if "b" in self.inner.needs:
            made["b"] = self.inner.range * torch.sigmoid(self._mix(finite, 1, 2)[..., 0])
        return (exact / length).to(k.dtype), made

    def _mix(self, k: Tensor, wide: int, stream: int) -> Tensor:
        """Returns `wide` random combinations of each key; no product of matrices, which the laws would count."""
        generator = torch.Generator().manual_seed(7 * self.seed + stream)
        directions = torch.randn(wide, k.shape[3], generator=generator, dtype=torch.float64).to(k)
        return (k[..., None, :] * directions).sum(-1)

    def forward(self, q: Any, k: Any, v: Tensor, mask: Mask = Mask()) -> Tensor:
        self.inner.use = self.use
        k, made = self.gates(k, mask.visible)
        out: Tensor = self.inner(q, k, v, mask, **made)
        return out

    def empty(self, size: Size, rules: Mask = Mask()) -> Memory:
        return self.inner.empty(size, rules)

    def extend(self, q: Any, k: Any, v: Tensor, state: Memory, visible: Tensor | None = None) -> tuple[Tensor, Memory]:
        self.inner.use = self.use
        k, made = self.gates(k, visible)
        return self.inner.extend(q, k, v, state, visible, **made)

    def write(self, state: Any, k: Any, v: Tensor, visible: Tensor | None = None) -> Any:
        return self.inner.write(state, k, v, visible)

    def read(self, q: Tensor, state: Any, positions: Any = None, bias: Any = None) -> Tensor:
        return self.inner.read(q, state, positions, bias)

    def weights(self, q: Any, k: Any, mask: Mask = Mask()) -> Tensor:
        k, made = self.gates(k, mask.visible)
        return self.inner.weights(q, k, mask, **made)

    def weight_bounds(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        """Returns a bound on the terms whose sum each weight is, [B,H,T,S], to which its rounding error is relative."""
        k, made = self.gates(k, mask.visible)
        if not self.inner.erases:
            return self.inner.weights(q.abs(), k.abs(), mask, **made)
        # A query that is carried back through erasures turns, but never grows: its product with a key is within both
        # lengths. Where channels fade apart, all of the length may be in the one that fades least.
        spread = q.shape[3] ** -0.5
        if self.inner.channels:
            spread = 1.0
        queries, keys = (spread * x.norm(dim=-1, keepdim=True).expand_as(x) for x in (q, k))
        keeping = copy.copy(self.inner)
        keeping.erases = False  # type: ignore[misc]
        return keeping.weights(queries, keys, mask, **made)

    def cost(self, size: Size, face: Face = "parallel") -> Cost:
        return self.inner.cost(size, face)

    def gradient_cost(self, size: Size) -> Cost:
        return self.inner.gradient_cost(size)


def _refuses(kernel: Kernel) -> Any:
    """Returns a kernel's `refuses`, called with keys, decays and write strengths as the inner mechanism gets them."""

    def ask(gated: TokenGated, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> str | None:
        k, made = gated.gates(k)
        return kernel.refuses(gated.inner, q, k, v, *rest, made.get("a"), made.get("b"))

    return ask
