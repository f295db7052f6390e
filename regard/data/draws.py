"""Random choices that are the same on every machine and with every Python."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import MutableSequence, Sequence
from itertools import accumulate
from typing import Any, TypeVar

X = TypeVar("X")


class Draws:
    """A stream of random choices for one purpose.

    Only `random.random()` is used, whose numbers Python promises never to change; `choice` and `shuffle` may change.
    """

    def __init__(self, seed: int, purpose: str) -> None:
        self._random = random.Random(f"{seed}:{purpose}").random

    def chance(self, p: float) -> bool:
        """Returns True with probability p."""
        return self._random() < p

    def randrange(self, n: int) -> int:
        """Returns a whole number from 0 to n − 1."""
        return int(self._random() * n)

    def choice(self, items: Sequence[X]) -> X:
        """Returns one of the items."""
        return items[self.randrange(len(items))]

    def weighted_index(self, weights: Sequence[float]) -> int:
        """Returns an index of the list, with probability proportional to its weight."""
        sums = list(accumulate(weights))
        return bisect_right(sums, self._random() * sums[-1], hi=len(sums) - 1)

    def uniform(self) -> float:
        """Returns a number that is uniform on [0, 1)."""
        return self._random()

    def shuffle(self, items: MutableSequence[Any]) -> None:
        """Puts the items into a random order, in place."""
        for i in range(len(items) - 1, 0, -1):
            j = self.randrange(i + 1)
            items[i], items[j] = items[j], items[i]

    def sample(self, items: Sequence[X], n: int) -> list[X]:
        """Returns n of the items in a random order; all of them come before any comes again."""
        chosen: list[X] = []
        while len(chosen) < n:
            order = list(items)
            self.shuffle(order)
            chosen += order
        return chosen[:n]


def apportion(weights: Sequence[float], n: int) -> list[int]:
    """Returns n divided in proportion to weights, by largest remainders; of equal remainders, the first is larger."""
    total = sum(weights)
    exact = [round(n * w / total, 9) for w in weights]  # the last bits of powers differ between machines
    shares = [int(x) for x in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (round(shares[i] - exact[i], 9), i))
    for i in by_remainder[: n - sum(shares)]:
        shares[i] += 1
    return shares
