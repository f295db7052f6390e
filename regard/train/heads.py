"""The heads experiment: how should the heads of attention be put together, and where should a token stand?

One small GPT for each kind of position, each merge and each seed. Trainings of one seed read the same windows in the
same order, and those that differ in nothing but the merge begin with the same weights: so their losses are compared
pair by pair, and what is larger than the noise of another seed can be told.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch

from regard.config import ConfigError
from regard.data.batch import Batch
from regard.data.files import write_lines
from regard.data.prose import python_prose
from regard.data.tokenizers import TextError, Tokenizer
from regard.data.tokens import fitted, windows
from regard.errors import did_you_mean
from regard.models import GPT, Model, load
from regard.nn import MERGES, POSITIONS
from regard.report.canvas import available
from regard.report.heads import heads_page
from regard.report.markup import counted
from regard.train import merging
from regard.train.experiment import Experiment, experiment
from regard.train.lm import TOKENS, LanguageModel, LMData, spaced, token_files
from regard.train.paired import detectable, holm, paired
from regard.train.recipe import SECTIONS, Recipe
from regard.train.run import MODEL, Run, versions
from regard.train.task import task

PROSE = "prose.txt"
ROWS = 32  # windows that are read prefix by prefix
MOST_SEEDS = 100
LEVEL = 0.05
PLAIN = "concatenate"
SENTENCES = {
    "normal": "Thank you so much for all your help with this !",
    "weird": "After learning language models model natural language",
    "long": (
        "When the old bridge over the river was closed for the winter, the people of the town had to walk along the "
        "far bank to the mill, then across the fields behind the church and down the long road to the market, which "
        "took them most of an hour on a good day and nearly two when there was snow, so in the end they met one "
        "evening, talked until it was late, and built a ferry from what wood they had, which was small and slow and "
        "leaked a little, but which all of them soon came to love."
    ),
}
MEASURES = ("train", "dev", *SENTENCES)


@dataclass(frozen=True, kw_only=True)
class HeadsData(LMData):
    """A text as for `lm`, or none for the prose of Python's documentation; and what is compared on it.

    `positions` × `merges`, each with the `seeds` from train.seed on. `sentences` are measured on their own, each in one
    pass, under the names normal, weird and long.
    """

    seeds: int = 3
    positions: tuple[str, ...] = ("learned", "sinusoidal")
    merges: tuple[str, ...] = (PLAIN, "shuffle", "shift", "reweight", "reweight-sequence")
    sentences: dict[str, str] = field(default_factory=lambda: dict(SENTENCES))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.seeds <= MOST_SEEDS:
            raise ConfigError(f"data.seeds = {self.seeds}: expected 1 to {MOST_SEEDS}")
        for key, known in {"positions": list(POSITIONS), "merges": list(MERGES)}.items():
            asked = getattr(self, key)
            if not asked or len(set(asked)) < len(asked):
                raise ConfigError(f"data.{key} = {list(asked)}: expected at least one name, and none twice")
            for name in asked:
                if name not in known:
                    raise ConfigError(f"data.{key}: no '{name}'.{did_you_mean(name, known)}")
        wrong = set(self.sentences) - set(SENTENCES)
        if wrong:
            raise ConfigError(f"no key '{min(wrong)}' in data.sentences.{did_you_mean(min(wrong), SENTENCES)}")
        # A change to one sentence leaves the others as they are.
        object.__setattr__(self, "sentences", {name: self.sentences.get(name, SENTENCES[name]) for name in SENTENCES})


@task("heads")
class Sentences(LanguageModel):
    """A language model that is measured on single sentences too."""

    Config = HeadsData

    def __init__(
        self, config: HeadsData, seed: int, device: torch.device, folder: Path, tokenizer: Tokenizer | None
    ) -> None:
        super().__init__(_with_text(config, folder), seed, device, folder, tokenizer)
        self.sentences = {name: self._sentence(name, text) for name, text in config.sentences.items()}

    def evaluate(self, model: Model[Any]) -> dict[str, float]:
        """As of any language model, and the loss of each sentence by itself."""
        alone = {f"{name}/loss": self.mean_loss(model, [rows]) for name, rows in self.sentences.items()}
        return super().evaluate(model) | alone

    def losses(self, model: Model[Any]) -> dict[str, float]:
        """Mean token losses of training text (as much of it as of dev), dev, and each sentence."""
        most = len(self.dev.tokens)
        parts = {"train": spaced(self.train.tokens, self.length, most), "dev": self._dev()}
        found = {name: self.mean_loss(model, rows) for name, rows in parts.items()}
        return found | {name: self.mean_loss(model, [rows]) for name, rows in self.sentences.items()}

    def windows(self, rows: int) -> Batch:
        """Whole windows of dev text, so many or as there are, evenly spaced."""
        length = fitted(self.dev.tokens, self.length)
        starts = torch.linspace(0, len(self.dev.tokens) - 1 - length, rows).long().unique()
        return self._here(windows(self.dev.tokens, length, starts))

    def _sentence(self, name: str, text: str) -> Batch:
        place = f"data.sentences.{name}"
        try:
            ids = self.tokenizer.encode(text)
        except TextError as error:
            raise ConfigError(f"{place}: {error} Or divide the text by data.tokenizer=bytes.") from None
        if not 2 <= len(ids) <= self.length + 1:
            raise ConfigError(
                f"{place} has {len(ids)} tokens, windows have {self.length}: expected 2 to {self.length + 1}; raise "
                "data.block, or give a longer text or another sentence"
            )
        row = torch.tensor([ids])
        return Batch(row[:, :-1], row[:, 1:])


def _with_text(config: HeadsData, folder: Path) -> HeadsData:
    """The config with a text: where none is named, prose that is written into the folder unless it is there."""
    if config.text or config.tokens:
        return config
    place = folder / PROSE
    if not place.is_file():
        write_lines(place, python_prose())
    return config.but(text=str(place))


class Setting(NamedTuple):
    """One of the models that are compared."""

    position: str
    merge: str

    def folder(self, seed: int) -> str:
        return f"{self.position}-{self.merge}-{seed}"


@experiment("heads", stages=(), files=("text", "tokens"))
def heads(this: Experiment) -> Mapping[str, Any]:
    """How should heads be put together, and where do tokens stand? Positions and merges, each with several seeds."""
    available()  # an error about a missing library comes before minutes of training
    began = time.perf_counter()
    _unasked(this.asked)
    probe = this.recipe("heads", "", {})
    data, first = probe.data, probe.train.seed
    assert isinstance(data, HeadsData)
    place = {"data": {"tokens": str(_tokens(data, this.out)), "text": ""}}
    settings = [Setting(position, merge) for position in data.positions for merge in data.merges]
    seeds = range(first, first + data.seeds)
    recipes = {
        (setting, seed): this.recipe("heads", "", place | {"model": _model(setting), "train": {"seed": seed}})
        for seed in seeds
        for setting in settings
    }
    measure = Sentences(data.but(**place["data"]), first, torch.device(this.device), this.out, None)
    this.shown.say(_plan(measure, settings, data.seeds))
    runs = {}
    for number, ((setting, seed), recipe) in enumerate(recipes.items(), 1):
        title = f"{number} of {len(recipes)}: {setting.position}, {setting.merge}, seed {seed}"
        runs[setting, seed] = this.train(recipe, setting.folder(seed), title)
    this.shown.say("Measuring …")
    results = _results(this, probe, measure, runs)
    earlier = sum(row["seconds"] for row in results["trainings"])
    results["seconds"] = round(max(time.perf_counter() - began, earlier), 1)
    this.write(results)
    heads_page(results).write(this.out / "report.html")
    return results


def _unasked(asked: Mapping[str, Any]) -> None:
    """An error where one position or merge is asked for all models, which is what they are compared by."""
    model = asked.get("model", {})
    attention = model.get("attention", {}) if isinstance(model, Mapping) else {}
    for key, table, instead in (("position", model, "positions"), ("attention.merge", attention, "merges")):
        name = key.rpartition(".")[2]
        if isinstance(table, Mapping) and name in table:
            raise ConfigError(f"model.{key}: this experiment compares them; say which by data.{instead}=[…]")


def _tokens(data: HeadsData, folder: Path) -> Path:
    """The tokens that all trainings read: the user's, or those of the text, made once."""
    if data.tokens:
        return Path(data.tokens)
    if not (folder / TOKENS).is_dir():
        token_files(_with_text(data, folder), folder, None)
    return (folder / TOKENS).resolve()


def _model(setting: Setting) -> dict[str, Any]:
    return {"position": setting.position, "attention": {"merge": setting.merge}}


def _plan(measure: Sentences, settings: Sequence[Setting], seeds: int) -> str:
    read = f"{len(measure.train):,} tokens to learn from, {len(measure.dev):,} for dev, in windows of {measure.length}"
    return f"{read}. {len(settings)} models × {counted(seeds, 'seed')} = {len(settings) * seeds} trainings"


def _results(
    this: Experiment, probe: Recipe, measure: Sentences, runs: Mapping[tuple[Setting, int], Run]
) -> dict[str, Any]:
    data = probe.data
    assert isinstance(data, HeadsData)
    rows = [_measured(measure, setting, seed, run, this.device) for (setting, seed), run in runs.items()]
    compared = _comparisons(rows, data)
    tests = sum(row["measure"] == "dev" for row in compared)
    return {
        "experiment": this.name,
        "run": Setting(data.positions[0], data.merges[0]).folder(rows[0]["seed"]),
        "command": this.command,
        "device": this.device,
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


def _measured(measure: Sentences, setting: Setting, seed: int, run: Run, device: str) -> dict[str, Any]:
    """All that is known of one training."""
    model = load(run.path / MODEL, device)
    assert isinstance(model, GPT)
    rows = run.metrics()
    windows = measure.windows(ROWS)
    with torch.no_grad():
        losses = measure.losses(model)
    growth = merging.growth(model, windows.x)
    found: dict[str, Any] = {
        **setting._asdict(),
        "seed": seed,
        "run": run.path.name,
        "seconds": [row for row in rows if "lr" in row][-1]["seconds"],
        "best": run.best,
        "parameters": sum(p.numel() for p in model.parameters()),
        "losses": losses,
        "evaluations": [{k: x for k, x in row.items() if k == "step" or k.endswith("/loss")} for row in rows],
        "ahead": merging.sees_ahead(model, windows.x.shape[1]),
        "growth": growth,
        "slope": merging.slope(growth),
        "writing": merging.as_it_writes(model, windows),
    }
    found["evaluations"] = [row for row in found["evaluations"] if len(row) > 1]
    if setting.merge == "shift":
        found["straightened"] = merging.shift_is_concatenate(model, windows.x)
    if MERGES[setting.merge].looks_ahead:  # type: ignore[attr-defined]
        with torch.no_grad():
            found["off"] = measure.losses(merging.with_merge(model, setting.merge, at_inference=False))
    return found


def _comparisons(rows: Sequence[Mapping[str, Any]], data: HeadsData) -> list[dict[str, Any]]:
    """Each merge against the plain one at each kind of position, and each kind against the first at each merge: the
    differences of each seed, tested pair by pair, corrected for how many there are of one measure."""
    others = [m for m in data.merges if m != PLAIN] if PLAIN in data.merges else []
    pairs = [(Setting(p, m), Setting(p, PLAIN)) for p in data.positions for m in others]
    pairs += [(Setting(p, m), Setting(data.positions[0], m)) for p in data.positions[1:] for m in data.merges]
    losses = {(Setting(row["position"], row["merge"]), row["seed"]): row["losses"] for row in rows}
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
