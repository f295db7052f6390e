"""Experiments: several trainings and what comes out of them, in one folder with a report."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tomli_w
import torch

from regard.config import ConfigError, Section
from regard.devices import resolve_device
from regard.errors import RegardError, RunError, did_you_mean
from regard.models.locate import RESULTS
from regard.models.locate import RUN_CONFIG as CONFIG
from regard.registry import Registry
from regard.train import recipe as recipes
from regard.train import stage
from regard.train.progress import Progress
from regard.train.recipe import COMPARE, SECTIONS, flatten, merge_tables
from regard.train.run import Run, claim, find_runs, write_text

S = TypeVar("S", bound=Section)
ASKED = "experiment.toml"


@dataclass(frozen=True)
class Shown:
    """How an experiment tells what it is doing: a line of text, and a progress for each training."""

    say: Callable[[str], None] = lambda text: None
    progress: Callable[[str], Progress] = field(default=lambda name: Progress())


@dataclass(frozen=True)
class Experiment:
    """One experiment on its way. `asked`: changes to all stages, or under a stage's name to that one."""

    name: str
    out: Path
    asked: Mapping[str, Any]
    variant: str | None
    device: str
    shown: Shown

    def recipe(self, file: str, name: str, own: Mapping[str, Any], drop: Sequence[str] = ()) -> recipes.Recipe:
        """A stage's recipe: its file, what all stages were asked, what this one was, and what the experiment sets."""
        common = {key: value for key, value in self.asked.items() if key in SECTIONS and key not in drop}
        asked = merge_tables(merge_tables(common, self.asked.get(name, {})), own)
        tables = recipes.apply_variant(recipes.read_tables(file), self.variant, file)
        return recipes.resolve(file, tables, asked)

    def compare(self, file: str, kind: type[S]) -> S:
        """What is varied: the section `compare` of a recipe, and what was asked of it."""
        tables = recipes.apply_variant(recipes.read_tables(file), self.variant, file)
        return kind().but(**tables.get(COMPARE, {})).but(**self.asked.get(COMPARE, {}))

    def train(self, recipe: recipes.Recipe, folder: str, title: str) -> Run:
        """Trains a stage, or goes on with it, or leaves it where it has ended."""
        path, progress = self.out / folder, self.shown.progress(title)
        if (path / CONFIG).is_file():
            return stage.resume(path, self.device, progress)
        return stage.train(recipe, path, self.device, progress)

    @property
    def command(self) -> str:
        """What to type to get these results again."""
        words = ["regard", "run", self.name, *(f"{key}={_toml(x)}" for key, x in sorted(flatten(self.asked)))]
        words += [] if self.variant is None else ["--variant", self.variant]
        return shlex.join([*words, *([] if self.device == "cpu" else ["--device", self.device])])

    @property
    def machine(self) -> str:
        """The device in words."""
        if self.device.startswith("cuda"):
            return torch.cuda.get_device_name(self.device)
        return f"{self.device}, {torch.get_num_threads()} threads"

    def write(self, results: Mapping[str, Any]) -> None:
        """Writes results.json."""
        write_text(self.out / RESULTS, json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def _toml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


Does = Callable[[Experiment], Mapping[str, Any]]


class Known(NamedTuple):
    """An experiment that can be run, the names of its stages (changes may stand under them), data keys of files, and
    whether it has settings of its own, the section `compare`."""

    does: Does
    stages: tuple[str, ...]
    files: tuple[str, ...]
    compares: bool


# An experiment is registered when its module is imported, which happens when it is first looked up.
EXPERIMENTS: Registry[Known] = Registry(
    "experiment",
    {name: f"regard.lab.{name}.run" for name in ("knowledge", "summarize", "sentiment", "heads")},
    ConfigError,
)


def experiment(
    name: str, stages: Sequence[str], files: Sequence[str] = (), compares: bool = False
) -> Callable[[Does], Does]:
    """Registers an experiment."""

    def add(function: Does) -> Does:
        EXPERIMENTS.put(name, Known(function, tuple(stages), tuple(files), compares))
        return function

    return add


def run(
    name: str,
    out: str | Path,
    overrides: Sequence[str] = (),
    variant: str | None = None,
    device: str = "cpu",
    shown: Shown = Shown(),  # noqa: B008
) -> Mapping[str, Any]:
    """Runs an experiment into a new folder; its results."""
    known = _known(name, "")
    asked, allowed = recipes.parse(overrides), (*SECTIONS, *known.stages, *([COMPARE] if known.compares else []))
    for key in asked:
        if key not in allowed:
            raise ConfigError(f"'{key}': no such section or stage in {name}.{did_you_mean(key, allowed)}")
        for inner, table in asked[key].items() if key in known.stages else ():
            if not isinstance(table, Mapping):
                raise ConfigError(f"{key}.{inner} = {table!r}: expected a section too, e.g. {key}.train.lr=3e-4")
    data = asked.get("data", {})
    absolute = {key: str(Path(data[key]).resolve()) for key in known.files if isinstance(data.get(key), str)}
    asked = merge_tables(asked, {"data": absolute} if absolute else {})
    encoder = asked.get("model", {}).get("name")
    if isinstance(encoder, str) and Path(encoder).is_dir():  # and no id of the hub
        asked = merge_tables(asked, {"model": {"name": str(Path(encoder).resolve())}})
    path = claim(out, ASKED, RESULTS)
    if find_runs(path):
        raise RunError(f"{path} holds runs already: choose another --out")
    document = {"experiment": name, "device": resolve_device(device), "asked": asked}
    write_text(path / ASKED, tomli_w.dumps(document | ({} if variant is None else {"variant": variant})))
    try:
        return known.does(Experiment(name, path, asked, variant, device, shown))
    except RegardError:
        if not find_runs(path):  # nothing has begun: the folder is free for another try
            (path / ASKED).unlink()
        raise


def resume(path: str | Path, device: str | None = None, shown: Shown = Shown()) -> Mapping[str, Any]:  # noqa: B008
    """Goes on with an experiment that was stopped: what has ended stays, the rest is done."""
    path = Path(path)
    if not (path / ASKED).is_file():
        raise RunError(f"{path} is no experiment: expected a folder with {ASKED}, as `regard run` makes")
    document = tomllib.loads((path / ASKED).read_text(encoding="utf-8"))
    name, where = document["experiment"], device or document["device"]
    made = Experiment(name, path, document["asked"], document.get("variant"), resolve_device(where), shown)
    return _known(name, f"{path / ASKED}: ").does(made)


def _known(name: str, place: str) -> Known:
    if name not in EXPERIMENTS:
        raise ConfigError(f"{place}no experiment '{name}'.{did_you_mean(name, EXPERIMENTS)}")
    return EXPERIMENTS[name]
