"""Summaries of runs."""

from __future__ import annotations

from statistics import median
from typing import Any

from regard.lab.experiment import TrainingLog, read_log
from regard.models.locate import checkpoint_steps
from regard.train.claim import is_claimed
from regard.train.progress import format_metrics
from regard.train.recipe import resolve_model
from regard.train.run import Run

SPEEDS = ("tokens_per_second", "mfu")


def summarize_run(run: Run) -> dict[str, Any]:
    """Returns a run as plain data: its name, recipe, status, steps, metrics and curves."""
    log = read_log(run)
    config = run.config
    saved = max(checkpoint_steps(run.checkpoints), default=0)  # it may be stopped before its first line
    best = next((row for row in log.evaluations if row["step"] == run.best), None)
    last = {}
    if log.curve:
        last = log.curve[-1]
    shown = best or {key: last[key] for key in ("loss",) if key in last}
    metrics = dict(last)
    for key in SPEEDS:  # that of the last steps alone may be anything
        known = [row[key] for row in log.curve if isinstance(row.get(key), int | float)]
        if known:
            metrics[key] = median(known)
    if log.evaluations:
        metrics |= log.evaluations[-1]
    return {
        "name": run.path.name,
        "path": str(run.path),
        "recipe": config.get("recipe", ""),
        "mechanism": resolve_model(config.get("model", {}))[1].mechanism,
        "status": _status(run, log, saved),
        "steps": max(log.steps, saved),
        "seconds": log.seconds,
        "tokens": log.tokens,
        "metrics": metrics,
        "best": best,
        "measured": format_metrics({key: value for key, value in shown.items() if key != "step"}),
        "curve": log.curve,
        "evaluations": log.evaluations,
    }


def _status(run: Run, log: TrainingLog, saved: int) -> str:
    if run.finished:
        return "finished"
    if is_claimed(run.path):
        return "running"
    if log.curve or saved:
        return "stopped"
    return "begun"
