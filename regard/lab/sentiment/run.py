"""The experiment "sentiment": a Hugging Face encoder learns whether a sentence is positive, by several optimisers.

Each optimiser trains the same encoder on the same batches at a learning rate of its own. The checkpoint that is right
most often on dev is kept, and the best of all is judged on test: against the majority and against what words alone say,
by kind of sentence where they were generated, and by the sentences that it gets most wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from regard.config import ConfigError, Section
from regard.data.bag import BagOfWords
from regard.data.files import write_lines
from regard.data.reviews import KINDS
from regard.data.scores import calibration, wilson
from regard.data.sentences import CLASSES, Sentence, SentenceSplit, majority_label
from regard.errors import did_you_mean
from regard.hub import display_name
from regard.hub.classifier import DISTRIBUTION, PACKAGE, Classifier
from regard.lab.experiment import Session, Training, TrainingPlan, experiment, read_log
from regard.lab.sentiment.page import sentiment_page
from regard.models.locate import MODEL
from regard.train.optimizer import OPTIMIZERS
from regard.train.recipe import COMPARE, Recipe, resolve_model
from regard.train.run import Run, versions
from regard.train.tasks.sentiment import SentenceRows, Sentiment, SentimentData, classify, encode_sentences

FILE = "sentiment"
OPTIMISERS = ("adamw", "adagrad", "sgd")
RATES = {"adamw": 1e-4, "adagrad": 1e-3, "sgd": 1e-2}
OPTIONS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9}}
WORDS, PAIRS = "bag of words", "words and pairs"


@dataclass(frozen=True, kw_only=True)
class OptimizerComparison(Section):
    """The optimisers to compare, the learning rate of each (`rates`; train.lr for one that has none there), how many of
    the most wrong sentences are shown, and how many rows of the inspected batch."""

    place = "compare"

    optimizers: tuple[str, ...] = OPTIMISERS
    rates: dict[str, float] = field(default_factory=dict)
    wrong: int = 12
    rows: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.optimizers or len(set(self.optimizers)) < len(self.optimizers):
            raise ConfigError(f"compare.optimizers = {list(self.optimizers)}: expected at least one, and none twice")
        for name in (*self.optimizers, *self.rates):
            if name not in OPTIMIZERS:
                raise ConfigError(f"compare.optimizers: no '{name}' in torch.optim.{did_you_mean(name, OPTIMIZERS)}")
        for name, rate in self.rates.items():
            if not isinstance(rate, float | int) or rate <= 0:
                raise ConfigError(f"compare.rates.{name} = {rate!r}: expected a learning rate above 0")
        # A change to one leaves the others as they are.
        object.__setattr__(self, "rates", RATES | dict(self.rates))
        if self.wrong < 0 or self.rows < 1:
            raise ConfigError(f"compare.wrong = {self.wrong}, compare.rows = {self.rows}: expected 0 and 1 or more")


class Judged(NamedTuple):
    """What a model says of sentences: the probability that each is positive."""

    sentences: Sequence[Sentence]
    positive: Sequence[float]

    @property
    def right(self) -> list[bool]:
        return [(p > 0.5) == bool(s.label) for p, s in zip(self.positive, self.sentences, strict=True)]


@dataclass(frozen=True)
class SentimentPlan(TrainingPlan):
    """One training an optimiser, with what is compared, the sentences as a task, and the encoder before training."""

    compare: OptimizerComparison
    task: Sentiment
    encoder: Classifier


def plan(session: Session) -> SentimentPlan:
    """Returns one training for each optimiser."""
    compare = session.compare(FILE, OptimizerComparison)
    _refuse_contradictions(session, compare)
    probe = session.recipe(FILE)
    encoder = Classifier(resolve_model(probe.model)[1])
    assert isinstance(probe.data, SentimentData)
    task = Sentiment(probe.data, probe.train.seed, torch.device(session.device), session.out, encoder.tokenizer)
    session.shown.say(_describe_plan(task, encoder))
    trainings = [Training(name, name, name, _recipe(session, name, compare, task.rows)) for name in compare.optimizers]
    return SentimentPlan(trainings, compare, task, encoder)


def _refuse_contradictions(session: Session, compare: OptimizerComparison) -> None:
    """Raises an error where one optimiser is asked for all trainings, or a learning rate that none of them has."""
    reason = "this experiment compares them; say which by compare.optimizers=[…]"
    session.refuse("train.optimizer.name", reason, ("", *OPTIMIZERS))
    for stage in ("", *OPTIMIZERS):  # `train.optimizer=NAME` is short for its name
        table = session.asked.get(stage, {}) if stage else session.asked
        if isinstance(table.get("train", {}).get("optimizer"), str):
            session.refuse("train.optimizer", reason, (stage,))
    for name in session.asked.get(COMPARE, {}).get("rates", {}):
        if name not in compare.optimizers:
            raise ConfigError(f"compare.rates.{name}: {name} is not one of compare.optimizers")
        session.refuse("train.lr", f"compare.rates.{name} says it already; leave one of them out", (name,))


@experiment("sentiment", plan, sentiment_page, stages=tuple(OPTIMIZERS), files=SentenceSplit._fields, compares=True)
def measure(session: Session, plan: SentimentPlan, runs: Mapping[str, Run]) -> dict[str, Any]:
    """Is a sentence positive? A Hugging Face encoder, fine-tuned by three optimisers, against what words alone say."""
    recipes = {training.title: training.recipe for training in plan.trainings}
    return _results(session, plan.compare, plan.task, plan.encoder, recipes, runs)


def _describe_plan(task: Sentiment, encoder: Classifier) -> str:
    n = {name: f"{len(part):,}" for name, part in task.sentences._asdict().items()}
    what = "Sentences" if task.config.train else "Generated sentences"
    read = f"{what}: {n['train']} to learn from, {n['dev']} to choose by (dev), {n['test']} to judge by (test)"
    return f"{read}. Encoder: {_title(encoder)}, {sum(p.numel() for p in encoder.parameters()):,} parameters"


def _title(encoder: Classifier) -> str:
    return DISTRIBUTION if f"/{PACKAGE}/" in encoder.config.name else display_name(encoder.config.name)


def _recipe(session: Session, name: str, compare: OptimizerComparison, rows: int) -> Recipe:
    """Returns one optimiser's recipe: its learning rate unless one was asked for, and an evaluation an epoch."""
    optimizer = {"name": name, "options": OPTIONS.get(name, {})}
    defaults: dict[str, Any] = {"train": {"optimizer": optimizer}}
    settings: dict[str, Any] = {}
    if name in compare.rates:
        # A rate that was asked for this optimiser overrides `train.lr`, its usual rate does not.
        rated = session.asks(f"{COMPARE}.rates.{name}")
        chosen = settings if rated else defaults
        chosen.setdefault("train", {})["lr"] = compare.rates[name]
    batch = session.recipe(FILE, name, defaults, settings).train.batch
    defaults["train"]["evaluation"] = {"every": max(1, round(rows / batch))}
    return session.recipe(FILE, name, defaults, settings)


def _results(
    session: Session,
    compare: OptimizerComparison,
    task: Sentiment,
    encoder: Classifier,
    recipes: Mapping[str, Recipe],
    runs: Mapping[str, Run],
) -> dict[str, Any]:
    session.shown.say("Judging …")
    rows = {"train": task.train, "dev": task.dev}
    rows["test"] = encode_sentences(
        task.tokenizer, task.sentences.test, task.config, task.config.test or "data/test.tsv"
    )
    said = {name: _judged(task, run, rows) for name, run in runs.items()}
    models = [_row(name, recipes[name], runs[name], said[name], task.rows) for name in runs]
    best = max(models, key=lambda row: row["dev"]["accuracy"])
    test = said[best["name"]]["test"]
    lines = [f"{int(p > 0.5)}\t{p:.4f}" for p in test.positive]
    write_lines(session.out / "predictions" / "test.tsv", lines)
    baselines = _baselines(task.sentences)
    results: dict[str, Any] = {
        "experiment": session.name,
        "run": best["run"],
        "command": session.command,
        "device": session.machine,
        "versions": versions(),
        "seed": recipes[best["name"]].train.seed,
        "encoder": {
            "name": _title(encoder),
            "class": type(encoder.model).__name__,
            "parameters": sum(p.numel() for p in encoder.parameters()),
            "limit": task.tokenizer.limit,
        },
        "data": _data(task),
        "batch": inspected(task, recipes[best["name"]].train.batch, compare.rows),
        "models": models,
        "best": best["name"],
        "baselines": [{"name": name, **_scores(found)} for name, found in baselines.items()],
        "confusion": _confusion(test),
        "kinds": _kinds({best["name"]: test} | {name: found["test"] for name, found in baselines.items()}),
        "calibration": _calibration(test),
        "wrong": _wrong(test, compare.wrong),
    }
    results["outcome"] = _outcome(results)
    return results


def _judged(task: Sentiment, run: Run, rows: Mapping[str, SentenceRows]) -> dict[str, Judged]:
    """What the best model of a run says of train, dev and test."""
    model, found = Classifier(name=str(run.path / MODEL)).to(task.device).eval(), {}
    for name, part in rows.items():
        with torch.no_grad():
            positive = classify(model, part).softmax(1)[:, 1].tolist()
        found[name] = Judged(getattr(task.sentences, name), positive)
    return found


def _baselines(sentences: SentenceSplit) -> dict[str, dict[str, Judged]]:
    """What can be said without reading: the label that most training sentences have, and what words alone say."""
    most = majority_label(sentences.train)
    bags = {WORDS: BagOfWords(*sentences[:2]), PAIRS: BagOfWords(*sentences[:2], grams=2)}
    made: dict[str, dict[str, Judged]] = {f"always {CLASSES[most]}": {}, **{name: {} for name in bags}}
    for split, part in sentences._asdict().items():
        made[f"always {CLASSES[most]}"][split] = Judged(part, [float(most)] * len(part))
        for name, bag in bags.items():
            made[name][split] = Judged(part, [float(x) for x in bag.predict([s.text for s in part])])
    return made


def _scores(judged: Mapping[str, Judged]) -> dict[str, Any]:
    """Accuracy on each split, with its 95% interval."""
    made = {}
    for name, found in judged.items():
        right, n = sum(found.right), len(found.sentences)
        low, high = wilson(right, n)
        made[name] = {"right": right, "n": n, "accuracy": right / n, "low": low, "high": high}
    return made


def _row(name: str, recipe: Recipe, run: Run, said: Mapping[str, Judged], rows: int) -> dict[str, Any]:
    log, batch = read_log(run), recipe.train.batch
    measured = [row | {"epoch": row["step"] * batch / rows} for row in log.evaluations]
    best = next(row for row in measured if row["step"] == run.best)
    return {
        "name": name,
        "run": run.path.name,
        "rate": recipe.train.lr,
        "batch": batch,
        "epochs": log.steps * batch / rows,
        "steps": log.steps,
        "seconds": log.seconds,
        "best_step": run.best,
        "best_epoch": best["epoch"],
        "best_loss": best["dev/loss"],
        "curve": [{"epoch": row["step"] * batch / rows, "loss": row["loss"]} for row in log.curve],
        "evaluations": measured,
        **_scores(said),
    }


def _data(task: Sentiment) -> dict[str, Any]:
    config = task.config
    return {
        "generated": not config.train,
        "unseen": config.reviews.unseen,
        "sentences": {name: len(part) for name, part in task.sentences._asdict().items()},
        "positive": {name: sum(s.label for s in part) / len(part) for name, part in task.sentences._asdict().items()},
        "tokens": {"mean": float(task.train.lengths.double().mean()), "longest": int(task.train.lengths.max())},
        "length": config.length,
        "cut": task.train.cut,
        "padding": config.padding,
        "truncation": config.truncation,
        "workers": config.workers,
        "examples": [[s.text, CLASSES[s.label], s.kind] for s in task.sentences.train[:8]],
    }


def inspected(task: Sentiment, size: int, rows: int) -> dict[str, Any]:
    """The batch of the first step: what it is made of, and some of its rows as text."""
    batch = task.batch(0, size)
    assert batch.visible is not None
    meaning = {
        "x": "token ids",
        "y": "the label at the first place, none elsewhere (−100)",
        "visible": "what is no padding",
    }
    tensors = {name: tensor for name, tensor in batch._asdict().items() if tensor is not None}
    shown = []
    for ids, label, seen in zip(
        batch.x[:rows].tolist(), batch.y[:rows, 0].tolist(), batch.visible[:rows].sum(1).tolist(), strict=True
    ):
        shown.append(
            {
                "text": task.tokenizer.decode(ids[:seen]),
                "label": CLASSES[label],
                "tokens": seen,
                "padding": len(ids) - seen,
                "ids": ids[:8],
            }
        )
    return {
        "tensors": [
            {
                "name": name,
                "what": meaning[name],
                "type": type(x).__name__,
                "dtype": str(x.dtype),
                "shape": list(x.shape),
                "device": str(x.device),
            }
            for name, x in tensors.items()
        ],
        "rows": shown,
        "padding": float((~batch.visible).double().mean()),
    }


def _confusion(judged: Judged) -> list[list[int]]:
    """Counts: a row a true class, a column what the model says."""
    counts = [[0, 0], [0, 0]]
    for sentence, positive in zip(judged.sentences, judged.positive, strict=True):
        counts[sentence.label][positive > 0.5] += 1
    return counts


def _kinds(judged: Mapping[str, Judged]) -> dict[str, Any]:
    """Accuracy by kind of sentence, for those that were generated."""
    made: dict[str, Any] = {}
    for name, found in judged.items():
        for kind in KINDS:
            own = [right for right, s in zip(found.right, found.sentences, strict=True) if s.kind == kind]
            if own:
                low, high = wilson(sum(own), len(own))
                made.setdefault(kind, {})[name] = {
                    "accuracy": sum(own) / len(own),
                    "n": len(own),
                    "low": low,
                    "high": high,
                }
    return made


def _calibration(judged: Judged) -> dict[str, Any]:
    """How sure it is against how often it is right."""
    found = calibration([max(p, 1 - p) for p in judged.positive], judged.right)
    return {"bins": [bin._asdict() for bin in found.bins], "error": found.error}


def _wrong(judged: Judged, most: int) -> list[dict[str, Any]]:
    """The sentences whose label the model finds least likely."""
    likely = [p if s.label else 1 - p for s, p in zip(judged.sentences, judged.positive, strict=True)]
    worst = sorted((n for n, p in enumerate(likely) if p <= 0.5), key=likely.__getitem__)[:most]
    rows = [(judged.sentences[n], likely[n]) for n in worst]
    return [{"text": s.text, "label": CLASSES[s.label], "kind": s.kind, "probability": p} for s, p in rows]


def _outcome(results: Mapping[str, Any]) -> dict[str, Any]:
    """The table for a terminal."""
    columns = [
        "",
        "learning rate",
        "best epoch",
        *(f"{name}, n = {results['data']['sentences'][name]:,}" for name in SentenceSplit._fields),
    ]
    table = []
    for row in (*results["baselines"], *results["models"]):
        cells = [f"{row[name]['accuracy']:6.1%}" for name in SentenceSplit._fields]
        cells[-1] += f"  [{row['test']['low']:.1%}, {row['test']['high']:.1%}]"
        trained = [f"{row['rate']:g}", f"{row['best_epoch']:.3g}"] if "rate" in row else ["", ""]
        table.append([row["name"], *trained, *cells])
    return {"columns": columns, "rows": table}
