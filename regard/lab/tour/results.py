"""What the chapters of the tour find out, as results.json has it; a chapter that is not done yet is None."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from regard.lab.bench.results import RaceResults
from regard.lab.knowledge.results import KnowledgeResults, ScoredModel
from regard.lab.results import OutcomeTable


@dataclass(frozen=True)
class AskedLaw:
    """The verdict of one law: whether it holds, the largest error, and the largest error allowed."""

    law: str
    claim: str
    status: str
    error: float | None
    limit: float | None
    detail: str = ""
    reproducer: str | None = None

    @property
    def is_broken(self) -> bool:
        """Whether the law is broken."""
        return self.status == "broken"


@dataclass(frozen=True)
class CheckChapter:
    """A performer that leaks, put to the laws: its source, its verdicts, and those of regard's own."""

    command: str
    seconds: float
    subject: str
    source: str
    trials: int
    laws: list[AskedLaw]
    own: str
    own_laws: list[AskedLaw]

    @property
    def broken(self) -> list[AskedLaw]:
        """The laws that are broken."""
        return [law for law in self.laws if law.is_broken]


@dataclass(frozen=True)
class TrainChapter:
    """What models know that have and have not read; `folder` is that of the whole experiment."""

    command: str
    seconds: float
    folder: str
    knowledge: KnowledgeResults

    @property
    def baseline(self) -> ScoredModel:
        """The score of the answer that is always the most frequent place of the training questions."""
        return (self.knowledge.baselines or [])[0]


@dataclass(frozen=True)
class MeasuredHead:
    """One head, in the trained model and in an untrained one of the same shape.

    `loss` and `accuracy` are those of answers without it; `loss` is of the questions that it was chosen by.
    `on_name` is its mean weight on the person's name while an answer is written.
    """

    layer: int
    head: int
    loss: float
    accuracy: float
    on_name: float
    untrained_on_name: float

    @property
    def title(self) -> str:
        """The head in words; layers and heads are counted from 1."""
        return f"layer {self.layer + 1}, head {self.head + 1}"


@dataclass(frozen=True)
class SeeChapter:
    """The head without which the most answers are lost, and what it attends to while one answer is written.

    `heads` are all of them, the one that was found first. `trained` and `untrained` [R,T] are its weights, from the
    tokens `rows` to the tokens `columns`. `page` is the lens's page of both models, beside the report.
    """

    command: str
    seconds: float
    page: str
    split: str
    n: int
    accuracy: float
    chosen_by: int
    loss: float
    heads: list[MeasuredHead]
    question: str
    answer: str
    rows: list[str]
    columns: list[str]
    trained: list[list[float]]
    untrained: list[list[float]]

    @property
    def found(self) -> MeasuredHead:
        """The head that was found."""
        return self.heads[0]


@dataclass(frozen=True)
class RaceChapter:
    """A race of mechanisms, as `regard bench` writes it; `page` is its own page, beside the report."""

    command: str
    seconds: float
    page: str
    race: dict[str, Any]

    @property
    def results(self) -> RaceResults:
        """The race with its types."""
        return RaceResults.from_dict(self.race)


@dataclass(frozen=True)
class TourResults:
    """All chapters, and the table that a terminal shows at the end."""

    check: CheckChapter | None = None
    train: TrainChapter | None = None
    see: SeeChapter | None = None
    race: RaceChapter | None = None
    outcome: OutcomeTable | None = None
