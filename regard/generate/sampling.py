"""From logits to a distribution, and from a distribution to a token."""

from __future__ import annotations

import math

import numpy
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.generate.settings import Settings
from regard.shapes import upcast_half


def candidates(
    logits: Float[Tensor, "B N"], settings: Settings
) -> tuple[Float[Tensor, "B C"], Int[Tensor, "B C"] | None]:
    """Returns logits [B,C] of candidates, −inf for tokens that must not be drawn, and their ids; None: the vocabulary.

    The temperature comes first, then top_k, top_p and min_p, each applied to the distribution that the last one left.
    """
    ids = None
    if settings.temperature is not None:
        # In float32, as logits over a low temperature overflow float16. A float, as JSON may hold an integer that is
        # too large for torch.
        logits = upcast_half(logits) / float(settings.temperature)
    if settings.top_k is not None or settings.top_p is not None:
        N = logits.shape[-1]
        logits, ids = logits.topk(min(settings.top_k or N, N), -1)  # in falling order
    if settings.top_p is not None and settings.top_p < 1:
        p = logits.double().softmax(-1)
        # A token is left out if those before it already reach top_p, which is never so for the likeliest.
        before = p.cumsum(-1) - p
        logits = logits.masked_fill(before >= settings.top_p, -math.inf)
    if settings.min_p is not None:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(settings.min_p), -math.inf)
    return logits, ids


def probabilities(logits: Float[Tensor, "B N"], settings: Settings) -> Float[Tensor, "B N"]:
    """Returns the distribution that a token is drawn from, in float64."""
    kept, ids = candidates(logits, settings)
    p = kept.double().softmax(-1)
    if ids is None:
        return p
    return torch.zeros_like(logits, dtype=p.dtype).scatter(-1, ids, p)


def draw(logits: Float[Tensor, "B N"], settings: Settings, u: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Returns the token at which the running sum of the probabilities passes u, uniform in [0, 1)."""
    kept, ids = candidates(logits, settings)
    sums = kept.double().softmax(-1).cumsum(-1)
    # Scaled by the last sum, which rounding may leave below 1, so that no token of probability 0 is drawn.
    places = torch.searchsorted(sums, u[:, None] * sums[:, -1:], right=True).clamp(max=kept.shape[-1] - 1)
    if ids is not None:
        places = ids.gather(-1, places)
    return places[:, 0]


def penalize_repetition(
    logits: Float[Tensor, "B N"], seen: Bool[Tensor, "B N"], penalty: float
) -> Float[Tensor, "B N"]:
    """Returns the logits with those of tokens that have occurred lowered.

    They are divided by the penalty if they are positive, and multiplied by it if they are negative.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def uniforms(seed: int, streams: list[int], count: int) -> Float[Tensor, "B count"]:
    """Returns numbers in [0, 1), each row from its own generator, so that batching does not change them."""
    rows = [numpy.random.Generator(numpy.random.Philox(numpy.random.SeedSequence((seed, n)))) for n in streams]
    return torch.from_numpy(numpy.stack([row.random(count) for row in rows]))
