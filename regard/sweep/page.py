"""The page of a sweep: the best trial, pictures of all trials, which settings mattered, and learning curves.

Its results are plain data: recipe, metric, maximize, parameters [{key, values, log}], trials [{trial, folder, state,
value, train, settings, step, seconds, error}], counts {state: n}, importance {key: share}, best (a trial's number or
None), command, again, curves {trial: [[step, value]]}, and train_curves, the same of the training data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from regard.report.learning import TrainAndDev, describe_overfitting, learning_caption, learning_figure
from regard.report.markup import Markup, code, count_noun, duration, join, number, strong, tag
from regard.report.page import (
    Page,
    build_part,
    command_listing,
    details,
    facts,
    figure,
    heading,
    paragraph,
    share_bar,
    table,
)
from regard.report.plots import Best, Point
from regard.report.trials import Dimension, TrialPoint, parallel_coordinates, slice_plots, trial_curves

Results = Mapping[str, Any]
SHOWN = 40  # trials in the table; the others are in a part that unfolds
BEST_FIRST = "Best first. Train: the same measure of the training data at that step."


def sweep_page(results: Results) -> Page:
    """Returns the page of a sweep's results so far."""
    page = Page(f"Sweep of {results['recipe']}", build_part("trials", _lead, results, __name__))
    for key, build in {"best": _best, "trials": _pictures, "importance": _importance, "curves": _curves}.items():
        page.add(*build_part(key, build, results, __name__))
    page.add(*build_part("trials", _trials, results, __name__))
    return page


def _done(results: Results) -> list[Mapping[str, Any]]:
    """Returns the trials that have a value, best first."""
    finished = [t for t in results["trials"] if t["state"] == "finished"]
    return sorted(finished, key=lambda t: -t["value"] if results["maximize"] else t["value"])


def _best_ones(results: Results) -> list[Mapping[str, Any]]:
    """Returns the trials with the best value; none if there are several trials and all have the same value."""
    done = _done(results)
    equal = [t for t in done if t["value"] == done[0]["value"]]
    return [] if 1 < len(equal) == len(done) else equal


def _bold_one(results: Results) -> str:
    """Returns the word for the trial that is drawn bold: "best", or "first" if none is best."""
    return "best" if _best_ones(results) else "first"


def _lead(results: Results) -> Markup:
    """Returns the first paragraph: what was varied, how many trials are done, and the best trial."""
    keys = [p["key"] for p in results["parameters"]]
    over = ", ".join(keys)
    if len(keys) > 1:
        over = f"{', '.join(keys[:-1])} and {keys[-1]}"
    counts = ", ".join(f"{n:,} {state}" for state, n in results["counts"].items())
    parts: list[object] = [f"{count_noun(len(results['trials']), 'trial')} over {over}: {counts}."]
    done = _done(results)
    if done:
        best = done[0]["value"]
        equal = len(_best_ones(results))
        if not equal:
            return join(*parts, f" None is best by {results['metric']}: each has ", strong(number(best)), ".")
        direction = "higher" if results["maximize"] else "lower"
        parts += [f" Best by {results['metric']} ({direction} is better): ", strong(done[0]["folder"]), " with "]
        parts += [strong(number(best)), f", as {count_noun(equal - 1, 'other')}." if equal > 1 else "."]
    return join(*parts)


def _best(results: Results) -> Iterator[Markup]:
    """Yields the section of the best trial: its settings, and the command that trains it again."""
    done = _done(results)
    if done and not _best_ones(results):
        yield heading("One of the trials, which all end alike")
    else:
        yield heading("The best trial")
    if not done:
        yield paragraph(f"No trial has finished yet. `{results['again']}` continues the sweep.", quiet=True)
        return
    best = done[0]
    found: dict[str, object] = {results["metric"]: strong(number(best["value"]))}
    if best.get("train") is not None:
        found["on the training data"] = number(best["train"])
    yield facts({**best["settings"], **found})
    yield paragraph("Its run is in the folder ", code(best["folder"]), ". This trains it again:")
    yield command_listing(results["command"])


def _pictures(results: Results) -> Iterator[Markup]:
    """Yields the plots of all trials: parallel coordinates, and the value against each setting."""
    if not _done(results):
        return
    ended = [t for t in results["trials"] if t["state"] in ("finished", "failed") and t["settings"]]
    dimensions = [Dimension(p["key"], p["values"], p["log"]) for p in results["parameters"]]
    points = [TrialPoint([t["settings"][d.name] for d in dimensions], t["value"]) for t in ended]
    caption = (
        f"A line for each trial, from its settings to its result. The bold one is the {_bold_one(results)}; fainter "
        "lines are worse; on the last axis the best is highest."
    )
    if results["counts"].get("failed"):
        caption += " Dashed: trials that failed."
    yield heading("All trials at a glance")
    yield figure(parallel_coordinates(dimensions, points, results["metric"], results["maximize"]), caption)
    yield figure(
        slice_plots(dimensions, points, results["metric"], results["maximize"]),
        f"A dot for each trial: its result against each setting. The diamond is the {_bold_one(results)} trial.",
        "Each setting by itself",
    )


def _importance(results: Results) -> Iterator[Markup]:
    """Yields the table of which settings mattered."""
    if len(results["parameters"]) < 2 or not _done(results):
        return
    yield heading("Which settings mattered")
    if not results["importance"]:
        yield paragraph("Left out: this needs at least eight finished trials whose values differ.", quiet=True)
        return
    rows = [[code(key), share_bar(value)] for key, value in results["importance"].items()]
    trials = len(_done(results))
    yield table(
        rows,
        ["setting", "share"],
        f"How far the settings of the best quarter of {trials} trials differ from those of all (PED-ANOVA), as shares "
        "of their sum. A setting whose values do equally well has little. Of few trials it is a hint, not a "
        "measurement.",
    )


def _curves(results: Results) -> Iterator[Markup]:
    """Yields the plot of the learning curves of trials whose runs are on this machine."""
    curves = {int(n): curve for n, curve in results["curves"].items() if curve}
    if not curves:
        return
    best = results["best"]
    name = next((t["folder"] for t in results["trials"] if t["trial"] == best), "")
    failed = {t["trial"] for t in results["trials"] if t["state"] == "failed"}
    caption = (
        f"{results['metric']} over the steps of {count_noun(len(curves), 'trial')}. Bold: the {_bold_one(results)} "
        "trial, with a dot at its best."
    )
    if failed & set(curves):
        caption += " Dashed: those that failed."
    yield heading("How they learned")
    yield figure(
        trial_curves(
            [curve for n, curve in curves.items() if n not in failed and n != best],
            curves.get(best, []),
            [curve for n, curve in curves.items() if n in failed],
            results["metric"],
            name,
            results["maximize"],
        ),
        caption,
    )
    yield from _best_training(results, curves.get(best, []), name)


def _best_training(results: Results, dev: Sequence[Point], name: str) -> Iterator[Markup]:
    """Yields a figure of train and dev of the best trial, with a sentence about overfitting if the metric is a loss."""
    train = (results.get("train_curves") or {}).get(results["best"])
    if not train or not dev:
        return
    curves = TrainAndDev(train, list(dev))
    best: Best = "max" if results["maximize"] else "min"
    quantity = results["metric"].partition("/")[2]
    svg = learning_figure({name: curves}, y=quantity, best=best, shares="accuracy" in quantity)
    said = learning_caption(best)
    if quantity == "loss":
        said = f"{said} {describe_overfitting({name: curves})}"
    yield figure(svg, said, f"The {_bold_one(results)} trial: training and dev")


def _trials(results: Results) -> Iterator[Markup]:
    """Yields the tables of all trials: finished ones, best first, failed ones, and those that run or wait."""
    yield heading("The trials")
    keys = [p["key"] for p in results["parameters"]]
    done = _done(results)
    failed = [t for t in results["trials"] if t["state"] == "failed"]
    running = [t for t in results["trials"] if t["state"] == "running"]
    rows = []
    for t in done:
        settings = [number(t["settings"].get(k)) for k in keys]
        rows.append([_name(t), *settings, t["value"], t.get("train"), t["step"], duration(t["seconds"])])
    names = [code(name) for name in _short_names(keys)]
    columns = ["trial", *names, results["metric"], "train", "at step", "time"]
    if done:
        yield table(rows[:SHOWN], columns, BEST_FIRST, highlight=range(len(_best_ones(results))))
    if rows[SHOWN:]:
        yield details(f"{count_noun(len(rows) - SHOWN, 'more trial')}", table(rows[SHOWN:], columns, BEST_FIRST))
    if failed:
        failures = [[_name(t), *(number(t["settings"].get(k)) for k in keys), t["error"] or ""] for t in failed]
        yield table(failures, ["trial", *names, "error"], "Failed. Each folder's error.txt has the traceback.")
    if running or results["counts"].get("waiting"):
        waiting = results["counts"].get("waiting", 0)
        names_running = ", ".join(t["folder"] for t in running) or "none"
        state = f"Running: {names_running}. Waiting: {waiting:,}. "
        yield paragraph(state, code(results["again"]), " goes on.", quiet=True)


def _short_names(keys: Sequence[str]) -> list[str]:
    """Returns the last parts of keys; the whole key if another has the same last part."""
    last = [key.rpartition(".")[2] for key in keys]
    return [name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)]


def _name(trial: Mapping[str, Any]) -> Markup:
    """Returns the name of a trial's folder, which is not wrapped."""
    return tag("span", trial["folder"], style="white-space:nowrap")
