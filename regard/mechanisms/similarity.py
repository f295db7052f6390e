"""Attention by a similarity of one's choice: weights sim(q, k) / Σ sim(q, k'), over the keys that a query may see.

gaussian:    exp(−‖q − k‖²/2σ²). With ‖q‖² gone in the ratio, it is softmax of (q·k − ‖k‖²/2)/σ²: for keys of one length
             it is softmax attention, and in general softmax that prefers short keys.
similarity:  sim(q, k) of two vectors, any function that returns one number. Its features are not known, so that every
             pair is computed.

Attention as a kernel smoother: Tsai et al. 2019, arXiv:1908.11775.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import NegativeSimilarityError, OptionError, ZeroRowError
from regard.mechanisms.base import refuse, register, without_autocast
from regard.mechanisms.cache import Cache, empty_cache
from regard.mechanisms.pairwise import Pairwise, scores
from regard.shapes import SCORE_FIELDS, Keys, Mask, Queries, Size, Weights, check_sizes, upcast_half


@register("gaussian")
class Gaussian(Pairwise):
    formula = "exp(−‖q − k‖²/2σ²)"

    def __init__(self, sigma: float | None = None) -> None:
        super().__init__()
        if sigma is not None and not sigma > 0:
            raise OptionError(f"gaussian: sigma = {sigma}, expected a number above 0, or None for K^¼")
        self.sigma = sigma

    def variance(self, K: int) -> float:
        """Returns σ² for keys of width K: √K where it is not given, so that q·k/σ² is softmax's q·k/√K."""
        if self.sigma is None:
            return math.sqrt(K)
        return self.sigma**2

    def as_softmax(self, q: Queries, k: Keys) -> tuple[Tensor, Tensor]:
        """Returns queries [q/σ², 1] and keys [k, −‖k‖²/2σ²], whose softmax attention at scale 1 this is."""
        variance = self.variance(q.shape[-1])
        lengths = upcast_half(k).square().sum(-1, keepdim=True)
        queries = torch.cat([upcast_half(q) / variance, torch.ones_like(upcast_half(q)[..., :1])], -1)
        return queries, torch.cat([upcast_half(k), -lengths / (2 * variance)], -1)

    def weights(self, q: Queries, k: Keys, mask: Mask = Mask()) -> Weights:  # type: ignore[override]
        variance = self.variance(q.shape[-1])
        lengths = upcast_half(mask.zero_hidden(k)).square().sum(-1)  # [B,G,S]
        lengths = lengths.repeat_interleave(q.shape[1] // k.shape[1], 1)
        return mask.softmax(scores(q / variance, k, mask) - lengths[:, :, None] / (2 * variance))


def cauchy(q: Float[Tensor, " K"], k: Float[Tensor, " K"]) -> Float[Tensor, ""]:
    """Returns 1 / (1 + ‖q − k‖²/√K), a similarity that falls off slowly with the distance."""
    return 1 / (1 + (q - k).square().sum(-1) / math.sqrt(q.shape[-1]))


@register("similarity")
class AnySimilarity(Pairwise):
    formula = "sim(q, k), sim yours (default 1/(1 + ‖q − k‖²/√K))"

    def __init__(self, sim: Callable[[Tensor, Tensor], Tensor] = cauchy, strict: bool = False) -> None:
        super().__init__()
        if not callable(sim):
            raise OptionError(f"similarity: sim = {sim!r}, expected a function of a query [K] and a key [K]")
        self.sim = sim
        self.strict = strict

    def score_flops(self, K: int) -> int:
        return 0  # what a function of one's own multiplies is not known

    def empty(self, size: Size, rules: Mask = Mask()) -> Cache:
        refuse(self, rules, *SCORE_FIELDS)
        return empty_cache(self, size, rules)

    def weights(self, q: Queries, k: Keys, mask: Mask = Mask()) -> Weights:  # type: ignore[override]
        check_sizes(q, k, k, mask)
        refuse(self, mask, *SCORE_FIELDS)
        with without_autocast(q):
            similarities = self._compare_all(upcast_half(q), upcast_half(mask.zero_hidden(k)))
        weights = mask.normalise(similarities)
        if self.strict:
            self._refuse_improper(mask.hide(similarities), weights, mask)
        return weights

    def _refuse_improper(self, similarities: Weights, weights: Weights, mask: Mask) -> None:
        """Raises where a similarity is negative, or where a query that may see keys has no weights."""
        if bool((similarities < 0).any()):
            raise NegativeSimilarityError(
                "similarity: sim(q, k) is negative for a pair, so that weights are negative and may sum to nearly "
                "zero. Use a similarity ≥ 0, or strict=False to allow it."
            )
        seen = mask.hide(torch.ones_like(similarities)).any(-1)
        if bool((seen & (weights == 0).all(-1)).any()):
            raise ZeroRowError(
                "similarity: a query's similarities to the keys it may see sum to zero, so it has no weights. "
                "Use a similarity that is positive, or strict=False to get zeros there."
            )

    def _compare_all(self, q: Queries, k: Keys) -> Weights:
        """Returns sim(q_i, k_j) for every pair, [B,H,T,S]: the function of two vectors, mapped over all of them."""
        B, H, T, K = q.shape
        S = k.shape[2]
        if S == 0 or T == 0:
            return q.new_zeros(B, H, T, S) + 0 * (q.sum() + k.sum())
        k = k.repeat_interleave(H // k.shape[1], 1)
        over_keys = torch.vmap(self._compare_pair, (None, 0))
        over_queries = torch.vmap(over_keys, (0, None))
        try:
            return torch.vmap(over_queries)(q.reshape(-1, T, K), k.reshape(-1, S, K)).view(B, H, T, S)
        except (RuntimeError, TypeError, IndexError) as error:
            reason = str(error).split("\n")[0].rstrip(".")
            raise OptionError(
                f"similarity: {describe_callable(self.sim)} could not be computed of a query [{K}] and a key [{K}]: "
                f"{reason[:200]}. Expected a function of two vectors that returns one number, in PyTorch's operations "
                "and without branching on numbers (torch.where instead of if)."
            ) from error

    def _compare_pair(self, q: Float[Tensor, " K"], k: Float[Tensor, " K"]) -> Tensor:
        similarity = self.sim(q, k)
        if not isinstance(similarity, Tensor) or similarity.numel() != 1:
            shape = list(similarity.shape) if isinstance(similarity, Tensor) else type(similarity).__name__
            raise TypeError(f"it returned {shape}")
        return similarity.reshape(())


def describe_callable(function: object) -> str:
    """Returns what a function is called in errors: its name, or its type's."""
    return getattr(function, "__name__", type(function).__name__)
