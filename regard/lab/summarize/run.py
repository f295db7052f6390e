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
from regard.lab.summarize.page import summarize_page
from regard.lab.summarize.summaries import judged, scored, summaries, writer
from regard.lens.recording.maps import attention_maps
from regard.models import Seq2Seq, load
from regard.models.locate import MODEL
from regard.shapes import Mask
from regard.train.recipe import COMPARE, Recipe, resolve_model
from regard.train.run import Run, versions
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
    rouge.require_rouge()  # an error about a missing library comes before minutes of training
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
def measure(session: Session, plan: SummarizePlan, runs: Mapping[str, Run]) -> dict[str, Any]:
    """One line about an article: softmax against performer, judged by ROUGE, copying and invented facts."""
    return _results(session, plan.compare, plan.pairs, plan.trials, runs)


def _files(data: SummarizeData, pairs: PairSplit, out: Path) -> dict[str, Any]:
    """Where the data of every training are. All share one tokenizer, so that their losses can be compared."""
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
        stage = BARE if features is None else RANDOM
        rates = compare.rates
        if session.asks("train.lr", stage):
            rates = (session.asked[stage]["train"]["lr"],)
        trials += [_trial(session, stage, features, rate, files) for rate in rates]
    return trials


def _trial(session: Session, stage: str, features: int | None, rate: float, files: Mapping[str, Any]) -> ComparedModel:
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


def _results(
    session: Session,
    compare: SummaryComparison,
    pairs: PairSplit,
    trials: Sequence[ComparedModel],
    runs: Mapping[str, Run],
) -> dict[str, Any]:
    k = max(1, round(rouge.mean_words(pair.summary or "" for pair in pairs.train)))
    rows = [_row(trial, runs[trial.training.title]) for trial in trials]
    best = [_best(rows, base) for base in (True, False) if any(row["base"] is base for row in rows)]
    texts: dict[str, dict[str, list[str]]] = {
        f"first {k} words": {key: [rouge.lead(p.article, k) for p in part] for key, part in _judging(pairs).items()}
    }
    models: dict[str, Seq2Seq] = {}
    for row in best:
        session.shown.say(f"Summaries by {row['name']} …")
        models[row["name"]] = writer(load(session.out / row["run"] / MODEL, session.device), row["run"])
        texts[row["name"]] = {
            key: [s.text for s in summaries(models[row["name"]], [p.article for p in part], compare.search)]
            for key, part in _judging(pairs).items()
        }
        for key, part in _judging(pairs).items():
            said = [Pair(p.article, text) for p, text in zip(part, texts[row["name"]][key], strict=True)]
            write_pairs(session.out / "predictions" / f"{row['run']}.{key}.jsonl", said)
    baseline = next(iter(texts))
    results: dict[str, Any] = {
        "experiment": session.name,
        "run": best[0]["run"],
        "command": session.command,
        "device": session.machine,
        "versions": versions(),
        "seed": trials[0].training.recipe.train.seed,
        "data": _data(trials[0].training.recipe, pairs, k),
        "compare": compare.as_dict(),
        "models": rows,
        "best": [row["name"] for row in best],
        "baseline": baseline,
        "scores": {key: scored(part, {n: t[key] for n, t in texts.items()}) for key, part in _judging(pairs).items()},
        "facts": judged(pairs.test, {n: t["test"] for n, t in texts.items() if n != baseline}),
    }
    model = models[best[0]["name"]]
    results["model"] = {"summary": str(model.summary(model.config.decoder.length, model.config.encoder.length))}
    results["examples"] = _examples(compare, pairs.test, texts, models)
    results["masks"] = _masks(model, pairs.test)
    results["attention"] = _attention(model, pairs.test, texts[best[0]["name"]]["test"])
    results["outcome"] = _outcome(results)
    return results


def _judging(pairs: PairSplit) -> dict[str, list[Pair]]:
    return {"dev": pairs.dev, "test": pairs.test}


def _row(trial: ComparedModel, run: Run) -> dict[str, Any]:
    log = read_log(run)
    best = next(row for row in log.evaluations if row["step"] == run.best)
    model = load(run.path / MODEL)
    return {
        "name": trial.training.title,
        "run": run.path.name,
        "base": trial.features is None,
        "mechanism": model.config.mechanism,
        "features": trial.features,
        "rate": trial.training.recipe.train.lr,
        "parameters": model.summary().total.parameters,
        "steps": log.steps,
        "seconds": log.seconds,
        "best_step": run.best,
        "dev": {key.removeprefix("dev/"): value for key, value in best.items() if key.startswith("dev/")},
        "curve": log.curve,
        "evaluations": log.evaluations,
    }


def _best(rows: Sequence[dict[str, Any]], base: bool) -> dict[str, Any]:
    return min((row for row in rows if row["base"] is base), key=lambda row: row["dev"]["loss"])


def _data(recipe: Recipe, pairs: PairSplit, k: int) -> dict[str, Any]:
    data = recipe.data
    assert isinstance(data, SummarizeData)
    tokenizer = build_tokenizer(data, pairs.train)
    rows = encode_pairs(tokenizer, pairs.train, data.source, data.target)
    return {
        "generated": all(pair.truth is not None for pair in pairs.test),
        "pairs": {name: len(part) for name, part in pairs._asdict().items()},
        "words": {
            "articles": rouge.mean_words(pair.article for pair in pairs.train),
            "summaries": rouge.mean_words(pair.summary or "" for pair in pairs.train),
        },
        "k": k,
        "vocabulary": tokenizer.size,
        "source": data.source,
        "target": data.target,
        "cut": list(rows.cut),
        "examples": [[pair.article, pair.summary] for pair in pairs.train[:4]],
    }


def _examples(
    compare: SummaryComparison,
    pairs: Sequence[Pair],
    texts: Mapping[str, Mapping[str, Sequence[str]]],
    models: Mapping[str, Seq2Seq],
) -> list[dict[str, Any]]:
    """Some articles with their reference, the baseline, and several summaries by each model: beams and samples."""
    places = [n * len(pairs) // min(compare.examples, len(pairs)) for n in range(min(compare.examples, len(pairs)))]
    articles = [pairs[n].article for n in places]
    lead = next(iter(texts))
    made: list[dict[str, Any]] = [
        {"article": pairs[n].article, "reference": pairs[n].summary, "lead": texts[lead]["test"][n], "by": {}}
        for n in places
    ]
    for name, model in models.items():
        beams = summaries(model, articles, compare.search.but(n=compare.n))
        drawn = summaries(model, articles, SAMPLED.but(n=compare.n))
        for row, found, others in zip(made, beams, drawn, strict=True):
            row["by"][name] = {
                "beams": [[c.text, c.score] for c in found.choices],
                "samples": [[c.text, c.score] for c in others.choices],
            }
    return made


def _masks(model: Seq2Seq, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Two articles and summaries of unequal length side by side, and who may see whom for the shorter ones."""
    assert model.tokenizer is not None
    short = sorted(pairs, key=lambda pair: len(pair.article))[: max(2, len(pairs) // 4)]
    chosen = [short[0], max(short[1:], key=lambda pair: len(pair.summary or ""))]
    rows = encode_pairs(model.tokenizer, chosen, model.config.encoder.length, model.config.decoder.length)
    batch = trim_padding(make_batch(rows, torch.arange(2), model.config.start))
    assert batch.visible is not None and batch.source is not None and batch.source_visible is not None
    place = int(batch.source_visible.sum(1).argmin())
    S, T = batch.source.shape[1], batch.x.shape[1]
    read, written = Mask(visible=batch.source_visible), Mask(causal=True, visible=batch.visible)
    matrices = {
        "encoder": read.allowed(S, S, batch.x.device),
        "causal": Mask(causal=True).allowed(T, T, batch.x.device),
        "decoder": written.allowed(T, T, batch.x.device),
        "cross": read.allowed(T, S, batch.x.device),
    }
    shapes = {"encoder": (S, S), "causal": (T, T), "decoder": (T, T), "cross": (T, S)}
    made = {}
    for name, allowed in matrices.items():
        assert allowed is not None
        whole = allowed.expand(len(allowed), 1, *shapes[name])
        made[name] = whole[place if len(allowed) > 1 else 0, 0].int().tolist()
    return {
        "matrices": made,
        "source": [int(n) for n in batch.source_visible[place]],
        "target": [int(n) for n in batch.visible[place]],
    }


def _attention(model: Seq2Seq, pairs: Sequence[Pair], said: Sequence[str]) -> dict[str, Any]:
    """Where the decoder looks in the article while it writes its own summary: the sharpest head of each layer. The
    weights of a word's tokens are added up."""
    assert model.tokenizer is not None
    scores = rouge.rouge(said, [pair.summary or "" for pair in pairs])["rougeL"]
    fits = [n for n, pair in enumerate(pairs) if len(pair.article.split()) <= 45 and said[n]] or [0]
    n = max(fits, key=lambda n: scores[n])
    rows = encode_pairs(model.tokenizer, [Pair(pairs[n].article, said[n])], *(c.length for c in _stacks(model)))
    batch = make_batch(rows, torch.tensor([0]), model.config.start)
    assert batch.source is not None
    maps = attention_maps(model, batch.x.to(model.device), source=batch.source.to(model.device), cross=True)
    read, begins = _words(model.tokenizer, batch.source[0].tolist())
    heads = []
    for number, layer in enumerate(maps):
        own = layer[0].float().cpu()
        head = int(own.amax(-1).mean(-1).argmax())
        heads.append({"layer": number, "head": head, "weights": (own[head] @ begins).tolist()})
    written = [model.tokenizer.decode([i]) for i in rows.target[0].tolist()]
    return {"read": read, "written": written, "heads": heads, "article": pairs[n].article, "summary": said[n]}


def _words(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[str], Tensor]:
    """The words that tokens make up, and which token is in which: [tokens, words]."""
    words: list[str] = []
    places = []
    for piece in (tokenizer.decode([i]) for i in ids):
        if piece[:1].isspace() or not words:
            words.append("")
        words[-1] += piece.strip()
        places.append(len(words) - 1)
    return words, torch.nn.functional.one_hot(torch.tensor(places), len(words)).float()


def _stacks(model: Seq2Seq) -> tuple[Any, Any]:
    return model.config.encoder, model.config.decoder


def _outcome(results: Mapping[str, Any]) -> dict[str, Any]:
    """The table that a terminal shows."""
    columns = ["", "dev loss", *(f"{key} {name}" for key in ("dev", "test") for name in ("ROUGE-1", "ROUGE-L"))]
    losses = {row["name"]: f"{row['dev']['loss']:.3f}" for row in results["models"]}
    rows = []
    for name in (results["baseline"], *results["best"]):
        cells = [results["scores"][key][name]["rouge"][m] for key in ("dev", "test") for m in ("rouge1", "rougeL")]
        shown = [f"{100 * mean:4.1f} [{100 * low:.1f}, {100 * high:.1f}]" for mean, low, high in cells]
        rows.append([name, losses.get(name, "–"), *shown])
    rows += [[name, loss, "–", "–", "–", "–"] for name, loss in losses.items() if name not in results["best"]]
    return {"columns": columns, "rows": rows}
