"""The page of the experiment `scale`: why scores are divided by √d."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from regard.lab.results import read_results
from regard.lab.scale.results import ProductRow, SaturationRow, ScaleResults
from regard.report.chart import Axis, Series, chart
from regard.report.experiment import build_page, share_axis, with_interval
from regard.report.heat import heads_grid
from regard.report.markup import Markup, join, number, percent, strong
from regard.report.page import Page, details, figure, figures, paragraph, table
from regard.report.palette import style


class _Measure(NamedTuple):
    """A column of the saturation's rows, and how it is shown."""

    column: str
    title: str
    axis: Axis
    caption: str


_MEASURES = (
    _Measure("largest", "Largest weight", share_axis("largest weight"), "Undivided, one key takes all."),
    _Measure("entropy", "Entropy", share_axis("entropy / log N"), "100% is the same weight for all keys."),
    _Measure("jacobian", "Jacobian of softmax", Axis("‖diag(p) − ppᵀ‖", log=True), "What a gradient has to pass."),
    _Measure("gradient", "Gradient of the query", Axis("‖dp/dq‖", log=True), "How much the weights move with q."),
)


def scale_page(document: Mapping[str, Any]) -> Page:
    """Returns the page of why scores are divided by √d, from what results.json holds."""
    sections = [
        ("Products grow with the width", _products),
        ("Saturation", _saturation),
        ("Who is looked at?", _sums),
        ("Queries that are their own keys", _identity),
    ]
    results = read_results(ScaleResults, document)
    return build_page("Why divide by √d?", _lead, sections, results, document)


def _lead(results: ScaleResults) -> Markup:
    """Returns what happens at the largest width with and without 1/√d."""
    d = max(row.width for row in results.saturation)
    rows = {row.scaled: row for row in results.saturation if row.width == d}
    plain = rows[False]
    scaled = rows[True]
    ratio = scaled.gradient[1] / max(plain.gradient[1], 1e-300)
    return join(
        f"The variance of q·k grows with the width d. Undivided, softmax over {results.config.tokens} random "
        f"keys {d:,} wide gives one of them ",
        strong(percent(plain.largest[1], 2)),
        " of the weight, and the weights' gradient with respect to the query is ",
        strong(f"{number(ratio)} times"),
        " smaller than with 1/√d. There the largest weight is ",
        strong(percent(scaled.largest[1])),
        ", and about that at any width (medians).",
    )


def _distinct_widths(rows: Iterable[ProductRow] | Iterable[SaturationRow]) -> list[int]:
    """Returns the widths of rows, each once."""
    return list(dict.fromkeys(row.width for row in rows))


def _products(results: ScaleResults) -> Iterable[Markup]:
    """Yields mean and variance of q·k, measured and predicted."""
    yield paragraph(
        "For q, k ~ N(μ, σ²I): E[q·k] = ‖μ‖² and Var[q·k] = dσ⁴ + 2σ²‖μ‖². Both grow like d where all μᵢ are alike."
    )
    rows = results.products
    caption = "Dashed: predicted. Points: measured; their intervals are smaller than the points."
    log_width = Axis("width d", log=True, ticks=_distinct_widths(rows))
    variance = chart(_product_series(rows, "variance"), log_width, Axis("variance of q·k", log=True))
    mean = chart(_product_series(rows, "mean"), Axis("width d"), Axis("mean of q·k"))
    yield figures(figure(variance, caption, "Variance"), figure(mean, caption, "Mean"))
    cells = []
    for row in rows:
        means = [with_interval(row.measured_mean, 2), row.predicted_mean]
        variances = [with_interval(row.measured_variance, 1), row.predicted_variance]
        cells.append([row.width, number(row.mean), *means, *variances])
    columns = ["d", "μᵢ", "mean of q·k", "predicted", "variance of q·k", "predicted"]
    yield table(cells, columns, f"{results.config.pairs:,} pairs each, with 95% intervals.")


def _product_series(rows: Sequence[ProductRow], moment: Literal["mean", "variance"]) -> list[Series]:
    """Returns the mean or the variance of q·k over the width, a line for each μ."""
    lines = []
    for n, mean in enumerate(dict.fromkeys(row.mean for row in rows)):
        own = [row for row in rows if row.mean == mean]
        measured = [(row.width, getattr(row, f"measured_{moment}")) for row in own]
        points = [(width, middle) for width, (middle, _, _) in measured]
        band = [(low, high) for _, (_, low, high) in measured]
        law = [(row.width, getattr(row, f"predicted_{moment}")) for row in own]
        lines.append(Series(f"μᵢ = {number(mean)}", points, style(n), band, predicted=law))
    return lines


def _saturation(results: ScaleResults) -> Iterable[Markup]:
    """Yields how softmax saturates without 1/√d."""
    rows = results.saturation
    yield paragraph(
        f"One query, {results.config.tokens} keys, all components standard normal. Gradients reach q and k through "
        "softmax's Jacobian diag(p) − ppᵀ: where one weight is nearly one, it is nearly zero. Without 1/√d it is "
        "multiplied by larger keys, which at first makes up for that, and at large widths no longer does."
    )
    x = Axis("width d", log=True, ticks=_distinct_widths(rows))
    charts = []
    for measure in _MEASURES:
        svg = chart(_saturation_series(rows, measure.column), x, measure.axis, values=True)
        charts.append(figure(svg, measure.caption, measure.title))
    yield figures(*charts)
    draws = results.config.draws
    yield paragraph(f"Medians of {draws:,} draws; shaded: from the first to the third quartile.", quiet=True)
    cells: list[list[object]] = []
    for row in rows:
        quartiles = [getattr(row, measure.column) for measure in _MEASURES]
        texts = [f"{median:.3g} ({first:.2g} to {third:.2g})" for first, median, third in quartiles]
        cells.append([row.width, "with" if row.scaled else "without", *texts])
    columns = ["d", "1/√d", *(measure.axis.name for measure in _MEASURES)]
    yield details("In numbers", table(cells, columns, "Medians and quartiles."))


def _saturation_series(rows: Sequence[SaturationRow], column: str) -> list[Series]:
    """Returns one column over the width, with 1/√d and without."""
    lines = []
    for n, (scaled, name) in enumerate(((True, "with 1/√d"), (False, "without"))):
        quartiles = [(row.width, getattr(row, column)) for row in rows if row.scaled == scaled]
        points = [(width, median) for width, (_, median, _) in quartiles]
        band = [(first, third) for _, (first, _, third) in quartiles]
        lines.append(Series(name, points, style(n), band))
    return lines


def _sums(results: ScaleResults) -> Iterable[Markup]:
    """Yields what keys get from all queries."""
    rows = results.sums
    off = max(row.given_off_one for row in rows)
    yield paragraph(
        f"What a query gives sums to one over the keys (here to within {off:.0e}). What a key gets, summed over "
        f"{results.config.tokens} queries, does not: longer keys get more, the more so the narrower the heads, whose "
        "keys differ more in length."
    )
    shown = rows
    if len(rows) > 2:
        shown = [rows[0], rows[len(rows) // 2], rows[-1]]
    lines = [
        Series(f"K = {row.width}", list(enumerate(row.sorted, 1)), style(n), marked=False)
        for n, row in enumerate(shown)
    ]
    svg = chart(lines, Axis("keys, from the least to the most attended"), Axis("sum over queries", span=(0, None)))
    yield figure(svg, "Means over draws. Were all keys alike, the line would be level at 1.", "What each key gets")
    cells = []
    for row in rows:
        ends = [with_interval(row.least), with_interval(row.most)]
        cells.append([row.width, *ends, with_interval(row.std, 3), f"{row.lengths:.2f}"])
    columns = ["K", "least attended key", "most attended key", "std over keys", "correlation with ‖k‖²"]
    yield table(cells, columns, "Sums over queries: means over draws with 95% intervals.")


def _identity(results: ScaleResults) -> Iterable[Markup]:
    """Yields the weights where queries are the keys."""
    rows = results.identity
    yield paragraph(
        "Where queries are the keys, a token's score with itself, ‖x‖²/√K ≈ √K, stands out from the others', about "
        "N(0, 1): the wider, the nearer the weights are to the identity. The prediction takes the others' sum at its "
        "mean: e^(r²/√K) / (e^(r²/√K) + (N−1)·e^(r²/2K)), averaged over r² ~ χ²(K)."
    )
    points = [(row.width, row.diagonal[0]) for row in rows]
    predicted = [(row.width, row.predicted) for row in rows]
    line = Series("mean diagonal", points, style(0), predicted=predicted)
    x = Axis("width K", log=True, ticks=[row.width for row in rows])
    svg = chart([line], x, share_axis("mean diagonal"))
    yield figure(svg, f"{results.config.tokens} tokens. Dashed: predicted.", "A token's weight on itself")
    cells = [[row.width, with_interval(row.diagonal, 3), f"{row.predicted:.3f}"] for row in rows]
    yield table(cells, ["K", "mean diagonal", "predicted"], f"{results.config.draws:,} draws, with 95% intervals.")
    maps = [picture.weights for picture in results.pictures]
    titles = [f"K = {picture.width}" for picture in results.pictures]
    svg = heads_grid(maps, ["·"] * len(maps[0]), titles, scale="all", across=3)
    yield figure(svg, "One draw each. Rows are queries, columns keys.", "Softmax of Q = K")
