"""A run is a folder: config.toml, metrics.jsonl, checkpoints/step-N/, best, model/, predictions/, report.html."""

from __future__ import annotations

import errno
import json
import platform
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import tomli_w
import torch

from regard.data.files import atomic_write
from regard.errors import RunError
from regard.models.locate import BEST, CHECKPOINTS, MODEL, MODEL_CONFIG, best_step
from regard.models.locate import RUN_CONFIG as CONFIG
from regard.version import __version__

METRICS = "metrics.jsonl"


class Run:
    """The folder of one training."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / CHECKPOINTS

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any]) -> Run:
        """Makes a new folder with its config; one that holds a run already is never written over."""
        run = cls(claim(path, CONFIG, METRICS, BEST, MODEL, CHECKPOINTS))
        document = {"versions": versions(), **config}
        run._write(CONFIG, tomli_w.dumps(_without_none(document), multiline_strings=False))
        return run

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Opens a folder that a training made."""
        run = cls(path)
        if not (run.path / CONFIG).is_file():
            raise RunError(f"{path} is no run: expected a folder with {CONFIG}, as `regard train` makes")
        return run

    def mark_started(self) -> None:
        """Makes an empty file of metrics. Tasks keep the data of a run that has one, and write anew those of others."""
        (self.path / METRICS).touch()

    def release(self) -> None:
        """Removes what marks the folder as a run's: one that could not start leaves it free for another."""
        for name in (CONFIG, METRICS):
            (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from training into the folder. A process that dies gives its lock up."""
        with (self.path / CONFIG).open("rb") as file:
            if not _try_lock(file):
                raise RunError(f"another process is training into {self.path}: wait until it has ended")
            yield

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved config, as config.toml has it."""
        try:
            return tomllib.loads((self.path / CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunError(f"{self.path / CONFIG} cannot be read: {error}") from None

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

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the lines of metrics; a last one that was cut off is left out."""
        path = self.path / METRICS
        if not path.is_file():
            return []
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(lines, 1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise RunError(f"{path}, line {number}: {error}; remove the line to go on without it") from None
        return rows

    def truncate_metrics(self, after: int) -> None:
        """Drops what was logged after a step: a resumed run is going to log it again."""
        kept = [json.dumps(row) + "\n" for row in self.metrics() if row["step"] <= after]
        self._write(METRICS, "".join(kept))

    def _write(self, name: str, text: str) -> None:
        write_text(self.path / name, text)


def _try_lock(file: IO[bytes]) -> bool:
    """Returns whether the file is locked for this process now. Where a system or a file system knows no locks, nobody
    is kept out."""
    if find_spec("fcntl") is None:
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def write_text(path: Path, text: str) -> None:
    """Writes a small file whole or not at all."""
    with atomic_write(path) as file:
        file.write(text.encode())


def claim(path: str | Path, *files: str) -> Path:
    """Makes a folder for new results and returns it; an error where it holds any of the files that tell of results, or
    cannot be written."""
    path = Path(path)
    if any((path / file).exists() for file in files):
        raise RunError(f"{path} holds results already: choose another --out, or continue it with --resume {path}")
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".probe"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise RunError(f"cannot write into {path}: {error}. Choose another folder with --out") from error
    return path


def timestamped_path(name: str, root: str | Path = "runs") -> Path:
    """Returns runs/NAME-<date>-<time>, with a number where that exists."""
    base = Path(root) / f"{name.replace('/', '-')}-{datetime.now():%Y%m%d-%H%M%S}"
    path = base
    number = 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def versions() -> dict[str, str]:
    """Returns the versions of the software that a result depends on."""
    return {"regard": __version__, "torch": torch.__version__, "python": platform.python_version()}


def find_runs(root: str | Path) -> list[Run]:
    """Returns the runs in a folder and in its folders, two levels down, oldest first."""
    folders = {file.parent for depth in ("", "*/", "*/*/") for file in Path(root).glob(f"{depth}{CONFIG}")}
    by_age = sorted(folders, key=lambda folder: ((folder / CONFIG).stat().st_mtime, folder))
    return [run for run in map(Run, by_age) if "task" in run.config]


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


def _without_none(value: Any) -> Any:
    """Returns nested tables without their Nones: TOML has none, and what is left out is None again when read."""
    if isinstance(value, Mapping):
        return {key: _without_none(x) for key, x in value.items() if x is not None}
    if isinstance(value, list | tuple):
        return [_without_none(x) for x in value]
    return value
