"""The recall experiment: how much does a state of fixed size remember?

One small model for each mechanism, width, short convolution, learning rate and seed learns multi-query associative
recall. Its accuracy is put against the bytes of its state: softmax keeps every key, and everything else has to choose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean
from typing import Any

import torch

from regard.config import ConfigError, Section
from regard.errors import quote
from regard.lab.experiment import Session, Training, TrainingPlan, experiment, read_log
from regard.lab.recall.page import recall_page
from regard.lab.recall.results import RecallModel, RecallPoint, RecallResults, RecallTraining
from regard.lab.results import OutcomeTable
from regard.mechanisms import lookup, mechanisms
from regard.models import GPT, load
from regard.models.locate import MODEL
from regard.report.markup import count_noun
from regard.train.recipe import COMPARE, SECTIONS, Recipe
from regard.train.run import Run
from regard.train.tasks.recall import Recall, RecallData

FILE = "recall"
NOT_TRAINED = ("linear",)  # it needs a function of the user's
OWN_KEYS = {
    "model.mechanism": "compare.mechanisms",
    "model.width": "compare.widths",
    "model.attention.convolution.width": "compare.convolutions",
    "train.lr": "compare.rates",
}


@dataclass(frozen=True, kw_only=True)
class RecallComparison(Section):
    """What is compared: each of `mechanisms` (none: every one), `widths`, `convolutions` (their widths, 0 for none)
    and learning `rates`, with so many `seeds`. The best rate of each model is chosen on examples of their own."""

    place = "compare"

    mechanisms: tuple[str, ...] = ()
    widths: tuple[int, ...] = (64,)
    convolutions: tuple[int, ...] = (4,)
    rates: tuple[float, ...] = (1e-2,)
    seeds: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.mechanisms:
            lookup(name)
        for key in ("widths", "convolutions", "rates"):
            values = getattr(self, key)
            if not values or min(values) < 0 or (key != "convolutions" and min(values) == 0):
                raise ConfigError(f"compare.{key} = {quote(list(values))}: expected at least one number above 0")
        if self.seeds < 1:
            raise ConfigError(f"compare.seeds = {self.seeds}: expected at least 1")


@dataclass(frozen=True)
class RecallPlan(TrainingPlan):
    """One training for each model, learning rate and seed."""

    probe: Recipe
    compare: RecallComparison
    trials: Mapping[str, tuple[RecallModel, float, int]]  # the model, the rate and the seed of each, by its title


def plan(session: Session) -> RecallPlan:
    """Returns one training for each mechanism, width, convolution, learning rate and seed."""
    for key, instead in OWN_KEYS.items():
        session.refuse(key, f"this experiment compares them; say which by {instead}=[…]")
    probe = session.recipe(FILE)
    compare = session.compare(FILE, RecallComparison)
    if not session.asks(f"{COMPARE}.mechanisms"):
        compare = compare.but(mechanisms=_with_plugins(compare.mechanisms))
    seeds = range(probe.train.seed, probe.train.seed + compare.seeds)
    models = [
        RecallModel(name, width, convolution)
        for convolution, width, name in product(compare.convolutions, compare.widths, compare.mechanisms)
    ]
    trials = list(product(seeds, models, compare.rates))
    trainings = []
    titles = {}
    for n, (seed, model, rate) in enumerate(trials):
        title = f"{n + 1} of {len(trials)}: {model.label}, {model.width} wide, rate {rate:g}, seed {seed}"
        folder = f"{model.mechanism}-{model.width}-{model.convolution}-{rate:g}-{seed}"
        settings = {"model": _changes(model), "train": {"seed": seed, "lr": rate}}
        trainings.append(Training("", title, folder, session.recipe(FILE, settings=settings)))
        titles[title] = (model, rate, seed)
    session.shown.say(
        f"{count_noun(len(models), 'model')} × {count_noun(len(compare.rates), 'learning rate')} × "
        f"{count_noun(len(seeds), 'seed')} = {count_noun(len(trials), 'training')}"
    )
    return RecallPlan(trainings, probe, compare, titles)


def _with_plugins(names: Sequence[str]) -> list[str]:
    """Returns the mechanisms to compare: those named, or else all of regard's, and those of the user's files."""
    known = mechanisms()
    own = [name for name, kind in known.items() if not kind.__module__.startswith("regard.")]
    return list(dict.fromkeys([*(names or (n for n in known if n not in NOT_TRAINED)), *own]))


def _changes(model: RecallModel) -> dict[str, Any]:
    convolution = {"convolution": {"width": model.convolution}}
    return {"mechanism": model.mechanism, "width": model.width, "attention": convolution}


@experiment("recall", plan, recall_page, compares=True, small=True)
def measure(session: Session, plan: RecallPlan, runs: Mapping[str, Run]) -> RecallResults:
    """How much does a state of fixed size remember? Recall of pairs against bytes of state, mechanism by mechanism."""
    session.shown.say("Measuring …")
    data = plan.probe.data
    assert isinstance(data, RecallData)
    trainings = [_measure_run(data, *plan.trials[title], run, session) for title, run in runs.items()]
    longest = max(size.length for size in data.test_sizes)
    points = []
    for model in dict.fromkeys(row.model for row in trainings):
        own = [row for row in trainings if row.model == model]
        state = load(session.out / own[0].run / MODEL).summary(longest).total.state
        points.append(_best_rate(model, own, state))
    config = {key: table for key, table in plan.probe.as_dict().items() if key in SECTIONS}
    return RecallResults(
        run=trainings[0].run,
        device=session.machine,
        threads=torch.get_num_threads(),
        config=config | {COMPARE: plan.compare.as_dict()},
        longest=longest,
        chance=1 / (data.vocabulary - data.vocabulary // 2),
        sizes=[size.name for size in data.test_sizes],
        seeds=plan.compare.seeds,
        points=points,
        trainings=trainings,
        outcome=_outcome(points, [size.name for size in data.test_sizes]),
    )


def _measure_run(
    data: RecallData, model: RecallModel, rate: float, seed: int, run: Run, session: Session
) -> RecallTraining:
    """Returns what is measured of one training's best checkpoint."""
    trained = load(run.path / MODEL, session.device)
    assert isinstance(trained, GPT)
    task = Recall(data, seed, torch.device(session.device), run.path, None)
    measured = task.test(trained)
    log = read_log(run)
    return RecallTraining(
        model=model,
        rate=rate,
        seed=seed,
        run=run.path.name,
        seconds=log.seconds,
        steps=log.steps,
        parameters=sum(p.numel() for p in trained.parameters()),
        dev=task.evaluate(trained)["accuracy"],
        accuracy=measured["accuracy"],
        by_size={size.name: measured[f"accuracy {size.name}"] for size in data.test_sizes},
    )


def _best_rate(model: RecallModel, rows: Sequence[RecallTraining], state: int) -> RecallPoint:
    """Returns what a model reaches at the learning rate that is best on the dev examples, over all seeds."""
    rates = dict.fromkeys(row.rate for row in rows)
    best = max(rates, key=lambda rate: mean(row.dev for row in rows if row.rate == rate))
    own = [row for row in rows if row.rate == best]
    found = [row.accuracy for row in own]
    by_size = {name: mean(row.by_size[name] for row in own) for name in own[0].by_size}
    return RecallPoint(model, best, state, mean(found), min(found), max(found), by_size)


def _outcome(points: Sequence[RecallPoint], sizes: Sequence[str]) -> OutcomeTable:
    """Returns the table that a terminal shows: bytes of state and accuracies, the best first."""
    columns = ["mechanism", "width", "conv", "state", "accuracy", *sizes]
    rows = []
    for point in sorted(points, key=lambda point: -point.accuracy):
        spread = ""
        if point.low < point.high:
            spread = f" ({point.low:.3f}–{point.high:.3f})"
        model = point.model
        cells = [model.mechanism, str(model.width), str(model.convolution or "–"), f"{point.state:,} B"]
        shares = [f"{point.by_size[name]:.3f}" for name in sizes]
        rows.append([*cells, f"{point.accuracy:.3f}{spread}", *shares])
    return OutcomeTable(columns, rows)
