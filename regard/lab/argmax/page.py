"""The page of the experiment `argmax`: can attention learn where to look?"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from regard.lab.argmax.results import ArgmaxResults, WayResults
from regard.lab.results import read_results
from regard.report.chart import Axis, Series, chart
from regard.report.experiment import build_page, share_axis
from regard.report.markup import Markup, join, percent, strong
from regard.report.page import Page, figure, figures, paragraph, table
from regard.report.palette import style

Column = Literal["accuracy", "loss", "dq", "dk"]


def argmax_page(document: Mapping[str, Any]) -> Page:
    """Returns the page of whether attention can learn where to look, from what results.json holds."""
    sections = [("Learning", _learning), ("What reaches q and k", _gradients), ("At the end", _ends)]
    results = read_results(ArgmaxResults, document)
    return build_page("Learning to select", _lead, sections, results, document)


def _lead(results: ArgmaxResults) -> Markup:
    """Returns the accuracy of each way."""
    words: list[object] = ["A small model has to learn where to look in order to answer. "]
    for n, way in enumerate(results.ways):
        name = way.name
        if n == 0:
            name = name.capitalize()
        else:
            words.append("; ")
        words += [f"{name}: ", strong(percent(_median(way.final))), " right"]
    words.append(f"; chance: {percent(results.chance)}. ")
    return join(*words, "Argmax passes no gradient to queries and keys, and so never learns to look.")


def _median(values: Sequence[float]) -> float:
    """Returns the median; for an even number of values, the mean of the two in the middle."""
    return statistics.median(values)


def _learning(results: ArgmaxResults) -> Iterable[Markup]:
    """Yields the curves of accuracy and loss."""
    config = results.config
    yield paragraph(
        f"Each row shows {config.tokens} of {config.symbols} symbols, each with one of {config.labels} random "
        "labels, and asks for the label of one of them. Queries and keys are learned tables of the symbols: the model "
        "has to find out that a symbol should look for itself."
    )
    svg = chart(_curves(results, "accuracy"), Axis("step"), share_axis("right answers"), values=True)
    loss = chart(_curves(results, "loss"), Axis("step"), Axis("loss", log=True), values=True)
    note = f"Medians and quartiles of {config.runs} trainings each."
    yield figures(figure(svg, f"Rows never seen. {note}", "Accuracy"), figure(loss, note, "Loss in training"))


def _curves(results: ArgmaxResults, column: Column) -> list[Series]:
    """Returns the medians of each way over the steps, with quartiles."""
    lines = []
    for n, way in enumerate(results.ways):
        quartiles = [(row.step, getattr(row, column)) for row in way.curve]
        points = [(step, median) for step, (_, median, _) in quartiles]
        band = [(first, third) for _, (first, _, third) in quartiles]
        lines.append(Series(way.name, points, style(n), band, marked=False))
    return lines


def _has_no_gradient(way: WayResults) -> bool:
    """Returns whether no gradient reaches q and k in any training, at any step that was looked at."""
    return all(row.dq[2] == 0 == row.dk[2] for row in way.curve)


def _gradients(results: ArgmaxResults) -> Iterable[Markup]:
    """Yields the norms of the gradients of q and k."""
    text = (
        "The norm of the loss's gradient with respect to the tables of queries and keys. Where the answers are right "
        "it fades, since nothing is left to learn."
    )
    still = [way.name for way in results.ways if _has_no_gradient(way)]
    if still:
        text += f" For {', '.join(still)} both are exactly zero at every step, and cannot be drawn here."
    yield paragraph(text)
    charts = []
    titles: dict[Column, str] = {"dq": "Queries", "dk": "Keys"}
    for column, title in titles.items():
        svg = chart(_curves(results, column), Axis("step"), Axis(f"‖{column}‖", log=True), values=True)
        charts.append(figure(svg, "Medians and quartiles.", title))
    yield figures(*charts)


def _ends(results: ArgmaxResults) -> Iterable[Markup]:
    """Yields what came out of the trainings."""
    rows = []
    for way in results.ways:
        cells = []
        for shares in (way.final, way.read_by_argmax, way.finds):
            cells.append(f"{percent(_median(shares))} ({percent(min(shares))} to {percent(max(shares))})")
        rows.append([way.name, *cells])
    columns = ["trained by", "right answers", "right answers, read by argmax", "looks at the asked symbol"]
    yield table(rows, columns, "Medians, and the least and the most of all trainings.")
    yield paragraph(
        "Argmax is better than chance only as far as its first, random tables happen to find the asked symbol, which "
        "training cannot change: it is right where it looks at that symbol, and by chance elsewhere. A model trained "
        "by softmax may be read by argmax afterwards: once it looks at one symbol only, the two are the same."
    )
