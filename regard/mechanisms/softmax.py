"""Softmax attention: softmax(q·kᵀ/√K + bias) v.

With G = H key/value heads it is multi-head attention, with G = 1 multi-query, in between grouped: the mathematics is
the same and only the cache shrinks. V need not equal K. The factor 1/√K keeps the scores of unit-variance q and k at
unit variance, so that the softmax does not saturate; a single decoding step needs it just as a whole sequence does.

Vaswani et al. 2017, arXiv:1706.03762; multi-query: Shazeer 2019, arXiv:1911.02150; grouped: Ainslie et al. 2023,
arXiv:2305.13245.
"""

from __future__ import annotations

from regard.mechanisms.base import register
from regard.mechanisms.pairwise import Pairwise, scores
from regard.shapes import Keys, Mask, Queries, Weights, default_scale


@register("softmax")
class Softmax(Pairwise):
    formula = "softmax(q·kᵀ/√K + bias) v"

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale

    def score_scale(self, K: int) -> float:
        """Returns the factor of the scores of keys of width K: `scale`, or 1/√K where it is None."""
        if self.scale is None:
            return default_scale(K)
        return self.scale

    def weights(self, q: Queries, k: Keys, mask: Mask = Mask()) -> Weights:  # type: ignore[override]
        return mask.softmax(scores(q * self.score_scale(q.shape[-1]), k, mask))
