"""The page of the experiment `recall`: accuracy against bytes of state, and published points beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from regard.lab.recall.published import PUBLISHED, SOURCE
from regard.lab.recall.results import RecallPoint, RecallResults
from regard.lab.results import read_results
from regard.report.chart import Axis, Series, chart
from regard.report.experiment import build_page
from regard.report.markup import Markup, count_noun, duration, join, number, percent, strong
from regard.report.page import Page, details, figure, figures, paragraph, table
from regard.report.palette import style, styles

STATE = Axis("kilobytes of state", log=True)
ACCURACY = Axis("right answers", span=(0, 1.02), shares=True)


def recall_page(document: Mapping[str, Any]) -> Page:
    """Returns the page of the content of results.json."""
    results = read_results(RecallResults, document)
    parts = [("Accuracy against state", _outcome), ("Size by size", _sizes), ("What is published", _published)]
    parts += [("The task", _task), ("Every training", _trainings)]
    return build_page("How much a state remembers", _lead, parts, results, document)


def _lead(results: RecallResults) -> Markup:
    best = max(results.points, key=lambda point: point.accuracy)
    worst = min(results.points, key=lambda point: point.accuracy)
    return join(
        f"{count_noun(len(results.points), 'model')}, {count_noun(results.seeds, 'seed')} each, learned to say which "
        "value was paired with which key, and were asked for all of them afterwards. ",
        strong(best.model.label),
        f", {best.model.width} wide, answers {percent(best.accuracy)} with {number(best.state)} bytes of state after "
        f"{number(results.longest)} tokens; ",
        strong(worst.model.label),
        f", {worst.model.width} wide, {percent(worst.accuracy)} with {number(worst.state)}. Guessing a value gives "
        f"{percent(results.chance)}.",
    )


def _lines(results: RecallResults) -> list[Series]:
    """Returns a line for each mechanism, from its smallest state to its largest."""
    labels = list(dict.fromkeys(point.model.label for point in results.points))
    drawn = styles(labels)
    lines = []
    for label in labels:
        own = sorted((p for p in results.points if p.model.label == label), key=lambda p: p.state)
        band = [(p.low, p.high) for p in own] if results.seeds > 1 else []
        lines.append(Series(label, [(p.state / 1000, p.accuracy) for p in own], drawn[label], band))
    return lines


def _published_lines() -> list[Series]:
    lines = []
    for n, curve in enumerate(PUBLISHED):
        lines.append(Series(curve.name, [(state / 1000, share) for state, share in curve.points], style(n)))
    return lines


def _outcome(results: RecallResults) -> Iterable[Markup]:
    yield paragraph(
        "The state is what a model keeps of a text to go on with it: keys and values for softmax, which grow with "
        "every token; a memory of fixed size for the others; and the last inputs of its short convolution. It is "
        f"counted in bytes, by the declared costs, after {number(results.longest)} tokens."
    )
    shaded = ""
    if results.seeds > 1:
        shaded = " Shaded: the lowest and the highest seed."
    yield figures(
        figure(chart(_lines(results), STATE, ACCURACY), f"Mean of the sizes of the test.{shaded}", "Measured here"),
        figure(
            chart(_published_lines(), STATE._replace(ticks=(5, 10, 30, 100, 500)), ACCURACY),
            f"{SOURCE}. Other models and sizes: see below.",
            "Published",
        ),
    )
    cells = [_cells(point, results) for point in sorted(results.points, key=lambda p: -p.accuracy)]
    columns = ["mechanism", "width", "short convolution", "bytes of state", "right answers", "learning rate"]
    caption = "Right answers: mean over the sizes of the test"
    if results.seeds > 1:
        caption += " and over seeds, with the lowest and the highest seed"
    yield table(cells, columns, f"{caption}. The learning rate is the best one on other examples.")


def _cells(point: RecallPoint, results: RecallResults) -> list[object]:
    spread = ""
    if results.seeds > 1:
        spread = f" ({percent(point.low)} to {percent(point.high)})"
    model = point.model
    convolution = str(model.convolution or "none")
    shown = f"{percent(point.accuracy)}{spread}"
    return [model.mechanism, model.width, convolution, number(point.state), shown, f"{point.rate:g}"]


def _sizes(results: RecallResults) -> Iterable[Markup]:
    yield paragraph(
        "Each size is tokens/pairs. With more pairs a memory of fixed size runs out of room, and answers that were "
        "stored over each other mix."
    )
    cells: list[list[object]] = []
    for point in sorted(results.points, key=lambda p: -p.accuracy):
        shares = [percent(point.by_size[name]) for name in results.sizes]
        cells.append([f"{point.model.label}, {point.model.width}", *shares])
    yield table(cells, ["model", *results.sizes], "Right answers by tokens/pairs of the test.")


def _published(results: RecallResults) -> Iterable[Markup]:
    yield paragraph(
        f"Source: {SOURCE}. Those models have a first layer that is a short convolution of width 3 times a linear "
        "map, and the mechanism in the second only; they are 64, 128 or 256 wide, learn from a mixture of 64 to 256 "
        "tokens with 4 to 64 pairs out of a vocabulary of 8,192, and are tested on up to 1,024 tokens with 256 pairs. "
        "The best of four learning rates of one seed is printed. Here all layers have the mechanism, and the "
        "convolution is part of each. So compare the order of mechanisms and how fast they rise, not single numbers; "
        "the variant “full” has their data."
    )
    cells = [[curve.name, number(state), f"{share:.3g}"] for curve in PUBLISHED for state, share in curve.points]
    yield table(cells, ["model", "bytes of state", "accuracy"], "Read off a picture, ±0.01.")


def _task(results: RecallResults) -> Iterable[Markup]:
    data = results.config["data"]
    filled = {"zeros": "are zeros", "random": "are random tokens"}[data["empty"]]
    yield paragraph(
        "A text begins with its pairs: key, value, key, value. Later each key comes once more, somewhere, and the "
        "model has to say its value; near places are likelier than far ones. Places where nothing is asked "
        f"{filled}. Keys are the lower half of a vocabulary of {number(data['vocabulary'])}, values the upper half."
    )
    cells = [
        [part, number(row["length"]), number(row["pairs"]), number(row["examples"])]
        for part in ("train", "test")
        for row in data[part]
    ]
    yield table(cells, ["", "tokens", "pairs", "examples"], "What was learned from, and what was asked.")


def _trainings(results: RecallResults) -> Iterable[Markup]:
    cells = [
        [row.run, number(row.parameters), row.steps, duration(row.seconds), percent(row.dev), percent(row.accuracy)]
        for row in results.trainings
    ]
    columns = ["folder", "parameters", "steps", "time", "dev", "test"]
    yield details("All", table(cells, columns, "A training ends early where it reaches the target on dev."))
