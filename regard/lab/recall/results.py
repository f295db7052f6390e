"""What the experiment "recall" finds out, as it is written to results.json and read from it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from regard.lab.results import OutcomeTable


@dataclass(frozen=True)
class RecallModel:
    """One of the models that are compared; `convolution` is the width of its short convolution, 0 for none."""

    mechanism: str
    width: int
    convolution: int

    @property
    def label(self) -> str:
        """The name of the line in figures on which the models lie that differ only in their width."""
        if self.convolution:
            return self.mechanism
        return f"{self.mechanism}, no convolution"


@dataclass(frozen=True)
class RecallTraining:
    """One training, and what was measured of its best checkpoint.

    `dev` is the accuracy by which a learning rate is chosen, `accuracy` that of the test, and `by_size` that of each of
    its sizes. `steps` says how far it was trained.
    """

    model: RecallModel
    rate: float
    seed: int
    run: str
    seconds: float
    steps: int
    parameters: int
    dev: float
    accuracy: float
    by_size: dict[str, float]


@dataclass(frozen=True)
class RecallPoint:
    """A model at its best learning rate: bytes of state after the longest text of the test, and accuracy over seeds."""

    model: RecallModel
    rate: float
    state: int
    accuracy: float
    low: float
    high: float
    by_size: dict[str, float]


@dataclass(frozen=True)
class RecallResults:
    """All results. `longest` is the tokens of the longest text, `chance` the accuracy of guessing a value."""

    run: str
    device: str
    threads: int
    config: dict[str, Any]
    longest: int
    chance: float
    sizes: list[str]
    seeds: int
    points: list[RecallPoint]
    trainings: list[RecallTraining]
    outcome: OutcomeTable | None = None
