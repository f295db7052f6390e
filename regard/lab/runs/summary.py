"""Runs at a glance."""

from __future__ import annotations

from typing import Any

from regard.lab.experiment import read_log
from regard.train.progress import format_metrics
from regard.train.recipe import resolve_model
from regard.train.run import Run


def described(run: Run) -> dict[str, Any]:
    """What a run is, how far it is, and what was measured."""
    log, config = read_log(run), run.config
    curve, measured = log.curve, log.evaluations
    best = next((row for row in measured if row["step"] == run.best), None)
    last = curve[-1] if curve else {}
    shown = best or ({"loss": last["loss"]} if last else {})
    return {
        "name": run.path.name,
        "path": str(run.path),
        "recipe": config.get("recipe", ""),
        "mechanism": resolve_model(config.get("model", {}))[1].mechanism,
        "status": "finished" if run.finished else "stopped" if curve else "begun",
        "steps": log.steps,
        "seconds": last.get("seconds", 0.0),
        "tokens": last.get("tokens", 0),
        "metrics": {**last, **(measured[-1] if measured else {})},
        "best": best,
        "measured": format_metrics({key: value for key, value in shown.items() if key != "step"}),
        "curve": curve,
        "evaluations": measured,
    }
