"""What the experiment "heads" finds out, as it is written to results.json and read from it again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from regard.lab.results import LEFT_OUT_IF_NONE, OutcomeTable


@dataclass(frozen=True)
class HeadsModel:
    """One of the models that are compared."""

    position: str
    merge: str

    def folder(self, seed: int) -> str:
        """Returns the name of its folder, trained with a seed."""
        return f"{self.position}-{self.merge}-{seed}"


@dataclass(frozen=True)
class LookAhead:
    """The causality law: how far logits move when only later tokens change, relative to the largest logit."""

    error: float
    limit: float
    broken: bool
    what: str


@dataclass(frozen=True)
class HeadsTraining:
    """One training, and what was measured of its best checkpoint.

    `losses` and `off` are mean losses a token by what was read: train, dev, and each sentence. `off` has them without
    the weighing that looks ahead, for merges that do. `straightened` is how far a model that shifts is from its twin
    that concatenates. `growth` holds {tokens, ratio} of ‖merged‖ / ‖heads‖, and `slope` its exponent. `writing` holds
    losses by how much of a window the model is given.
    """

    position: str
    merge: str
    seed: int
    run: str
    seconds: float
    best: int | None
    parameters: int
    losses: dict[str, float]
    evaluations: list[dict[str, float]]
    ahead: LookAhead
    growth: list[dict[str, float]]
    slope: float
    writing: list[dict[str, float]]
    straightened: float | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    off: dict[str, float] | None = field(default=None, metadata=LEFT_OUT_IF_NONE)

    @property
    def model(self) -> HeadsModel:
        """The model that was trained."""
        return HeadsModel(self.position, self.merge)


@dataclass(frozen=True)
class HeadsComparison:
    """The differences of a loss between two models, seed by seed, and Student's test of them.

    `low` and `high` are the ends of the 95% interval of their mean, `corrected` is p after Holm's correction; None
    where there is one seed only.
    """

    measure: str
    of: HeadsModel
    against: HeadsModel
    differences: list[float]
    mean: float
    low: float | None
    high: float | None
    p: float | None
    corrected: float | None
    exceeds: bool


@dataclass(frozen=True)
class HeadsText:
    """The text that was read, in tokens."""

    source: str
    train: int
    dev: int
    window: int
    vocabulary: int


@dataclass(frozen=True)
class MeasuredSentence:
    """A sentence that is measured by itself, and how many tokens it has."""

    text: str
    tokens: int


@dataclass(frozen=True)
class HeadsResults:
    """All results. `detectable` says for a number of seeds how large a mean difference must be to count, in standard
    deviations of the differences."""

    run: str
    device: str
    threads: int
    config: dict[str, Any]
    text: HeadsText
    sentences: dict[str, MeasuredSentence]
    trainings: list[HeadsTraining]
    comparisons: list[HeadsComparison]
    detectable: list[tuple[int, float]]
    outcome: OutcomeTable | None = None

    def of_merge(self, merge: str) -> list[HeadsTraining]:
        """Returns the trainings of models with a merge."""
        return [row for row in self.trainings if row.merge == merge]

    def of_model(self, position: str, merge: str) -> list[HeadsTraining]:
        """Returns the trainings of one model, one a seed."""
        return [row for row in self.of_merge(merge) if row.position == position]

    def of_measure(self, measure: str) -> list[HeadsComparison]:
        """Returns the comparisons of one loss."""
        return [row for row in self.comparisons if row.measure == measure]

    @property
    def positions(self) -> list[str]:
        """The kinds of position, in the order of the trainings."""
        return list(dict.fromkeys(row.position for row in self.trainings))

    @property
    def merges(self) -> list[str]:
        """The merges, in the order of the trainings."""
        return list(dict.fromkeys(row.merge for row in self.trainings))

    @property
    def seeds(self) -> list[int]:
        """The seeds, in the order of the trainings."""
        return list(dict.fromkeys(row.seed for row in self.trainings))
