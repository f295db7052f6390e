"""Results of grading: an outcome for each item, a grade for each submission, and Gradescope's format."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from regard.grade.spec import GradeItem, Spec

# "failed": it ran and is wrong. The others say why there was no output to compare.
ItemStatus = Literal["passed", "failed", "error", "timeout", "memory", "missing"]


@dataclass(frozen=True)
class ItemOutcome:
    """The outcome of one item for a submission: points, what is wrong, and what to do about it."""

    item: str
    status: ItemStatus
    score: float
    points: float
    words: str = ""
    advice: str = ""
    slip: str | None = None  # the name of the slip that explains the output
    visibility: str = "visible"
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    @property
    def text(self) -> str:
        """Returns what is wrong and what to do about it, in one line."""
        return " ".join(filter(None, [self.words, self.advice]))


def outcome_of(
    item: GradeItem, status: ItemStatus, words: str = "", advice: str = "", slip: str | None = None
) -> ItemOutcome:
    """Returns the outcome of an item, with all of its points if it passed and none otherwise."""
    score = 0.0
    if status == "passed":
        score = item.points
    return ItemOutcome(item.name, status, score, item.points, words, advice, slip, item.visibility)


@dataclass(frozen=True)
class Grade:
    """All outcomes of one submission, in the order of the spec; `notes` are about the whole of it."""

    submission: str
    spec: str
    outcomes: tuple[ItemOutcome, ...]
    notes: tuple[str, ...] = ()
    printed: str = ""

    @property
    def score(self) -> float:
        return sum(outcome.score for outcome in self.outcomes)

    @property
    def points(self) -> float:
        return sum(outcome.points for outcome in self.outcomes)

    @property
    def full(self) -> bool:
        return all(outcome.passed for outcome in self.outcomes)

    @property
    def slips(self) -> list[str]:
        """Returns the names of the slips that were recognised, each once."""
        return list(dict.fromkeys(o.slip for o in self.outcomes if o.slip is not None))

    @property
    def first_fault(self) -> ItemOutcome | None:
        """Returns the outcome to correct first: one with a known slip, else the first that did not pass; or None."""
        failed = [o for o in self.outcomes if not o.passed]
        named = [o for o in failed if o.slip is not None]
        return next(iter(named + failed), None)

    def visible_part(self) -> Grade:
        """Returns the grade with only the items that students may see before the due date."""
        return replace(self, outcomes=tuple(o for o in self.outcomes if o.visibility == "visible"))

    def as_json(self) -> dict[str, Any]:
        """Returns the grade as plain data with every outcome, for JSON."""
        made = asdict(self)
        made["outcomes"] = [asdict(o) for o in self.outcomes]
        made["notes"] = list(self.notes)
        return made | {"score": self.score, "points": self.points}

    def as_gradescope(self) -> dict[str, Any]:
        """Returns the grade in Gradescope's format for results/results.json: a test for each item."""
        tests = []
        for number, outcome in enumerate(self.outcomes, 1):
            status = "failed"
            if outcome.passed:
                status = "passed"
            tests.append(
                {
                    "name": outcome.item,
                    "number": str(number),
                    "score": outcome.score,
                    "max_score": outcome.points,
                    "status": status,
                    "output": outcome.text,
                    "output_format": "text",
                    "visibility": outcome.visibility,
                }
            )
        return {
            "score": self.score,
            "execution_time": round(sum(o.seconds for o in self.outcomes)),
            "output": "\n".join(self.notes),
            "output_format": "text",
            "visibility": "visible",
            "stdout_visibility": "hidden",
            "tests": tests,
        }


def failed_everywhere(spec: Spec, status: ItemStatus, words: str) -> list[ItemOutcome]:
    """Returns outcomes without points for all items, with the same words."""
    return [outcome_of(item, status, words) for item in spec.items]
