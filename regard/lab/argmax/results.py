"""The settings of the experiment `argmax`, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from regard.config import ConfigError
from regard.lab.base import LabConfig
from regard.lab.results import OutcomeTable

Quartiles = list[float]  # the first quartile, the median, the third


@dataclass(frozen=True, kw_only=True)
class Selecting(LabConfig):
    """The sizes: a row holds `tokens` of `symbols` symbols, each with one of `labels` labels.

    Each way to attend is trained `runs` times, with different seeds.
    """

    place: ClassVar[str] = "argmax"
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {
        "symbols": (2, 4096),
        "tokens": (2, 4096),
        "labels": (2, 4096),
        "size": (1, 1024),
        "steps": (1, 1_000_000),
        "batch": (1, 65_536),
        "runs": (1, 1000),
        "lr": (1e-6, 10),
        "every": (1, 1_000_000),
    }

    symbols: int = 32
    tokens: int = 8
    labels: int = 8
    size: int = 16
    steps: int = 400
    batch: int = 64
    runs: int = 7
    lr: float = 0.01
    every: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens > self.symbols:
            raise ConfigError(f"argmax.tokens = {self.tokens}: expected at most argmax.symbols, {self.symbols}")


@dataclass(frozen=True)
class CurveRow:
    """Quartiles over trainings at one step: accuracy on rows never seen, loss, and the norms of dq and dk."""

    step: int
    accuracy: Quartiles
    loss: Quartiles
    dq: Quartiles
    dk: Quartiles


@dataclass(frozen=True)
class WayResults:
    """The results of one way to attend; each list holds one number for each training.

    `final` is the accuracy at the end, `read_by_argmax` that when the trained model attends by argmax, and `finds` the
    share of rows in which the largest score is that of the asked symbol.
    """

    name: str
    curve: list[CurveRow]
    final: list[float]
    read_by_argmax: list[float]
    finds: list[float]


@dataclass(frozen=True)
class ArgmaxResults:
    """All that the experiment finds; `chance` is the accuracy of guessing."""

    config: Selecting
    chance: float
    ways: list[WayResults]
    outcome: OutcomeTable | None = None
