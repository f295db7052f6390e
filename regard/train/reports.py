"""Pages about experiments and runs that are already there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.report.convert import convert_page
from regard.report.heads import heads_page
from regard.report.knowledge import knowledge_page
from regard.report.page import Page, ReportError
from regard.report.runs import compare_page
from regard.report.sentiment import sentiment_page
from regard.report.summarize import summarize_page
from regard.train.recipe import flat
from regard.train.run import RESULTS, Run, RunError, find_runs
from regard.train.runs import described
from regard.train.sweep import ASKED, Sweep

PAGES: dict[str, Callable[[Mapping[str, Any]], Page]] = {
    "convert": convert_page,
    "heads": heads_page,
    "knowledge": knowledge_page,
    "sentiment": sentiment_page,
    "summarize": summarize_page,
}


def compare(folders: Sequence[Path], out: Path | None = None) -> Path:
    """One experiment's or sweep's page again, or one page that compares all runs in the folders."""
    if len(folders) == 1 and (folders[0] / ASKED).is_file():
        return Sweep.open(folders[0]).page().write(out or folders[0] / "report.html")
    if len(folders) == 1 and (folders[0] / RESULTS).is_file():
        results = json.loads((folders[0] / RESULTS).read_text(encoding="utf-8"))
        if results.get("experiment") not in PAGES:
            expected = ", ".join(PAGES)
            found = f"{folders[0] / RESULTS}: experiment = {results.get('experiment')!r}"
            raise ReportError(f"{found} has no page; expected one of {expected}")
        return PAGES[results["experiment"]](results).write(out or folders[0] / "report.html")
    runs = [run for folder in folders for run in find_runs(folder)]
    if not runs:
        raise RunError(f"no runs in {', '.join(map(str, folders))}: expected folders that `regard train` made")
    place = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    rows = [described(run) | {"config_differences": changed} for run, changed in _differing(runs)]
    return compare_page(rows).write(place)


def _differing(runs: Sequence[Run]) -> list[tuple[Run, dict[str, Any]]]:
    """Each run with the settings in which the runs are not all alike."""
    settings = [dict(flat(run.config)) for run in runs]
    keys = sorted({key for one in settings for key in one if len({repr(other.get(key)) for other in settings}) > 1})
    return [(run, {key: one.get(key) for key in keys}) for run, one in zip(runs, settings, strict=True)]
