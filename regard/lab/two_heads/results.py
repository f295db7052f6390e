"""The settings of the experiment `two-heads`, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from regard.lab.base import LabConfig
from regard.lab.results import OutcomeTable


@dataclass(frozen=True, kw_only=True)
class TwoHeads(LabConfig):
    """The settings: `keys` orthogonal unit keys, one of them scaled by a random length of that `variance`, and the
    lengths `betas` of queries."""

    place: ClassVar[str] = "two-heads"
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {
        "keys": (3, 1024),
        "variance": (0, 100),
        "betas": (1e-3, 1000),
        "draws": (2, 1_000_000),
    }

    keys: int = 7
    variance: float = 0.5
    betas: tuple[float, ...] = (10.0, 20.0, 30.0, 40.0, 50.0)
    draws: int = 20_000


@dataclass(frozen=True)
class WeightRow:
    """The weight of one key, "a" or "b", with so many heads and queries of length beta.

    `positive`: only over draws with ε > 0, as the exercise has it; a query cannot find a key that points away from it.
    """

    beta: float
    heads: int
    key: str
    mean: float
    std: float
    positive: bool = False


@dataclass(frozen=True)
class DrawnWeights:
    """Some draws: the length of key a, and its weight by one head and by two."""

    beta: float
    lengths: list[float]
    one: list[float]
    two: list[float]


@dataclass(frozen=True)
class TwoHeadsResults:
    """All that the experiment finds."""

    config: TwoHeads
    rows: list[WeightRow]
    drawn: DrawnWeights
    outcome: OutcomeTable | None = None

    def over(self, positive: bool) -> list[WeightRow]:
        """Returns the rows over all draws, or over those with ε > 0."""
        return [row for row in self.rows if row.positive == positive]
