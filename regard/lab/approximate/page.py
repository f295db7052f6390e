"""The page of the experiment `approximate`: how far random features are from softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from regard.lab.approximate.results import ApproximateResults, ErrorRow, VarianceLaw
from regard.lab.results import read_results
from regard.report.chart import Axis, Series, chart
from regard.report.experiment import build_page, signed_number, with_interval
from regard.report.markup import Markup, join, number, percent, strong
from regard.report.page import Page, details, figure, figures, paragraph, table
from regard.report.palette import style
from regard.report.plots import Point

Part = Literal["kernel", "output"]
_INPUTS = {"1": "unit variance", "1/K": "variance 1/K"}


def approximate_page(document: Mapping[str, Any]) -> Page:
    """Returns the page of how far random features are from softmax, from what results.json holds."""
    sections = [
        ("Error of the output", _outputs),
        ("Error of the kernel", _kernels),
        ("How fast errors fall", _slopes),
        ("The law of the variance", _laws),
        ("Bias", _biases),
    ]
    results = read_results(ApproximateResults, document)
    return build_page("Random features against softmax", _lead, sections, results, document)


def _lead(results: ApproximateResults) -> Markup:
    """Returns the errors at the largest size, for both kinds of inputs."""
    K = max(results.widths)
    F = max(results.features)

    def errors(variance: str) -> str:
        rows = [row for row in results.errors if (row.variance, row.width, row.features) == (variance, K, F)]
        return " and ".join(f"{100 * row.output[1]:.3g}% ({row.mechanism})" for row in rows)

    return join(
        f"Random features estimate softmax attention in time linear in the length: "
        f"{' and '.join(results.mechanisms)}. With {F:,} features and heads {K} wide, outputs are off by ",
        strong(errors("1")),
        " of their length where q and k have unit variance, and by ",
        strong(errors("1/K")),
        " where they have variance 1/K (medians). Which of the two your inputs are like decides whether it works.",
    )


def _panels(
    results: ApproximateResults, part: Part, caption: Callable[[Sequence[Series], Sequence[float]], str]
) -> Markup:
    """Returns a chart for each mechanism and variance: errors over features, a line a width, predictions dashed."""
    charts = []
    for variance, inputs in _INPUTS.items():
        for mechanism in results.mechanisms:
            lines = []
            slopes = []
            for n, K in enumerate(results.widths):
                rows = results.errors_of(mechanism, variance, K)
                points = [(row.features, getattr(row, part)[1]) for row in rows]
                slope = getattr(results.slope_of(mechanism, variance, K), part)[0]
                predicted = _predicted(rows, points, part)
                lines.append(Series(f"K = {K}", points, style(n), fitted=_fit(points, slope), predicted=predicted))
                slopes.append(slope)
            x = Axis("features F", log=True, ticks=results.features)
            svg = chart(lines, x, Axis("median relative error", log=True))
            charts.append(figure(svg, caption(lines, slopes), f"{mechanism}, {inputs}"))
    return figures(*charts)


def _predicted(rows: Sequence[ErrorRow], points: Sequence[Point], part: Part) -> list[Point]:
    """Returns the predicted errors: those of the kernel by the law of the variance.

    Those of the output are a fall like 1/√F from the first measured point, since the law says nothing about their size.
    """
    if part == "kernel":
        return [(row.features, row.predicted) for row in rows]
    first, error = points[0]
    return [(F, error * math.sqrt(first / F)) for F, _ in points]


def _fit(points: Sequence[Point], slope: float) -> list[Point]:
    """Returns the line of that slope through the middle of the points, both axes being logarithmic."""
    x0, y0 = (sum(math.log(p[n]) for p in points) / len(points) for n in (0, 1))
    return [(p[0], math.exp(y0 + slope * (math.log(p[0]) - x0))) for p in points]


def _outputs(results: ApproximateResults) -> Iterable[Markup]:
    """Yields the errors of the output."""
    config = results.config
    yield paragraph(
        f"{config.tokens} queries attend to {config.tokens} keys; each point is the median over "
        f"{config.draws} draws of inputs and of directions, and over all queries, of ‖estimate − exact‖ / ‖exact‖. "
        "Medians, not means: where features estimate badly, the estimate is a ratio whose denominator comes close to "
        "zero, and its mean is decided by a few draws or does not exist. Dashed: a fall like 1/√F from the first point."
    )

    def caption(lines: Sequence[Series], slopes: Sequence[float]) -> str:
        ends = " and ".join(f"{signed_number(slopes[n])} at {lines[n].name}" for n in (0, -1))
        wider = "worse"
        if lines[-1].points[-1][1] < lines[0].points[-1][1]:
            wider = "better"
        return f"Wider heads are {wider}. Slopes: {ends}; small errors have −½."

    yield _panels(results, "output", caption)
    yield details("Quartiles", _quartile_table(results, "output"))


def _kernels(results: ApproximateResults) -> Iterable[Markup]:
    """Yields the errors of the kernel."""
    yield paragraph(
        "The error of a single entry exp(q·k/√K) of the kernel, relative to that entry. Dashed: what the law of the "
        "variance (below) predicts of the median, were errors normal. At unit variance that is about e^√K/√F."
    )

    def caption(lines: Sequence[Series], slopes: Sequence[float]) -> str:
        ratios = [p[1] / law[1] for line in lines for p, law in zip(line.points, line.predicted, strict=True)]
        if min(ratios) > 0.75:
            return f"The law holds: measured over predicted is {min(ratios):.2f} to {max(ratios):.2f}."
        return (
            "Below its law where that is large: most of the variance is in draws so rare that none was seen. Without "
            "them the estimate is near zero, which is an error of 1."
        )

    yield _panels(results, "kernel", caption)
    yield details("Quartiles", _quartile_table(results, "kernel"))


def _quartile_table(results: ApproximateResults, part: Part) -> Markup:
    """Returns the table of all errors; for the kernel with the predictions of the law."""
    rows: list[list[object]] = []
    for row in results.errors:
        cells: list[object] = [row.mechanism, _INPUTS[row.variance], row.width, row.features]
        cells += [f"{x:.3g}" for x in getattr(row, part)]
        if part == "kernel":
            cells.append(f"{row.predicted:.3g}")
        rows.append(cells)
    columns = ["mechanism", "inputs", "K", "F", "first quartile", "median", "third quartile"]
    if part == "kernel":
        columns.append("predicted median")
    return table(rows, columns, f"Relative errors of the {part}, over all draws.")


def _slopes(results: ApproximateResults) -> Iterable[Markup]:
    """Yields the slopes of the errors."""
    ends = (results.features[0], results.features[-1])
    yield paragraph(
        "The slope of log error against log F is −½ where errors are small. Each draw has its own slope; shown are "
        "their mean and its 95% interval."
    )
    rows: list[list[object]] = []
    for row in sorted(results.slopes, key=lambda row: (row.mechanism, row.variance)):
        errors = {e.features: e.output[1] for e in results.errors_of(row.mechanism, row.variance, row.width)}
        slopes = [f"{signed_number(middle)} ± {high - middle:.2f}" for middle, _, high in (row.kernel, row.output)]
        rows.append([row.mechanism, row.variance, row.width, *slopes, *(f"{errors[F]:.3g}" for F in ends)])
    columns = ["mechanism", "variance", "K", "slope, kernel", "slope, output"]
    columns += [f"output error, F = {F:,}" for F in ends]
    yield table(rows, columns, "Slopes, and the median error of the output at both ends.")


def _laws(results: ApproximateResults) -> Iterable[Markup]:
    """Yields the variance of an entry, measured and by its law."""
    yield paragraph(
        "With x = q·K^(−1/4) and y = k·K^(−1/4) the variance of an entry is known exactly. fourier: "
        "(1 − e^(−δ²))²/2F with δ² = ‖x−y‖², for the Gaussian kernel e^(−δ²/2). performer, relative: "
        "[e^s − 1 − (K−1)(1 − e^(−s)·₁F₁(K; K/2; s/2))]/F with s = ‖x+y‖²; e^s − 1 would be that of independent "
        "directions, the rest is saved by orthogonal ones."
    )
    charts = []
    rows: list[list[object]] = []
    for n, (name, law) in enumerate(results.laws.items()):
        symbol = "s"
        quantity = "relative variance"
        if name == "fourier":
            symbol = "δ²"
            quantity = "variance"
        x = Axis(symbol, log=True, ticks=[row.shift for row in law.rows])
        svg = chart([_law_series(law, n)], x, Axis(quantity, log=True))
        caption = f"F = {law.features}, K = {law.width}. Dashed: the law. Shaded: two standard errors."
        charts.append(figure(svg, caption, name))
        for row in law.rows:
            ratio = f"{row.measured / row.predicted:.3f} ± {row.error / row.predicted:.3f}"
            rows.append([name, f"{symbol} = {number(row.shift)}", row.predicted, row.measured, ratio])
    yield figures(*charts)
    redraws = results.config.redraws
    yield table(rows, ["mechanism", "", "predicted", "measured", "ratio"], f"Variance over {redraws:,} redraws.")
    yield paragraph(
        "The larger performer's s, the more of the variance sits in rare draws, and the more a measured variance falls "
        "short, its standard error too. At unit variance s is about 2√K: hence the medians above.",
        quiet=True,
    )


def _law_series(law: VarianceLaw, n: int) -> Series:
    """Returns the measured variances with two standard errors, and the law, in the n-th style."""
    return Series(
        "measured",
        [(row.shift, row.measured) for row in law.rows],
        style(n),
        band=[(row.measured - 2 * row.error, row.measured + 2 * row.error) for row in law.rows],
        predicted=[(row.shift, row.predicted) for row in law.rows],
    )


def _biases(results: ApproximateResults) -> Iterable[Markup]:
    """Yields the bias of the output beside its spread."""
    yield paragraph(
        "The mean of an entry over many draws is the right entry; the mean of the output is not quite the right "
        "output, because it is a ratio. Its bias falls about like 1/F, faster than the spread, which falls like 1/√F."
    )
    rows: list[list[object]] = []
    lines = []
    for n, found in enumerate(results.bias):
        for row in found.rows:
            kernel = with_interval([100 * x for x in row.kernel])
            shares = [percent(share, 2) for share in (row.spread, row.bias, row.noise)]
            rows.append([found.mechanism, row.features, kernel, *shares])
        spread = [(row.features, row.spread) for row in found.rows]
        lines += _falling_series(f"{found.mechanism}, spread", spread, 0.5, 2 * n)
        bias = [(row.features, row.bias) for row in found.rows]
        lines += _falling_series(f"{found.mechanism}, bias", bias, 1.0, 2 * n + 1)
    sizes = list(dict.fromkeys(row.features for found in results.bias for row in found.rows))
    svg = chart(lines, Axis("features F", log=True, ticks=sizes), Axis("relative to the exact output", log=True))
    yield figure(svg, "Dashed: 1/√F for the spread and 1/F for the bias, from the first point.", "Spread and bias")
    columns = ["mechanism", "F", "mean error of an entry, %", "spread of the output", "its bias", "known to within"]
    caption = f"{results.config.redraws:,} redraws, 16 keys, K = {results.bias[0].width}, inputs of variance 1/K."
    yield table(rows, columns, caption)


def _falling_series(name: str, points: Sequence[Point], power: float, n: int) -> list[Series]:
    """Returns a series of the points above zero, with F^(−power) through the first as a dashed line; [] for none."""
    points = [point for point in points if point[1] > 0]
    if not points:
        return []
    first, value = points[0]
    predicted = [(F, value * (first / F) ** power) for F, _ in points]
    return [Series(name, points, style(n), predicted=predicted)]
