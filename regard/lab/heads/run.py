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
from typing import Any, NamedTuple

import torch

from regard.lab.experiment import Session, Training, TrainingPlan, experiment, read_log
from regard.lab.heads import measures
from regard.lab.heads.page import heads_page
from regard.lab.heads.statistics import detectable, holm, paired
from regard.models import GPT, load
from regard.models.locate import MODEL
from regard.nn import MERGES
from regard.report.markup import count_noun
from regard.train.recipe import SECTIONS, Recipe
from regard.train.run import Run, versions
from regard.train.tasks.heads import PLAIN, SENTENCES, HeadsData, Sentences, with_text
from regard.train.tasks.lm import TOKENS, token_files

ROWS = 32  # windows that are read prefix by prefix
LEVEL = 0.05
MEASURES = ("train", "dev", *SENTENCES)


class HeadsModel(NamedTuple):
    """One of the models that are compared."""

    position: str
    merge: str

    def folder(self, seed: int) -> str:
        return f"{self.position}-{self.merge}-{seed}"


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
    data, first = probe.data, probe.train.seed
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
def measure(session: Session, plan: HeadsPlan, runs: Mapping[str, Run]) -> dict[str, Any]:
    """How should heads be put together, and where do tokens stand? Positions and merges, each with several seeds."""
    session.shown.say("Measuring …")
    return _results(session, plan.probe, plan.task, {plan.models[title]: run for title, run in runs.items()})


def _tokens(data: HeadsData, folder: Path) -> Path:
    """The tokens that all trainings read: the user's, or those of the text, made once."""
    if data.tokens:
        return Path(data.tokens)
    if not (folder / TOKENS).is_dir():
        token_files(with_text(data, folder), folder, None)
    return (folder / TOKENS).resolve()


def _model(setting: HeadsModel) -> dict[str, Any]:
    return {"position": setting.position, "attention": {"merge": setting.merge}}


def _describe_plan(measure: Sentences, settings: Sequence[HeadsModel], seeds: int) -> str:
    read = f"{len(measure.train):,} tokens to learn from, {len(measure.dev):,} for dev, in windows of {measure.length}"
    return f"{read}. {len(settings)} models × {count_noun(seeds, 'seed')} = {len(settings) * seeds} trainings"


def _results(
    session: Session, probe: Recipe, measure: Sentences, runs: Mapping[tuple[HeadsModel, int], Run]
) -> dict[str, Any]:
    data = probe.data
    assert isinstance(data, HeadsData)
    rows = [_measured(measure, setting, seed, run, session.device) for (setting, seed), run in runs.items()]
    compared = _comparisons(rows, data)
    tests = sum(row["measure"] == "dev" for row in compared)
    return {
        "experiment": session.name,
        "run": HeadsModel(data.positions[0], data.merges[0]).folder(rows[0]["seed"]),
        "command": session.command,
        "device": session.device,
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "config": {key: table for key, table in probe.as_dict().items() if key in SECTIONS},
        "text": {
            "source": data.text or data.tokens or "the prose of Python's documentation",
            "train": len(measure.train),
            "dev": len(measure.dev),
            "window": measure.length,
            "vocabulary": measure.tokenizer.size,
        },
        "sentences": {
            name: {"text": data.sentences[name], "tokens": rows.x.shape[1] + 1}
            for name, rows in measure.sentences.items()
        },
        "trainings": rows,
        "comparisons": compared,
        "detectable": [[n, detectable(n, tests)] for n in sorted({3, 5, 10, 20, data.seeds} - {1})] if tests else [],
        "outcome": _outcome(rows, data),
    }


def _measured(measure: Sentences, setting: HeadsModel, seed: int, run: Run, device: str) -> dict[str, Any]:
    """All that is known of one training."""
    model = load(run.path / MODEL, device)
    assert isinstance(model, GPT)
    rows = run.metrics()
    windows = measure.windows(ROWS)
    with torch.no_grad():
        losses = measure.losses(model)
    growth = measures.growth(model, windows.x)
    found: dict[str, Any] = {
        **setting._asdict(),
        "seed": seed,
        "run": run.path.name,
        "seconds": read_log(run).seconds,
        "best": run.best,
        "parameters": sum(p.numel() for p in model.parameters()),
        "losses": losses,
        "evaluations": [{k: x for k, x in row.items() if k == "step" or k.endswith("/loss")} for row in rows],
        "ahead": measures.sees_ahead(model, windows.x.shape[1]),
        "growth": growth,
        "slope": measures.slope(growth),
        "writing": measures.as_it_writes(model, windows),
    }
    found["evaluations"] = [row for row in found["evaluations"] if len(row) > 1]
    if setting.merge == "shift":
        found["straightened"] = measures.shift_is_concatenate(model, windows.x)
    if MERGES[setting.merge].looks_ahead:
        with torch.no_grad():
            found["off"] = measure.losses(measures.with_merge(model, setting.merge, at_inference=False))
    return found


def _comparisons(rows: Sequence[Mapping[str, Any]], data: HeadsData) -> list[dict[str, Any]]:
    """Each merge against the plain one at each kind of position, and each kind against the first at each merge: the
    differences of each seed, tested pair by pair, corrected for how many there are of one measure."""
    others = [m for m in data.merges if m != PLAIN] if PLAIN in data.merges else []
    pairs = [(HeadsModel(p, m), HeadsModel(p, PLAIN)) for p in data.positions for m in others]
    pairs += [(HeadsModel(p, m), HeadsModel(data.positions[0], m)) for p in data.positions[1:] for m in data.merges]
    losses = {(HeadsModel(row["position"], row["merge"]), row["seed"]): row["losses"] for row in rows}
    seeds = sorted({seed for _, seed in losses})
    made = []
    for measure in MEASURES:
        differences = [[losses[a, s][measure] - losses[b, s][measure] for s in seeds] for a, b in pairs]
        tested = [paired(one) for one in differences]
        corrected: Sequence[float | None] = holm([one.p for one in tested if one.p is not None]) or [None] * len(tested)
        for (a, b), each, one, p in zip(pairs, differences, tested, corrected, strict=True):
            row = {"measure": measure, "of": a._asdict(), "against": b._asdict(), "differences": each}
            made.append(row | one._asdict() | {"corrected": p, "exceeds": p is not None and p < LEVEL})
    return made


def _outcome(rows: Sequence[Mapping[str, Any]], data: HeadsData) -> dict[str, Any]:
    """The table for a terminal: perplexities of the mean losses, and the spread of the dev loss over seeds."""
    table = []
    for position in data.positions:
        for merge in data.merges:
            own = [row for row in rows if (row["position"], row["merge"]) == (position, merge)]
            by = {"": [row["losses"] for row in own], ", off at inference": [r["off"] for r in own if "off" in r]}
            for note, losses in by.items():
                if losses:
                    dev = [one["dev"] for one in losses]
                    spread = f" ± {stdev(dev):.3f}" if len(dev) > 1 else ""
                    cells = [f"{exp(min(mean(one[key] for one in losses), 700.0)):,.4g}" for key in MEASURES]
                    table.append([position, merge + note, f"{mean(dev):.3f}{spread}", *cells])
    return {"columns": ["positions", "merge", "dev loss", *(f"ppl {key}" for key in MEASURES)], "rows": table}
