"""What the experiment "sentiment" finds out, as it is written to results.json and read from it again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from regard.lab.results import OutcomeTable


@dataclass(frozen=True)
class SentimentScore:
    """The share of n sentences whose label is stated right, with its 95% interval."""

    n: int
    accuracy: float
    low: float
    high: float
    right: int | None = None


@dataclass(frozen=True, kw_only=True)
class SentimentBaseline:
    """A baseline that uses no encoder, scored on each split."""

    name: str
    train: SentimentScore
    dev: SentimentScore
    test: SentimentScore

    @property
    def scores(self) -> dict[str, SentimentScore]:
        """The score on each split."""
        return {"train": self.train, "dev": self.dev, "test": self.test}


@dataclass(frozen=True, kw_only=True)
class OptimizerModel(SentimentBaseline):
    """The encoder as one optimiser trained it, at the checkpoint that is right most often on dev.

    `options` are the optimiser's own. `curve` holds {epoch, loss}, `evaluations` {step, epoch, dev/loss, dev/accuracy,
    train/loss, train/accuracy}; `best_train_epoch` is the epoch that is right most often on the training data.
    """

    run: str
    rate: float
    batch: int
    epochs: float
    steps: int
    seconds: float
    best_step: int | None
    best_epoch: float
    best_loss: float
    curve: list[dict[str, float]]
    evaluations: list[dict[str, float]]
    options: dict[str, Any] = field(default_factory=dict)
    best_train_epoch: float | None = None

    @property
    def title(self) -> str:
        """The optimiser's name with its options: sgd, momentum 0.9."""
        return ", ".join([self.name, *(f"{key} {value}" for key, value in self.options.items())])


@dataclass(frozen=True)
class EncoderSummary:
    """The encoder: its name, the class of transformers, its size, and the most tokens that it can read."""

    name: str
    class_: str
    parameters: int
    limit: int | None


@dataclass(frozen=True)
class SentimentDataSummary:
    """The sentences by split, how long they are, and how they are cut and padded.

    `unseen` is the share of adjectives that generated training sentences lack. `examples` are [text, class, kind].
    """

    generated: bool
    unseen: float
    sentences: dict[str, int]
    positive: dict[str, float]
    tokens: dict[str, float]
    length: int
    cut: int
    padding: str
    truncation: bool
    workers: int
    examples: list[list[str]]


@dataclass(frozen=True)
class BatchTensor:
    """One tensor of a batch, and what it holds."""

    name: str
    what: str
    type: str
    dtype: str
    shape: list[int]
    device: str


@dataclass(frozen=True)
class BatchRow:
    """One row of a batch as text; `ids` are its first."""

    text: str
    label: str
    tokens: int
    padding: int
    ids: list[int]


@dataclass(frozen=True)
class BatchInspection:
    """The tensors of a batch, some of its rows, and the share of padding."""

    tensors: list[BatchTensor]
    rows: list[BatchRow]
    padding: float


@dataclass(frozen=True)
class SentimentCalibration:
    """Groups of sentences of like confidence {confidence, accuracy, n}, and the calibration error.

    `separation` and `skill` are those of `regard.data.scores.Calibration`.
    """

    bins: list[dict[str, Any]]
    error: float
    separation: float | None = None
    skill: float | None = None


@dataclass(frozen=True)
class WrongSentence:
    """A sentence that the model gets wrong; `probability` is what it gives to the right label."""

    text: str
    label: str
    kind: str
    probability: float


@dataclass(frozen=True)
class SentimentResults:
    """All results. `confusion` has a row a true class, negative first; it, `kinds`, `calibration` and `wrong` are of
    the best model on test. `kinds` are scores by kind and model, empty unless sentences were generated."""

    run: str
    seed: int
    encoder: EncoderSummary
    data: SentimentDataSummary
    batch: BatchInspection
    models: list[OptimizerModel]
    best: str
    baselines: list[SentimentBaseline]
    confusion: list[list[int]]
    kinds: dict[str, dict[str, SentimentScore]]
    calibration: SentimentCalibration
    wrong: list[WrongSentence]
    outcome: OutcomeTable | None = None

    @property
    def best_model(self) -> OptimizerModel:
        """The model that is right most often on dev."""
        return next(model for model in self.models if model.name == self.best)
