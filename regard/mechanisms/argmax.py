"""Argmax (hard) attention: the value of the visible key with the largest inner product.

The weights are one-hot, ties go to the first visible key, and a query that sees nothing gets zeros. Almost everywhere
the choice does not move with q or k, so gradients reach v only and q, k cannot learn. The straight-through estimator
lends them softmax's gradient: W = onehot + (P − stop(P)), with P the softmax under the same mask. Forward it is the
argmax; backward dq and dk are softmax's, dv is argmax's.

Hard attention: Xu et al. 2015, arXiv:1502.03044; the estimator: Bengio et al. 2013, arXiv:1308.3432.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from regard.errors import OptionError
from regard.mechanisms.base import refuse, register
from regard.mechanisms.pairwise import Pairwise, scores
from regard.shapes import Keys, Mask, Queries, Weights


@register("argmax")
class Argmax(Pairwise):
    formula = "v_j, j = argmax q·k"

    def __init__(self, gradient: Literal["none", "straight_through"] = "none") -> None:
        super().__init__()
        if gradient not in ("none", "straight_through"):
            raise OptionError(f"argmax: gradient = '{gradient}', expected 'none' or 'straight_through'")
        self.gradient = gradient

    @property
    def learns(self) -> bool:
        return self.gradient != "none"

    def weights(self, q: Queries, k: Keys, mask: Mask = Mask()) -> Weights:  # type: ignore[override]
        refuse(self, mask, "sinks")
        # Divided after the product, by √K itself: products of integers stay exact, so that ties stay ties.
        raw = scores(q, k, mask) / math.sqrt(q.shape[-1])
        ranked = _hide_disallowed(raw.detach(), mask)
        if ranked.shape[-1] == 0:
            return raw  # without keys there are no weights, and nothing to choose
        best = ranked.argmax(-1, keepdim=True)
        hard = torch.zeros_like(ranked).scatter_(-1, best, 1.0)
        hard = hard.masked_fill(ranked.gather(-1, best) == float("-inf"), 0)
        if self.gradient == "none":
            return hard
        soft = mask.softmax(raw)
        return hard + (soft - soft.detach())

    def unambiguous_rows(self, q: Queries, k: Keys, mask: Mask) -> Bool[Tensor, "B H T"]:
        """Returns the rows whose best and second-best score differ by more than rounding."""
        ranked = _hide_disallowed(scores(q.double(), k.double(), mask), mask)
        top = ranked.topk(min(2, ranked.shape[-1]), -1).values
        if top.shape[-1] < 2:
            return torch.ones_like(top[..., 0], dtype=torch.bool)
        scale = 1 + top.masked_fill(top.isinf(), 0).abs().amax(-1)
        # Negated, not ≥: a row that sees one key or none has differences of inf or NaN, and no ambiguity.
        unambiguous: Tensor = ~(top[..., 0] - top[..., 1] < 8 * torch.finfo(q.dtype).eps * q.shape[-1] * scale)
        return unambiguous


def _hide_disallowed(raw: Weights, mask: Mask) -> Weights:
    """Returns the adjusted scores with −inf where nothing may be seen: before the argmax, as after it is too late."""
    raw = mask.adjusted_scores(raw)
    allowed = mask.allowed(raw.shape[2], raw.shape[3], raw.device)
    if allowed is None:
        return raw
    return raw.masked_fill(~allowed, float("-inf"))
