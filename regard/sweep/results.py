"""Results of a sweep's trials as plain data: the value of a run, rows of results.json, the best, importance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.errors import did_you_mean
from regard.report.learning import TrainAndDev, train_and_dev
from regard.report.markup import number
from regard.sweep.study import Study, SweepError, trial_folder, trial_number, trial_values
from regard.train.run import Run

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

STATES = {"COMPLETE": "finished", "FAIL": "failed", "RUNNING": "running", "WAITING": "waiting"}
QUARTER = 0.25  # the share of trials, the best ones, that importance compares with all
ENOUGH = 8  # the fewest trials for which importance is computed


class TrialValue(NamedTuple):
    """The best value of a run by a metric, its step, and the value on training data there (None: not measured)."""

    value: float
    step: int
    train: float | None = None


def best_value(run: Run, metric: str, maximize: bool) -> TrialValue:
    """Returns the best value of a metric in a run's evaluations; if only training logs it, the last value.

    Among equal values it is the one of the checkpoint that the run kept, or else the first.
    """
    rows = run.metrics()
    finite = [row for row in rows if is_finite(row.get(metric))]
    if not finite:
        known = dict.fromkeys(key for row in rows for key in row if key != "step")
        what = "is not measured"
        if metric in known:
            what = "is never a finite number"
        raise SweepError(f"'{metric}' {what} in {run.path}.{did_you_mean(metric, known)}")
    row = finite[-1]
    evaluations = [row for row in finite if "lr" not in row]  # a line of training has a learning rate
    if evaluations:
        pick = max if maximize else min
        best = pick(row[metric] for row in evaluations)
        equals = [row for row in evaluations if row[metric] == best]
        row = next((row for row in equals if row["step"] == run.best), equals[0])
    return TrialValue(row[metric], row["step"], _train_value(rows, metric, row["step"]))


def _train_value(rows: Sequence[Mapping[str, Any]], metric: str, step: int) -> float | None:
    """Returns the value on training data of a metric of dev, at this step or the last one before it."""
    before = [y for x, y in metric_curves(rows, metric).train if x <= step]
    return before[-1] if before else None


def metric_curves(rows: Sequence[Mapping[str, Any]], metric: str) -> TrainAndDev:
    """Returns the curve of a metric over the steps as `dev`; as `train`, the same on training data, if it is one of
    dev."""
    split, _, quantity = metric.partition("/")
    if split == "dev" and quantity:
        curve = [row for row in rows if "lr" in row]
        return train_and_dev(curve, [row for row in rows if "lr" not in row], quantity)
    return TrainAndDev([], [(row["step"], row[metric]) for row in rows if is_finite(row.get(metric))])


def is_finite(value: Any) -> bool:
    """Returns whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def trial_row(trial: FrozenTrial) -> dict[str, Any]:
    """Returns the row of a trial in results.json; `train` is its value on the training data."""
    index = trial_number(trial)
    details = trial.user_attrs.get("found", {})
    return {
        "trial": index,
        "folder": trial_folder(index),
        "state": STATES[trial.state.name],
        "value": trial.value,
        "settings": trial_values(trial),
        **{key: details.get(key) for key in ("train", "step", "seconds", "host", "error")},
    }


def best_row(rows: Sequence[dict[str, Any]], maximize: bool) -> dict[str, Any] | None:
    """Returns the row of the best finished trial; of equal ones, the first; None if none has finished."""
    finished = [row for row in rows if row["state"] == "finished"]
    if not finished:
        return None
    pick = max if maximize else min
    return pick(finished, key=lambda row: row["value"])


def measure_importance(study: Study, parameters: int) -> dict[str, float]:
    """Returns how far the settings of the best quarter of the trials differ from those of all (PED-ANOVA); {} if too
    few."""
    import optuna

    values = [trial.value for trial in study.trials() if trial.state.name == "COMPLETE"]
    if len(values) < ENOUGH or len(set(values)) == 1 or parameters == 1:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=QUARTER)
    return dict(optuna.importance.get_param_importances(study.optuna, evaluator=evaluator))


def summarize_trial(n: int, rows: Sequence[dict[str, Any]], metric: str, maximize: bool) -> str:
    """Returns a line about the n-th trial, which has ended."""
    row = next(row for row in rows if row["trial"] == n)
    best = best_row(rows, maximize)
    ended = sum(other["state"] in ("finished", "failed") for other in rows)
    if row["state"] != "finished":
        outcome = f"{row['state']}: {row['error'] or 'another process has it'}"
    elif best is None or row is best:
        outcome = f"{metric} {number(row['value'])}, the best"
    else:
        outcome = f"{metric} {number(row['value'])} (best: {number(best['value'])}, {best['folder']})"
    return f"{row['folder']}, {ended} of {len(rows)}: {format_settings(row['settings'])} → {outcome}"


def format_settings(settings: Mapping[str, Any]) -> str:
    """Returns the settings of a trial in a line."""
    words = []
    for key, value in settings.items():
        if isinstance(value, float):
            words.append(f"{key}={value:.4g}")
        else:
            words.append(f"{key}={value}")
    return " ".join(words)
