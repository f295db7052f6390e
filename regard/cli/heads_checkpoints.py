"""`regard heads --checkpoints`: what the heads of a run did at each checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.cli.show import align_right, console, table
from regard.lens.heads.checkpoints import examine_checkpoints
from regard.lens.models import Sample
from regard.models.locate import run_folder
from regard.report.head_curves import drawn_scores, naming, plot_head_curves
from regard.report.plots import Point
from regard.train.run import Run

MOST_ROWS = 16  # of the table


def examine_run(
    name: str, texts: Sequence[Sample] | None, seed: int, device: str, progress: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """Returns what the heads of a run do at each checkpoint, and as "losses" its losses by name: [step, loss]."""
    results = examine_checkpoints(name, texts, seed, device, progress)
    return results | {"losses": _read_losses(Path(name))}


def _read_losses(path: Path) -> dict[str, list[Point]]:
    """Returns the losses of a run's evaluations by name; without any, its training loss."""
    rows = Run(run_folder(path)).metrics()
    losses: dict[str, list[Point]] = {}
    for row in rows:
        for name, value in row.items():
            if name.endswith("/loss") and value is not None:
                losses.setdefault(name, []).append((row["step"], value))
    if not losses:
        losses["loss"] = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
    return losses


def print_run(results: Mapping[str, Any]) -> None:
    """Prints the largest effect of each score at each checkpoint with its head, and when each score appeared."""
    out = console()
    card = results["model"]
    steps = results["steps"]
    out.print(
        f"{results['run']}: {card['class']}, {len(results['heads'])} heads at {len(steps)} checkpoints of steps "
        f"{steps[0]:,} to {steps[-1]:,}; {results['texts']} texts\n",
        soft_wrap=True,
    )
    names = drawn_scores(results)
    if not names:
        out.print("no head stands out from an even spread at any checkpoint")
        return
    losses = {name: points for name, points in results["losses"].items() if points}
    made = table("step", *losses, *names)
    for n in _spread(len(steps)):
        cells = [_value_at(points, steps[n]) for points in losses.values()]
        made.add_row(f"{steps[n]:,}", *cells, *(_strongest(results["heads"], name, n) for name in names))
    out.print(align_right(made, 0))
    rest = ""
    if len(steps) > MOST_ROWS:
        rest = f" These are {MOST_ROWS} of {len(steps)} checkpoints; --json and --plot have all."
    out.print(f"\nThe largest effect of any head and, where a head does this, the head.{rest}\n", soft_wrap=True)
    name_of = naming(results["heads"])
    for row in results["appeared"]:
        out.print(_describe(row, name_of(row)), soft_wrap=True)


def _spread(checkpoints: int) -> list[int]:
    """Returns the indices of checkpoints that have a row: all, or MOST_ROWS evenly spaced ones."""
    rows = min(checkpoints, MOST_ROWS)
    return [round(n * (checkpoints - 1) / (rows - 1)) for n in range(rows)]


def _value_at(points: Sequence[Point], step: int) -> str:
    """Returns the last value that was measured up to a step."""
    values = [value for at, value in points if at <= step]
    if not values:
        return ""
    return f"{values[-1]:.3f}"


def _strongest(heads: Sequence[Mapping[str, Any]], name: str, n: int) -> str:
    """Returns the largest effect of a score at the n-th checkpoint, with the head if the score is one of its labels."""
    scored = [head for head in heads if name in head["scores"] and head["scores"][name]["effect"][n] is not None]
    if not scored:
        return ""
    doing = [head for head in scored if name in head["does"][n]]
    most = max(doing or scored, key=lambda head: head["scores"][name]["effect"][n])
    effect = f"{most['scores'][name]['effect'][n]:.2f}"
    if doing:
        return f"{naming(heads)(most)} {effect}"
    return effect


def _describe(row: Mapping[str, Any], head: str) -> str:
    """Returns the sentence that says when a score appeared, and how many heads have it at the end."""
    when = f"by step {row['step']:,}, the first checkpoint"
    if row["before"] is not None:
        when = f"between steps {row['before']:,} and {row['step']:,}"
    heads = "1 head does"
    if row["heads"] > 1:
        heads = f"{row['heads']} heads do"
    return f"{row['score']} appeared {when}; at the end {heads} it, {head} most ({row['effect']:.2f})"


def plot_run(results: Mapping[str, Any], path: Path) -> None:
    """Writes the figure of all curves, and prints its size."""
    plot_head_curves(path, results, results["losses"])
    console(stderr=True).print(f"{path}: {path.stat().st_size:,} bytes", soft_wrap=True)
