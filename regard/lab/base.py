"""Experiments: how they are found, run into a folder, written down, and drawn again.

An experiment is a folder of regard.lab with a module `run`, which registers it here. There are two kinds: one measures
something that takes no data (`Measurement`, registered by `lab`), the other trains models
(`regard.lab.experiment.TrainingExperiment`). Both leave results.json and report.html.
"""

from __future__ import annotations

import json
import math
import pkgutil
import platform
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import tomli_w
import torch
from torch import Tensor

from regard.config import ConfigError, Section
from regard.errors import OptionError, RunError, UnknownNameError, did_you_mean, list_known, quote
from regard.lab.results import to_json
from regard.reading import read_toml
from regard.registry import Registry
from regard.report.page import Page
from regard.storage import write_text
from regard.train.claim import claimed
from regard.train.progress import Progress
from regard.train.recipe import parse, recipe_names
from regard.version import __version__

CONFIG, RESULTS, REPORT = "config.toml", "results.json", "report.html"

LONG = 2.0  # seconds after which the remaining time is estimated

Say = Callable[[str], None]
Results = dict[str, Any]
DrawPage = Callable[[Mapping[str, Any]], Page]
# Several documents of results, by the names of their folders, on one page.
ComparePage = Callable[[Mapping[str, Mapping[str, Any]]], Page]


@dataclass(frozen=True)
class Shown:
    """How an experiment reports its progress: `say` takes a line of text, `progress` a title and makes a Progress."""

    say: Say = lambda text: None
    progress: Callable[[str], Progress] = field(default=lambda name: Progress())


@dataclass(frozen=True)
class RunOptions:
    """The options of the command line beside overrides; None if one is not given."""

    variant: str | None = None
    seed: int | None = None
    device: str | None = None


@dataclass(frozen=True)
class Experiment:
    """An experiment: it writes results.json and a page. `page` draws the document of one results.json.

    `compare` draws several; if it is None, their outcomes and runs are shown side by side. An instance of this very
    class has a `command` of its own; `regard run` runs instances of the derived classes.
    """

    name: str
    about: str
    page: DrawPage
    command: str = ""
    compare: ComparePage | None = None

    @property
    def is_runnable(self) -> bool:
        """Whether `regard run` takes it."""
        return not self.command

    def run(self, out: Path, overrides: Sequence[str], options: RunOptions, shown: Shown) -> Mapping[str, Any]:
        """Runs the experiment into a new folder and returns its results, as results.json has them."""
        raise OptionError(f"{self.name} has a command of its own: {self.command}")


def _find_modules() -> dict[str, str]:
    """Returns the module that registers each experiment, by its name, without importing it."""
    root = Path(__file__).parent
    packages = [module.name for module in pkgutil.iter_modules([str(root)]) if module.ispkg]
    found = {name: f"regard.lab.{name}.run" for name in packages if (root / name / "run.py").is_file()}
    # Converting a model stands in a layer above, and has a page as experiments have.
    found["convert"] = "regard.convert.run"
    return {name.replace("_", "-"): module for name, module in sorted(found.items())}


# An experiment is registered when its module is imported, which happens when it is first looked up.
EXPERIMENTS: Registry[Experiment] = Registry("experiment", _find_modules())


def find_experiment(name: str) -> Experiment:
    """Returns an experiment that can be run; the error of a wrong name lists the right ones."""
    if name not in EXPERIMENTS:
        runnable = [known for known, experiment in EXPERIMENTS.items() if experiment.is_runnable]
        hint = did_you_mean(name, runnable)
        if name in recipe_names():
            hint = f" It is a recipe: `regard train {name}`.{list_known(runnable)}"
        raise UnknownNameError(f"no experiment {quote(name)}.{hint}")
    return EXPERIMENTS[name]


# Folders and files


def write_results(folder: Path, results: Mapping[str, Any], allow_nan: bool = True) -> None:
    """Writes results.json, whole or not at all."""
    text = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=allow_nan)
    write_text(folder / RESULTS, text + "\n")


def versions() -> dict[str, str]:
    """Returns the versions of the software that results depend on."""
    return {"regard": __version__, "torch": torch.__version__, "python": platform.python_version()}


def as_document(found: Any) -> dict[str, Any]:
    """Returns what an experiment found as JSON has it: a dataclass of results, or a dictionary."""
    document = to_json(found) if is_dataclass(found) else found
    assert isinstance(document, dict)
    return document


# Measurements


@dataclass(frozen=True, kw_only=True)
class LabConfig(Section):
    """Sizes and a seed. `limits`: the least and the most that a number, or each of a list of numbers, may be."""

    place: ClassVar[str] = "lab"
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {}

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for f in fields(self):
            value = getattr(self, f.name)
            low, high = self.limits.get(f.name, (-math.inf, math.inf))
            if isinstance(value, tuple):
                numbers = value
                shown: Any = list(value)
            else:
                numbers = (value,)
                shown = value
            if not numbers or list(numbers) != sorted(set(numbers)):
                raise ConfigError(f"{self.place}.{f.name} = {shown}: expected numbers in rising order, at least one")
            if not all(low <= x <= high for x in numbers):
                raise ConfigError(f"{self.place}.{f.name} = {shown}: expected {low} to {high}")


# A function of the config and of `say`; it returns a dataclass of results, or plain data for JSON.
Measure = Callable[[Any, Say], Any]


@dataclass(frozen=True)
class Measurement(Experiment):
    """An experiment with numbers instead of data: a config of sizes and a seed, and what is measured with it."""

    Config: type[LabConfig] = LabConfig
    measure: Measure = lambda config, say: {}

    def run(self, out: Path, overrides: Sequence[str], options: RunOptions, shown: Shown) -> Results:
        """Measures into a new folder and returns the results."""
        if options.variant or options.device:
            raise OptionError(f"{self.name} is a calculation on the CPU: it takes KEY=VALUE, --seed and --out")
        words = list(overrides)
        if options.seed is not None:
            words.append(f"seed={options.seed}")
        return self.run_config(self.Config().but(**parse(words, sections=False)), out, shown.say)

    def run_config(self, config: LabConfig, out: str | Path, say: Say) -> Results:
        """Measures with a config into a new folder: config.toml, results.json, report.html."""
        settings = config.as_dict()
        path = Path(out)
        # If no results.json is written, the folder is removed again.
        with claimed(path, self._marks(path), (path / RESULTS).exists):
            write_text(path / CONFIG, tomli_w.dumps({"lab": self.name, "versions": versions(), self.name: settings}))
            began = time.monotonic()
            found = self.measure(config, partial(_say_with_time, say, began))
            results: Results = {"lab": self.name, "command": self._command(config), "config": settings}
            results |= {"threads": torch.get_num_threads(), "seconds": round(time.monotonic() - began, 1)}
            results |= {"versions": versions(), **as_document(found)}
            write_results(path, results, allow_nan=False)
            self.page(results).write(path / REPORT)
            return results

    def _marks(self, path: Path) -> tuple[str, ...]:
        """Returns the files that mark a folder of results; a config alone does not if a killed measurement left it."""
        try:
            began = read_toml(path / CONFIG, RunError).get("lab")
        except RunError:
            began = None
        if began == self.name and not (path / RESULTS).exists():
            return (REPORT,)
        return (CONFIG, RESULTS, REPORT)

    def _command(self, config: LabConfig) -> str:
        """Returns the command that gives these results again."""
        usual = type(config)().as_dict()
        changed = [f"{key}={json.dumps(value)}" for key, value in config.as_dict().items() if value != usual[key]]
        return shlex.join(["regard", "run", self.name, *changed])


_PART = re.compile(r"(\d+) of (\d+): ")


def _say_with_time(say: Say, began: float, text: str) -> None:
    """Says what is being done; for a text "n of m: …" it also estimates how long the remaining parts will take."""
    match = _PART.match(text)
    spent = time.monotonic() - began
    if match is not None and int(match[1]) > 1 and spent > LONG:
        done = int(match[1]) - 1
        text += f" ({spent:,.0f} s so far, about {spent / done * (int(match[2]) - done):,.0f} s left)"
    say(text)


def lab(name: str, Config: type[LabConfig], page: DrawPage) -> Callable[[Measure], Measure]:
    """Registers a measurement; the first line of its docstring says what it is about."""

    def register(measure: Measure) -> Measure:
        about = (measure.__doc__ or "").partition("\n")[0]
        EXPERIMENTS.put(name, Measurement(name, about, page, Config=Config, measure=measure))
        return measure

    return register


def run(
    name: str, out: str | Path, overrides: Mapping[str, Any] | None = None, say: Say = lambda text: None
) -> Results:
    """Measures into a new folder and returns the results; a folder that holds results is never written over."""
    experiment = find_experiment(name)
    if not isinstance(experiment, Measurement):
        raise OptionError(f"{name} is no measurement; expected one, or regard.lab.experiment.run")
    return experiment.run_config(experiment.Config().but(**(overrides or {})), out, say)


# Numbers


def normal(draw: torch.Generator, *shape: int) -> Tensor:
    """Returns independent standard normal numbers of a shape, in float64."""
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def quartiles(values: Sequence[float] | Tensor) -> list[float]:
    """Returns the first quartile, the median and the third. (torch.quantile refuses more than 16 million values.)"""
    x = torch.as_tensor(values, dtype=torch.float64).flatten().sort().values
    found = []
    for share in (0.25, 0.5, 0.75):
        place = share * (len(x) - 1)
        below = x[math.floor(place)]
        above = x[math.ceil(place)]
        found.append(float(below + (above - below) * (place % 1)))
    return found


def mean_within(values: Sequence[float] | Tensor) -> list[float]:
    """Returns a mean and the ends of its 95% normal interval; both ends are the mean if there is one value."""
    x = torch.as_tensor(values, dtype=torch.float64).flatten()
    middle = float(x.mean())
    half = 0.0
    if len(x) > 1:
        half = 1.96 * float(x.std()) / math.sqrt(len(x))
    return [middle, middle - half, middle + half]
