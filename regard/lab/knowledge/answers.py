"""Answers of a model to questions, and what they are worth: accuracy, baselines, calibration, coverage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import exp
from typing import Any, NamedTuple

from regard.data.questions import MARK, Question, prompt
from regard.data.scores import calibration, coverage, exact_match, most_frequent, wilson
from regard.errors import LengthError, OptionError
from regard.generate import generate
from regard.models import Decoder

PART = 256  # questions answered at a time
CONSTANT = "London"


class Answer(NamedTuple):
    """What a model says, and the probability it gives to saying exactly that."""

    text: str
    confidence: float


def answer(model: Decoder[Any], questions: Sequence[Question]) -> list[Answer]:
    """The model's answers, greedily, in the order of the questions."""
    order = sorted(range(len(questions)), key=lambda n: len(questions[n].text))  # alike in length: little padding
    found: dict[int, Answer] = {}
    for start in range(0, len(order), PART):
        part = order[start : start + PART]
        ids = [_ids(model, n, questions[n]) for n in part]
        most = (model.limit or 256) - min(map(len, ids)) + 1  # the last need not be read
        for n, result in zip(part, generate(model, ids, stop=MARK, max_tokens=most), strict=True):
            found[n] = Answer(result.text, exp(min(0.0, result.score)))
    return [found[n] for n in range(len(questions))]


def _ids(model: Decoder[Any], number: int, question: Question) -> list[int]:
    if model.tokenizer is None:
        raise OptionError("the model has no tokenizer.json, so it cannot read questions")
    ids = model.tokenizer.encode(prompt(question))
    if model.limit is not None and len(ids) >= model.limit:
        raise LengthError(
            f"question {number + 1}, {question.text!r:.60}, has {len(ids)} tokens with its mark, but the model reads "
            f"{model.limit}: shorten it"
        )
    return ids


def score(said: Sequence[str], questions: Sequence[Question]) -> dict[str, Any] | None:
    """Right, n, accuracy and its 95% interval; None where the answers are not known."""
    if any(q.answer is None for q in questions):
        return None
    right = sum(exact_match(said, [q.answer or "" for q in questions]))
    low, high = wilson(right, len(questions))
    return {"right": right, "n": len(questions), "accuracy": right / len(questions), "low": low, "high": high}


def baselines(train: Sequence[Question], sets: dict[str, Sequence[Question]]) -> list[dict[str, Any]]:
    """What always giving one answer reaches: the most frequent of training, and a constant."""
    frequent = most_frequent([q.answer or "" for q in train])
    named = {f"most frequent place ({frequent})": frequent, f"constant ({CONSTANT})": CONSTANT}
    return [
        {"name": name, "answer": place, **{key: score([place] * len(qs), qs) for key, qs in sets.items()}}
        for name, place in named.items()
    ]


def listed(questions: Sequence[Question], answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Question by question: what was expected and what was said."""
    return [
        {
            "question": q.text,
            "person": person(q.text),
            "expected": q.answer,
            "predicted": a.text,
            "confidence": a.confidence,
            "right": a.text == q.answer,
        }
        for q, a in zip(questions, answers, strict=True)
    ]


def doubts(questions: Sequence[Question], answers: Sequence[Answer]) -> dict[str, Any]:
    """Calibration and accuracy against coverage: does it know what it does not know?"""
    sure, right = [a.confidence for a in answers], [a.text == q.answer for q, a in zip(questions, answers, strict=True)]
    bins = min(10, max(3, len(sure) // 12))  # a dozen answers in each, at least
    reliability, points = calibration(sure, right, bins), coverage(sure, right)
    rows = [{"confidence": b.confidence, "accuracy": b.accuracy, "n": b.n} for b in reliability.bins]
    return {"calibration": {"rows": rows, "ece": reliability.error}, "coverage": [list(p) for p in points]}


def about_strangers(questions: Sequence[Question], forms: Sequence[str], answers: Sequence[Answer]) -> dict[str, Any]:
    """What is said of people that no document names, by the form of their names."""
    rows = []
    for form in dict.fromkeys(forms):
        mine = [(q, a) for q, f, a in zip(questions, forms, answers, strict=True) if f == form]
        (top, count), *_ = Counter(a.text for _, a in mine).most_common(1)
        rows.append(
            {
                "form": form,
                "n": len(mine),
                "mean_confidence": sum(a.confidence for _, a in mine) / len(mine),
                "distinct": len({a.text for _, a in mine}),
                "top": [top, count / len(mine)],
                "examples": [[q.text, a.text, a.confidence] for q, a in mine[:3]],
            }
        )
    return {
        "n": len(answers),
        "mean_confidence": sum(a.confidence for a in answers) / len(answers),
        "top_answers": [list(pair) for pair in Counter(a.text for a in answers).most_common(8)],
        "by_form": rows,
    }


def person(question: str) -> str:
    """The X of "Where was X born?", else the question."""
    inner = question.removeprefix("Where was ").removesuffix(" born?")
    return inner if len(inner) + len("Where was  born?") == len(question) else question
