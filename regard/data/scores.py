"""How good answers are: exact match with its interval, calibration, and accuracy against coverage."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import sqrt
from typing import NamedTuple

from regard.data.files import DataError


class Bin(NamedTuple):
    """The mean confidence, the accuracy and the number of answers with similar confidence."""

    confidence: float
    accuracy: float
    n: int


class Calibration(NamedTuple):
    """Bins by rising confidence, and the expected calibration error Σ n/N·|confidence − accuracy|.

    The error alone can mislead: a model whose confidence is always its overall accuracy has none. `separation` (AUROC)
    is the chance that a right answer has more confidence than a wrong one (½ by guessing), `skill` is the Brier skill
    score, 1 − Σ(confidence − right)²/Σ(accuracy − right)², which is 0 for always stating the accuracy. Both are None
    where all answers are right or all are wrong.
    """

    bins: list[Bin]
    error: float
    separation: float | None = None
    skill: float | None = None


def exact_match(predictions: Sequence[str], answers: Sequence[str]) -> list[bool]:
    """Returns for each prediction whether it equals its answer, character for character."""
    if len(predictions) != len(answers):
        raise DataError(f"{len(predictions)} predictions for {len(answers)} answers; expected as many, in their order")
    return [p == a for p, a in zip(predictions, answers, strict=True)]


def most_frequent(answers: Sequence[str]) -> str:
    """Returns the most frequent answer; of several, the one that occurs first."""
    if not answers:
        raise DataError("no answers: expected at least one to find the most frequent")
    return Counter(answers).most_common(1)[0][0]


def wilson(right: int, n: int) -> tuple[float, float]:
    """Returns Wilson's 95% interval of a share: (p + z²/2n ± z√(p(1−p)/n + z²/4n²)) / (1 + z²/n)."""
    if not 0 <= right <= n:
        raise DataError(f"{right} right of {n}: expected 0 to {n}")
    if n == 0:
        return 0.0, 1.0
    z = 1.959963984540054  # the normal distribution's 97.5% point
    p = right / n
    middle = p + z * z / (2 * n)
    half = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low = max((middle - half) / (1 + z * z / n), 0.0)
    high = min((middle + half) / (1 + z * z / n), 1.0)
    # At the ends the bound is exactly 0 or 1, which rounding may miss.
    if right == 0:
        low = 0.0
    if right == n:
        high = 1.0
    return low, high


def calibration(confidence: Sequence[float], right: Sequence[bool], bins: int = 10) -> Calibration:
    """Returns confidence against accuracy in bins of about equal count; equal confidences share a bin."""
    _check(confidence, right)
    n = len(confidence)
    rows: list[Bin] = []
    group: list[tuple[float, bool]] = []
    done = 0
    for tied in _group_ties(confidence, right):
        group += tied
        filled = done + len(group)
        # A bin is closed when the answers so far reach its share: (bins so far + 1)/`bins` of all.
        if filled * bins >= (len(rows) + 1) * n or filled == n:
            rows.append(_make_bin(group))
            done = filled
            group = []
    error = sum(r.n * abs(r.confidence - r.accuracy) for r in rows) / n
    share = sum(right) / n
    if share in (0.0, 1.0):
        return Calibration(rows, error)
    of_right = [c for c, is_right in zip(confidence, right, strict=True) if is_right]
    of_wrong = [c for c, is_right in zip(confidence, right, strict=True) if not is_right]
    squares = sum((c - is_right) ** 2 for c, is_right in zip(confidence, right, strict=True)) / n
    return Calibration(rows, error, chance_of_order(of_right, of_wrong), 1 - squares / (share * (1 - share)))


def chance_of_order(higher: Sequence[float], lower: Sequence[float]) -> float:
    """Returns the chance that a value of the first is above one of the second; a tie counts half."""
    below = sorted(lower)
    total = sum(bisect_left(below, x) + bisect_right(below, x) for x in higher)
    return total / (2 * len(higher) * len(lower))


def coverage(confidence: Sequence[float], right: Sequence[bool]) -> list[tuple[float, float]]:
    """Returns (share answered, accuracy among them) by rising share, one point for each threshold of confidence."""
    _check(confidence, right)
    n = len(confidence)
    points = []
    answered = good = 0
    for tied in reversed(list(_group_ties(confidence, right))):
        answered += len(tied)
        good += sum(r for _, r in tied)
        points.append((answered / n, good / answered))
    return points


def _check(confidence: Sequence[float], right: Sequence[bool]) -> None:
    """Raises a DataError unless each answer has a confidence from 0 to 1."""
    if len(confidence) != len(right) or not confidence:
        raise DataError(f"{len(confidence)} confidences for {len(right)} answers; expected as many, and at least one")
    for n, c in enumerate(confidence):
        if not 0 <= c <= 1:
            raise DataError(f"confidence {c} of answer {n}: expected 0 to 1")


def _group_ties(confidence: Sequence[float], right: Sequence[bool]) -> Iterator[list[tuple[float, bool]]]:
    """Yields a list of (confidence, right) for each group of answers of equal confidence, by rising confidence."""
    # Sorted by confidence alone: answers of equal confidence keep their order.
    pairs = sorted(zip(confidence, right, strict=True), key=lambda pair: pair[0])
    for _, tied in groupby(pairs, key=lambda pair: pair[0]):
        yield list(tied)


def _make_bin(group: list[tuple[float, bool]]) -> Bin:
    n = len(group)
    return Bin(sum(c for c, _ in group) / n, sum(r for _, r in group) / n, n)
