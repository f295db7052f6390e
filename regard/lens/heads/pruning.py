"""Pruning heads: removing them one after the other, and the curve of a measure over the number of heads left.

The order is chosen on some texts and the curve is measured on others: an order that was measured where it was chosen
would look better than it is. Random orders, measured on the same texts, are the control.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from regard.data.seeds import generator
from regard.errors import OptionError
from regard.lens.heads.ablation import self_attention_layers, without_heads
from regard.lens.heads.labels import MIXED, RESTS
from regard.lens.heads.measures import Examples
from regard.lens.models import RecordableModel
from regard.lens.recording.maps import evaluation_mode
from regard.registry import Registry

POINTS = 16  # steps of the curve between all heads and none
RANDOM_ORDERS = 3
SPECIALISED = 2  # the rank of a head whose label says what it does; see `_rank`

Progress = Callable[[int, int], None]  # called with the number of passes done, and of all passes
Cost = Callable[[Collection[int]], float]  # what the removal of some heads costs, by their numbers


@dataclass(frozen=True)
class PruningOrder:
    """A way to choose which heads go first.

    `choose(cost, labels)` returns the numbers of all heads in the order of their removal; `labels` holds one dict per
    head, as `regard heads --json` prints them. `passes(N)` is how often it asks for a cost, with N heads.
    """

    what: str
    choose: Callable[[Cost, Sequence[Mapping[str, Any]]], list[int]]
    passes: Callable[[int], int]


PRUNING_ORDERS: Registry[PruningOrder] = Registry("order of pruning", error=OptionError)


def order_by_importance(cost: Cost, labels: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the heads by what each costs when it alone is removed, the cheapest first."""
    alone = [cost([head]) for head in range(len(labels))]
    return sorted(range(len(labels)), key=alone.__getitem__)


def order_greedily(cost: Cost, labels: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the heads in the order of greedy removal: each time the one with which the removed cost least."""
    gone: list[int] = []
    left = list(range(len(labels)))
    while len(left) > 1:
        cheapest = min(left, key=lambda head: cost([*gone, head]))
        left.remove(cheapest)
        gone.append(cheapest)
    return gone + left


def order_by_label(cost: Cost, labels: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns "mixed" heads first, then attention sinks, then specialised heads; each part by effect, smallest first.

    `cost` is not called.
    """

    def key(head: int) -> tuple[int, float]:
        return _rank(labels[head]["label"]), labels[head]["effect"]

    return sorted(range(len(labels)), key=key)


def _rank(label: str) -> int:
    """Returns 0 for the label "mixed", 1 for the labels of attention sinks, SPECIALISED for all others."""
    if label == MIXED:
        return 0
    return 1 if label in RESTS else SPECIALISED


PRUNING_ORDERS["importance"] = PruningOrder("those that cost least alone go first", order_by_importance, lambda N: N)
PRUNING_ORDERS["greedy"] = PruningOrder(
    "each time the one that costs least goes", order_greedily, lambda N: N * (N + 1) // 2 - 1
)
PRUNING_ORDERS["label"] = PruningOrder("those without a label go first", order_by_label, lambda N: 0)


@dataclass(frozen=True)
class Pruning:
    """A pruning that is ready to run: the model, its heads and labels, the order, and the two sets of examples."""

    recordable: RecordableModel
    order: str
    heads: list[dict[str, Any]]
    labels: list[Mapping[str, Any]]
    choose: Examples
    judge: Examples
    seconds_a_pass: tuple[float, float]  # of `choose` and of `judge`
    seed: int = 0

    @property
    def passes(self) -> tuple[int, int]:
        """The number of times that the model reads the examples of `choose`, and those of `judge`."""
        N = len(self.heads)
        curves = (1 + RANDOM_ORDERS) * (len(curve_points(N)) - 2)
        return PRUNING_ORDERS.find(self.order).passes(N), curves + 2

    @property
    def seconds(self) -> float:
        """How long `run` will take, estimated from one timed pass over each set of examples."""
        return sum(n * seconds for n, seconds in zip(self.passes, self.seconds_a_pass, strict=True))

    @torch.no_grad()
    def run(self, progress: Progress | None = None) -> dict[str, Any]:
        """Returns the order, the curve of the measure over heads left, and that of random orders, as plain numbers."""
        count = _Counter(sum(self.passes), progress)
        N = len(self.heads)
        with evaluation_mode(self.recordable.model):
            cost = partial(self._measure, self.choose, count)
            order = PRUNING_ORDERS.find(self.order).choose(lambda gone: cost(gone)[self.choose.cost], self.labels)
            # All orders begin with every head and end with none.
            ends = {left: self._measure(self.judge, count, order[: N - left]) for left in (N, 0)}
            curve = self._curve(order, ends, count)
            draw = generator(self.seed, "pruning")
            drawn = [torch.randperm(N, generator=draw).tolist() for _ in range(RANDOM_ORDERS)]
            random = [self._curve(other, ends, count) for other in drawn]
        return {
            "order": self.order,
            "measure": self.judge.measure,
            "unit": self.judge.unit,
            "source": self.judge.source,
            "chosen_on": len(self.choose),
            "measured_on": len(self.judge),
            "chance": self.judge.chance,
            "removed": [self._describe(head) for head in order],
            "curve": curve,
            "random": _spread(random, self.judge.measure),
            "random_orders": RANDOM_ORDERS,
            "specialised": sum(_rank(row["label"]) == SPECIALISED for row in self.labels),
            "suffice": self._suffice(curve, random),
        }

    def _curve(
        self, order: Sequence[int], ends: Mapping[int, Mapping[str, float]], count: _Counter
    ) -> list[dict[str, float]]:
        """Returns the measures for each number of heads left, with the first heads of an order removed."""
        N = len(order)
        return [
            {"left": left, **(ends.get(left) or self._measure(self.judge, count, order[: N - left]))}
            for left in curve_points(N)
        ]

    def _measure(self, examples: Examples, count: _Counter, gone: Collection[int]) -> dict[str, float]:
        """Returns the measures of the model without some heads."""
        removed: dict[str, list[int]] = defaultdict(list)
        for head in gone:
            removed[self.heads[head]["name"]].append(self.heads[head]["head"])
        with without_heads(self.recordable.model, removed):
            measured = examples.run()
        count.add()
        return {name: round(value, 6) for name, value in measured.items()}

    def _describe(self, head: int) -> dict[str, Any]:
        """Returns the layer, side, module and number of a head, with its label."""
        return {**self.heads[head], "label": self.labels[head]["label"]}

    def _suffice(self, curve: Sequence[Mapping[str, float]], random: Sequence[Sequence[Mapping[str, float]]]) -> Any:
        """Returns how many heads suffice to stay within the tolerance: in this order, and on average in random ones."""
        others = [self.judge.fewest_heads(line) for line in random]
        return {
            "tolerance": self.judge.tolerance,
            "order": self.judge.fewest_heads(curve),
            "random": sum(others) / len(others),
        }


class _Counter:
    """Counts passes, and reports each to `progress`."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total = total
        self.done = 0
        self.progress = progress

    def add(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)


def prepare_pruning(
    recordable: RecordableModel,
    order: str,
    labels: Sequence[Mapping[str, Any]],
    choose: Examples,
    judge: Examples,
    seed: int = 0,
) -> Pruning:
    """Returns a pruning that is ready to run and knows what it will cost.

    `labels` are those of `examine`, one dict per head. The order is chosen on the examples `choose`, the curve is
    measured on `judge`.
    """
    PRUNING_ORDERS.find(order)
    layers = self_attention_layers(recordable, choose.first)
    heads = [{**layer, "head": head} for layer, count in layers for head in range(count)]
    by_place = {(row["side"], row["layer"], row["head"]): row for row in labels}
    own = [by_place[row["side"], row["layer"], row["head"]] for row in heads]
    if len(heads) < 2:
        raise OptionError(f"{recordable.card.name} has {len(heads)} head of self-attention; to prune it needs two")
    with torch.no_grad(), evaluation_mode(recordable.model):
        seconds = (_time_pass(recordable, choose, heads), _time_pass(recordable, judge, heads))
    return Pruning(recordable, order, heads, own, choose, judge, seconds, seed)


def _time_pass(recordable: RecordableModel, examples: Examples, heads: Sequence[Mapping[str, Any]]) -> float:
    """Returns how many seconds the model needs for the examples, with one head of each module removed."""
    with without_heads(recordable.model, {head["name"]: [0] for head in heads}):
        examples.run()  # the first pass also fills caches
        start = time.perf_counter()
        examples.run()
        return time.perf_counter() - start


def curve_points(heads: int) -> list[int]:
    """Returns the numbers of heads left at which the curve is measured, from all to none."""
    steps = min(POINTS, heads)
    return [round(heads * n / steps) for n in range(steps, -1, -1)]


def _spread(curves: Sequence[Sequence[Mapping[str, float]]], measure: str) -> list[dict[str, float]]:
    """Returns the mean of several curves at each point, with the lowest and the highest value."""
    spread = []
    for rows in zip(*curves, strict=True):
        values = [row[measure] for row in rows]
        mean = sum(values) / len(values)
        spread.append({"left": rows[0]["left"], measure: round(mean, 6), "low": min(values), "high": max(values)})
    return spread
