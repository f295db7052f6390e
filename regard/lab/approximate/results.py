"""The settings of the experiment `approximate`, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from regard.lab.base import LabConfig
from regard.lab.results import OutcomeTable

Quartiles = list[float]  # the first quartile, the median, the third
Interval = list[float]  # a mean, and the ends of its 95% interval


@dataclass(frozen=True, kw_only=True)
class Approximate(LabConfig):
    """The sizes: for each, `draws` draws of inputs (`tokens` queries and keys) and of directions.

    For the laws of the variance and the bias, directions are drawn `redraws` times for fixed inputs.
    """

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


@dataclass(frozen=True)
class ErrorRow:
    """Relative errors of one size. `variance` is that of the inputs: "1" or "1/K".

    `kernel` are errors of an entry of the kernel, `predicted` the median that the law gives for them, and `output`
    errors of the output.
    """

    mechanism: str
    variance: str
    width: int
    features: int
    kernel: Quartiles
    predicted: float
    output: Quartiles


@dataclass(frozen=True)
class SlopeRow:
    """The slopes of log error against log F, as means over draws."""

    mechanism: str
    variance: str
    width: int
    kernel: Interval
    output: Interval


@dataclass(frozen=True)
class VarianceRow:
    """The variance of one entry of the kernel at a shift s, and the standard error of what was measured."""

    shift: float
    predicted: float
    measured: float
    error: float


@dataclass(frozen=True)
class VarianceLaw:
    """The measured and the predicted variance for each shift, at one number of features and one width of heads."""

    features: int
    width: int
    rows: list[VarianceRow]


@dataclass(frozen=True)
class BiasRow:
    """Means over redrawn directions: the error of an entry, and of the output its spread and its bias.

    All but `kernel` are relative to the exact output; `noise` is the standard error of the mean output.
    """

    features: int
    kernel: Interval
    spread: float
    bias: float
    noise: float


@dataclass(frozen=True)
class MechanismBias:
    """The bias of one mechanism over the number of features."""

    mechanism: str
    width: int
    rows: list[BiasRow]


@dataclass(frozen=True)
class ApproximateResults:
    """All that the experiment finds; `laws` are by mechanism."""

    config: Approximate
    errors: list[ErrorRow]
    slopes: list[SlopeRow]
    laws: dict[str, VarianceLaw]
    bias: list[MechanismBias]
    outcome: OutcomeTable | None = None

    @property
    def mechanisms(self) -> list[str]:
        """The mechanisms, in order of appearance."""
        return list(dict.fromkeys(row.mechanism for row in self.errors))

    @property
    def widths(self) -> list[int]:
        """The widths of heads, in order of appearance."""
        return list(dict.fromkeys(row.width for row in self.errors))

    @property
    def features(self) -> list[int]:
        """The numbers of features, in order of appearance."""
        return list(dict.fromkeys(row.features for row in self.errors))

    def errors_of(self, mechanism: str, variance: str, width: int) -> list[ErrorRow]:
        """Returns the errors of one mechanism, variance and width, over the number of features."""
        place = (mechanism, variance, width)
        return [row for row in self.errors if (row.mechanism, row.variance, row.width) == place]

    def slope_of(self, mechanism: str, variance: str, width: int) -> SlopeRow:
        """Returns the slopes of one mechanism, variance and width."""
        place = (mechanism, variance, width)
        return next(row for row in self.slopes if (row.mechanism, row.variance, row.width) == place)
