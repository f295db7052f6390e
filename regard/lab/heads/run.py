"""The heads experiment: how should the heads of attention be put together, and where should a token stand?

One small GPT for each kind of position, each merge and each seed. Trainings of one seed read the same windows in the
same order, and those that differ in nothing but the merge begin with the same weights: so their losses are compared
pair by pair, and what is larger than the noise of another seed can be told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from regard.lab.experiment import Session, Training, TrainingPlan, experiment, read_log
from regard.lab.heads import measures
from regard.lab.heads.page import heads_page
from regard.lab.heads.results import (
    HeadsComparison,
    HeadsModel,
    HeadsResults,
    HeadsText,
    HeadsTraining,
    MeasuredSentence,
)
from regard.lab.heads.statistics import detectable, holm, paired
from regard.lab.results import OutcomeTable
from regard.models import GPT, load
from regard.models.locate import MODEL
from regard.nn import MERGES
from regard.report.markup import count_noun
from regard.train.recipe import SECTIONS, Recipe
from regard.train.run import Run
from regard.train.tasks.heads import PLAIN, SENTENCES, HeadsData, Sentences
from regard.train.tasks.lm import TOKENS, token_files

ROWS = 32  # windows that are read prefix by prefix
LEVEL = 0.05
MEASURES = ("train", "dev", *SENTENCES)


@dataclass(frozen=True)
class HeadsPlan(TrainingPlan):
    """One training for each model and seed, with the recipe that they share and the task that measures them."""

    probe: Recipe
    task: Sentences
    models: Mapping[str, tuple[HeadsModel, int]]  # the model and the seed of each training, by its title


def plan(session: Session) -> HeadsPlan:
    """Returns one training for each kind of position, each merge and each seed."""
    for key, instead in (("position", "positions"), ("attention.merge", "merges")):
        session.refuse(f"model.{key}", f"this experiment compares them; say which by data.{instead}=[…]")
    probe = session.recipe("heads")
    data = probe.data
    first = probe.train.seed
    assert isinstance(data, HeadsData)
    place = {"data": {"tokens": str(_tokens(data, session.out)), "text": ""}}
    settings = [HeadsModel(position, merge) for position in data.positions for merge in data.merges]
    trainings: list[Training] = []
    models = {}
    count = len(settings) * data.seeds
    for seed in range(first, first + data.seeds):
        for setting in settings:
            own = place | {"model": _model(setting), "train": {"seed": seed}}
            title = f"{len(trainings) + 1} of {count}: {setting.position}, {setting.merge}, seed {seed}"
            trainings.append(Training("", title, setting.folder(seed), session.recipe("heads", settings=own)))
            models[title] = (setting, seed)
    task = Sentences(data.but(**place["data"]), first, torch.device(session.device), session.out, None)
    session.shown.say(_describe_plan(task, settings, data.seeds))
    return HeadsPlan(trainings, probe, task, models)


@experiment("heads", plan, heads_page, files=("text", "tokens"))
def measure(session: Session, plan: HeadsPlan, runs: Mapping[str, Run]) -> HeadsResults:
    """How should heads be put together, and where do tokens stand? Positions and merges, each with several seeds."""
    session.shown.say("Measuring …")
    task = plan.task
    data = plan.probe.data
    assert isinstance(data, HeadsData)
    trainings = [_measure_run(task, *plan.models[title], run, session.device) for title, run in runs.items()]
    comparisons = _compare(trainings, data)
    tests = sum(row.measure == "dev" for row in comparisons)
    seed_counts = sorted({3, 5, 10, 20, data.seeds} - {1}) if tests else []
    sentences = {
        name: MeasuredSentence(data.sentences[name], rows.x.shape[1] + 1) for name, rows in task.sentences.items()
    }
    source = data.text or data.tokens or "the prose of Python's documentation"
    return HeadsResults(
        run=HeadsModel(data.positions[0], data.merges[0]).folder(trainings[0].seed),
        device=session.device,
        threads=torch.get_num_threads(),
        config={key: table for key, table in plan.probe.as_dict().items() if key in SECTIONS},
        text=HeadsText(source, len(task.train), len(task.dev), task.length, task.tokenizer.size),
        sentences=sentences,
        trainings=trainings,
        comparisons=comparisons,
        detectable=[(n, detectable(n, tests)) for n in seed_counts],
        outcome=_outcome(trainings, data),
    )


def _tokens(data: HeadsData, folder: Path) -> Path:
    """Returns the tokens that all trainings read: the user's, or those of the text, made once."""
    if data.tokens:
        return Path(data.tokens)
    if not (folder / TOKENS).is_dir():
        token_files(data, folder, None)
    return (folder / TOKENS).resolve()


def _model(setting: HeadsModel) -> dict[str, Any]:
    return {"position": setting.position, "attention": {"merge": setting.merge}}


def _describe_plan(measure: Sentences, settings: Sequence[HeadsModel], seeds: int) -> str:
    read = f"{len(measure.train):,} tokens to learn from, {len(measure.dev):,} for dev, in windows of {measure.length}"
    return f"{read}. {len(settings)} models × {count_noun(seeds, 'seed')} = {len(settings) * seeds} trainings"


def _measure_run(task: Sentences, model: HeadsModel, seed: int, run: Run, device: str) -> HeadsTraining:
    """Returns all that is measured of one training."""
    trained = load(run.path / MODEL, device)
    assert isinstance(trained, GPT)
    windows = task.windows(ROWS)
    growth = measures.growth(trained, windows.x)
    straightened = None
    off = None
    with torch.no_grad():
        losses = task.losses(trained)
        if MERGES[model.merge].looks_ahead:
            off = task.losses(measures.with_merge(trained, model.merge, at_inference=False))
    if model.merge == "shift":
        straightened = measures.shift_is_concatenate(trained, windows.x)
    lines = [{k: x for k, x in row.items() if k == "step" or k.endswith("/loss")} for row in run.metrics()]
    return HeadsTraining(
        position=model.position,
        merge=model.merge,
        seed=seed,
        run=run.path.name,
        seconds=read_log(run).seconds,
        best=run.best,
        parameters=sum(p.numel() for p in trained.parameters()),
        losses=losses,
        evaluations=[row for row in lines if len(row) > 1],
        ahead=measures.sees_ahead(trained, windows.x.shape[1]),
        growth=growth,
        slope=measures.slope(growth),
        writing=measures.as_it_writes(trained, windows),
        straightened=straightened,
        off=off,
    )


def _compare(trainings: Sequence[HeadsTraining], data: HeadsData) -> list[HeadsComparison]:
    """Returns each merge against the plain one at each kind of position, and each kind against the first at each merge.

    The differences of each seed are tested pair by pair, and p-values corrected for how many there are of one measure.
    """
    pairs = []
    if PLAIN in data.merges:
        others = [m for m in data.merges if m != PLAIN]
        pairs += [(HeadsModel(p, m), HeadsModel(p, PLAIN)) for p in data.positions for m in others]
    pairs += [(HeadsModel(p, m), HeadsModel(data.positions[0], m)) for p in data.positions[1:] for m in data.merges]
    losses = {(row.model, row.seed): row.losses for row in trainings}
    seeds = sorted({seed for _, seed in losses})
    comparisons = []
    for measure in MEASURES:
        differences = [[losses[a, s][measure] - losses[b, s][measure] for s in seeds] for a, b in pairs]
        tests = [paired(each) for each in differences]
        # One seed has no p-value at all, and then none is corrected.
        corrected: Sequence[float | None] = holm([t.p for t in tests if t.p is not None]) or [None] * len(tests)
        for (a, b), each, test, p in zip(pairs, differences, tests, corrected, strict=True):
            exceeds = p is not None and p < LEVEL
            comparisons.append(HeadsComparison(measure, a, b, each, *test, corrected=p, exceeds=exceeds))
    return comparisons


def _outcome(trainings: Sequence[HeadsTraining], data: HeadsData) -> OutcomeTable:
    """Returns the table that a terminal shows: perplexities of the mean losses, and the spread of the dev loss."""
    rows = []
    for position in data.positions:
        for merge in data.merges:
            own = [row for row in trainings if row.model == HeadsModel(position, merge)]
            rows.append([position, merge, *_loss_cells([row.losses for row in own])])
            off = [row.off for row in own if row.off is not None]
            if off:
                rows.append([position, f"{merge}, off at inference", *_loss_cells(off)])
    return OutcomeTable(["positions", "merge", "dev loss", *(f"ppl {key}" for key in MEASURES)], rows)


def _loss_cells(losses: Sequence[Mapping[str, float]]) -> list[str]:
    """Returns the mean dev loss over seeds with its standard deviation, and the perplexity of each measure."""
    dev = [each["dev"] for each in losses]
    spread = ""
    if len(dev) > 1:
        spread = f" ± {stdev(dev):.3f}"
    perplexities = [exp(min(mean(each[key] for each in losses), 700.0)) for key in MEASURES]
    return [f"{mean(dev):.3f}{spread}", *(f"{perplexity:,.4g}" for perplexity in perplexities)]
