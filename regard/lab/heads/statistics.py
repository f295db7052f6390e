"""Differences between trainings that share a seed, against what another seed would change.

Two settings that were trained with the same seeds differ by d_s at seed s. Were there nothing between them, the mean of
the d_s would be Student-distributed around zero: t = mean / (std/√n), n − 1 degrees of freedom. Of m such tests some
would exceed any limit by chance, so p-values are corrected by Holm's step-down: the k-th smallest is multiplied by
m − k + 1, and none may be below the one before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple


class Difference(NamedTuple):
    """The mean of paired differences, the ends of its 95% interval, and how likely so large a one is by chance.

    One pair alone has no interval and no p: both are None.
    """

    mean: float
    low: float | None
    high: float | None
    p: float | None


def paired(differences: Sequence[float]) -> Difference:
    """Returns Student's test of paired differences."""
    n = len(differences)
    middle = mean(differences)
    if n < 2:
        return Difference(middle, None, None, None)
    error = stdev(differences) / math.sqrt(n)
    half = error * student_limit(0.05, n - 1)
    p = float(middle == 0)
    if error:
        p = beyond(abs(middle) / error, n - 1)
    return Difference(middle, middle - half, middle + half, p)


def holm(ps: Sequence[float]) -> list[float]:
    """Returns the p-values after Holm's correction, in the order given."""
    corrected = [0.0] * len(ps)
    worst = 0.0
    for rank, n in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[n]))
        corrected[n] = worst
    return corrected


def detectable(n: int, tests: int, level: float = 0.05) -> float:
    """Returns how many standard deviations a mean of n paired differences must exceed to be significant."""
    return student_limit(level / tests, n - 1) / math.sqrt(n)


def beyond(t: float, degrees: int) -> float:
    """Returns the chance of a Student-distributed number beyond ±t, by the finite sums for whole degrees of freedom."""
    angle = math.atan2(t, math.sqrt(degrees))
    cos2, odd = math.cos(angle) ** 2, degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(3 if odd else 2, degrees - 1, 2):
        term *= cos2 * (k - 1) / k
        total += term
    inside = math.sin(angle) * total
    return max(0.0, 1 - (2 * (angle + inside) / math.pi if odd else inside))


def student_limit(level: float, degrees: int) -> float:
    """Returns the t beyond which, on either side, a Student-distributed number falls with chance `level`."""
    low, high = 0.0, 1.0
    while beyond(high, degrees) > level:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        if beyond(middle, degrees) > level:
            low = middle
        else:
            high = middle
    return high
