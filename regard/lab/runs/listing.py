"""Listing the trainings, experiments and measurements in a folder."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from regard.errors import RegardError, RunError
from regard.lab.base import RESULTS
from regard.lab.experiment import ASKED
from regard.lab.runs.summary import summarize_run
from regard.models.locate import RUN_CONFIG as CONFIG
from regard.reading import read_json_object, read_toml
from regard.report.markup import duration
from regard.train.claim import is_claimed
from regard.train.run import find_runs

# Before results.json is there, one of these files marks a folder; the function reads the name of the experiment from
# it.
_BEGUN: dict[str, Callable[[Path], Any]] = {
    ASKED: lambda path: read_toml(path, RunError).get("experiment"),
    "sweep.toml": lambda path: "sweep",
    "convert.json": lambda path: "convert",
    CONFIG: lambda path: read_toml(path, RunError).get("lab"),
}


def list_results(root: Path) -> list[dict[str, Any]]:
    """Returns a row for each training, experiment and measurement in a folder and two levels down, oldest first.

    What is damaged is passed over with a warning: the others are still listed.
    """
    trained = {run.path: run for run in find_runs(root)}
    marks = (RESULTS, *_BEGUN)
    found = {file.parent for depth in ("", "*/", "*/*/") for mark in marks for file in root.glob(f"{depth}{mark}")}
    rows = []
    for folder in sorted({*trained, *found}, key=lambda folder: (_began(folder), folder)):
        try:
            if folder in trained:
                rows.append({"kind": "run"} | summarize_run(trained[folder]))
            else:
                rows += _summarize_results(folder)
        except RegardError as error:
            warnings.warn(f"passed over: {error}", stacklevel=2)
    return rows


def _began(folder: Path) -> float:
    """Returns when the first of the files was written that mark a folder of results."""
    return min((folder / mark).stat().st_mtime for mark in (RESULTS, *_BEGUN) if (folder / mark).exists())


def _is_whole(results: Mapping[str, Any]) -> bool:
    """Returns whether results are complete: a race writes them after each size, the tour after each chapter."""
    if results.get("interrupted"):
        return False
    if results.get("experiment") != "tour":
        return True
    chapters = [results.get(key) for key in ("check", "train", "see", "race")]
    return all(isinstance(chapter, dict) and _is_whole(chapter.get("race") or {}) for chapter in chapters)


def _summarize_results(folder: Path) -> list[dict[str, Any]]:
    """Returns the row of an experiment or a measurement; none where a folder holds something else."""
    results: Mapping[str, Any] = {}
    status = "running" if is_claimed(folder) else "stopped"
    if (folder / RESULTS).is_file():
        results = read_json_object(folder / RESULTS, RunError)
        if _is_whole(results):
            status = "finished"
    name = results.get("experiment") or results.get("lab")
    kind = "measurement" if "lab" in results else "experiment"
    for mark, read in _BEGUN.items():
        if name is None and (folder / mark).is_file():
            name = read(folder / mark)
            kind = "measurement" if mark == CONFIG else "experiment"
    if not isinstance(name, str):
        return []
    seconds = results.get("seconds")
    measured = ""
    if isinstance(seconds, int | float):
        measured = f"in {duration(seconds)}"
    row = {"kind": kind, "name": folder.name, "path": str(folder), "recipe": name, "status": status}
    return [row | {"mechanism": "", "steps": "", "seconds": seconds, "measured": measured}]
