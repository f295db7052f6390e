"""Plain feature maps: `elu`, `polynomial`, `quadratic`, and any map of your own.

elu:        φ(x) = elu(x) + 1, positive; the linear transformer. Where all of x is negative, it is eᶜ·exp(x − c) with
            c = max x, so that nothing underflows.
polynomial: (q·k + c)ᵖ, exactly: a feature for each product of p of the numbers √c, x_1, …, x_K, times the root of the
            number of orders in which that product can be written. An odd p gives negative weights.
quadratic:  (q·k + 1)² of these: φ(x) = [1, √2·x_i, x_i², √2·x_i x_j (i<j)], (K+1)(K+2)/2 features.
            The √2 belongs there: without it the cross terms are halved. A strongly *negative* q·k gets a large weight.
linear:     your φ; similarities must be ≥ 0 and must not sum to zero over the keys a query sees.

elu and maps of one's own: Katharopoulos et al. 2020, arXiv:2006.16236; kernels of other kinds: Tsai et al. 2019,
arXiv:1908.11775.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import functional

from regard.errors import NegativeSimilarityError, OptionError
from regard.mechanisms.base import can_read, register, without_autocast
from regard.mechanisms.linear import Linear
from regard.mechanisms.pairwise import scores
from regard.mechanisms.sums import has_negative
from regard.shapes import Keys, Mask, Queries


def scaled_elu(x: Tensor, c: Tensor) -> Tensor:
    """Returns ψ = relu(x) + exp(min(x, 0) − c), in few passes over memory; its numbers have to be known by now."""
    psi = x.clamp(max=0)
    if c.any():
        psi.sub_(c[..., None])
    return psi.exp_().add_(x.clamp(min=0))


class ScaledElu(torch.autograd.Function):
    """ψ = relu(x) + exp(min(x, 0) − c), in a third of the passes over memory that autograd would take.

    Its derivative is min(ψ, 1): where x is positive c is 0 and ψ = x + 1, elsewhere ψ is an exponential of at most 1.
    """

    # Without `setup_context`, for which PyTorch reads the signature of `forward` at each call: longer than one
    # token's features take. `torch.func` would want it, and does not come here: numbers cannot be read there.
    @staticmethod
    def forward(ctx: Any, x: Tensor, c: Tensor) -> Tensor:
        psi = scaled_elu(x, c)
        ctx.save_for_backward(psi)
        ctx.save_for_forward(psi)
        return psi

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (psi,) = ctx.saved_tensors
        return gradient * psi.clamp(max=1), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        (psi,) = ctx.saved_tensors
        change: Tensor = tangent * psi.clamp(max=1)
        return change


@register("elu")
class Elu(Linear):
    formula = "φ(x) = elu(x) + 1"
    order = "N·K·V"
    memory = "G·K·(V+1)"
    training_memory = "N·K+K·V"

    maps_each_vector = True

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c = x.detach().amax(-1).clamp(max=0)  # 0 unless all of x is negative: only a scale, so it has no gradient
        if x.device.type == "cpu" and can_read(x):
            if not (torch.is_grad_enabled() and x.requires_grad):
                return scaled_elu(x, c), c
            psi: Tensor = ScaledElu.apply(x, c)  # type: ignore[no-untyped-call]
            return psi, c
        return x.relu() + torch.exp(x.clamp(max=0) - c[..., None]), c

    def has_unit_scale(self, k: Keys) -> bool:
        return bool((k.detach().amax(-1) >= 0).all())

    def feature_count(self, K: int) -> int:
        return K


@register("polynomial")
class Polynomial(Linear):
    formula = "(q·k + c)ᵖ"
    letters: ClassVar[dict[str, str]] = {"feature_count": "F"}
    maps_each_vector = True
    accumulate = torch.float64  # a power of q·k + c near zero is a small difference of large products

    def __init__(self, degree: int = 2, offset: float = 1.0, strict: bool = False) -> None:
        super().__init__(strict)
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise OptionError(f"{self.name}: degree = {degree!r}, expected a whole number of at least 1")
        if not offset >= 0:
            raise OptionError(f"{self.name}: offset = {offset!r}, expected at least 0: no features give less")
        self.degree = degree
        self.offset = float(offset)

    def features(self, x: Tensor) -> tuple[Tensor, None]:
        if self.offset > 0:
            x = torch.cat([torch.full_like(x[..., :1], math.sqrt(self.offset)), x], -1)
        factors, orders = _products(x.shape[-1], self.degree, x.device)
        psi = orders.to(x.dtype).sqrt()
        for chosen in factors:
            psi = psi * x[..., chosen]
        return psi, None

    def feature_count(self, K: int) -> int:
        numbers = K + (self.offset > 0)
        return _count_products(numbers, self.degree)

    def unambiguous_rows(self, q: Queries, k: Keys, mask: Mask) -> Bool[Tensor, "B H T"]:
        """Returns the rows whose features do not cancel beyond what float64 resolves.

        The digits lost are those of Σ(|q|·|k|+c)ᵖ / |Σ(q·k+c)ᵖ|.
        """
        q = q.double()
        k = k.double()
        allowed = mask.allowed(q.shape[2], k.shape[2], q.device)

        def total(a: Tensor, b: Tensor) -> Tensor:
            similarities = (scores(a, b, mask) + self.offset) ** self.degree
            if allowed is not None:
                similarities = similarities.masked_fill(~allowed, 0)
            return similarities.sum(-1).abs()

        loss = total(q.abs(), k.abs()) / total(q, k)
        return ~(32 * torch.finfo(torch.float64).eps * loss > 1e-10)


def _count_products(numbers: int, degree: int) -> int:
    """Returns how many products of `degree` of so many numbers there are: (numbers + degree − 1 choose degree).

    math.comb does not take sizes that torch.compile leaves open.
    """
    count = 1
    for i in range(degree):
        count = count * (numbers + i) // (i + 1)
    return count


def _products(numbers: int, degree: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Returns the products of `degree` of so many numbers, and in how many orders each can be written [F].

    A product is given by the places of its factors in rising order: the f-th product has those at f of the list's
    tensors [F]. They grow by one factor at a time, from the last one's place on.
    """
    factors = [torch.arange(numbers, device=device)]
    equal = torch.ones_like(factors[0])  # how many of the last factors are the same
    repeats = torch.ones_like(factors[0])  # the orders of equal factors, which make no difference
    for wanted in range(2, degree + 1):
        count = _count_products(numbers, wanted)
        choices = numbers - factors[-1]
        parent = torch.repeat_interleave(choices, output_size=count)
        last = factors[-1][parent]
        first_child = (choices.cumsum(0) - choices)[parent]
        new = last + torch.arange(count, device=device) - first_child
        equal = torch.where(new == last, equal[parent] + 1, 1)
        repeats = repeats[parent] * equal
        factors = [*(places[parent] for places in factors), new]
    return factors, math.factorial(degree) // repeats


@register("quadratic")
class Quadratic(Polynomial):
    formula = "(q·k + 1)²"
    order = "N·K²·V"
    memory = "G·K²/2·(V+1)"
    training_memory = "N·K²+K²·V"

    def __init__(self, strict: bool = False) -> None:
        super().__init__(degree=2, offset=1.0, strict=strict)


@register("linear")
class AnyFeatures(Linear):
    formula = "φ(q)·φ(k), φ yours (default softplus)"
    letters: ClassVar[dict[str, str]] = {"feature_count": "F"}

    def __init__(self, phi: Callable[[Tensor], Tensor] = functional.softplus, strict: bool = False) -> None:
        super().__init__(strict)
        self.phi = phi
        self._counted: tuple[Any, int, int] = (None, 0, 0)  # φ, K and F of the last count: a step asks more than once

    def features(self, x: Tensor) -> tuple[Tensor, None]:
        return self.phi(x), None

    def feature_count(self, K: int) -> int:
        if self._counted[0] is not self.phi or self._counted[1] != K:
            self._counted = (self.phi, K, self._count_features(K))
        return self._counted[2]

    def _count_features(self, K: int) -> int:
        """Returns how many features a vector of width K is mapped to, by mapping one."""
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
