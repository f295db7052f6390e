"""The page of the experiment `approximate`: how far random features are from softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from regard.report.chart import Axis, Series, chart
from regard.report.experiment import Row, build_page, distinct_values, select_rows, signed_number, with_interval
from regard.report.markup import Markup, join, number, percent, strong
from regard.report.page import Page, details, figure, figures, paragraph, table
from regard.report.palette import style
from regard.report.plots import Point


def approximate_page(results: Row) -> Page:
    """How far random features are from softmax."""
    parts = [
        ("Error of the output", _outputs),
        ("Error of the kernel", _kernels),
        ("How fast errors fall", _slopes),
        ("The law of the variance", _laws),
        ("Bias", _biases),
    ]
    return build_page("Random features against softmax", _lead, parts, results)


_SIZE = {"1": "unit variance", "1/K": "variance 1/K"}


def _lead(results: Row) -> Markup:
    rows = results["errors"]
    K, F = max(distinct_values(rows, "width")), max(distinct_values(rows, "features"))
    names = distinct_values(rows, "mechanism")

    def off(variance: str) -> str:
        here = select_rows(rows, variance=variance, width=K, features=F)
        return " and ".join(f"{100 * row['output'][1]:.3g}% ({row['mechanism']})" for row in here)

    return join(
        f"Random features estimate softmax attention in time linear in the length: {' and '.join(names)}. With {F:,} "
        f"features and heads {K} wide, outputs are off by ",
        strong(off("1")),
        " of their length where q and k have unit variance, and by ",
        strong(off("1/K")),
        " where they have variance 1/K (medians). Which of the two your inputs are like decides whether it works.",
    )


def _panels(results: Row, key: str, caption: Callable[[Sequence[Series], Sequence[float]], str]) -> Markup:
    """One chart a mechanism and variance: errors over features, a line a width; dashed what they should be.

    The law gives the kernel's errors. Of the output it says only how they should fall, from where they start.
    """
    rows = results["errors"]
    widths, sizes = distinct_values(rows, "width"), distinct_values(rows, "features")
    drawn = []
    for variance, words in _SIZE.items():
        for name in distinct_values(rows, "mechanism"):
            lines, slopes = [], []
            for n, K in enumerate(widths):
                here = select_rows(rows, mechanism=name, variance=variance, width=K)
                points = [(row["features"], row[key][1]) for row in here]
                slopes.append(select_rows(results["slopes"], mechanism=name, variance=variance, width=K)[0][key][0])
                if key == "kernel":
                    law = [(row["features"], row["predicted"]) for row in here]
                else:
                    law = [(F, points[0][1] * math.sqrt(points[0][0] / F)) for F, _ in points]
                lines.append(Series(f"K = {K}", points, style(n), fitted=_fit(points, slopes[-1]), predicted=law))
            at = Axis("features F", log=True, ticks=sizes)
            svg = chart(lines, at, Axis("median relative error", log=True))
            drawn.append(figure(svg, caption(lines, slopes), f"{name}, {words}"))
    return figures(*drawn)


def _fit(points: Sequence[Point], slope: float) -> list[Point]:
    """The line of that slope through the middle of the points, both axes being logarithmic."""
    x0, y0 = (sum(math.log(p[n]) for p in points) / len(points) for n in (0, 1))
    return [(p[0], math.exp(y0 + slope * (math.log(p[0]) - x0))) for p in points]


def _outputs(results: Row) -> Iterable[Markup]:
    config = results["config"]
    yield paragraph(
        f"{config['tokens']} queries attend to {config['tokens']} keys; each point is the median over "
        f"{config['draws']} draws of inputs and of directions, and over all queries, of ‖estimate − exact‖ / ‖exact‖. "
        "Medians, not means: where features estimate badly, the estimate is a ratio whose denominator comes close to "
        "zero, and its mean is decided by a few draws or does not exist. Dashed: a fall like 1/√F from the first point."
    )

    def caption(lines: Sequence[Series], slopes: Sequence[float]) -> str:
        ends = " and ".join(f"{signed_number(slopes[n])} at {lines[n].name}" for n in (0, -1))
        first, last = lines[0].points[-1][1], lines[-1].points[-1][1]
        return f"Wider heads are {'better' if last < first else 'worse'}. Slopes: {ends}; small errors have −½."

    yield _panels(results, "output", caption)
    yield details("Quartiles", _quartiles(results, "output"))


def _kernels(results: Row) -> Iterable[Markup]:
    yield paragraph(
        "The error of a single entry exp(q·k/√K) of the kernel, relative to that entry. Dashed: what the law of the "
        "variance (below) predicts of the median, were errors normal. At unit variance that is about e^√K/√F."
    )

    def caption(lines: Sequence[Series], slopes: Sequence[float]) -> str:
        ratios = [p[1] / law[1] for one in lines for p, law in zip(one.points, one.predicted, strict=True)]
        if min(ratios) > 0.75:
            return f"The law holds: measured over predicted is {min(ratios):.2f} to {max(ratios):.2f}."
        return (
            "Below its law where that is large: most of the variance is in draws so rare that none was seen. Without "
            "them the estimate is near zero, which is an error of 1."
        )

    yield _panels(results, "kernel", caption)
    yield details("Quartiles", _quartiles(results, "kernel"))


def _quartiles(results: Row, key: str) -> Markup:
    rows = []
    for row in results["errors"]:
        place = [row["mechanism"], _SIZE[row["variance"]], row["width"], row["features"]]
        rows.append([*place, *(f"{x:.3g}" for x in row[key]), f"{row['predicted']:.3g}"][: 8 if key == "kernel" else 7])
    columns = ["mechanism", "inputs", "K", "F", "first quartile", "median", "third quartile", "predicted median"]
    caption = f"Relative errors of the {key}, over all draws."
    return table(rows, columns[: 8 if key == "kernel" else 7], caption)


def _slopes(results: Row) -> Iterable[Markup]:
    sizes = distinct_values(results["errors"], "features")
    yield paragraph(
        "The slope of log error against log F is −½ where errors are small. Each draw has its own slope; shown are "
        "their mean and its 95% interval."
    )
    rows = []
    for row in sorted(results["slopes"], key=lambda row: (row["mechanism"], row["variance"])):
        place = {key: row[key] for key in ("mechanism", "variance", "width")}
        ends = [select_rows(results["errors"], **place, features=F)[0]["output"][1] for F in (sizes[0], sizes[-1])]
        slopes = [
            f"{signed_number(middle)} ± {high - middle:.2f}" for middle, _, high in (row["kernel"], row["output"])
        ]
        rows.append([row["mechanism"], row["variance"], row["width"], *slopes, *(f"{x:.3g}" for x in ends)])
    columns = ["mechanism", "variance", "K", "slope, kernel", "slope, output"]
    columns += [f"output error, F = {F:,}" for F in (sizes[0], sizes[-1])]
    yield table(rows, columns, "Slopes, and the median error of the output at both ends.")


def _laws(results: Row) -> Iterable[Markup]:
    yield paragraph(
        "With x = q·K^(−1/4) and y = k·K^(−1/4) the variance of an entry is known exactly. fourier: "
        "(1 − e^(−δ²))²/2F with δ² = ‖x−y‖², for the Gaussian kernel e^(−δ²/2). performer, relative: "
        "[e^s − 1 − (K−1)(1 − e^(−s)·₁F₁(K; K/2; s/2))]/F with s = ‖x+y‖²; e^s − 1 would be that of independent "
        "directions, the rest is saved by orthogonal ones."
    )
    drawn, rows = [], []
    for n, (name, law) in enumerate(results["laws"].items()):
        s = "δ²" if name == "fourier" else "s"
        line = Series(
            "measured", [(r["shift"], r["measured"]) for r in law["rows"]], style(n),
            band=[(r["measured"] - 2 * r["error"], r["measured"] + 2 * r["error"]) for r in law["rows"]],
            predicted=[(r["shift"], r["predicted"]) for r in law["rows"]],
        )  # fmt: skip
        of = "variance" if name == "fourier" else "relative variance"
        svg = chart([line], Axis(s, log=True, ticks=[r["shift"] for r in law["rows"]]), Axis(of, log=True))
        caption = f"F = {law['features']}, K = {law['width']}. Dashed: the law. Shaded: two standard errors."
        drawn.append(figure(svg, caption, name))
        for r in law["rows"]:
            ratio = f"{r['measured'] / r['predicted']:.3f} ± {r['error'] / r['predicted']:.3f}"
            rows.append([name, f"{s} = {number(r['shift'])}", r["predicted"], r["measured"], ratio])
    yield figures(*drawn)
    redraws = results["config"]["redraws"]
    yield table(rows, ["mechanism", "", "predicted", "measured", "ratio"], f"Variance over {redraws:,} redraws.")
    yield paragraph(
        "The larger performer's s, the more of the variance sits in rare draws, and the more a measured variance falls "
        "short, its standard error too. At unit variance s is about 2√K: hence the medians above.",
        quiet=True,
    )


def _biases(results: Row) -> Iterable[Markup]:
    yield paragraph(
        "The mean of an entry over many draws is the right entry; the mean of the output is not quite the right "
        "output, because it is a ratio. Its bias falls about like 1/F, faster than the spread, which falls like 1/√F."
    )
    rows, lines = [], []
    for n, found in enumerate(results["bias"]):
        name = found["mechanism"]
        for r in found["rows"]:
            cells = [percent(r[key], 2) for key in ("spread", "bias", "noise")]
            rows.append([name, r["features"], with_interval([100 * x for x in r["kernel"]]), *cells])
        for m, key in enumerate(("spread", "bias")):
            points = [(r["features"], r[key]) for r in found["rows"] if r[key] > 0]
            if points:
                law = [(F, points[0][1] * (points[0][0] / F) ** (0.5 + 0.5 * m)) for F, _ in points]
                lines.append(Series(f"{name}, {key}", points, style(2 * n + m), predicted=law))
    sizes = distinct_values((r for found in results["bias"] for r in found["rows"]), "features")
    svg = chart(lines, Axis("features F", log=True, ticks=sizes), Axis("relative to the exact output", log=True))
    yield figure(svg, "Dashed: 1/√F for the spread and 1/F for the bias, from the first point.", "Spread and bias")
    columns = ["mechanism", "F", "mean error of an entry, %", "spread of the output", "its bias", "known to within"]
    K = results["bias"][0]["width"]
    yield table(rows, columns, f"{results['config']['redraws']:,} redraws, 16 keys, K = {K}, inputs of variance 1/K.")
