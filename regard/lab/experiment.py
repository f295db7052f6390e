"""Experiments that train: several trainings and what comes out of them, in one folder with a report.

An experiment says what it trains (`plan`), from recipes that the user may change, and what it finds out about the
models that were trained (`measure`). Everything else is the same for all of them: the folder, resuming, results.json,
the page, and the command that gives the same numbers again.
"""

from __future__ import annotations

import json
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tomli_w
import torch

from regard import plugins
from regard.config import ConfigError, Section
from regard.devices import resolve_device
from regard.errors import RunError, did_you_mean, quote
from regard.lab.base import (
    CONFIG,
    EXPERIMENTS,
    REPORT,
    RESULTS,
    ComparePage,
    DrawPage,
    Experiment,
    RunOptions,
    Shown,
    as_document,
    find_experiment,
    versions,
    write_results,
)
from regard.lab.side_by_side import one_thread, train_side_by_side
from regard.reading import check_fields, check_path, read_toml
from regard.report.markup import count_noun
from regard.storage import write_text
from regard.train import recipe as recipes
from regard.train import stage
from regard.train.claim import claimed, locked
from regard.train.recipe import COMPARE, SECTIONS, merge_tables
from regard.train.run import Run, find_runs

S = TypeVar("S", bound=Section)
ASKED = "experiment.toml"


class Training(NamedTuple):
    """One training of an experiment. `stage` is the section of settings that change it alone; "" if there is none."""

    stage: str
    title: str
    folder: str
    recipe: recipes.Recipe


@dataclass(frozen=True)
class TrainingPlan:
    """The trainings that an experiment is going to do; a subclass adds the data that the experiment has read."""

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
        asked = self.asked.get(stage, {})
        if not isinstance(asked, Mapping):
            raise ConfigError(f"{quote(stage)} = {quote(asked)}: expected a table of settings")
        layers = (defaults or {}, common, settings or {}, asked)
        tables = recipes.apply_variant(recipes.read_tables(file), self.variant, file)
        return recipes.resolve(file, tables, reduce(merge_tables, layers))

    def compare(self, file: str, kind: type[S]) -> S:
        """Returns the section `compare` of a recipe, which says what is varied, with the user's changes."""
        tables = recipes.apply_variant(recipes.read_tables(file), self.variant, file)
        asked = self.asked.get(COMPARE, {})
        if not isinstance(asked, Mapping):
            raise ConfigError(f"{COMPARE} = {quote(asked)}: expected a table of settings")
        return kind().but(**tables.get(COMPARE, {})).but(**asked)

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
        """Trains a stage, or resumes it, and returns its run; one that has ended is not trained again."""
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
        return shlex.join([*words, *plugins.words(plugins.mechanism_names(self.asked))])

    @property
    def machine(self) -> str:
        """The device in words."""
        if self.device.startswith("cuda"):
            return torch.cuda.get_device_name(self.device)
        return f"{self.device}, {count_noun(torch.get_num_threads(), 'thread')}"


def override_words(asked: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Returns nested changes as `section.key=value`, such that `recipe.parse` reads the same changes from them."""
    words = []
    for key, value in sorted(asked.items()):
        if isinstance(value, Mapping) and value:
            words += override_words(value, f"{prefix}{key}.")
        else:
            words.append(f"{prefix}{key}={override_text(value)}")
    return words


def override_text(value: Any) -> str:
    """Returns a value as an override is typed: TOML, or a string without quotes if it is read as the same string."""
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


# A function of the session, the plan, and the finished runs by title; it returns a dataclass of results.
MeasureRuns = Callable[[Session, Any, Mapping[str, Run]], Any]


@dataclass(frozen=True)
class ResumableExperiment(Experiment, ABC):
    """An experiment of several parts in one folder, which can be resumed.

    `stages` are the names of sections that change one training alone, `files` the keys of the sections `data` and
    `compare` that name files. `compares` says whether there is a section `compare`; `sections` are further ones.
    """

    stages: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    compares: bool = False
    sections: tuple[str, ...] = ()

    def run(self, out: Path, overrides: Sequence[str], options: RunOptions, shown: Shown) -> dict[str, Any]:
        """Runs the experiment into a new folder and returns its results."""
        words = list(overrides)
        if options.seed is not None:
            words.append(f"train.seed={options.seed}")
        asked = read_overrides(self, words)
        device = options.device or "cpu"
        document: dict[str, Any] = {"experiment": self.name, "device": resolve_device(device), "asked": asked}
        if options.variant is not None:
            document["variant"] = options.variant
        used = plugins.describe(plugins.mechanism_names(asked))
        if used:
            document[plugins.KEY] = used
        if find_runs(out) and not (out / ASKED).exists():
            raise RunError(f"{out} holds runs already: choose another --out")
        hint = f", or continue it with --resume {out}"

        def has_started() -> bool:
            return (out / RESULTS).exists() or bool(find_runs(out))

        # If no part has begun, the folder is removed again.
        with claimed(out, (ASKED, RESULTS), has_started, hint):
            write_text(out / ASKED, tomli_w.dumps(document))
            return self.carry_out(Session(self.name, out, asked, options.variant, device, shown))

    @abstractmethod
    def carry_out(self, session: Session) -> dict[str, Any]:
        """Does the parts that are not done yet, writes results and page, and returns the results."""


@dataclass(frozen=True)
class TrainingExperiment(ResumableExperiment):
    """An experiment that trains: `plan` returns its trainings, and `measure` the results of their runs.

    If `small`, trainings on a CPU have one thread each, and as many of them run at a time as there are threads.
    """

    small: bool = False
    plan: Callable[[Session], TrainingPlan] = lambda session: TrainingPlan(())
    measure: MeasureRuns = lambda session, plan, runs: {}

    def carry_out(self, session: Session) -> dict[str, Any]:
        """Runs the planned trainings that have not ended, measures all, and writes results and page."""
        if not self.small or session.device != "cpu":
            return self._carry_out(session, 1)
        with one_thread() as threads:
            return self._carry_out(session, threads)

    def _carry_out(self, session: Session, workers: int) -> dict[str, Any]:
        """Does what `carry_out` says with this many trainings at a time."""
        began = time.perf_counter()
        plan = plan_trainings(self, session)
        if workers > 1:
            left = {n: one.title for n, one in enumerate(plan.trainings) if not Run(session.out / one.folder).finished}
            files = {*plugins.imported_paths(), *plugins.paths(plugins.mechanism_names(session.asked))}
            train_side_by_side(session.out, left, workers, session.shown.say, sorted(files))
        runs = {one.title: session.train(one.recipe, one.folder, one.title) for one in plan.trainings}
        found = as_document(self.measure(session, plan, runs))
        # Of an experiment that was resumed, the trainings alone may have taken longer than this session.
        trained = sum(read_log(run).seconds for run in runs.values()) / workers
        results: dict[str, Any] = {"experiment": self.name, "command": session.command, "device": session.machine}
        results |= {"versions": versions(), **found}
        if workers > 1:
            results["device"] += f", {count_noun(workers, 'training')} at a time"
        results["seconds"] = round(max(time.perf_counter() - began, trained), 1)
        write_results(session.out, results)
        self.page(results).write(session.out / REPORT)
        return results


def experiment(
    name: str,
    plan: Callable[[Session], TrainingPlan],
    page: DrawPage,
    stages: Sequence[str] = (),
    files: Sequence[str] = (),
    compares: bool = False,
    compare: ComparePage | None = None,
    small: bool = False,
) -> Callable[[MeasureRuns], MeasureRuns]:
    """Registers an experiment by its measurement; the first line of its docstring says what it is about."""

    def register(measure: MeasureRuns) -> MeasureRuns:
        about = (measure.__doc__ or "").partition("\n")[0]
        entry = TrainingExperiment(
            name,
            about,
            page,
            plan=plan,
            measure=measure,
            stages=tuple(stages),
            files=tuple(files),
            compares=compares,
            compare=compare,
            small=small,
        )
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
    return find_experiment(name).run(Path(out), overrides, RunOptions(variant, device=device), shown)


# What experiment.toml holds.
_REQUEST: dict[str, Any] = {"experiment": str, "device": str, "asked": dict, "variant": str | None}


def resume(path: str | Path, device: str | None = None, shown: Shown = Shown()) -> Mapping[str, Any]:  # noqa: B008
    """Resumes an experiment that was stopped: it does the parts that have not ended."""
    path = check_path(path, RunError)
    known, session = open_session(path, device, shown)
    with locked(path):
        return known.carry_out(session)


def open_session(path: Path, device: str | None, shown: Shown) -> tuple[ResumableExperiment, Session]:
    """Returns what was begun in a folder: the experiment, and what was asked of it."""
    if not (path / ASKED).is_file():
        raise RunError(f"{path} is no experiment: expected a folder with {ASKED}, as `regard run` makes")
    document = check_fields(read_toml(path / ASKED, RunError), _REQUEST, str(path / ASKED), RunError)
    plugins.require(document.get(plugins.KEY), path)
    known = find_experiment(document["experiment"])
    if not isinstance(known, ResumableExperiment):
        raise RunError(f"{path / ASKED}: {known.name} trains nothing, so there is nothing to go on with")
    where = resolve_device(device or document["device"])
    return known, Session(known.name, path, document["asked"], document.get("variant"), where, shown)


def plan_trainings(known: TrainingExperiment, session: Session) -> TrainingPlan:
    """Returns the plan of an experiment; raises ConfigError for a change that would have no effect."""
    plan = known.plan(session)
    for training in plan.trainings:
        recipes.refuse_unused(training.recipe.task, session.asked)
    trained = {training.stage for training in plan.trainings}
    for name in session.asked:
        if name in known.stages and name not in trained:
            raise ConfigError(f"{quote(name)}: no such stage is trained here; there is {', '.join(sorted(trained))}")
    return plan


class TrainingLog(NamedTuple):
    """The metrics of a run: its learning curve, its evaluations, and the steps, tokens and seconds that were done.

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


def read_overrides(known: ResumableExperiment, overrides: Sequence[str]) -> dict[str, Any]:
    """Returns overrides as nested tables, with absolute paths of files; an unknown section or stage is an error."""
    asked = recipes.parse(overrides, recipe=known.name)
    allowed = [*SECTIONS, *known.stages, *known.sections]
    if known.compares:
        allowed.append(COMPARE)
    for key, tables in asked.items():
        if key not in allowed:
            raise ConfigError(f"{quote(key)}: no such section or stage in {known.name}.{did_you_mean(key, allowed)}")
        for inner, table in tables.items() if key in known.stages else ():
            if not isinstance(table, Mapping):
                raise ConfigError(f"{key}.{inner} = {quote(table)}: expected a section too, e.g. {key}.train.lr=3e-4")
    for stage_name in known.stages:
        if stage_name in asked:
            asked[stage_name] = _with_absolute_paths(asked[stage_name], known.files)
    return _with_absolute_paths(asked, known.files)


def _with_absolute_paths(asked: dict[str, Any], files: Sequence[str]) -> dict[str, Any]:
    """Returns changes with absolute paths of files, so that the experiment can be resumed from any folder."""
    paths: dict[str, Any] = {}
    for section, keys in {"data": files, COMPARE: files, "train": ("init",), "model": ("name",)}.items():
        table = asked.get(section, {})
        for key in keys:
            value = table.get(key)
            is_id = section == "model" and not (isinstance(value, str) and Path(value).is_dir())  # of the hub
            if isinstance(value, str) and value and not is_id:
                paths.setdefault(section, {})[key] = str(Path(value).resolve())
    return merge_tables(asked, paths)
