"""A run is a folder: config.toml, metrics.jsonl, checkpoints/step-N/, best, model/, predictions/, report.html."""

from __future__ import annotations

import json
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w
import torch

from regard.errors import RunError, quote
from regard.models.locate import BEST, CHECKPOINTS, MODEL, MODEL_CONFIG, best_step
from regard.models.locate import RUN_CONFIG as CONFIG
from regard.reading import check_path, parse_json, parse_toml, read_bytes, read_toml
from regard.storage import finish_replacing, remove_leftovers, sync, write_text
from regard.train.claim import claimed, locked
from regard.train.settings import COMPILES
from regard.version import __version__

METRICS = "metrics.jsonl"
MAX_METRICS_BYTES = 1 << 30
VERSIONS = "versions"
COMPILED = "compiled"  # the key of the config that says what train.compile = "auto" was decided to mean
JOB = "job"  # the key of the config that names the torchrun job which began the run


class Run:
    """The folder of one training."""

    def __init__(self, path: str | Path) -> None:
        self.path = check_path(path, RunError)
        self.checkpoints = self.path / CHECKPOINTS

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any]) -> Run:
        """Makes a new folder with its config; one that holds a run already is never written over."""
        with cls(path).claimed(config, lambda: False) as run:
            return run

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Opens a folder that a training made."""
        run = cls(path)
        if not (run.path / CONFIG).is_file():
            raise RunError(f"{path} is no run: expected a folder with {CONFIG}, as `regard train` makes")
        return run

    @contextmanager
    def claimed(self, config: Mapping[str, Any], started: Callable[[], bool]) -> Iterator[Run]:
        """Makes the folder with its config, and locks it; raises RunError if it holds a run already.

        If the body fails while `started()` is False, the folder is removed again.
        """
        marks = (CONFIG, METRICS, BEST, MODEL, CHECKPOINTS)
        hint = f", or continue it with --resume {self.path}"
        with claimed(self.path, marks, started, hint):
            self._write(CONFIG, _as_toml({VERSIONS: versions(), **config}))
            yield self

    def mark_started(self) -> None:
        """Makes an empty file of metrics, after which tasks no longer write the data of this run anew."""
        (self.path / METRICS).touch()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder while the context lasts, and first removes unfinished files of killed processes."""
        with locked(self.path):
            for folder in (self.checkpoints, self.path / MODEL):
                if folder.is_dir():
                    finish_replacing(folder)
                    remove_leftovers(folder)
            yield

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config, as config.toml has it."""
        return read_toml(self.path / CONFIG, RunError)

    def was_begun_as(self, config: Mapping[str, Any]) -> bool:
        """Returns whether the job that `config` names has begun this run, with the same settings."""
        if config.get(JOB) is None or not (self.path / CONFIG).is_file():
            return False
        saved = {key: value for key, value in self.config.items() if key not in (VERSIONS, COMPILED)}
        return saved == parse_toml(_as_toml(config).encode(), CONFIG, RunError)

    @property
    def compiled(self) -> str | None:
        """How the steps are compiled if `train.compile = "auto"` left it open; None if it is not decided yet."""
        mode = self.config.get(COMPILED)
        if mode is None or mode in COMPILES:
            return mode
        raise RunError(f"{self.path / CONFIG}: {COMPILED} = {quote(mode)}, expected {', '.join(COMPILES)}")

    @compiled.setter
    def compiled(self, mode: str) -> None:
        self._write(CONFIG, _as_toml({**self.config, COMPILED: mode}))
        del self.config  # it is read anew

    @property
    def finished(self) -> bool:
        """Whether the training has ended: its model is there."""
        return (self.path / MODEL / MODEL_CONFIG).is_file()

    @property
    def best(self) -> int | None:
        """The step of the best checkpoint."""
        return best_step(self.path)

    @best.setter
    def best(self, step: int | None) -> None:
        if step is None:
            (self.path / BEST).unlink(missing_ok=True)
        else:
            self._write(BEST, f"step-{step}\n")

    def log(self, row: Mapping[str, Any]) -> None:
        """Appends a line of metrics."""
        try:
            with (self.path / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise RunError(f"cannot write {self.path / METRICS}: {error}") from error

    def sync_metrics(self) -> None:
        """Forces the lines of metrics to disk."""
        if not (self.path / METRICS).is_file():
            return
        try:
            sync(self.path / METRICS)
            sync(self.path)
        except OSError as error:
            raise RunError(f"cannot write {self.path / METRICS}: {error}. Checkpoints are as they were") from error

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the rows of metrics.jsonl, without a last line that was cut off."""
        path = self.path / METRICS
        if not path.is_file():
            return []
        lines = read_bytes(path, RunError, MAX_METRICS_BYTES).split(b"\n")[:-1]
        return [_parse_row(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]

    def truncate_metrics(self, after: int) -> None:
        """Drops what was logged after a step: a resumed run is going to log it again."""
        kept = [json.dumps(row) + "\n" for row in self.metrics() if row["step"] <= after]
        self._write(METRICS, "".join(kept))

    def _write(self, name: str, text: str) -> None:
        write_text(self.path / name, text)


LARGEST = 1e308  # of a whole number in metrics, so that it can be converted to a float


def _parse_row(line: bytes, place: str) -> dict[str, Any]:
    """Returns a line of metrics: a `step`, and values by name."""
    row = parse_json(line, place, RunError)
    if not isinstance(row, dict) or not _is_number(row.get("step")):
        raise RunError(f'{place}: expected an object with a "step"; remove the line to go on without it')
    for name, value in row.items():
        if not isinstance(value, int | float | None) or (isinstance(value, int) and abs(value) > LARGEST):
            raise RunError(f"{place}: {quote(name)} = {quote(value)}, expected a number; remove the line to go on")
    return row


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def timestamped_path(name: str, root: str | Path = "runs") -> Path:
    """Returns runs/NAME-<date>-<time>, with a number behind it if that exists; for a file, NAME is its stem."""
    base = Path(root) / f"{_folder_name(name)}-{datetime.now():%Y%m%d-%H%M%S}"
    path = base
    number = 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def find_begun(name: str, config: Mapping[str, Any], root: str | Path = "runs") -> Path | None:
    """Returns the newest runs/NAME-<time> that the job which `config` names has begun with these settings, or None."""
    if config.get(JOB) is None:
        return None
    folders = sorted(file.parent for file in Path(root).glob(f"{_folder_name(name)}-*/{CONFIG}"))
    begun = [folder for folder in folders if Run(folder).was_begun_as(config)]
    return begun[-1] if begun else None


def _folder_name(name: str) -> str:
    """Returns the name for the run folders of a recipe, an experiment or a file.toml."""
    if name.endswith(".toml"):
        return Path(name).stem
    return name.replace("/", "-")


def versions() -> dict[str, str]:
    """Returns the versions of the software that a result depends on."""
    return {"regard": __version__, "torch": torch.__version__, "python": platform.python_version()}


def find_runs(root: str | Path) -> list[Run]:
    """Returns the runs in a folder and in its folders, two levels down, oldest first."""
    root = check_path(root, RunError)
    folders = {file.parent for depth in ("", "*/", "*/*/") for file in root.glob(f"{depth}{CONFIG}")}
    by_age = sorted(folders, key=lambda folder: ((folder / CONFIG).stat().st_mtime, folder))
    return [run for run in map(Run, by_age) if _trains(run)]


def _trains(run: Run) -> bool:
    """Tells whether a run's config.toml is that of a training.

    For one that cannot be read it warns and returns False, so that a damaged run does not hide the others.
    """
    try:
        return "task" in run.config
    except RunError as error:
        warnings.warn(f"passed over: {error}", stacklevel=3)
        return False


def run_of(folder: Path) -> Run | None:
    """Returns the run that a model folder belongs to, as its model or as one of its checkpoints; None for others."""
    folder = folder.resolve()
    if folder.parent.name == CHECKPOINTS:
        path = folder.parent.parent
    elif folder.name == MODEL:
        path = folder.parent
    else:
        return None
    if not (path / CONFIG).is_file():
        return None
    return Run(path)


def _as_toml(config: Mapping[str, Any]) -> str:
    return tomli_w.dumps(_without_none(config), multiline_strings=False)


def _without_none(value: Any) -> Any:
    """Returns nested tables without keys that are None: TOML has no None, and a missing key is read as None again."""
    if isinstance(value, Mapping):
        return {key: _without_none(x) for key, x in value.items() if x is not None}
    if isinstance(value, list | tuple):
        return [_without_none(x) for x in value]
    return value
