"""The page that compares runs: one table, curves laid over each other, and what differs between their configs.

A run is plain data: name, path, recipe, status, steps, seconds, parameters, mechanism, metrics {name: final value},
best {name: value}, curve [{step, loss, …}], evaluations [{step, name: value}], config_differences {key: value},
settings {key: value}, versions {name: version}, sample (what a language model writes). What a run lacks is shown as –.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.report import plots
from regard.report.learning import (
    TrainAndDev,
    best_of,
    find_overfitting,
    learning_caption,
    learning_figure,
    train_and_dev,
)
from regard.report.markup import Markup, code, count_noun, duration, join, number, percent, strong
from regard.report.page import (
    Page,
    ReportError,
    details,
    facts,
    figure,
    figures,
    heading,
    listing,
    paragraph,
    table,
)
from regard.report.palette import style

Run = Mapping[str, Any]
_HIGHER = ("accuracy", "exact", "rouge", "f1", "right", "speed", "per_second")
_LOWER = ("loss", "perplexity", "error", "ece")
_SHARES = ("accuracy", "exact", "ece")
MOST_FIGURES = 4  # of each kind


def compare_page(runs: Sequence[Run], title: str | None = None) -> Page:
    """Returns the page of these runs, in the order given; one run alone has a page too."""
    if not runs:
        raise ReportError("no runs to compare; name at least one run folder")
    names = _names(runs)
    if title is None and len(runs) == 1:
        title = names[0]
    title = title or (f"{count_noun(len(runs), 'run')} compared")
    page = Page(title, _lead(runs, names), heading("Results"), _results(runs, names))
    if len(runs) > 1:
        page.add(heading("What differs"), _differences(runs, names))
    curves = list(_curves(runs, names))
    page.add(heading("Curves"))
    page.add(figures(*curves) if curves else paragraph("Left out: no run has logged anything yet.", quiet=True))
    page.add(*_best_steps(runs, names))
    page.add(*_written(runs, names))
    page.add(heading("The runs"))
    for name, run in zip(names, runs, strict=True):
        shown = {key: run.get(key) for key in ("recipe", "status", "mechanism", "parameters", "steps")}
        where = {"folder": code(run.get("path", "–")), "time": duration(run.get("seconds"))}
        page.add(details(name, facts(where | {key: value for key, value in shown.items() if value is not None})))
    page.add(*_how_made(runs, names))
    return page


def _written(runs: Sequence[Run], names: Sequence[str]) -> Iterable[Markup]:
    """Yields what the language models among the runs write, so that a loss can be seen."""
    texts = [(name, run["sample"]) for name, run in zip(names, runs, strict=True) if run.get("sample")]
    if not texts:
        return
    yield heading("What they write")
    yield paragraph("Drawn at temperature 0.8 with seed 0; nothing was chosen.", quiet=True)
    for name, text in texts:
        yield join(strong(name), listing(text))


def _how_made(runs: Sequence[Run], names: Sequence[str]) -> Iterable[Markup]:
    """Yields the settings of each run, and the versions that it was trained with."""
    made = [(name, run) for name, run in zip(names, runs, strict=True) if run.get("settings")]
    if not made:
        return
    yield heading("How it was made")
    yield paragraph("The same settings and seed on the same machine, with as many threads, give the same numbers.")
    for name, run in made:
        settings = {key: number(value) for key, value in run["settings"].items()}
        yield details(f"{name}: settings", facts(settings | dict(run.get("versions") or {})))


def _names(runs: Sequence[Run]) -> list[str]:
    """Returns one name a run: where two are called the same, the folders above them tell them apart."""
    given = [str(run.get("name") or run.get("path") or f"run {n + 1}") for n, run in enumerate(runs)]
    named = []
    for name, run in zip(given, runs, strict=True):
        is_unique = given.count(name) == 1
        named.append(name if is_unique else "/".join(Path(str(run.get("path"))).parts[-2:]))
    return [x if named.count(x) == 1 else f"{x} [{n + 1}]" for n, x in enumerate(named)]


def direction(metric: str) -> plots.Best:
    """Returns whether more or less of a metric is better, judged by its name; None if that is unknown."""
    last = metric.rsplit("/", 1)[-1].lower()
    if any(word in last for word in _LOWER):
        return "min"
    if any(word in last for word in _HIGHER):
        return "max"
    return None


def _is_share(metric: str) -> bool:
    return any(word in metric.rsplit("/", 1)[-1].lower() for word in _SHARES)


def _shown(metric: str, value: Any) -> str:
    if _is_share(metric) and isinstance(value, int | float):
        return percent(value)
    return number(value)


def _values(run: Run) -> dict[str, float]:
    """Returns the metrics of a run by name: the best value if it is known, else the last."""
    every = {**(run.get("metrics") or {}), **(run.get("best") or {})}
    return {k: v for k, v in every.items() if isinstance(v, int | float) and not isinstance(v, bool) and k != "step"}


def _metrics(runs: Sequence[Run]) -> list[str]:
    """Returns the metrics that can be judged: of dev, of other evaluations, of training; shares before losses."""
    keys = dict.fromkeys(key for run in runs for key in _values(run) if direction(key))
    return sorted(keys, key=lambda k: (_kind(k), direction(k) == "min"))


def _kind(metric: str) -> int:
    """Returns the place of a metric's kind: a model is judged by dev, not by what it learned from."""
    if metric.startswith("dev/"):
        return 0
    if "/" in metric and not metric.startswith("train/"):
        return 1
    return 2


def _winner(runs: Sequence[Run], metric: str) -> int | None:
    """Returns the index of the best run by a metric; None if fewer than two have it or several are equally good."""
    which = direction(metric)
    scored = [(_values(run)[metric], n) for n, run in enumerate(runs) if metric in _values(run)]
    scored = [(value, n) for value, n in scored if value == value]
    if which is None or len(scored) < 2:
        return None
    best = (max if which == "max" else min)(value for value, _ in scored)
    holders = [n for value, n in scored if value == best]
    if len(holders) != 1:
        return None
    return holders[0]


def _lead(runs: Sequence[Run], names: Sequence[str]) -> Markup:
    recipes = list(dict.fromkeys(str(run["recipe"]) for run in runs if run.get("recipe")))
    of = ""
    if recipes:
        of = f" of {', '.join(recipes)}"
    unfinished = [n for n, run in zip(names, runs, strict=True) if run.get("status") not in (None, "done", "finished")]
    parts: list[object] = [f"{count_noun(len(runs), 'run')}{of}"]
    judged = _metrics(runs)
    if judged and len(runs) == 1:
        parts += [": ", ", ".join(f"{m} {_shown(m, _values(runs[0])[m])}" for m in judged[:3])]
    for metric in judged[:1] if len(runs) > 1 else ():
        winner = _winner(runs, metric)
        if winner is None:
            parts.append(f". By {metric} none is best")
        else:
            parts += [f". Best by {metric}: ", strong(names[winner]), " with "]
            parts.append(strong(_shown(metric, _values(runs[winner])[metric])))
    if unfinished:
        parts.append(f". Not finished: {', '.join(unfinished)}")
    return join(*parts, ".")


def _results(runs: Sequence[Run], names: Sequence[str]) -> Markup:
    metrics = _metrics(runs)[:6]
    best = {metric: _winner(runs, metric) for metric in metrics}
    rows = []
    for n, (name, run) in enumerate(zip(names, runs, strict=True)):
        values = _values(run)
        cells: list[object] = [name, run.get("status"), run.get("mechanism"), run.get("parameters"), run.get("steps")]
        cells.append(duration(run.get("seconds")))
        for metric in metrics:
            shown = _shown(metric, values.get(metric))
            cells.append(strong(shown) if best[metric] == n else shown)
        rows.append(cells)
    first = best[metrics[0]] if metrics else None  # the best by what runs are judged by, and not by their speed
    caption = (
        "Best value of each run by each metric, the last where no best is known, and the median of speeds. Bold: the "
        "best of all runs."
    )
    columns = ["run", "status", "attention", "parameters", "steps", "time", *metrics]
    kept = [n for n in range(len(columns)) if any(row[n] not in (None, "–") for row in rows)]
    rows = [[row[n] for n in kept] for row in rows]
    return table(rows, [columns[n] for n in kept], caption, highlight=[] if first is None else [first])


def _differences(runs: Sequence[Run], names: Sequence[str]) -> Markup:
    keys = dict.fromkeys(key for run in runs for key in run.get("config_differences") or {})
    if not keys:
        return paragraph("The configs are the same.", quiet=True)
    rows = [[code(key), *(number((run.get("config_differences") or {}).get(key)) for run in runs)] for key in keys]
    return table(rows, ["key", *names], "Keys of the configs that are not the same in all runs.")


def _curves(runs: Sequence[Run], names: Sequence[str]) -> Iterable[Markup]:
    """Yields a figure for each quantity of training and dev, both in one, then for what else was logged."""
    drawn = {name: style(n) for n, name in enumerate(names)}
    for quantity in _quantities(runs)[:MOST_FIGURES]:
        best = direction(quantity)
        series = {name: _learned(run, quantity) for name, run in zip(names, runs, strict=True)}
        log = "loss" in quantity or "perplexity" in quantity
        kept = {name: _kept_step(run) for name, run in zip(names, runs, strict=True)}
        shares = _is_share(quantity)
        svg = learning_figure(series, y=quantity, log=log, best=best, styles=drawn, shares=shares, kept=kept)
        yield figure(svg, learning_caption(best), f"{quantity.capitalize()}, train and dev")
    for part, where in (("curve", "training"), ("evaluations", "evaluation")):
        keys = dict.fromkeys(key for run in runs for row in run.get(part) or [] for key in row if direction(key))
        rest = [key for key in keys if key != "loss" and not key.startswith(("dev/", "train/"))]
        for key in rest[:MOST_FIGURES]:
            yield _logged(runs, names, part, key, f"{key} ({where})")


def _logged(runs: Sequence[Run], names: Sequence[str], part: str, key: str, title: str) -> Markup:
    """Returns the figure of what was logged under one key."""
    series = {
        name: [(row["step"], row[key]) for row in run.get(part) or [] if row.get(key) is not None]
        for name, run in zip(names, runs, strict=True)
    }
    series = {name: points for name, points in series.items() if points}
    drawn = {name: style(n) for n, name in enumerate(names)}
    best = direction(key)
    marked = best if part == "evaluations" else None
    svg = plots.curves(series, y=key, log="loss" in key, mark_best=marked, styles=drawn, shares=_is_share(key))
    word = "The dot is the best evaluation, and its value stands beside the name." if marked else ""
    lower = "Lower is better." if best == "min" else "Higher is better."
    return figure(svg, f"{lower} {word}".strip(), title)


def _quantities(runs: Sequence[Run]) -> list[str]:
    """Returns what was measured of dev, shares first, and the loss of training: accuracy, loss, perplexity."""
    keys = [key for run in runs for row in run.get("evaluations") or [] for key in row if direction(key)]
    found = [key.removeprefix("dev/") for key in keys if key.startswith("dev/")]
    if any(run.get("curve") for run in runs):
        found.append("loss")
    return sorted(dict.fromkeys(found), key=lambda q: (direction(q) == "min", q != "loss"))


def _learned(run: Run, quantity: str) -> TrainAndDev:
    return train_and_dev(run.get("curve") or (), run.get("evaluations") or (), quantity)


def _best_steps(runs: Sequence[Run], names: Sequence[str]) -> Iterable[Markup]:
    """Yields the best step of each run by dev and by train, and since when it overfits."""
    measured = [q for q in _quantities(runs) if any(_learned(run, q).dev for run in runs)]
    if not measured:
        return
    quantity = measured[0]
    rows = []
    for name, run in zip(names, runs, strict=True):
        cells: list[object] = [name]
        curves = _learned(run, quantity)
        for points, kept in ((curves.dev, _kept_step(run)), (curves.train, None)):
            best = best_of(points, direction(quantity), kept)
            cells += ["–", "–"] if best is None else [_shown(quantity, best[1]), number(best[0])]
        rows.append([*cells, _overfits(_learned(run, "loss"))])
    columns = ["run", f"dev {quantity}", "at step", f"train {quantity}", "at step", "overfits"]
    caption = (
        "The best of dev (of equals the checkpoint that was kept) and of the training data (the first of equals). A "
        "run overfits from where its dev loss is lowest, if it has risen by more than 2% at the end while the training "
        "loss fell."
    )
    yield table(rows, columns, caption)


def _kept_step(run: Run) -> int | None:
    """Returns the step of the checkpoint that a run kept as its best; None where it measured nothing there."""
    return (run.get("best") or {}).get("step")


def _overfits(loss: TrainAndDev) -> str:
    """Returns since when a run overfits; – where its dev loss was not measured often enough to tell."""
    found = find_overfitting(loss)
    if found is not None:
        return f"from step {number(found.start)}"
    if min(len(loss.train), len(loss.dev)) < 2:
        return "–"
    return "no"
