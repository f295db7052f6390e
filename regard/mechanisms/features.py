"""Plain feature maps: `elu`, `quadratic`, and any map of your own.

elu:        φ(x) = elu(x) + 1, positive; the linear transformer. Where all of x is negative, it is eᶜ·exp(x − c) with
            c = max x, so that nothing underflows.
quadratic:  φ(x) = [1, √2·x_i, x_i², √2·x_i x_j (i<j)], (K+1)(K+2)/2 features, gives exactly (q·k + 1)².
            The √2 belongs there: without it the cross terms are halved. A strongly *negative* q·k gets a large weight.
linear:     your φ; similarities must be ≥ 0 and must not sum to zero over the keys a query sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import functional

from regard.errors import NegativeSimilarityError
from regard.mechanisms.base import register, without_autocast
from regard.mechanisms.linear import Linear
from regard.mechanisms.pairwise import scores
from regard.mechanisms.sums import has_negative
from regard.shapes import Keys, Mask, Queries


@register("elu")
class Elu(Linear):
    formula = "φ(x) = elu(x) + 1"
    order = "N·K·V"
    memory = "G·K·(V+1)"
    training_memory = "N·K+K·V"

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c = x.detach().amax(-1).clamp(max=0)  # 0 unless all of x is negative: only a scale, so it has no gradient
        return x.relu() + torch.exp(x.clamp(max=0) - c[..., None]), c

    def has_unit_scale(self, k: Keys) -> bool:
        return bool((k.detach().amax(-1) >= 0).all())

    def feature_count(self, K: int) -> int:
        return K


@register("quadratic")
class Quadratic(Linear):
    formula = "(q·k + 1)²"
    order = "N·K²·V"
    memory = "G·K²/2·(V+1)"
    training_memory = "N·K²+K²·V"
    letters: ClassVar[dict[str, str]] = {"feature_count": "F"}
    accumulate = torch.float64  # (q·k + 1)² near zero is a small difference of large products

    def features(self, x: Tensor) -> tuple[Tensor, None]:
        K = x.shape[-1]
        i, j = torch.triu_indices(K, K, offset=1, device=x.device)
        ones = torch.ones_like(x[..., :1])
        root = math.sqrt(2.0)
        return torch.cat([ones, root * x, x * x, root * x[..., i] * x[..., j]], -1), None

    def feature_count(self, K: int) -> int:
        return (K + 1) * (K + 2) // 2

    def unambiguous_rows(self, q: Queries, k: Keys, mask: Mask) -> Bool[Tensor, "B H T"]:
        """Returns the rows whose features do not cancel beyond what float64 resolves.

        The digits lost are those of Σ(|q|·|k|+1)² / Σ(q·k+1)².
        """
        q = q.double()
        k = k.double()
        allowed = mask.allowed(q.shape[2], k.shape[2], q.device)

        def total(a: Tensor, b: Tensor) -> Tensor:
            similarities = (scores(a, b, mask) + 1).square()
            if allowed is not None:
                similarities = similarities.masked_fill(~allowed, 0)
            return similarities.sum(-1)

        loss = total(q.abs(), k.abs()) / total(q, k)
        return ~(32 * torch.finfo(torch.float64).eps * loss > 1e-10)


@register("linear")
class AnyFeatures(Linear):
    formula = "φ(q)·φ(k), φ yours (default softplus)"
    letters: ClassVar[dict[str, str]] = {"feature_count": "F"}

    def __init__(self, phi: Callable[[Tensor], Tensor] = functional.softplus, strict: bool = False) -> None:
        super().__init__(strict)
        self.phi = phi

    def features(self, x: Tensor) -> tuple[Tensor, None]:
        return self.phi(x), None

    def feature_count(self, K: int) -> int:
        probe = torch.zeros(1, 1, 1, K)
        if isinstance(self.phi, torch.nn.Module):  # a module wants inputs of its own dtype and device
            parameter = next(self.phi.parameters(), probe)
            probe = parameter.new_zeros(1, 1, 1, K)
        return int(self.phi(probe).shape[-1])

    def _check_similarities(self, q: Queries, k: Keys, mask: Mask) -> None:
        """Raises where `strict` and a pair of this call has a negative similarity: it looks at all of them."""
        if not self.strict:
            return
        with without_autocast(q):
            psi, _, _ = self._map_keys(k, k, mask.visible)
            allowed = mask.allowed(q.shape[2], k.shape[2], q.device)
            negative = has_negative(self._map_queries(q, k.shape[1]), psi, allowed)
        if negative:
            raise NegativeSimilarityError(
                f"{self.name}: a similarity φ(q)·φ(k) is negative, so that weights are negative and may sum to nearly "
                "zero. Use a φ with similarities ≥ 0 (softplus, elu + 1, exp), or strict=False to allow it."
            )
