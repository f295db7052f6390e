"""Pages about experiments and runs that are already there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.errors import RegardError, RunError, quote
from regard.lab.base import EXPERIMENTS, REPORT, RESULTS
from regard.lab.runs.page import compare_page
from regard.lab.runs.summary import summarize_run
from regard.reading import read_json_object
from regard.report.page import Page, ReportError
from regard.sweep.run import SWEEP_CONFIG, Sweep
from regard.train.recipe import flatten
from regard.train.run import JOB, Run, find_runs


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Writes the page of one experiment or sweep again, or one page that compares all runs in the folders."""
    if len(folders) == 1 and (folders[0] / SWEEP_CONFIG).is_file():
        return Sweep.open(folders[0]).page().write(out or folders[0] / REPORT)
    if len(folders) == 1 and (folders[0] / RESULTS).is_file():
        return _draw_again(folders[0]).write(out or folders[0] / REPORT)
    runs = [run for folder in folders for run in find_runs(folder)]
    if not runs:
        raise RunError(f"no runs in {', '.join(map(str, folders))}: expected folders that `regard train` made")
    place = out or (folders[0] if len(folders) == 1 else Path()) / REPORT
    rows = [summarize_run(run) | {"config_differences": changed} for run, changed in _differing(runs)]
    return compare_page(rows).write(place)


def _draw_again(folder: Path) -> Page:
    """Draws the page of a folder's results.json."""
    results = read_json_object(folder / RESULTS, ReportError)
    name = results.get("experiment") or results.get("lab")
    if not isinstance(name, str) or name not in EXPERIMENTS:
        raise ReportError(
            f"{folder / RESULTS}: experiment = {quote(name)} has no page; expected one of {', '.join(EXPERIMENTS)}"
        )
    try:
        return EXPERIMENTS[name].page(results)
    except RegardError:
        raise
    # A page is drawn from numbers that no type describes, such as the ends of an axis.
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ReportError(
            f"{folder / RESULTS} is damaged: a page cannot be drawn from it ({type(error).__name__}: {quote(error)})"
        ) from error


def _differing(runs: Sequence[Run]) -> list[tuple[Run, dict[str, Any]]]:
    """Each run with the settings in which the runs are not all alike."""
    settings = [dict(flatten({key: x for key, x in run.config.items() if key != JOB})) for run in runs]
    keys = sorted({key for one in settings for key in one if len({repr(other.get(key)) for other in settings}) > 1})
    return [(run, {key: one.get(key) for key in keys}) for run, one in zip(runs, settings, strict=True)]
