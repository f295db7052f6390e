"""What the experiment "knowledge" finds out, as it is written to results.json and read from it again.

Every part may be missing, in results of other versions and of experiments that were cut short: it is None or empty
then. Shares and confidences lie between 0 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from regard.lab.results import OutcomeTable

SPLITS = {"dev": "development", "test": "test"}
FEWEST = 5  # right answers, and wrong ones, that calibration is judged by


@dataclass(frozen=True)
class AnswerScore:
    """How many of n answers are right, and the 95% interval of their share."""

    right: int
    n: int
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True)
class ScoredModel:
    """A model with its score on each set; None where the answers of a set are not known."""

    name: str
    dev: AnswerScore | None = None
    test: AnswerScore | None = None

    def on(self, split: str) -> AnswerScore | None:
        """Returns the score on dev or test."""
        return {"dev": self.dev, "test": self.test}[split]


@dataclass(frozen=True)
class ConstantBaseline(ScoredModel):
    """A baseline that always gives the same answer."""

    answer: str = ""


@dataclass(frozen=True)
class KnowledgeStage:
    """One training: what it took, and its learning curve and evaluations as the run logged them."""

    name: str
    run: str = "–"
    steps: int | None = None
    epochs: float | None = None
    tokens: int | None = None
    seconds: float | None = None
    best: int | None = None
    curve: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    train: dict[str, Any] | None = None  # the section `train` of its config


@dataclass(frozen=True)
class AnsweredQuestion:
    """One question with its expected answer, the model's answer, and its confidence."""

    question: str
    person: str
    expected: str | None
    predicted: str
    confidence: float
    right: bool


@dataclass(frozen=True)
class CalibrationCurve:
    """Groups of answers of like confidence {confidence, accuracy, n}, and the expected calibration error.

    `separation` and `skill` are those of `regard.data.scores.Calibration`.
    """

    rows: list[dict[str, float]]
    ece: float | None = None
    separation: float | None = None
    skill: float | None = None

    @property
    def n(self) -> int:
        """How many answers there are."""
        return round(sum(row["n"] for row in self.rows))

    @property
    def right(self) -> int:
        """How many of them are right."""
        return round(sum(row["n"] * row["accuracy"] for row in self.rows))

    @property
    def mean_confidence(self) -> float:
        """How sure the model is on average."""
        return sum(row["n"] * row["confidence"] for row in self.rows) / max(1, self.n)

    @property
    def is_judged(self) -> bool:
        """Whether there are enough right and wrong answers to say what a confidence is worth."""
        return min(self.right, self.n - self.right) >= FEWEST


@dataclass(frozen=True)
class NameForm:
    """Answers about unknown people whose names have one form; `top` is the most frequent answer and its share."""

    form: str
    n: int
    mean_confidence: float
    distinct: int
    top: tuple[str, float]
    examples: list[list[Any]] = field(default_factory=list)  # [question, answer, confidence]


@dataclass(frozen=True)
class UnwrittenAnswers:
    """A model's answers about people whom no document names, with its confidences there and about people it read of."""

    n: int
    mean_confidence: float
    top_answers: list[tuple[str, int]] = field(default_factory=list)
    by_form: list[NameForm] = field(default_factory=list)
    written_confidences: list[float] = field(default_factory=list)
    unwritten_confidences: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class KnowledgeWorld:
    """What was read and asked, with examples; `questions` are counts by set."""

    invented: bool = False
    people: int | None = None
    documents: int | None = None
    questions: dict[str, int] = field(default_factory=dict)
    example_documents: list[str] = field(default_factory=list)
    example_questions: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class KnowledgeModel:
    """The size of the model, and its summary as text."""

    parameters: int | None = None
    summary: str = ""


@dataclass(frozen=True)
class RecordedHead:
    """The weights [T,T] of one head while an answer was written."""

    layer: int
    head: int
    weights: list[list[float]]
    note: str | None = None


@dataclass(frozen=True)
class AnswerAttention:
    """Where heads looked while one answer was written."""

    tokens: list[str]
    heads: list[RecordedHead]
    question: str = ""


@dataclass(frozen=True)
class KnowledgeResults:
    """All results; dictionaries are by the name of a model, and `answers_of` is the set that they are of."""

    run: str = ""
    seed: int | None = None
    mechanism: str | None = None
    world: KnowledgeWorld | None = None
    model: KnowledgeModel | None = None
    stages: list[KnowledgeStage] | None = None
    baselines: list[ConstantBaseline] | None = None
    models: list[ScoredModel] | None = None
    answers: dict[str, list[AnsweredQuestion]] | None = None
    answers_of: str | None = None
    calibration: dict[str, CalibrationCurve] | None = None
    coverage: dict[str, list[tuple[float, float]]] | None = None
    unwritten: dict[str, UnwrittenAnswers] | None = None
    attention: AnswerAttention | None = None
    outcome: OutcomeTable | None = None

    @property
    def scored_split(self) -> str:
        """The set that counts: test where its answers are known."""
        has_test = any(model.test for model in self.models or ())
        return "test" if has_test else "dev"


@dataclass(frozen=True)
class CandidateResults:
    """The results of one mechanism or setting, and the folder of its runs inside the experiment's own."""

    name: str
    folder: str
    results: KnowledgeResults


@dataclass(frozen=True)
class KnowledgeComparisonResults:
    """The results of several mechanisms or settings; `run` is the best of them on dev, after reading."""

    run: str
    candidates: list[CandidateResults]
    outcome: OutcomeTable | None = None
