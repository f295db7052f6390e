"""Why scores are divided by √d, and what attention between random vectors looks like.

For q, k ~ N(μ, σ²I) of width d:      E[q·k] = ‖μ‖²,      Var[q·k] = dσ⁴ + 2σ²‖μ‖²
so that scores grow like √d and softmax saturates: its largest weight goes to one, its entropy to zero, and with it the
Jacobian diag(p) − ppᵀ through which all gradients of q and k pass. Divided by √d, nothing depends on d.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.data.seeds import generator
from regard.lab.base import LabConfig, Results, Say, lab, mean_within, normal, quartiles
from regard.lab.scale.page import scale_page
from regard.mechanisms import mechanism

PIECE = 1 << 22  # numbers drawn at a time
PICTURED = 24  # tokens of the matrices that the page shows


@dataclass(frozen=True, kw_only=True)
class Scale(LabConfig):
    """`widths` of q and k for products and saturation, `head_widths` for whole matrices; `mean` is each component of μ.

    `pairs` of q and k are drawn for the products, `draws` of the rest, with `tokens` queries and keys.
    """

    place: ClassVar[str] = "scale"
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {
        "widths": (1, 1 << 14),
        "head_widths": (1, 1 << 12),
        "mean": (-100, 100),
        "std": (1e-3, 100),
        "tokens": (2, 4096),
        "pairs": (2, 10_000_000),
        "draws": (2, 100_000),
    }

    widths: tuple[int, ...] = (4, 16, 64, 256, 1024)
    head_widths: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    mean: float = 0.5
    std: float = 1.0
    tokens: int = 64
    pairs: int = 20_000
    draws: int = 1000


@lab("scale", Scale, scale_page)
def measure(config: Scale, say: Say) -> Results:
    """Why scores are divided by the root of the width, and what random attention looks like."""
    say("mean and variance of q·k")
    found = [products(config, d, mean) for mean in dict.fromkeys((0.0, config.mean)) for d in config.widths]
    say("saturation of softmax")
    saturated = [saturation(config, d, scaled) for scaled in (True, False) for d in config.widths]
    say("weights of random queries and keys")
    return {
        "products": found,
        "saturation": saturated,
        "sums": [sums(config, K) for K in config.head_widths],
        "identity": [identity(config, K) for K in config.head_widths],
        "pictures": [
            {"width": K, "weights": _identity(config, K, 0, min(config.tokens, PICTURED)).tolist()}
            for K in config.head_widths
        ],
    }


def products(config: Scale, d: int, mean: float) -> dict[str, Any]:
    """Mean and variance of q·k, both with the ends of a 95% interval, and what they should be."""
    draw = generator(config.seed, "products", d, str(mean))
    most, left, drawn = max(1, PIECE // d), config.pairs, []
    while left:
        n = min(most, left)
        q, k = (mean + config.std * normal(draw, n, d) for _ in range(2))
        drawn.append((q * k).sum(-1))
        left -= n
    x = torch.cat(drawn)
    length = d * mean**2
    return {
        "width": d,
        "mean": mean,
        "measured_mean": mean_within(x),
        "predicted_mean": length,
        "measured_variance": mean_within((x - x.mean()).square()),
        "predicted_variance": d * config.std**4 + 2 * config.std**2 * length,
    }


def saturation(config: Scale, d: int, scaled: bool) -> dict[str, Any]:
    """Quartiles over draws of one query: entropy as a share of log N, largest weight, and what gradients pass through.

    `jacobian` is ‖diag(p) − ppᵀ‖, `gradient` is ‖dp/dq‖.
    """
    draw = generator(config.seed, "saturation", d)
    q = normal(draw, config.draws, 1, 1, d)
    rows = max(1, PIECE // (config.tokens * d))
    parts, gradients = [], []
    for queries in q.split(rows):
        keys = normal(draw, len(queries), 1, config.tokens, d)
        # The mechanism divides by √d itself: to leave that out, multiply first.
        weights = mechanism("softmax").weights(queries if scaled else queries * math.sqrt(d), keys)
        parts.append(weights[:, 0, 0])
        gradients.append(gradient_norm(weights, keys) / (math.sqrt(d) if scaled else 1))
    p = torch.cat(parts)
    entropy = -torch.special.xlogy(p, p).sum(-1) / math.log(config.tokens)
    return {
        "width": d,
        "scaled": scaled,
        "entropy": quartiles(entropy),
        "largest": quartiles(p.amax(-1)),
        "jacobian": quartiles(jacobian_norm(p)),
        "gradient": quartiles(torch.cat(gradients)),
    }


def jacobian_norm(p: Tensor) -> Tensor:
    """‖diag(p) − ppᵀ‖ (Frobenius) for each row p of weights: √(Σp² − 2Σp³ + (Σp²)²)."""
    squares = p.square().sum(-1)
    return (squares - 2 * p.pow(3).sum(-1) + squares.square()).clamp_min(0).sqrt()


def gradient_norm(p: Tensor, k: Tensor) -> Tensor:
    """‖dp/dq‖ (Frobenius) [B] for weights p [B,1,1,S] = softmax(q·kᵀ): the rows of dp/dq are p_j(k_j − Σ_i p_i k_i)."""
    norms: Tensor = (p.mT * (k - p @ k)).flatten(1).norm(dim=-1)
    return norms


def sums(config: Scale, K: int) -> dict[str, Any]:
    """Weights of random queries and keys: what each query gives sums to one, what each key gets does not.

    `sorted` are a draw's sums over queries from the least to the most attended key, means over draws. `lengths` is the
    correlation of a key's sum with its length.
    """
    draw = generator(config.seed, "sums", K)
    q, k = (normal(draw, config.draws, 1, config.tokens, K) for _ in range(2))
    weights = mechanism("softmax").weights(q, k)[:, 0]
    given, got = weights.sum(-1), weights.sum(-2)
    related = torch.corrcoef(torch.stack([got.flatten(), k[:, 0].square().sum(-1).flatten()]))[0, 1]
    return {
        "width": K,
        "given_off_one": float((given - 1).abs().max()),
        "got": quartiles(got),
        "std": mean_within(got.std(-1)),
        "most": mean_within(got.amax(-1)),
        "least": mean_within(got.amin(-1)),
        "lengths": float(related),
        "sorted": got.sort(-1).values.mean(0).tolist(),
    }


def identity(config: Scale, K: int) -> dict[str, Any]:
    """The mean diagonal of weights with Q = K, and a simple prediction.

    A vector of length r has the score r²/√K with itself and N(0, r²/K) with the others, whose exponentials have
    the mean e^{r²/2K}:   diagonal ≈ e^{r²/√K} / (e^{r²/√K} + (N−1)·e^{r²/2K}), averaged over r² ~ χ²(K).
    """
    each = torch.stack([_identity(config, K, n, config.tokens).diagonal().mean() for n in range(config.draws)])
    r2 = normal(generator(config.seed, "lengths", K), 20_000, K).square().sum(-1)
    others = math.log(config.tokens - 1) + r2 / (2 * K)
    predicted = torch.sigmoid(r2 / math.sqrt(K) - others).mean()
    return {"width": K, "diagonal": mean_within(each), "predicted": float(predicted)}


def _identity(config: Scale, K: int, n: int, tokens: int) -> Tensor:
    x = normal(generator(config.seed, "identity", K, n), 1, 1, tokens, K)
    return mechanism("softmax").weights(x, x)[0, 0]
