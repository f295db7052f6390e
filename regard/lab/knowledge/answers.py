"""Answers of a model to questions, and their accuracy, baselines, calibration and coverage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import exp
from typing import Any, NamedTuple

from regard.data.questions import MARK, Question, prompt
from regard.data.scores import calibration, coverage, exact_match, most_frequent, wilson
from regard.errors import LengthError, OptionError
from regard.generate import generate
from regard.lab.knowledge.results import AnsweredQuestion, CalibrationCurve, NameForm, UnwrittenAnswers
from regard.models import Decoder

PART = 256  # questions answered at a time
CONSTANT = "London"  # the answer of a second baseline


class Answer(NamedTuple):
    """What a model says, and the probability it gives to saying exactly that."""

    text: str
    confidence: float


def answer(model: Decoder[Any], questions: Sequence[Question]) -> list[Answer]:
    """Returns the model's answers, written greedily, in the order of the questions."""
    order = sorted(range(len(questions)), key=lambda n: len(questions[n].text))  # alike in length: little padding
    answers: dict[int, Answer] = {}
    for start in range(0, len(order), PART):
        part = order[start : start + PART]
        ids = [_ids(model, n, questions[n]) for n in part]
        most = (model.limit or 256) - min(map(len, ids)) + 1  # the last need not be read
        for n, result in zip(part, generate(model, ids, stop=MARK, max_tokens=most), strict=True):
            answers[n] = Answer(result.text, exp(min(0.0, result.score)))
    return [answers[n] for n in range(len(questions))]


def _ids(model: Decoder[Any], number: int, question: Question) -> list[int]:
    """Returns the tokens of a question with its mark; one that leaves no room for an answer is an error."""
    if model.tokenizer is None:
        raise OptionError("the model has no tokenizer.json, so it cannot read questions")
    ids = model.tokenizer.encode(prompt(question))
    if model.limit is not None and len(ids) >= model.limit:
        raise LengthError(
            f"question {number + 1}, {question.text!r:.60}, has {len(ids)} tokens with its mark, but the model reads "
            f"{model.limit}: shorten it"
        )
    return ids


def fits_model(model: Decoder[Any], question: Question) -> bool:
    """Returns whether a question leaves room for an answer."""
    assert model.tokenizer is not None
    return model.limit is None or len(model.tokenizer.encode(prompt(question))) < model.limit


def score(said: Sequence[str], questions: Sequence[Question]) -> dict[str, Any] | None:
    """Returns right, n, accuracy and its 95% interval; None where the answers are not known."""
    if any(q.answer is None for q in questions):
        return None
    right = sum(exact_match(said, [q.answer or "" for q in questions]))
    low, high = wilson(right, len(questions))
    return {"right": right, "n": len(questions), "accuracy": right / len(questions), "low": low, "high": high}


def baselines(train: Sequence[Question], sets: dict[str, Sequence[Question]]) -> list[dict[str, Any]]:
    """Returns the scores of always giving one answer: the most frequent one of training, and CONSTANT."""
    frequent = most_frequent([q.answer or "" for q in train])
    named = {f"most frequent place ({frequent})": frequent}
    if frequent != CONSTANT:
        named[f"constant ({CONSTANT})"] = CONSTANT
    return [
        {"name": name, "answer": place, **{key: score([place] * len(qs), qs) for key, qs in sets.items()}}
        for name, place in named.items()
    ]


def list_answers(questions: Sequence[Question], answers: Sequence[Answer]) -> list[AnsweredQuestion]:
    """Returns each question with its expected and its given answer."""
    return [
        AnsweredQuestion(q.text, person(q.text), q.answer, a.text, a.confidence, a.text == q.answer)
        for q, a in zip(questions, answers, strict=True)
    ]


class ConfidenceMeasures(NamedTuple):
    """How well confidences fit answers: the calibration curve, and accuracy against coverage."""

    calibration: CalibrationCurve
    coverage: list[tuple[float, float]]


def measure_confidence(questions: Sequence[Question], answers: Sequence[Answer]) -> ConfidenceMeasures:
    """Returns the calibration of answers, and their accuracy against coverage."""
    confidences = [a.confidence for a in answers]
    right = [a.text == q.answer for q, a in zip(questions, answers, strict=True)]
    bins = min(10, max(3, len(confidences) // 12))  # a dozen answers in each, at least
    found = calibration(confidences, right, bins)
    rows = [{"confidence": b.confidence, "accuracy": b.accuracy, "n": b.n} for b in found.bins]
    curve = CalibrationCurve(rows, found.error, found.separation, found.skill)
    return ConfidenceMeasures(curve, coverage(confidences, right))


def about_strangers(
    questions: Sequence[Question], forms: Sequence[str], answers: Sequence[Answer], written: Sequence[float]
) -> UnwrittenAnswers:
    """Returns a summary of the answers about people whom no document names, by the form of their names.

    `written` are the confidences of answers about people of whom the model read.
    """
    return UnwrittenAnswers(
        n=len(answers),
        mean_confidence=sum(a.confidence for a in answers) / len(answers),
        top_answers=Counter(a.text for a in answers).most_common(8),
        by_form=[_name_form(form, questions, forms, answers) for form in dict.fromkeys(forms)],
        written_confidences=list(written),
        unwritten_confidences=[a.confidence for a in answers],
    )


def _name_form(form: str, questions: Sequence[Question], forms: Sequence[str], answers: Sequence[Answer]) -> NameForm:
    """Returns the answers about people whose names have one form."""
    own = [(q, a) for q, f, a in zip(questions, forms, answers, strict=True) if f == form]
    (top, count), *_ = Counter(a.text for _, a in own).most_common(1)
    return NameForm(
        form=form,
        n=len(own),
        mean_confidence=sum(a.confidence for _, a in own) / len(own),
        distinct=len({a.text for _, a in own}),
        top=(top, count / len(own)),
        examples=[[q.text, a.text, a.confidence] for q, a in own[:3]],
    )


def person(question: str) -> str:
    """Returns the X of "Where was X born?", and else the whole question."""
    inner = question.removeprefix("Where was ").removesuffix(" born?")
    if len(inner) + len("Where was  born?") == len(question):
        return inner
    return question
