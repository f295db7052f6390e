"""The experiment "summarize": an encoder-decoder learns to write one line about an article.

softmax is trained beside performer, with several numbers of random features and several learning rates; the best of
each is judged against the first words of the article by ROUGE, by how much it copies, and, on generated pairs, by which
of the facts that it states are true.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.config import ConfigError, Section
from regard.data import rouge
from regard.data.pairs import Pair, PairSplit, write_pairs
from regard.data.tokenizers import Tokenizer
from regard.generate import Settings
from regard.lab.experiment import Session, Training, TrainingPlan, experiment, read_log
from regard.lab.results import OutcomeTable
from regard.lab.summarize.page import summarize_page
from regard.lab.summarize.results import (
    CrossAttention,
    CrossHead,
    PairMasks,
    PairsSummary,
    SummarizeResults,
    SummarizerTraining,
    SummaryExample,
    SummaryScore,
    WrittenSummaries,
)
from regard.lab.summarize.summaries import Summaries, count_facts, score_summaries, summaries, writer
from regard.lens.recording.maps import attention_maps
from regard.models import Seq2Seq, load
from regard.models.locate import MODEL
from regard.shapes import Mask
from regard.train.recipe import COMPARE, Recipe, resolve_model
from regard.train.run import Run
from regard.train.tasks.summarize import (
    TOKENIZER,
    SummarizeData,
    build_tokenizer,
    encode_pairs,
    load_pairs,
    make_batch,
    save_tokenizer,
    trim_padding,
)

FILE = "summarize"
FILES = ("train", "dev", "test", "tokenizer_file")
SAMPLED = Settings(temperature=0.8, top_p=0.95, seed=0)
BARE, RANDOM = "softmax", "performer"  # the stages
OWN_DATA = ("source", "target", "copies")  # what of the data one stage may have for itself


@dataclass(frozen=True, kw_only=True)
class SummaryComparison(Section):
    """Learning rates and numbers of random features to try; how summaries are searched for: `beams`, ranked by
    log p / length^`length_penalty`; of how many articles (`examples`) how many summaries (`n`) are shown."""

    place = "compare"

    rates: tuple[float, ...] = (1e-3,)
    features: tuple[int, ...] = (64,)
    beams: int = 4
    length_penalty: float = 1.0
    n: int = 3
    examples: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rates or min(self.rates) <= 0:
            raise ConfigError(f"compare.rates = {list(self.rates)}: expected at least one learning rate above 0")
        if any(F < 1 for F in self.features):
            raise ConfigError(
                f"compare.features = {list(self.features)}: expected numbers of at least 1, or none at all"
            )
        if not 1 <= self.n <= self.beams:
            raise ConfigError(
                f"compare.n = {self.n} summaries of compare.beams = {self.beams}: expected 1 to {self.beams}"
            )

    @property
    def search(self) -> Settings:
        """The beam search for the likeliest summary."""
        return Settings(beams=self.beams, length_penalty=self.length_penalty)


class ComparedModel(NamedTuple):
    """One of the models that are compared; `features` is None for the base, which is no performer."""

    training: Training
    features: int | None


@dataclass(frozen=True)
class SummarizePlan(TrainingPlan):
    """One training for each mechanism and learning rate, with what is compared and the pairs that all read."""

    compare: SummaryComparison
    pairs: PairSplit
    trials: Sequence[ComparedModel]


def plan(session: Session) -> SummarizePlan:
    """Returns one training for each learning rate of the base, and for each of every number of random features."""
    _refuse_contradictions(session)
    compare = session.compare(FILE, SummaryComparison)
    if session.asks("train.lr"):
        compare = compare.but(rates=[session.asked["train"]["lr"]])
    data = session.recipe(FILE).data
    assert isinstance(data, SummarizeData)
    pairs = load_pairs(data, session.out)
    session.shown.say(
        f"{'Pairs' if data.train else 'Generated pairs'}: {len(pairs.train):,} to learn from, {len(pairs.dev):,} to "
        f"choose by (dev), {len(pairs.test):,} to judge by (test)"
    )
    trials = _trials(session, compare, _files(data, pairs, session.out))
    return SummarizePlan([trial.training for trial in trials], compare, pairs, trials)


def _refuse_contradictions(session: Session) -> None:
    """Raises an error where something is asked that the comparison sets itself."""
    if session.asks(f"{COMPARE}.rates"):
        session.refuse("train.lr", "compare.rates says it already; leave one of them out")
    for field in fields(SummarizeData):
        if field.name not in OWN_DATA:
            reason = f"all trainings read the same pairs; say data.{field.name} for all of them"
            session.refuse(f"data.{field.name}", reason, (BARE, RANDOM))
    for key in ("encoder.mechanism", "decoder.mechanism", "cross"):
        session.refuse(f"model.{key}", "it is what this stage is named by", (RANDOM,))
    for key in ("encoder.options", "decoder.options", "cross_options"):
        session.refuse(f"model.{key}.features", "this experiment compares them; say compare.features=[…]", (RANDOM,))


@experiment("summarize", plan, summarize_page, stages=(BARE, RANDOM), files=FILES, compares=True)
def measure(session: Session, plan: SummarizePlan, runs: Mapping[str, Run]) -> SummarizeResults:
    """One line about an article: softmax against performer, judged by ROUGE, copying and invented facts."""
    compare = plan.compare
    judging = {"dev": plan.pairs.dev, "test": plan.pairs.test}
    test = plan.pairs.test
    first = plan.trials[0].training.recipe
    trainings = [_describe_training(trial, runs[trial.training.title]) for trial in plan.trials]
    best = _best_of_each(trainings)
    k = max(1, round(rouge.mean_words(pair.summary or "" for pair in plan.pairs.train)))
    baseline = f"first {k} words"
    texts = {baseline: {key: [rouge.lead(p.article, k) for p in part] for key, part in judging.items()}}
    models: dict[str, Seq2Seq] = {}
    for row in best:
        session.shown.say(f"Summaries by {row.name} …")
        models[row.name] = writer(load(session.out / row.run / MODEL, session.device), row.run)
        texts[row.name] = _write_summaries(models[row.name], judging, compare, session.out / "predictions" / row.run)
    model = models[best[0].name]
    scores = {
        key: score_summaries(part, {name: said[key] for name, said in texts.items()}) for key, part in judging.items()
    }
    names = [row.name for row in best]
    return SummarizeResults(
        run=best[0].run,
        seed=first.train.seed,
        data=_describe_pairs(first, plan.pairs, k),
        compare=compare.as_dict(),
        models=trainings,
        best=names,
        baseline=baseline,
        scores=scores,
        facts=count_facts(test, {name: texts[name]["test"] for name in names}),
        model={"summary": str(model.summary(model.config.decoder.length, model.config.encoder.length))},
        examples=_examples(compare, test, texts[baseline]["test"], models),
        masks=_masks(model, test),
        attention=_attention(model, test, texts[best[0].name]["test"]),
        outcome=_outcome(trainings, [baseline, *names], scores),
    )


def _files(data: SummarizeData, pairs: PairSplit, out: Path) -> dict[str, Any]:
    """Returns the paths of the data of all trainings, which share one tokenizer, so that losses can be compared."""
    named = {key: getattr(data, key) for key in FILES if getattr(data, key)}
    if not data.train:
        named |= {name: str((out / "data" / f"{name}.jsonl").resolve()) for name in pairs._fields}
    path = out / "data" / TOKENIZER
    if "tokenizer_file" not in named:
        if not path.is_file():
            save_tokenizer(build_tokenizer(data, pairs.train), path)
        named["tokenizer_file"] = str(path.resolve())
    return named


def _trials(session: Session, compare: SummaryComparison, files: Mapping[str, Any]) -> list[ComparedModel]:
    """Returns every training, checked before the first begins."""
    trials = []
    for features in (None, *compare.features):
        stage = RANDOM
        if features is None:
            stage = BARE
        rates = compare.rates
        if session.asks("train.lr", stage):
            rates = (session.asked[stage]["train"]["lr"],)
        trials += [_trial(session, stage, features, rate, files) for rate in rates]
    return trials


def _trial(session: Session, stage: str, features: int | None, rate: float, files: Mapping[str, Any]) -> ComparedModel:
    """Returns the training of one mechanism with one learning rate."""
    settings: dict[str, Any] = {"data": dict(files), "train": {"lr": rate}}
    if features is not None:
        part = {"mechanism": RANDOM, "options": {"features": features}}
        cross = {"cross": RANDOM, "cross_options": part["options"]}
        settings["model"] = {"encoder": part, "decoder": part, **cross}
    recipe = session.recipe(FILE, stage, settings=settings)
    if features is None:
        kind = resolve_model(recipe.model)[1].mechanism
        folder = f"base-lr-{rate:g}"
    else:
        kind = f"{RANDOM} {features}"
        folder = f"{RANDOM}-{features}-lr-{rate:g}"
    return ComparedModel(Training(stage, f"{kind}, lr {rate:g}", folder, recipe), features)


def _write_summaries(
    model: Seq2Seq, judging: Mapping[str, Sequence[Pair]], compare: SummaryComparison, place: Path
) -> dict[str, list[str]]:
    """Returns a model's summaries of the articles of each split, and writes them to PLACE.SPLIT.jsonl."""
    texts = {}
    for key, pairs in judging.items():
        texts[key] = [s.text for s in summaries(model, [p.article for p in pairs], compare.search)]
        said = [Pair(p.article, text) for p, text in zip(pairs, texts[key], strict=True)]
        write_pairs(place.with_name(f"{place.name}.{key}.jsonl"), said)
    return texts


def _describe_training(trial: ComparedModel, run: Run) -> SummarizerTraining:
    log = read_log(run)
    best = next(row for row in log.evaluations if row["step"] == run.best)
    model = load(run.path / MODEL)
    return SummarizerTraining(
        name=trial.training.title,
        run=run.path.name,
        base=trial.features is None,
        mechanism=model.config.mechanism,
        features=trial.features,
        rate=trial.training.recipe.train.lr,
        parameters=model.summary().total.parameters,
        steps=log.steps,
        seconds=log.seconds,
        best_step=run.best,
        dev={key.removeprefix("dev/"): value for key, value in best.items() if key.startswith("dev/")},
        curve=log.curve,
        evaluations=log.evaluations,
    )


def _best_of_each(trainings: Sequence[SummarizerTraining]) -> list[SummarizerTraining]:
    """Returns the best base model by dev loss, and the best performer where there is one."""
    kinds = ([row for row in trainings if row.base], [row for row in trainings if not row.base])
    return [min(rows, key=lambda row: row.loss) for rows in kinds if rows]


def _describe_pairs(recipe: Recipe, pairs: PairSplit, k: int) -> PairsSummary:
    data = recipe.data
    assert isinstance(data, SummarizeData)
    tokenizer = build_tokenizer(data, pairs.train)
    articles, summaries = encode_pairs(tokenizer, pairs.train, data.source, data.target).cut
    return PairsSummary(
        generated=all(pair.truth is not None for pair in pairs.test),
        pairs={name: len(part) for name, part in pairs._asdict().items()},
        words={
            "articles": rouge.mean_words(pair.article for pair in pairs.train),
            "summaries": rouge.mean_words(pair.summary or "" for pair in pairs.train),
        },
        k=k,
        vocabulary=tokenizer.size,
        source=data.source,
        target=data.target,
        cut=(articles, summaries),
        examples=[[pair.article, pair.summary or ""] for pair in pairs.train[:4]],
    )


def _examples(
    compare: SummaryComparison, pairs: Sequence[Pair], leads: Sequence[str], models: Mapping[str, Seq2Seq]
) -> list[SummaryExample]:
    """Returns some articles with their reference, their first words, and several summaries by each model."""
    count = min(compare.examples, len(pairs))
    places = [n * len(pairs) // count for n in range(count)]
    articles = [pairs[n].article for n in places]
    written: list[dict[str, WrittenSummaries]] = [{} for _ in places]
    for name, model in models.items():
        beams = summaries(model, articles, compare.search.but(n=compare.n))
        drawn = summaries(model, articles, SAMPLED.but(n=compare.n))
        for by, likeliest, others in zip(written, beams, drawn, strict=True):
            by[name] = WrittenSummaries(_with_scores(likeliest), _with_scores(others))
    return [
        SummaryExample(pairs[n].article, pairs[n].summary, leads[n], by) for n, by in zip(places, written, strict=True)
    ]


def _with_scores(found: Summaries) -> list[tuple[str, float]]:
    return [(choice.text or "", choice.score) for choice in found.choices]


def _masks(model: Seq2Seq, pairs: Sequence[Pair]) -> PairMasks:
    """Returns the masks of an encoder-decoder for the shorter of two pairs of unequal length in one batch."""
    assert model.tokenizer is not None
    short = sorted(pairs, key=lambda pair: len(pair.article))[: max(2, len(pairs) // 4)]
    chosen = [short[0], max(short[1:], key=lambda pair: len(pair.summary or ""))]
    rows = encode_pairs(model.tokenizer, chosen, model.config.encoder.length, model.config.decoder.length)
    batch = trim_padding(make_batch(rows, torch.arange(2), model.config.start))
    assert batch.visible is not None and batch.source is not None and batch.source_visible is not None
    place = int(batch.source_visible.sum(1).argmin())
    S = batch.source.shape[1]
    T = batch.x.shape[1]
    read = Mask(visible=batch.source_visible)
    written = Mask(causal=True, visible=batch.visible)
    masks = {
        "encoder": (read, S, S),
        "causal": (Mask(causal=True), T, T),
        "decoder": (written, T, T),
        "cross": (read, T, S),
    }
    matrices = {}
    for name, (mask, queries, keys) in masks.items():
        allowed = mask.allowed(queries, keys, batch.x.device)
        assert allowed is not None
        whole = allowed.expand(len(batch.x), 1, queries, keys)  # a causal mask is the same for both pairs
        matrices[name] = whole[place, 0].int().tolist()
    source = [int(n) for n in batch.source_visible[place]]
    return PairMasks(matrices, source, [int(n) for n in batch.visible[place]])


def _attention(model: Seq2Seq, pairs: Sequence[Pair], said: Sequence[str]) -> CrossAttention:
    """Returns where the decoder looks in the article while it writes its own summary: the sharpest head of each layer.
    The weights of a word's tokens are added up."""
    assert model.tokenizer is not None
    scores = rouge.rouge(said, [pair.summary or "" for pair in pairs])["rougeL"]
    fits = [n for n, pair in enumerate(pairs) if len(pair.article.split()) <= 45 and said[n]] or [0]
    n = max(fits, key=lambda n: scores[n])
    lengths = (model.config.encoder.length, model.config.decoder.length)
    rows = encode_pairs(model.tokenizer, [Pair(pairs[n].article, said[n])], *lengths)
    batch = make_batch(rows, torch.tensor([0]), model.config.start)
    assert batch.source is not None
    maps = attention_maps(model, batch.x.to(model.device), source=batch.source.to(model.device), cross=True)
    read, begins = _words(model.tokenizer, batch.source[0].tolist())
    heads = []
    for number, layer in enumerate(maps):
        own = layer[0].float().cpu()
        head = int(own.amax(-1).mean(-1).argmax())
        heads.append(CrossHead(number, head, (own[head] @ begins).tolist()))
    written = [model.tokenizer.decode([i]) for i in rows.target[0].tolist()]
    return CrossAttention(read, written, heads, pairs[n].article, said[n])


def _words(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[str], Tensor]:
    """Returns the words that tokens make up, and which token is in which: [tokens, words]."""
    words: list[str] = []
    places = []
    for piece in (tokenizer.decode([i]) for i in ids):
        if piece[:1].isspace() or not words:
            words.append("")
        words[-1] += piece.strip()
        places.append(len(words) - 1)
    return words, torch.nn.functional.one_hot(torch.tensor(places), len(words)).float()


def _outcome(
    trainings: Sequence[SummarizerTraining], judged: Sequence[str], scores: Mapping[str, Mapping[str, SummaryScore]]
) -> OutcomeTable:
    """Returns the table that a terminal shows: the writers that were judged first, then the other trainings."""
    columns = ["", "dev loss", *(f"{key} {name}" for key in ("dev", "test") for name in ("ROUGE-1", "ROUGE-L"))]
    losses = {row.name: f"{row.loss:.3f}" for row in trainings}
    rows = []
    for name in judged:
        estimates = [scores[key][name].on(m) for key in ("dev", "test") for m in ("rouge1", "rougeL")]
        cells = [f"{100 * mean:4.1f} [{100 * low:.1f}–{100 * high:.1f}]" for mean, low, high in estimates]
        rows.append([name, losses.get(name, "–"), *cells])
    rows += [[name, loss, "–", "–", "–", "–"] for name, loss in losses.items() if name not in judged]
    return OutcomeTable(columns, rows)
