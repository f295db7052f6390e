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
from regard.hub.classifier import DISTRIBUTION, Classifier
from regard.hub.fetching import MINILM_PACKAGE
from regard.lab.experiment import Session, Training, TrainingPlan, experiment, read_log
from regard.lab.results import OutcomeTable
from regard.lab.sentiment.page import sentiment_page
from regard.lab.sentiment.results import (
    BatchInspection,
    BatchRow,
    BatchTensor,
    EncoderSummary,
    OptimizerModel,
    SentimentBaseline,
    SentimentCalibration,
    SentimentDataSummary,
    SentimentResults,
    SentimentScore,
    WrongSentence,
)
from regard.models.locate import MODEL
from regard.train.optimizer import OPTIMIZERS
from regard.train.recipe import COMPARE, Recipe, resolve_model
from regard.train.run import Run
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
    """Sentences, and the probability that a model gives to each being positive."""

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
def measure(session: Session, plan: SentimentPlan, runs: Mapping[str, Run]) -> SentimentResults:
    """Is a sentence positive? A Hugging Face encoder, fine-tuned by three optimisers, against what words alone say."""
    session.shown.say("Judging …")
    task = plan.task
    recipes = {training.title: training.recipe for training in plan.trainings}
    rows = {"train": task.train, "dev": task.dev}
    rows["test"] = encode_sentences(
        task.tokenizer, task.sentences.test, task.config, task.config.test or "data/test.tsv"
    )
    judged = {name: _judge(task, run, rows) for name, run in runs.items()}
    models = [_describe_model(name, recipes[name], runs[name], judged[name], task.rows) for name in runs]
    best = max(models, key=lambda model: model.dev.accuracy)
    test = judged[best.name]["test"]
    lines = [f"{int(p > 0.5)}\t{p:.4f}" for p in test.positive]
    write_lines(session.out / "predictions" / "test.tsv", lines)
    bags = _baselines(task.sentences)
    baselines = [SentimentBaseline(name=name, **_scores(found)) for name, found in bags.items()]
    data = _describe_data(task)
    return SentimentResults(
        run=best.run,
        seed=recipes[best.name].train.seed,
        encoder=_describe_encoder(plan.encoder, task),
        data=data,
        batch=inspect_batch(task, recipes[best.name].train.batch, plan.compare.rows),
        models=models,
        best=best.name,
        baselines=baselines,
        confusion=_confusion(test),
        kinds=_kinds({best.name: test} | {name: found["test"] for name, found in bags.items()}),
        calibration=_calibration(test),
        wrong=_wrong(test, plan.compare.wrong),
        outcome=_outcome(data, baselines, models),
    )


def _describe_plan(task: Sentiment, encoder: Classifier) -> str:
    n = {name: f"{len(part):,}" for name, part in task.sentences._asdict().items()}
    what = "Sentences" if task.config.train else "Generated sentences"
    read = f"{what}: {n['train']} to learn from, {n['dev']} to choose by (dev), {n['test']} to judge by (test)"
    return f"{read}. Encoder: {_title(encoder)}, {sum(p.numel() for p in encoder.parameters()):,} parameters"


def _title(encoder: Classifier) -> str:
    return DISTRIBUTION if f"/{MINILM_PACKAGE}/" in encoder.config.name else display_name(encoder.config.name)


def _recipe(session: Session, name: str, compare: OptimizerComparison, rows: int) -> Recipe:
    """Returns an optimiser's recipe: its usual learning rate unless one was asked for, and an evaluation an epoch."""
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


def _describe_encoder(encoder: Classifier, task: Sentiment) -> EncoderSummary:
    parameters = sum(p.numel() for p in encoder.parameters())
    return EncoderSummary(_title(encoder), type(encoder.model).__name__, parameters, task.tokenizer.limit)


def _judge(task: Sentiment, run: Run, rows: Mapping[str, SentenceRows]) -> dict[str, Judged]:
    """Returns the probabilities that the best model of a run gives to the sentences of train, dev and test."""
    model = Classifier(name=str(run.path / MODEL)).to(task.device).eval()
    judged = {}
    for name, part in rows.items():
        with torch.no_grad():
            positive = classify(model, part).softmax(1)[:, 1].tolist()
        judged[name] = Judged(getattr(task.sentences, name), positive)
    return judged


def _baselines(sentences: SentenceSplit) -> dict[str, dict[str, Judged]]:
    """Returns the judgements of the baselines on each split: the label that most training sentences have, and logistic
    regression on bags of words."""
    most = majority_label(sentences.train)
    bags = {WORDS: BagOfWords(*sentences[:2]), PAIRS: BagOfWords(*sentences[:2], grams=2)}
    judged: dict[str, dict[str, Judged]] = {f"always {CLASSES[most]}": {}, **{name: {} for name in bags}}
    for split, part in sentences._asdict().items():
        judged[f"always {CLASSES[most]}"][split] = Judged(part, [float(most)] * len(part))
        for name, bag in bags.items():
            judged[name][split] = Judged(part, [float(x) for x in bag.predict([s.text for s in part])])
    return judged


def _score(right: Sequence[bool]) -> SentimentScore:
    """Returns the accuracy of judgements, with its 95% interval."""
    low, high = wilson(sum(right), len(right))
    return SentimentScore(len(right), sum(right) / len(right), low, high, sum(right))


def _scores(judged: Mapping[str, Judged]) -> dict[str, SentimentScore]:
    return {split: _score(found.right) for split, found in judged.items()}


def _describe_model(name: str, recipe: Recipe, run: Run, judged: Mapping[str, Judged], rows: int) -> OptimizerModel:
    """Returns one optimiser's training, whose epochs have `rows` rows, and the scores of its best checkpoint."""
    log = read_log(run)
    batch = recipe.train.batch
    evaluations = [row | {"epoch": row["step"] * batch / rows} for row in log.evaluations]
    best = next(row for row in evaluations if row["step"] == run.best)
    return OptimizerModel(
        name=name,
        run=run.path.name,
        rate=recipe.train.lr,
        options=dict(recipe.train.optimizer.options),
        batch=batch,
        epochs=log.steps * batch / rows,
        steps=log.steps,
        seconds=log.seconds,
        best_step=run.best,
        best_epoch=best["epoch"],
        best_train_epoch=max(evaluations, key=lambda row: row["train/accuracy"])["epoch"],
        best_loss=best["dev/loss"],
        curve=[{"epoch": row["step"] * batch / rows, "loss": row["loss"]} for row in log.curve],
        evaluations=evaluations,
        **_scores(judged),
    )


def _describe_data(task: Sentiment) -> SentimentDataSummary:
    config = task.config
    splits = task.sentences._asdict()
    return SentimentDataSummary(
        generated=not config.train,
        unseen=config.reviews.unseen,
        sentences={name: len(part) for name, part in splits.items()},
        positive={name: sum(s.label for s in part) / len(part) for name, part in splits.items()},
        tokens={"mean": float(task.train.lengths.double().mean()), "longest": int(task.train.lengths.max())},
        length=config.length,
        cut=task.train.cut,
        padding=config.padding,
        truncation=config.truncation,
        workers=config.workers,
        examples=[[s.text, CLASSES[s.label], s.kind] for s in task.sentences.train[:8]],
    )


def inspect_batch(task: Sentiment, size: int, rows: int) -> BatchInspection:
    """Returns the tensors of the batch of the first step, and some of its rows as text."""
    batch = task.batch(0, size)
    assert batch.visible is not None
    meaning = {
        "x": "token ids (transformers' input_ids)",
        "y": "the label of each row (labels)",
        "visible": "what is no padding (attention_mask)",
    }
    tensors = [
        BatchTensor(name, meaning[name], type(x).__name__, str(x.dtype), list(x.shape), str(x.device))
        for name, x in batch._asdict().items()
        if x is not None
    ]
    shown = []
    lengths = batch.visible[:rows].sum(1).tolist()
    for ids, label, length in zip(batch.x[:rows].tolist(), batch.y[:rows].tolist(), lengths, strict=True):
        text = task.tokenizer.decode(ids[:length])
        shown.append(BatchRow(text, CLASSES[label], length, len(ids) - length, ids[:8]))
    return BatchInspection(tensors, shown, float((~batch.visible).double().mean()))


def _confusion(judged: Judged) -> list[list[int]]:
    """Returns counts: a row a true class, a column what the model says."""
    counts = [[0, 0], [0, 0]]
    for sentence, positive in zip(judged.sentences, judged.positive, strict=True):
        counts[sentence.label][positive > 0.5] += 1
    return counts


def _kinds(judged: Mapping[str, Judged]) -> dict[str, dict[str, SentimentScore]]:
    """Returns the score of each model by kind of sentence, for those that were generated."""
    scores: dict[str, dict[str, SentimentScore]] = {}
    for name, found in judged.items():
        for kind in KINDS:
            own = [right for right, s in zip(found.right, found.sentences, strict=True) if s.kind == kind]
            if own:
                scores.setdefault(kind, {})[name] = _score(own)
    return scores


def _calibration(judged: Judged) -> SentimentCalibration:
    """Returns the calibration: how often the model is right, by the probability that it gives its answers."""
    found = calibration([max(p, 1 - p) for p in judged.positive], judged.right)
    return SentimentCalibration([bin._asdict() for bin in found.bins], *found[1:])


def _wrong(judged: Judged, most: int) -> list[WrongSentence]:
    """Returns the sentences whose label the model finds least likely, the worst first."""
    likely = [_label_probability(s, p) for s, p in zip(judged.sentences, judged.positive, strict=True)]
    worst = sorted((n for n, p in enumerate(likely) if p <= 0.5), key=likely.__getitem__)[:most]
    rows = [(judged.sentences[n], likely[n]) for n in worst]
    return [WrongSentence(s.text, CLASSES[s.label], s.kind, p) for s, p in rows]


def _label_probability(sentence: Sentence, positive: float) -> float:
    """Returns the probability of a sentence's own label, given that of the positive one."""
    if sentence.label:
        return positive
    return 1 - positive


def _outcome(
    data: SentimentDataSummary, baselines: Sequence[SentimentBaseline], models: Sequence[OptimizerModel]
) -> OutcomeTable:
    """Returns the table that a terminal shows."""
    counts = [f"{name} ({data.sentences[name]:,})" for name in SentenceSplit._fields]
    rows = [[row.name, "", "", *_accuracy_cells(row)] for row in baselines]
    for model in models:
        epochs = f"{model.best_epoch:.3g}/{model.best_train_epoch or 0:.3g}"
        rows.append([model.title, f"{model.rate:g}", epochs, *_accuracy_cells(model)])
    return OutcomeTable(["", "rate", "best epoch: dev/train", *counts], rows)


def _accuracy_cells(row: SentimentBaseline) -> list[str]:
    *others, test = (f"{score.accuracy:.1%}" for score in row.scores.values())
    return [*others, f"{test} ({100 * row.test.low:.0f}–{row.test.high:.0%})"]
