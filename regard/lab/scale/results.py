"""The settings of the experiment `scale`, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from regard.lab.base import LabConfig
from regard.lab.results import OutcomeTable

Quartiles = list[float]  # the first quartile, the median, the third
Interval = list[float]  # a mean, and the ends of its 95% interval


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


@dataclass(frozen=True)
class ProductRow:
    """Mean and variance of q·k at one width, and what they should be; `mean` is each component of μ."""

    width: int
    mean: float
    measured_mean: Interval
    predicted_mean: float
    measured_variance: Interval
    predicted_variance: float


@dataclass(frozen=True)
class SaturationRow:
    """Softmax over random scores, divided by √d where `scaled`; quartiles over draws of one query.

    `entropy` is a share of log N, `largest` the largest weight, `jacobian` ‖diag(p) − ppᵀ‖, `gradient` ‖dp/dq‖.
    """

    width: int
    scaled: bool
    entropy: Quartiles
    largest: Quartiles
    jacobian: Quartiles
    gradient: Quartiles


@dataclass(frozen=True)
class SumRow:
    """The sums of the weights of random queries and keys, over keys and over queries.

    `given_off_one` is how far the sum of a query's weights is from one. `got` is the sum of a key's weights over
    queries; of these sums `std`, `most` and `least` are means over draws, and `sorted` holds a draw's sums from the
    least to the most attended key, as means over draws. `lengths` is the correlation of a key's sum with its squared
    length.
    """

    width: int
    given_off_one: float
    got: Quartiles
    std: Interval
    most: Interval
    least: Interval
    lengths: float
    sorted: list[float]


@dataclass(frozen=True)
class IdentityRow:
    """The mean diagonal of weights with Q = K, and the simple prediction of it."""

    width: int
    diagonal: Interval
    predicted: float


@dataclass(frozen=True)
class WeightPicture:
    """The weights of one draw with Q = K."""

    width: int
    weights: list[list[float]]


@dataclass(frozen=True)
class ScaleResults:
    """All that the experiment finds."""

    config: Scale
    products: list[ProductRow]
    saturation: list[SaturationRow]
    sums: list[SumRow]
    identity: list[IdentityRow]
    pictures: list[WeightPicture]
    outcome: OutcomeTable | None = None
