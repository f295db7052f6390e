"""How well random features stand in for softmax: `fourier` and `performer` over features F, width K and input size.

With x = q·K^(−1/4), y = k·K^(−1/4), an estimate of exp(x·y) = exp(q·k/√K) has the relative variance
    fourier     (1 − e^{−s})² e^{s} / 2F                                    s = ‖x−y‖² = δ²
    performer   [e^{s} − 1 − (K−1)(1 − e^{−s}·₁F₁(K; K/2; s/2))] / F         s = ‖x+y‖²
(F a multiple of K). e^{s} − 1 is that of independent directions, and the rest is what orthogonal ones save. It follows
from the sum of two orthogonal directions, whose length is that of a Gaussian vector of width 2K and whose direction is
uniform.
At unit variance of q and k, s is about 2√K, so that the standard deviation grows like e^{√K}/√F. At variance 1/K, s is
about 2/√K and shrinks. The kernel is unbiased; the output, a ratio, is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from regard.data.seeds import derive, generator
from regard.lab.approximate.page import approximate_page
from regard.lab.approximate.results import (
    Approximate,
    ApproximateResults,
    BiasRow,
    ErrorRow,
    MechanismBias,
    SlopeRow,
    VarianceLaw,
    VarianceRow,
)
from regard.lab.base import Say, lab, mean_within, normal, quartiles
from regard.lab.results import OutcomeTable
from regard.mechanisms import mechanism
from regard.mechanisms.random_features import RandomFeatures

NAMES = ("fourier", "performer")
# The variance of q's and k's components, as a function of the width.
VARIANCES: dict[str, Callable[[int], float]] = {"1": lambda K: 1.0, "1/K": lambda K: 1.0 / K}
# The shifts s at which the laws of the variance are checked.
SHIFTS = {"fourier": (1 / 16, 1 / 4, 1.0, 2.0, 4.0, 16.0), "performer": (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)}


class MeasuredErrors(NamedTuple):
    """The errors of one size over all draws, and the median of each draw [2, draws]: of the kernel, of the output."""

    row: ErrorRow
    medians: Tensor


@lab("approximate", Approximate, approximate_page)
def measure(config: Approximate, say: Say) -> ApproximateResults:
    """How far random features are from softmax, over features, width and the size of inputs."""
    errors: list[ErrorRow] = []
    slopes: list[SlopeRow] = []
    parts = (len(VARIANCES) * len(config.widths) + 2) * len(NAMES)
    numbers = iter(range(1, parts + 1))
    for variance in VARIANCES:
        for K in config.widths:
            for name in NAMES:
                say(f"{next(numbers)} of {parts}: errors of {name} at variance {variance}, K = {K}")
                measured = _measure_errors(config, name, variance, K)
                errors += [one.row for one in measured]
                slopes.append(_fit_slopes(measured))
    laws = {}
    biases = []
    for name in NAMES:
        say(f"{next(numbers)} of {parts}: the law of the variance of {name}'s kernel")
        laws[name] = variance_law(config, name)
        say(f"{next(numbers)} of {parts}: the bias of {name}'s kernel and output")
        biases.append(bias(config, name))
    return ApproximateResults(config, errors, slopes, laws, biases, _outcome(config, errors))


def _outcome(config: Approximate, errors: list[ErrorRow]) -> OutcomeTable:
    """Returns the table that a terminal shows: the median error of the output at the fewest and the most features."""
    found = {(row.mechanism, row.variance, row.width, row.features): row.output[1] for row in errors}
    most = config.features[-1]
    fewest = config.features[0]
    lines = []
    for name in NAMES:
        for variance in VARIANCES:
            for K in config.widths:
                ends = [f"{found[name, variance, K, F]:.1%}" for F in (fewest, most)]
                lines.append([name, variance, str(K), *ends])
    columns = ["mechanism", "variance", "K", f"output error, F = {fewest}", f"F = {most}"]
    return OutcomeTable(columns, lines)


def _build(name: str, F: int, K: int, seed: int) -> RandomFeatures:
    """Returns the mechanism with its directions drawn."""
    built = mechanism(name, features=F, width=K, seed=seed)
    assert isinstance(built, RandomFeatures)
    return built


def relative_kernel(attention: RandomFeatures, q: Tensor, k: Tensor) -> Tensor:
    """Returns φ(q_i)·φ(k_j) / exp(q_i·k_j/√K) [..., T, S]: one where the estimate is right."""
    psi_q, c_q = attention.features(q)
    psi_k, c_k = attention.features(k)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return (psi_q @ psi_k.mT) * torch.exp(c_q[..., :, None] + c_k[..., None, :] - scores)


def shift(name: str, q: Tensor, k: Tensor) -> Tensor:
    """Returns what the variance of an entry depends on: ‖x−y‖² for fourier, ‖x+y‖² for performer."""
    if name == "fourier":
        k = -k
    return (q + k).square().sum(-1) / math.sqrt(q.shape[-1])


def relative_variance(name: str, s: Tensor, F: int, K: int) -> Tensor:
    """Returns the variance of an estimate over the square of its mean, by the law; s is what `shift` returns."""
    if name == "fourier":
        return 2 * torch.sinh(s / 2).square() / F
    # Directions come in blocks of K that are orthogonal to each other; the last block may be smaller.
    full, rest = divmod(F, K)
    partners = (full * K * (K - 1) + rest * (rest - 1)) / F
    return (torch.expm1(s) - partners * (1 - torch.exp(-s) * _hypergeometric(K, K / 2, s / 2))) / F


def _hypergeometric(a: float, b: float, z: Tensor) -> Tensor:
    """Returns ₁F₁(a; b; z) = Σ_n (a)_n zⁿ / ((b)_n n!) for z ≥ 0: all terms are positive, none cancels."""
    term = total = torch.ones_like(z)
    n = 0
    while (term > 1e-17 * total).any():
        term = term * z * (a + n) / ((b + n) * (n + 1))
        total = total + term
        n += 1
    return total


def _measure_errors(config: Approximate, name: str, variance: str, K: int) -> list[MeasuredErrors]:
    """Returns for each F the relative errors of kernel entries and of outputs."""
    std = math.sqrt(VARIANCES[variance](K))
    N = config.tokens
    kernel: dict[int, list[Tensor]] = {F: [] for F in config.features}
    output: dict[int, list[Tensor]] = {F: [] for F in config.features}
    expected: dict[int, list[Tensor]] = {F: [] for F in config.features}
    for n in range(config.draws):
        draw = generator(config.seed, "inputs", variance, K, n)
        q, k, v = (normal(draw, 1, 1, N, K) for _ in range(3))
        q = q * std
        k = k * std
        exact = mechanism("softmax")(q, k, v)
        shifts = shift(name, q[0, 0, :, None], k[0, 0, None, :])
        noise = normal(draw, N, N).abs()
        for F in config.features:
            attention = _build(name, F, K, derive(config.seed, name, variance, K, F, n))
            kernel[F].append((relative_kernel(attention, q, k) - 1).abs().flatten())
            output[F].append(((attention(q, k, v) - exact).norm(dim=-1) / exact.norm(dim=-1)).flatten())
            # A normal error of the law's size for each pair: its median is what the law predicts of the median.
            expected[F].append((relative_variance(name, shifts, F, K).sqrt() * noise).flatten())
    measured = []
    for F in config.features:
        row = ErrorRow(
            mechanism=name,
            variance=variance,
            width=K,
            features=F,
            kernel=quartiles(torch.cat(kernel[F])),
            predicted=quartiles(torch.cat(expected[F]))[1],
            output=quartiles(torch.cat(output[F])),
        )
        # torch.median of an even count is the lower of the two in the middle, not their mean.
        medians = torch.tensor(
            [[quartiles(x)[1] for x in errors[F]] for errors in (kernel, output)], dtype=torch.float64
        )
        measured.append(MeasuredErrors(row, medians))
    return measured


def _fit_slopes(measured: list[MeasuredErrors]) -> SlopeRow:
    """Returns the slopes of log error against log F: of each draw by least squares, then their means."""
    x = torch.tensor([math.log(one.row.features) for one in measured], dtype=torch.float64)
    x = x - x.mean()
    y = torch.stack([one.medians for one in measured]).log()  # [features, 2, draws]
    slopes = torch.einsum("f,fpr->pr", x, y) / x.square().sum().clamp_min(1e-300)
    first = measured[0].row
    return SlopeRow(first.mechanism, first.variance, first.width, mean_within(slopes[0]), mean_within(slopes[1]))


def variance_law(config: Approximate, name: str, F: int = 64, K: int = 16) -> VarianceLaw:
    """Returns the measured and the predicted variance of one entry over redrawn directions.

    That of fourier is of the Gaussian kernel e^{−s/2} itself, (1−e^{−s})²/2F. That of performer is relative, since s
    does not fix its kernel.
    """
    shifts = torch.tensor(SHIFTS[name], dtype=torch.float64)
    draw = generator(config.seed, "law", name)
    towards = torch.nn.functional.normalize(normal(draw, len(shifts), K), dim=-1)
    # x and y are q and k times K^(−1/4), so that steps in q are longer by K^(1/4).
    step = towards * (shifts.sqrt() * K**0.25)[:, None]
    if name == "fourier":
        k = normal(draw, len(shifts), K)
        q = k + step
        scale = torch.exp(-shifts)
    else:
        q = k = step / 2
        scale = torch.ones_like(shifts)
    predicted = relative_variance(name, shifts, F, K) * scale
    estimates = []
    attention = _build(name, F, K, 0)
    for n in range(config.redraws):
        attention.redraw(derive(config.seed, "law", name, n))
        psi_q, c_q = attention.features(q)
        psi_k, c_k = attention.features(k)
        entry = (psi_q * psi_k).sum(-1)
        # fourier's c belongs to the factors around the Gaussian kernel, performer's to the features themselves.
        if name == "performer":
            entry = entry * torch.exp(c_q + c_k - (q * k).sum(-1) / math.sqrt(K))
        estimates.append(entry)
    entries = torch.stack(estimates)
    squares = (entries - entries.mean(0)).square()
    measured = squares.sum(0) / (len(entries) - 1)
    error = squares.std(0) / math.sqrt(len(entries))
    columns = (shifts.tolist(), predicted.tolist(), measured.tolist(), error.tolist())
    return VarianceLaw(F, K, [VarianceRow(*row) for row in zip(*columns, strict=True)])


def bias(config: Approximate, name: str, K: int = 4, sizes: tuple[int, ...] = (16, 32, 64, 128)) -> MechanismBias:
    """Returns means over redrawn directions for fixed inputs of variance 1/K: of the kernel, and of the output.

    The mean of the kernel is right, that of the output is not. The squared norm of a mean of R draws is too large by
    variance/R, which is subtracted.
    """
    draw = generator(config.seed, "bias")
    q, k, v = (normal(draw, 1, 1, 16, K) for _ in range(3))
    q = q / math.sqrt(K)
    k = k / math.sqrt(K)
    exact = mechanism("softmax")(q, k, v)
    rows = []
    for F in sizes:
        attention = _build(name, F, K, 0)
        kernel_errors = []
        output_errors = []
        for n in range(config.redraws):
            attention.redraw(derive(config.seed, "bias", name, F, n))
            kernel_errors.append(relative_kernel(attention, q, k).mean() - 1)
            output_errors.append((attention(q, k, v) - exact).flatten())
        outputs = torch.stack(output_errors)
        spread = outputs.var(0).sum()
        squared = outputs.mean(0).square().sum() - spread / len(outputs)
        rows.append(
            BiasRow(
                features=F,
                kernel=mean_within(torch.stack(kernel_errors)),
                spread=float(spread.sqrt() / exact.norm()),
                bias=float(squared.clamp_min(0).sqrt() / exact.norm()),
                noise=float((spread / len(outputs)).sqrt() / exact.norm()),
            )
        )
    return MechanismBias(name, K, rows)
