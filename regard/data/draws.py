"""Random choices that are the same on every machine and with every Python."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import MutableSequence, Sequence
from itertools import accumulate
from typing import Any, TypeVar

X = TypeVar("X")


class Draws:
    """A stream of choices for one purpose. Only `random()` is used, whose numbers Python promises never to change."""

    def __init__(self, seed: int, purpose: str) -> None:
        self._random = random.Random(f"{seed}:{purpose}").random

    def chance(self, p: float) -> bool:
        """True with probability p."""
        return self._random() < p

    def below(self, n: int) -> int:
        """A whole number from 0 to n − 1."""
        return int(self._random() * n)

    def pick(self, items: Sequence[X]) -> X:
        """One of them."""
        return items[self.below(len(items))]

    def weighted(self, weights: Sequence[float]) -> int:
        """A place in the list, with probability proportional to its weight."""
        sums = list(accumulate(weights))
        return bisect_right(sums, self._random() * sums[-1], hi=len(sums) - 1)

    def number(self) -> float:
        """Uniform on [0, 1)."""
        return self._random()

    def shuffle(self, items: MutableSequence[Any]) -> None:
        """Puts them into a random order."""
        for i in range(len(items) - 1, 0, -1):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]

    def some(self, items: Sequence[X], n: int) -> list[X]:
        """n of them in a random order; all of them before any comes again."""
        made: list[X] = []
        while len(made) < n:
            again = list(items)
            self.shuffle(again)
            made += again
        return made[:n]


def quotas(weights: Sequence[float], n: int) -> list[int]:
    """n divided in proportion to weights, by largest remainders, the first of equals first."""
    total = sum(weights)
    exact = [round(n * w / total, 9) for w in weights]  # the last bits of a power differ between machines
    shares = [int(x) for x in exact]
    left = sorted(range(len(exact)), key=lambda i: (round(shares[i] - exact[i], 9), i))
    for i in left[: n - sum(shares)]:
        shares[i] += 1
    return shares
