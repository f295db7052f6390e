"""Why scores are divided by √d, and what attention between random vectors looks like.

For q, k ~ N(μ, σ²I) of width d:      E[q·k] = ‖μ‖²,      Var[q·k] = dσ⁴ + 2σ²‖μ‖²
so that scores grow like √d and softmax saturates: its largest weight goes to one, its entropy to zero, and with it the
Jacobian diag(p) − ppᵀ through which all gradients of q and k pass. Divided by √d, nothing depends on d.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.data.seeds import generator
from regard.lab.base import Say, lab, mean_within, normal, quartiles
from regard.lab.results import OutcomeTable
from regard.lab.scale.page import scale_page
from regard.lab.scale.results import (
    IdentityRow,
    ProductRow,
    SaturationRow,
    Scale,
    ScaleResults,
    SumRow,
    WeightPicture,
)
from regard.mechanisms import mechanism

PIECE = 1 << 22  # numbers drawn at a time
PICTURED = 24  # tokens of the matrices that the page shows


@lab("scale", Scale, scale_page)
def measure(config: Scale, say: Say) -> ScaleResults:
    """Why scores are divided by the root of the width, and what random attention looks like."""
    say("mean and variance of q·k")
    means = dict.fromkeys((0.0, config.mean))  # once where both are zero
    product_rows = [products(config, d, mean) for mean in means for d in config.widths]
    say("saturation of softmax")
    saturation_rows = [saturation(config, d, scaled) for scaled in (True, False) for d in config.widths]
    say("weights of random queries and keys")
    shown = min(config.tokens, PICTURED)
    return ScaleResults(
        config=config,
        products=product_rows,
        saturation=saturation_rows,
        sums=[sums(config, K) for K in config.head_widths],
        identity=[identity(config, K) for K in config.head_widths],
        pictures=[WeightPicture(K, _self_weights(config, K, 0, shown).tolist()) for K in config.head_widths],
        outcome=_outcome(product_rows, saturation_rows),
    )


def _outcome(products: list[ProductRow], saturations: list[SaturationRow]) -> OutcomeTable:
    """Returns the table that a terminal shows: how scores grow with the width, and what that does to softmax."""
    centred = {row.width: row for row in products if row.mean == 0}
    softmaxes = {(row.width, row.scaled): row for row in saturations}
    lines = []
    for width, product in centred.items():
        plain, scaled = (softmaxes[width, divided] for divided in (False, True))
        largest = [f"{row.largest[1]:.3f}" for row in (plain, scaled)]
        gradients = [f"{row.gradient[1]:.2g}" for row in (plain, scaled)]
        variance = f"{product.measured_variance[0]:.4g} ({product.predicted_variance:.4g})"
        lines.append([str(width), variance, *largest, *gradients])
    columns = ["d", "Var q·k (law)", "largest weight", "with 1/√d", "‖dp/dq‖", "with 1/√d"]
    return OutcomeTable(columns, lines)


def products(config: Scale, d: int, mean: float) -> ProductRow:
    """Returns mean and variance of q·k, both with the ends of a 95% interval, and what they should be."""
    draw = generator(config.seed, "products", d, str(mean))
    # In pieces, so that wide vectors do not take all memory at once.
    most = max(1, PIECE // d)
    left = config.pairs
    parts = []
    while left:
        n = min(most, left)
        q, k = (mean + config.std * normal(draw, n, d) for _ in range(2))
        parts.append((q * k).sum(-1))
        left -= n
    x = torch.cat(parts)
    length = d * mean**2
    return ProductRow(
        width=d,
        mean=mean,
        measured_mean=mean_within(x),
        predicted_mean=length,
        measured_variance=mean_within((x - x.mean()).square()),
        predicted_variance=d * config.std**4 + 2 * config.std**2 * length,
    )


def saturation(config: Scale, d: int, scaled: bool) -> SaturationRow:
    """Returns how far softmax over random scores is saturated, over draws of one query."""
    draw = generator(config.seed, "saturation", d)
    q = normal(draw, config.draws, 1, 1, d)
    # The mechanism divides by √d itself: to leave that out, multiply first.
    factor = 1.0
    divisor = math.sqrt(d)
    if not scaled:
        factor = math.sqrt(d)
        divisor = 1.0
    rows = max(1, PIECE // (config.tokens * d))
    parts = []
    gradients = []
    for queries in q.split(rows):
        keys = normal(draw, len(queries), 1, config.tokens, d)
        weights = mechanism("softmax").weights(queries * factor, keys)
        parts.append(weights[:, 0, 0])
        gradients.append(gradient_norm(weights, keys) / divisor)
    p = torch.cat(parts)
    entropy = -torch.special.xlogy(p, p).sum(-1) / math.log(config.tokens)
    return SaturationRow(
        width=d,
        scaled=scaled,
        entropy=quartiles(entropy),
        largest=quartiles(p.amax(-1)),
        jacobian=quartiles(jacobian_norm(p)),
        gradient=quartiles(torch.cat(gradients)),
    )


def jacobian_norm(p: Tensor) -> Tensor:
    """Returns ‖diag(p) − ppᵀ‖ (Frobenius) for each row p of weights [..., S]: √(Σp² − 2Σp³ + (Σp²)²)."""
    squares = p.square().sum(-1)
    return (squares - 2 * p.pow(3).sum(-1) + squares.square()).clamp_min(0).sqrt()


def gradient_norm(p: Tensor, k: Tensor) -> Tensor:
    """Returns ‖dp/dq‖ (Frobenius) [B] for weights p [B,1,1,S] = softmax(q·kᵀ) and keys k [B,1,S,K].

    The rows of dp/dq are p_j(k_j − Σ_i p_i k_i).
    """
    norms: Tensor = (p.mT * (k - p @ k)).flatten(1).norm(dim=-1)
    return norms


def sums(config: Scale, K: int) -> SumRow:
    """Returns sums of weights of random queries and keys: what a query gives sums to one, what a key gets does not."""
    draw = generator(config.seed, "sums", K)
    q, k = (normal(draw, config.draws, 1, config.tokens, K) for _ in range(2))
    weights = mechanism("softmax").weights(q, k)[:, 0]  # [draws, tokens, tokens]
    given = weights.sum(-1)
    got = weights.sum(-2)
    squared_lengths = k[:, 0].square().sum(-1)
    correlation = torch.corrcoef(torch.stack([got.flatten(), squared_lengths.flatten()]))[0, 1]
    return SumRow(
        width=K,
        given_off_one=float((given - 1).abs().max()),
        got=quartiles(got),
        std=mean_within(got.std(-1)),
        most=mean_within(got.amax(-1)),
        least=mean_within(got.amin(-1)),
        lengths=float(correlation),
        sorted=got.sort(-1).values.mean(0).tolist(),
    )


def identity(config: Scale, K: int) -> IdentityRow:
    """Returns the mean diagonal of weights with Q = K, and a simple prediction of it.

    A vector of length r has the score r²/√K with itself and N(0, r²/K) with the others, whose exponentials have
    the mean e^{r²/2K}:   diagonal ≈ e^{r²/√K} / (e^{r²/√K} + (N−1)·e^{r²/2K}), averaged over r² ~ χ²(K).
    """
    diagonals = [_self_weights(config, K, n, config.tokens).diagonal().mean() for n in range(config.draws)]
    r2 = normal(generator(config.seed, "lengths", K), 20_000, K).square().sum(-1)
    # In logarithms: e^{r²/√K} overflows for wide heads.
    others = math.log(config.tokens - 1) + r2 / (2 * K)
    predicted = torch.sigmoid(r2 / math.sqrt(K) - others).mean()
    return IdentityRow(K, mean_within(torch.stack(diagonals)), float(predicted))


def _self_weights(config: Scale, K: int, n: int, tokens: int) -> Tensor:
    """Returns the weights [tokens, tokens] of the n-th draw with Q = K."""
    x = normal(generator(config.seed, "identity", K, n), 1, 1, tokens, K)
    return mechanism("softmax").weights(x, x)[0, 0]
