"""How well random features stand in for softmax: `fourier` and `performer` over features F, width K and input size.

With x = q·K^(−1/4), y = k·K^(−1/4), an estimate of exp(x·y) = exp(q·k/√K) has the relative variance
    fourier     (1 − e^{−s})² e^{s} / 2F                                    s = ‖x−y‖² = δ²
    performer   [e^{s} − 1 − (K−1)(1 − e^{−s}·₁F₁(K; K/2; s/2))] / F         s = ‖x+y‖²
(F a multiple of K). e^{s} − 1 is that of independent directions, and the rest is what orthogonal ones save: the sum of
two has the length of a Gaussian vector of width 2K, and any direction.
At unit variance of q and k, s is about 2√K, so that the standard deviation grows like e^{√K}/√F. At variance 1/K, s is
about 2/√K and shrinks. The kernel is unbiased; the output, a ratio, is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.data.seeds import derive, generator
from regard.lab.approximate.page import approximate_page
from regard.lab.base import LabConfig, Results, Say, lab, mean_within, normal, quartiles
from regard.mechanisms import mechanism
from regard.mechanisms.random_features import RandomFeatures

NAMES = ("fourier", "performer")
VARIANCES: dict[str, Callable[[int], float]] = {
    "1": lambda K: 1.0,
    "1/K": lambda K: 1.0 / K,
}  # of q's and k's components
SHIFTS = {"fourier": (1 / 16, 1 / 4, 1.0, 2.0, 4.0, 16.0), "performer": (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)}


@dataclass(frozen=True, kw_only=True)
class Approximate(LabConfig):
    """`draws` of inputs and directions for each size, of `tokens` queries and keys; `redraws` for the laws."""

    place: ClassVar[str] = "approximate"
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {
        "features": (1, 1 << 16),
        "widths": (1, 1 << 10),
        "draws": (2, 10_000),
        "tokens": (2, 4096),
        "redraws": (2, 1_000_000),
    }

    features: tuple[int, ...] = (64, 256, 1024, 4096)
    widths: tuple[int, ...] = (4, 8, 16, 32, 64)
    draws: int = 32
    tokens: int = 128
    redraws: int = 4000


@lab("approximate", Approximate, approximate_page)
def measure(config: Approximate, say: Say) -> Results:
    """How far random features are from softmax, over features, width and the size of inputs."""
    errors: list[dict[str, Any]] = []
    slopes: list[dict[str, Any]] = []
    for variance in VARIANCES:
        for K in config.widths:
            say(f"errors at variance {variance}, K = {K}")
            for name in NAMES:
                found = _errors(config, name, variance, K)
                errors += [row for row, _ in found]
                slopes.append(_slopes([row for row, _ in found], [middles for _, middles in found]))
    say("the laws of the kernel's variance")
    laws = {name: variance_law(config, name) for name in NAMES}
    say("bias of kernel and output")
    return {"errors": errors, "slopes": slopes, "laws": laws, "bias": [bias(config, name) for name in NAMES]}


def made(name: str, F: int, K: int, seed: int) -> RandomFeatures:
    """The mechanism with its directions drawn."""
    one = mechanism(name, features=F, width=K, seed=seed)
    assert isinstance(one, RandomFeatures)
    return one


def relative_kernel(one: RandomFeatures, q: Tensor, k: Tensor) -> Tensor:
    """φ(q_i)·φ(k_j) / exp(q_i·k_j/√K) [T,S]: one where the estimate is right."""
    (psi_q, c_q), (psi_k, c_k) = one.features(q), one.features(k)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return (psi_q @ psi_k.mT) * torch.exp(c_q[..., :, None] + c_k[..., None, :] - scores)


def shift(name: str, q: Tensor, k: Tensor) -> Tensor:
    """What the variance of an entry depends on: ‖x−y‖² for fourier, ‖x+y‖² for performer."""
    sign = -1 if name == "fourier" else 1
    return (q + sign * k).square().sum(-1) / math.sqrt(q.shape[-1])


def relative_variance(name: str, s: Tensor, F: int, K: int) -> Tensor:
    """The law for the variance of an estimate over the square of its mean."""
    if name == "fourier":
        return 2 * torch.sinh(s / 2).square() / F
    full, rest = divmod(F, K)
    partners = (full * K * (K - 1) + rest * (rest - 1)) / F
    return (torch.expm1(s) - partners * (1 - torch.exp(-s) * _hypergeometric(K, K / 2, s / 2))) / F


def _hypergeometric(a: float, b: float, z: Tensor) -> Tensor:
    """₁F₁(a; b; z) = Σ_n (a)_n zⁿ / ((b)_n n!), z ≥ 0: all terms are positive, none cancels."""
    term = total = torch.ones_like(z)
    n = 0
    while (term > 1e-17 * total).any():
        term = term * z * (a + n) / ((b + n) * (n + 1))
        total = total + term
        n += 1
    return total


def _errors(config: Approximate, name: str, variance: str, K: int) -> list[tuple[dict[str, Any], Tensor]]:
    """For each F: quartiles of the relative errors of kernel entries and of outputs, and each draw's own medians."""
    size, N = math.sqrt(VARIANCES[variance](K)), config.tokens
    kernel: dict[int, list[Tensor]] = {F: [] for F in config.features}
    output: dict[int, list[Tensor]] = {F: [] for F in config.features}
    expected: dict[int, list[Tensor]] = {F: [] for F in config.features}
    for n in range(config.draws):
        draw = generator(config.seed, "inputs", variance, K, n)
        q, k, v = (normal(draw, 1, 1, N, K) for _ in range(3))
        q, k = q * size, k * size
        exact = mechanism("softmax")(q, k, v)
        pairs, lots = shift(name, q[0, 0, :, None], k[0, 0, None, :]), normal(draw, N, N).abs()
        for F in config.features:
            one = made(name, F, K, derive(config.seed, name, variance, K, F, n))
            kernel[F].append((relative_kernel(one, q, k) - 1).abs().flatten())
            output[F].append(((one(q, k, v) - exact).norm(dim=-1) / exact.norm(dim=-1)).flatten())
            # A normal error of the law's size for each pair: its median is what the law predicts of the median.
            expected[F].append((relative_variance(name, pairs, F, K).sqrt() * lots).flatten())
    made_rows = []
    for F in config.features:
        row = {
            "mechanism": name, "variance": variance, "width": K, "features": F,
            "kernel": quartiles(torch.cat(kernel[F])), "predicted": quartiles(torch.cat(expected[F]))[1],
            "output": quartiles(torch.cat(output[F])),
        }  # fmt: skip
        middles = torch.stack([torch.stack([x.median() for x in part[F]]) for part in (kernel, output)])
        made_rows.append((row, middles))
    return made_rows


def _slopes(rows: list[dict[str, Any]], middles: list[Tensor]) -> dict[str, Any]:
    """The slope of log error against log F: of each draw by least squares, then their mean with its interval."""
    x = torch.tensor([math.log(row["features"]) for row in rows], dtype=torch.float64)
    x = x - x.mean()
    y = torch.stack(middles).log()  # [features, 2, draws]
    each = torch.einsum("f,fpr->pr", x, y) / x.square().sum().clamp_min(1e-300)
    place = {key: rows[0][key] for key in ("mechanism", "variance", "width")}
    return place | {part: mean_within(each[n]) for n, part in enumerate(("kernel", "output"))}


def variance_law(config: Approximate, name: str, F: int = 64, K: int = 16) -> dict[str, Any]:
    """Measured against predicted variance of one entry over redrawn directions.

    fourier: of the Gaussian kernel e^{−s/2} itself, (1−e^{−s})²/2F. performer: relative; s does not fix its kernel.
    """
    shifts = torch.tensor(SHIFTS[name], dtype=torch.float64)
    draw = generator(config.seed, "law", name)
    towards = torch.nn.functional.normalize(normal(draw, len(shifts), K), dim=-1)
    step = towards * (shifts.sqrt() * K**0.25)[:, None]
    if name == "fourier":
        k = normal(draw, len(shifts), K)
        q = k + step
        scale = torch.exp(-shifts)
    else:
        q = k = step / 2
        scale = torch.ones_like(shifts)
    predicted = relative_variance(name, shifts, F, K) * scale
    drawn = []
    one = made(name, F, K, 0)
    for n in range(config.redraws):
        one.redraw(derive(config.seed, "law", name, n))
        (psi_q, c_q), (psi_k, c_k) = one.features(q), one.features(k)
        # fourier's c belongs to the factors around the Gaussian kernel, performer's to the features themselves
        size = 1.0 if name == "fourier" else torch.exp(c_q + c_k - (q * k).sum(-1) / math.sqrt(K))
        drawn.append((psi_q * psi_k).sum(-1) * size)
    entries = torch.stack(drawn)
    off = (entries - entries.mean(0)).square()
    rows = [
        {"shift": s, "predicted": p, "measured": m, "error": e}
        for s, p, m, e in zip(
            shifts.tolist(),
            predicted.tolist(),
            (off.sum(0) / (len(drawn) - 1)).tolist(),
            (off.std(0) / math.sqrt(len(drawn))).tolist(),
            strict=True,
        )
    ]
    return {"features": F, "width": K, "rows": rows}


def bias(config: Approximate, name: str, K: int = 4, sizes: tuple[int, ...] = (16, 32, 64, 128)) -> dict[str, Any]:
    """Means over redrawn directions, inputs of variance 1/K held: of the kernel, which is right, and of the output.

    The squared norm of a mean of R draws is too large by variance/R; that is taken off.
    """
    draw = generator(config.seed, "bias")
    q, k, v = (normal(draw, 1, 1, 16, K) for _ in range(3))
    q, k = q / math.sqrt(K), k / math.sqrt(K)
    exact = mechanism("softmax")(q, k, v)
    rows = []
    for F in sizes:
        one = made(name, F, K, 0)
        kernel, output = [], []
        for n in range(config.redraws):
            one.redraw(derive(config.seed, "bias", name, F, n))
            kernel.append(relative_kernel(one, q, k).mean() - 1)
            output.append((one(q, k, v) - exact).flatten())
        outputs = torch.stack(output)
        spread = outputs.var(0).sum()
        squared = outputs.mean(0).square().sum() - spread / len(output)
        rows.append(
            {
                "features": F,
                "kernel": mean_within(torch.stack(kernel)),
                "spread": float(spread.sqrt() / exact.norm()),
                "bias": float(squared.clamp_min(0).sqrt() / exact.norm()),
                "noise": float((spread / len(output)).sqrt() / exact.norm()),
            }
        )
    return {"mechanism": name, "width": K, "rows": rows}
