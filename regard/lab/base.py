"""Small experiments with numbers instead of data: each measures, writes what it found, and shows it on a page.

A lab is a config (sizes and a seed), a measurement that gives plain data, and a page of that data. `run` puts all of it
into one folder: config.toml, results.json, report.html.
"""

from __future__ import annotations

import json
import math
import platform
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import tomli_w
import torch
from torch import Tensor

from regard.config import ConfigError, Section
from regard.data.files import atomic_write
from regard.errors import RegardError
from regard.registry import Registry
from regard.report.canvas import require_matplotlib
from regard.report.page import Page
from regard.version import __version__

CONFIG, RESULTS, REPORT = "config.toml", "results.json", "report.html"

Say = Callable[[str], None]
Results = dict[str, Any]


class LabError(RegardError, OSError):
    """A folder that results cannot be written into."""


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
            many, shown = (value, list(value)) if isinstance(value, tuple) else ((value,), value)
            if not many or list(many) != sorted(set(many)):
                raise ConfigError(f"{self.place}.{f.name} = {shown}: expected numbers in rising order, at least one")
            if not all(low <= x <= high for x in many):
                raise ConfigError(f"{self.place}.{f.name} = {shown}: expected {low} to {high}")


class Lab(NamedTuple):
    """One experiment: its config, what it measures (plain data, as JSON has it), and the page of that."""

    name: str
    about: str
    Config: type[LabConfig]
    measure: Callable[[Any, Say], Results]
    page: Callable[[Mapping[str, Any]], Page]


# A lab is registered when its module is imported, which happens when it is first looked up.
LABS: Registry[Lab] = Registry(
    "lab experiment",
    {
        "approximate": "regard.lab.approximate.run",
        "scale": "regard.lab.scale.run",
        "argmax": "regard.lab.argmax.run",
        "two-heads": "regard.lab.two_heads.run",
    },
)


def lab(
    name: str, Config: type[LabConfig], page: Callable[[Mapping[str, Any]], Page]
) -> Callable[[Callable[[Any, Say], Results]], Callable[[Any, Say], Results]]:
    """Registers a measurement; the first line of its docstring says what it is about."""

    def add(measure: Callable[[Any, Say], Results]) -> Callable[[Any, Say], Results]:
        LABS.put(name, Lab(name, (measure.__doc__ or "").partition("\n")[0], Config, measure, page))
        return measure

    return add


def run(
    name: str, out: str | Path, overrides: Mapping[str, Any] | None = None, say: Say = lambda text: None
) -> Results:
    """Measures into a new folder, and returns the results; one that holds results is never written over."""
    one = LABS.find(name)
    config = one.Config().but(**(overrides or {}))
    require_matplotlib()
    path = _claimed(Path(out), {"lab": name, "versions": versions(), name: config.as_dict()})
    began = time.monotonic()
    try:
        found = one.measure(config, say)
    except BaseException:
        (path / CONFIG).unlink()  # nothing was found: the folder is free for another try
        raise
    made = {"threads": torch.get_num_threads(), "seconds": round(time.monotonic() - began, 1), "versions": versions()}
    results = {"lab": name, "command": _command(name, config), "config": config.as_dict(), **made, **found}
    with atomic_write(path / RESULTS) as file:
        file.write(json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n")
    one.page(results).write(path / REPORT)
    return results


def _command(name: str, config: LabConfig) -> str:
    """What to type to get these results again."""
    usual = type(config)().as_dict()
    changed = [f"{key}={json.dumps(value)}" for key, value in config.as_dict().items() if value != usual[key]]
    return " ".join(["regard run", name, *(shlex.quote(one) for one in changed)])


def _claimed(path: Path, config: Mapping[str, Any]) -> Path:
    """The folder, made where it is missing, with the config in it; the config's file is what claims it."""
    held = [file for file in (CONFIG, RESULTS, REPORT) if (path / file).exists()]
    if held:
        raise LabError(f"{path} holds results already ({held[0]}); choose another --out")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with (path / CONFIG).open("xb") as file:
            tomli_w.dump(config, file)
    except OSError as error:
        raise LabError(f"cannot write into {path}: {error.strerror}; choose another --out") from error
    return path


def versions() -> dict[str, str]:
    """What results depend on beside their settings."""
    return {"regard": __version__, "torch": torch.__version__, "python": platform.python_version()}


def normal(draw: torch.Generator, *shape: int) -> Tensor:
    """Independent standard normal numbers, in float64."""
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def quartiles(values: Sequence[float] | Tensor) -> list[float]:
    """The first quartile, the median, the third. (torch.quantile refuses more than 16 million values.)"""
    x = torch.as_tensor(values, dtype=torch.float64).flatten().sort().values
    made = []
    for place in (p * (len(x) - 1) for p in (0.25, 0.5, 0.75)):
        below, above = x[math.floor(place)], x[math.ceil(place)]
        made.append(float(below + (above - below) * (place % 1)))
    return made


def mean_within(values: Sequence[float] | Tensor) -> list[float]:
    """A mean and the ends of its 95% interval, by the normal law; one value has no interval but itself."""
    x = torch.as_tensor(values, dtype=torch.float64).flatten()
    middle = float(x.mean())
    half = 1.96 * float(x.std()) / math.sqrt(len(x)) if len(x) > 1 else 0.0
    return [middle, middle - half, middle + half]
