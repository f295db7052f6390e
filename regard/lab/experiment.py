"""Experiments that train: several trainings and what comes out of them, in one folder with a report.

An experiment says what it trains (`plan`), from recipes that the user may change, and what it finds out about the
models that were trained (`measure`). Everything else is the same for all of them: the folder, going on after a stop,
results.json, the page, and the command that gives the same numbers again.
"""

from __future__ import annotations

import json
import shlex
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
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
from regard.report.canvas import require_matplotlib
from regard.report.page import Page
from regard.train import recipe as recipes
from regard.train import stage
from regard.train.progress import Progress
from regard.train.recipe import COMPARE, SECTIONS, merge_tables
from regard.train.run import Run, claim, find_runs, write_text

S = TypeVar("S", bound=Section)
ASKED = "experiment.toml"
REPORT = "report.html"


@dataclass(frozen=True)
class Shown:
    """How an experiment tells what it is doing: a line of text, and a progress for each training."""

    say: Callable[[str], None] = lambda text: None
    progress: Callable[[str], Progress] = field(default=lambda name: Progress())


class Training(NamedTuple):
    """One training of an experiment. `stage` is the section under which it alone is changed, "" where it has none."""

    stage: str
    title: str
    folder: str
    recipe: recipes.Recipe


@dataclass(frozen=True)
class TrainingPlan:
    """What an experiment is going to train; experiments add the data that they have read for it."""

    trainings: Sequence[Training]


@dataclass(frozen=True)
class Session:
    """One run of an experiment: its folder, and what the user asked for.

    `asked` holds changes to all stages, and under a stage's name changes to that one.
    """

    name: str
    out: Path
    asked: Mapping[str, Any]
    variant: str | None
    device: str
    shown: Shown

    def recipe(
        self,
        file: str,
        stage: str = "",
        defaults: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        drop: Sequence[str] = (),
    ) -> recipes.Recipe:
        """Resolves the recipe of one training.

        Each of these overrides those before it: the file with its variant, the experiment's `defaults`, what was asked
        of all stages (but for the sections in `drop`), the experiment's `settings`, and what was asked of this stage.
        """
        common = {key: value for key, value in self.asked.items() if key in SECTIONS and key not in drop}
        layers = (defaults or {}, common, settings or {}, self.asked.get(stage, {}))
        tables = recipes.apply_variant(recipes.read_tables(file), self.variant, file)
        return recipes.resolve(file, tables, reduce(merge_tables, layers))

    def compare(self, file: str, kind: type[S]) -> S:
        """Returns what is varied: the section `compare` of a recipe, with what was asked of it."""
        tables = recipes.apply_variant(recipes.read_tables(file), self.variant, file)
        return kind().but(**tables.get(COMPARE, {})).but(**self.asked.get(COMPARE, {}))

    def asks(self, key: str, stage: str = "") -> bool:
        """Returns whether the user asked for `section.key`, of all stages or of the one that is named."""
        table: Any = self.asked.get(stage, {}) if stage else self.asked
        for part in key.split("."):
            if not isinstance(table, Mapping) or part not in table:
                return False
            table = table[part]
        return True

    def refuse(self, key: str, reason: str, stages: Sequence[str] = ("",)) -> None:
        """Raises an error where a key was asked for that the experiment sets itself: no override is ignored."""
        for name in stages:
            if self.asks(key, name):
                place = f"{name}.{key}" if name else key
                raise ConfigError(f"{place}: {reason}")

    def train(self, recipe: recipes.Recipe, folder: str, title: str) -> Run:
        """Trains a stage, or goes on with it, or leaves it where it has ended."""
        path = self.out / folder
        progress = self.shown.progress(title)
        if (path / CONFIG).is_file():
            return stage.resume(path, self.device, progress)
        return stage.train(recipe, path, self.device, progress)

    @property
    def command(self) -> str:
        """The command that gives these results again: every change with its value, the variant and the device."""
        words = ["regard", "run", self.name, *override_words(self.asked)]
        if self.variant is not None:
            words += ["--variant", self.variant]
        if self.device != "cpu":
            words += ["--device", self.device]
        return shlex.join(words)

    @property
    def machine(self) -> str:
        """The device in words."""
        if self.device.startswith("cuda"):
            return torch.cuda.get_device_name(self.device)
        return f"{self.device}, {torch.get_num_threads()} threads"

    def write(self, results: Mapping[str, Any]) -> None:
        """Writes results.json."""
        write_text(self.out / RESULTS, json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def override_words(asked: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Returns nested changes as `section.key=value`, such that `recipe.parse` reads the same changes from them."""
    words = []
    for key, value in sorted(asked.items()):
        if isinstance(value, Mapping) and value:
            words += override_words(value, f"{prefix}{key}.")
        else:
            words.append(f"{prefix}{key}={_override_text(value)}")
    return words


def _override_text(value: Any) -> str:
    """Returns a value as an override has it: TOML, or a text without quotes where that is read as the same text."""
    if isinstance(value, str) and recipes.parse([f"_._={value}"]) == {"_": {"_": value}}:
        return value
    return _toml(value)


def _toml(value: Any) -> str:
    """Returns a value as TOML, in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(x)}" for key, x in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    return str(value)  # numbers, dates and times are written as Python writes them


Measure = Callable[[Session, Any, Mapping[str, Run]], dict[str, Any]]


class TrainingExperiment(NamedTuple):
    """An experiment that trains.

    `plan` says what, `measure` what comes out: from the session, the plan, and the finished run of each training by
    its title. `stages` are the names of sections that change one training alone, `files` the keys of the section
    `data` that name files. `compares` says whether there is a section `compare`.
    """

    about: str
    plan: Callable[[Session], TrainingPlan]
    measure: Measure
    page: Callable[[Mapping[str, Any]], Page]
    stages: tuple[str, ...]
    files: tuple[str, ...]
    compares: bool


# An experiment is registered when its module is imported, which happens when it is first looked up.
EXPERIMENTS: Registry[TrainingExperiment] = Registry(
    "experiment",
    {name: f"regard.lab.{name}.run" for name in ("knowledge", "summarize", "sentiment", "heads")},
    ConfigError,
)


def experiment(
    name: str,
    plan: Callable[[Session], TrainingPlan],
    page: Callable[[Mapping[str, Any]], Page],
    stages: Sequence[str] = (),
    files: Sequence[str] = (),
    compares: bool = False,
) -> Callable[[Measure], Measure]:
    """Registers an experiment by its measurement; the first line of its docstring says what it is about."""

    def register(measure: Measure) -> Measure:
        about = (measure.__doc__ or "").partition("\n")[0]
        entry = TrainingExperiment(about, plan, measure, page, tuple(stages), tuple(files), compares)
        EXPERIMENTS.put(name, entry)
        return measure

    return register


def run(
    name: str,
    out: str | Path,
    overrides: Sequence[str] = (),
    variant: str | None = None,
    device: str = "cpu",
    shown: Shown = Shown(),  # noqa: B008
) -> Mapping[str, Any]:
    """Runs an experiment into a new folder and returns its results."""
    known = _find(name, "")
    asked = read_overrides(name, known, overrides)
    path = claim(out, ASKED, RESULTS)
    if find_runs(path):
        raise RunError(f"{path} holds runs already: choose another --out")
    document = {"experiment": name, "device": resolve_device(device), "asked": asked}
    if variant is not None:
        document["variant"] = variant
    write_text(path / ASKED, tomli_w.dumps(document))
    try:
        return _carry_out(known, Session(name, path, asked, variant, device, shown))
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
    name = document["experiment"]
    where = resolve_device(device or document["device"])
    session = Session(name, path, document["asked"], document.get("variant"), where, shown)
    return _carry_out(_find(name, f"{path / ASKED}: "), session)


def plan_trainings(known: TrainingExperiment, session: Session) -> TrainingPlan:
    """Returns the plan of an experiment; changes to a stage that is not trained are an error."""
    plan = known.plan(session)
    trained = {training.stage for training in plan.trainings}
    for name in session.asked:
        if name in known.stages and name not in trained:
            raise ConfigError(f"'{name}': no such stage is trained here; there is {', '.join(sorted(trained))}")
    return plan


def _carry_out(known: TrainingExperiment, session: Session) -> dict[str, Any]:
    """Trains what the experiment plans, measures it, and writes results and page."""
    require_matplotlib()  # an error about a missing library comes before minutes of training
    began = time.perf_counter()
    plan = plan_trainings(known, session)
    runs = {one.title: session.train(one.recipe, one.folder, one.title) for one in plan.trainings}
    results = known.measure(session, plan, runs)
    # Of an experiment that was resumed, the trainings alone may have taken longer than this session.
    trained = sum(read_log(run).seconds for run in runs.values())
    results["seconds"] = round(max(time.perf_counter() - began, trained), 1)
    session.write(results)
    known.page(results).write(session.out / REPORT)
    return results


class TrainingLog(NamedTuple):
    """The metrics of a run: its learning curve, its evaluations, and how far it came.

    `steps` counts those that were done. The last line of the curve may be of an earlier step, where a training was
    stopped at an evaluation.
    """

    curve: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    steps: int
    tokens: int
    seconds: float


def read_log(run: Run) -> TrainingLog:
    """Returns what a run has logged; lines of the learning curve are those that have a learning rate."""
    rows = run.metrics()
    curve = [row for row in rows if "lr" in row]
    evaluations = [row for row in rows if "lr" not in row]
    last = curve[-1] if curve else {}
    steps = max((row["step"] for row in rows), default=0)
    return TrainingLog(curve, evaluations, steps, last.get("tokens", 0), last.get("seconds", 0.0))


def read_overrides(name: str, known: TrainingExperiment, overrides: Sequence[str]) -> dict[str, Any]:
    """Returns overrides as nested tables, with absolute paths of files; an unknown section or stage is an error."""
    asked = recipes.parse(overrides)
    allowed = [*SECTIONS, *known.stages]
    if known.compares:
        allowed.append(COMPARE)
    for key, tables in asked.items():
        if key not in allowed:
            raise ConfigError(f"'{key}': no such section or stage in {name}.{did_you_mean(key, allowed)}")
        for inner, table in tables.items() if key in known.stages else ():
            if not isinstance(table, Mapping):
                raise ConfigError(f"{key}.{inner} = {table!r}: expected a section too, e.g. {key}.train.lr=3e-4")
    for stage_name in known.stages:
        if stage_name in asked:
            asked[stage_name] = _with_absolute_paths(asked[stage_name], known.files)
    return _with_absolute_paths(asked, known.files)


def _with_absolute_paths(asked: dict[str, Any], files: Sequence[str]) -> dict[str, Any]:
    """Returns changes whose files are named such that the experiment can be resumed, and repeated, from anywhere."""
    paths: dict[str, Any] = {}
    for section, keys in {"data": files, "train": ("init",), "model": ("name",)}.items():
        table = asked.get(section, {})
        for key in keys:
            value = table.get(key)
            is_id = section == "model" and not (isinstance(value, str) and Path(value).is_dir())  # of the hub
            if isinstance(value, str) and value and not is_id:
                paths.setdefault(section, {})[key] = str(Path(value).resolve())
    return merge_tables(asked, paths)


def _find(name: str, place: str) -> TrainingExperiment:
    if name not in EXPERIMENTS:
        raise ConfigError(f"{place}no experiment '{name}'.{did_you_mean(name, EXPERIMENTS)}")
    return EXPERIMENTS[name]
