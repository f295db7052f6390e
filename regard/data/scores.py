"""How good answers are: exact match with its interval, calibration, and accuracy against coverage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import sqrt
from typing import NamedTuple

from regard.data.files import DataError


class Bin(NamedTuple):
    """Answers of like confidence."""

    confidence: float
    accuracy: float
    n: int


class Calibration(NamedTuple):
    """Bins by rising confidence, and the expected calibration error Σ n/N·|confidence − accuracy|."""

    bins: list[Bin]
    error: float


def exact_match(predictions: Sequence[str], answers: Sequence[str]) -> list[bool]:
    """Which predictions are the answer, character for character."""
    if len(predictions) != len(answers):
        raise DataError(f"{len(predictions)} predictions for {len(answers)} answers; expected as many, in their order")
    return [p == a for p, a in zip(predictions, answers, strict=True)]


def most_frequent(answers: Sequence[str]) -> str:
    """The answer that occurs most often, the first of them where several do."""
    if not answers:
        raise DataError("no answers: expected at least one to find the most frequent")
    return Counter(answers).most_common(1)[0][0]


def wilson(right: int, n: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share: (p + z²/2n ± z√(p(1−p)/n + z²/4n²)) / (1 + z²/n)."""
    if not 0 <= right <= n:
        raise DataError(f"{right} right of {n}: expected 0 to {n}")
    if n == 0:
        return 0.0, 1.0
    z, p = 1.959963984540054, right / n  # z: the normal distribution's 97.5% point
    middle, half = p + z * z / (2 * n), z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)
    return max(low, 0.0) if right else 0.0, min(high, 1.0) if right < n else 1.0


def calibration(confidence: Sequence[float], right: Sequence[bool], bins: int = 10) -> Calibration:
    """Confidence against accuracy in bins of about equal count; equal confidences share a bin."""
    n = len(_checked(confidence, right))
    rows: list[Bin] = []
    group: list[tuple[float, bool]] = []
    done = 0
    for tied in _tied(confidence, right):
        group += tied
        if (done + len(group)) * bins >= (len(rows) + 1) * n or done + len(group) == n:
            rows.append(_bin(group))
            done, group = done + len(group), []
    return Calibration(rows, sum(r.n * abs(r.confidence - r.accuracy) for r in rows) / n)


def coverage(confidence: Sequence[float], right: Sequence[bool]) -> list[tuple[float, float]]:
    """(share answered, accuracy among them) by rising share: one point for each confidence that may be demanded."""
    n = len(_checked(confidence, right))
    points = []
    answered = good = 0
    for tied in reversed(list(_tied(confidence, right))):
        answered += len(tied)
        good += sum(r for _, r in tied)
        points.append((answered / n, good / answered))
    return points


def _checked(confidence: Sequence[float], right: Sequence[bool]) -> Sequence[float]:
    if len(confidence) != len(right) or not confidence:
        raise DataError(f"{len(confidence)} confidences for {len(right)} answers; expected as many, and at least one")
    for n, c in enumerate(confidence):
        if not 0 <= c <= 1:
            raise DataError(f"confidence {c} of answer {n}: expected 0 to 1")
    return confidence


def _tied(confidence: Sequence[float], right: Sequence[bool]) -> Iterator[list[tuple[float, bool]]]:
    pairs = sorted(zip(confidence, right, strict=True), key=lambda pair: pair[0])
    for _, tied in groupby(pairs, key=lambda pair: pair[0]):
        yield list(tied)


def _bin(group: list[tuple[float, bool]]) -> Bin:
    n = len(group)
    return Bin(sum(c for c, _ in group) / n, sum(r for _, r in group) / n, n)
