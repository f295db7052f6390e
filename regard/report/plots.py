"""Pictures of plain numbers: curves, bars, calibration, coverage, histograms, with labels beside the lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

from regard.report import palette
from regard.report.canvas import SIZE, draw
from regard.report.markup import Markup, number, percent, shorten
from regard.report.palette import CARD, INK, MUTED, Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Point = tuple[float, float]
Bar = tuple[str, float, float, float, int]
Best = Literal["max", "min"] | None
_PLATE = {"facecolor": CARD.light, "edgecolor": "none", "alpha": 0.85, "pad": 1.0}  # covers lines behind text
_DASH: Any = (0, (3, 2))
_LINE = 1.3 * SIZE / 72  # inches that a line of text takes
_BELOW_AXES = 0.7  # inches of a figure below its axes, for their labels
MOST = 300  # points that are drawn of a curve; more could not be seen


def curves(
    series: Mapping[str, Sequence[Point]],
    x: str = "step",
    y: str = "loss",
    log: bool = False,
    mark_best: Best = None,
    styles: Mapping[str, Style] | None = None,
    shares: bool = False,
) -> Markup:
    """Returns a picture with a line for each series and its name at its end.

    `mark_best` puts a dot at each series' best point; `shares` writes y in percent. Curves of more than 300 points are
    thinned out by means of neighbours.
    """
    styles = styles or palette.styles(series)
    kept = {name: finite_points(points, log) for name, points in series.items()}
    kept = {name: points for name, points in kept.items() if points}
    # The point whose value is in the label: the best one if it is marked, else the last.
    labelled = {name: points[-1] for name, points in kept.items()}
    which = "at the end"
    if mark_best:
        labelled = {name: best_point(points, mark_best) for name, points in kept.items()}
        which = mark_best
    format_value: Callable[[float], str] = percent if shares else number
    labels = {name: f"{shorten(name)}\n{format_value(value)}" for name, (_, value) in labelled.items()}

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        if log:
            ax.set_yscale("log")
        for name, points in kept.items():
            colour, dash, _ = styles[name]
            thin = thin_out(points)
            marker = None
            if len(thin) == 1:
                marker = "o"  # a line through one point would not be seen
            ax.plot(*zip(*thin, strict=True), color=colour, linestyle=dash, marker=marker)
            if mark_best:
                ax.plot(*labelled[name], "o", color=colour, markersize=5.5, markeredgecolor=CARD.light)
        ax.set(xlabel=x, ylabel=y)
        if shares:
            ax.set_ylim(bottom=0)
            format_axis_percent(ax.yaxis)
        else:
            format_axis_numbers(ax.yaxis, log)
        whole = all(float(step).is_integer() for points in kept.values() for step, _ in points)
        format_axis_numbers(ax.xaxis, whole=whole)
        label_line_ends(ax, [(labels[name], points[-1], styles[name].colour) for name, points in kept.items()])

    ends = "; ".join(labels.values()).replace("\n", " ") or "nothing to show"
    return draw(paint, f"{y} against {x}, {which}: {ends}", height=height_for_labels(labels.values()))


def bars(
    rows: Sequence[Bar],
    baseline: Mapping[str, float] | None = None,
    x: str = "accuracy",
    styles: Mapping[str, Style] | None = None,
) -> Markup:
    """Returns a picture of shares as bars with their 95% intervals and n.

    `rows` are (name, value, low, high, n); each baseline is a dashed line with its name below the bars.
    """
    styles = styles or palette.styles(name for name, *_ in rows)
    baselines = sorted((baseline or {}).items(), key=lambda item: item[1])
    # At least 5%, so that the axis has a length if all bars are zero.
    top = max([high for _, _, _, high, _ in rows] + [value for _, value in baselines] + [0.05])

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        for place, row in enumerate(rows):
            _draw_bar(ax, row, place, top, styles[row[0]].colour)
        for level, (name, value) in enumerate(baselines):
            below = len(rows) - 0.42 + 0.36 * level
            ax.plot([value, value], [-0.4, below + 0.1], color=MUTED.light, linestyle=_DASH, linewidth=1.1)
            label = f"{shorten(name)} {percent(value)}"
            ax.text(value + 0.012 * top, below, label, va="center", color=MUTED.light, bbox=_PLATE)
        # Leaves room for the numbers right of the bars; the first bar is at the top.
        ax.set(xlim=(0, 1.35 * top), ylim=(len(rows) - 0.25 + 0.36 * len(baselines), -0.75), yticks=[], xlabel=x)
        ax.spines["left"].set_visible(False)
        ax.grid(False, axis="y")
        format_axis_percent(ax.xaxis)

    values = [f"{name} {percent(v)} ({percent(a)} to {percent(b)}, n = {n:,})" for name, v, a, b, n in rows]
    values += [f"{name} {percent(value)}" for name, value in baselines]
    return draw(paint, f"{x}: {'; '.join(values)}", height=0.75 + 0.62 * len(rows) + 0.24 * len(baselines))


def _draw_bar(ax: Axes, row: Bar, place: int, top: float, colour: str) -> None:
    """Draws one bar with its interval, its name above it and its numbers right of it."""
    name, value, low, high = row[:4]
    ax.barh(place, value, height=0.46, color=colour, alpha=0.85)
    ax.plot([low, high], [place, place], color=INK.light, linewidth=1.3, solid_capstyle="butt")
    ax.plot([low, high], [place, place], "|", color=INK.light, markersize=7)
    ax.text(0, place - 0.36, shorten(name), va="bottom", color=colour, fontweight="bold", bbox=_PLATE)
    ax.text(high + 0.02 * top, place, f"{percent(value)}, n = {row[4]:,}", va="center", bbox=_PLATE)


def calibration(
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    ece: Mapping[str, float] | None = None,
    styles: Mapping[str, Style] | None = None,
) -> Markup:
    """Returns a picture of accuracy against confidence: a point for each bin of answers, the larger the greater its n.

    Each bin has `confidence`, `accuracy` and `n`; empty ones are left out. On the diagonal, accuracy equals confidence.
    `ece` is the expected calibration error of each series.
    """
    styles = styles or palette.styles(rows)
    ece = ece or {}
    filled = {name: [row for row in bins if row["n"]] for name, bins in rows.items()}
    most = max((row["n"] for bins in filled.values() for row in bins), default=1)

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        ax.plot([0, 1], [0, 1], color=MUTED.light, linewidth=1.1, linestyle=_DASH)
        ax.text(0.03, 0.93, "right more often than it says", color=MUTED.light)
        ax.text(0.99, 0.03, "surer than it is right", color=MUTED.light, ha="right")
        ends = []
        for name, bins in filled.items():
            if not bins:
                continue
            colour, dash, marker = styles[name]
            xs = [row["confidence"] for row in bins]
            ys = [row["accuracy"] for row in bins]
            ax.plot(xs, ys, color=colour, linestyle=dash, linewidth=1.2)
            # The area of a marker grows with its bin; the smallest one is still visible.
            sizes = [14 + 150 * row["n"] / most for row in bins]
            ax.scatter(xs, ys, s=sizes, color=colour, marker=marker, alpha=0.8, edgecolors=CARD.light, linewidths=0.8)
            ends.append((shorten(name), (xs[-1], ys[-1]), colour))
        ax.set(xlim=(0, 1), ylim=(-0.03, 1.03), xlabel="stated confidence", ylabel="accuracy")
        format_axis_percent(ax.xaxis)
        format_axis_percent(ax.yaxis)
        label_line_ends(ax, ends)

    texts = []
    for name, bins in filled.items():
        points = (f"{percent(r['accuracy'], 0)} at {percent(r['confidence'], 0)} (n = {r['n']:,})" for r in bins)
        error = ""
        if name in ece:
            error = f", calibration error {percent(ece[name])}"
        texts.append(f"{name}{error}: {', '.join(points)}")
    return draw(paint, f"Accuracy against stated confidence. {'; '.join(texts)}", height=3.3)


def coverage(points: Mapping[str, Sequence[Point]], styles: Mapping[str, Style] | None = None) -> Markup:
    """Returns a picture of the accuracy of the most confident share of answers, against that share."""
    styles = styles or palette.styles(points)
    kept = {name: sorted(finite_points(line)) for name, line in points.items()}
    kept = {name: line for name, line in kept.items() if line}

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        ends = []
        for place, (name, line) in enumerate(kept.items()):
            colour, dash, _ = styles[name]
            ax.plot(*zip(*line, strict=True), color=colour, linestyle=dash)
            half = interpolate(line, 0.5)
            ax.plot(0.5, half, "o", color=colour, markersize=5.5, markeredgecolor=CARD.light)
            label: Any = {"xytext": (5, 5), "ha": "left", "color": colour, "fontweight": "bold"}
            if place % 2:  # alternate sides, so that labels of similar lines do not overlap
                label |= {"xytext": (-5, 5), "ha": "right"}
            ax.annotate(percent(half), (0.5, half), textcoords="offset points", **label)
            ends.append((shorten(name), line[-1], colour))
        highest = max((y for line in kept.values() for _, y in line), default=1.0)
        top = min(1.03, max(0.1, 1.2 * highest))
        ax.set(xlim=(0, 1), ylim=(0, top), xlabel="share of the questions that it answers", ylabel="accuracy of those")
        format_axis_percent(ax.xaxis)
        format_axis_percent(ax.yaxis)
        label_line_ends(ax, ends)

    texts = (
        f"{name} {percent(interpolate(line, 0.5))} on the surest half, {percent(line[-1][1])} on all"
        for name, line in kept.items()
    )
    return draw(paint, f"Accuracy against coverage: {'; '.join(texts)}", height=3.3)


def histogram(
    values: Mapping[str, Sequence[float]],
    x: str = "confidence",
    bins: int = 10,
    span: tuple[float, float] = (0.0, 1.0),
    styles: Mapping[str, Style] | None = None,
) -> Markup:
    """Returns a picture of the share of each series' values in each bin of the span, as outlined steps."""
    styles = styles or palette.styles(values)
    low, high = span
    edges = [low + (high - low) * n / bins for n in range(bins + 1)]
    heights = {name: _bin_shares(series, bins, span) for name, series in values.items()}

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        for name, shares in heights.items():
            colour, dash, _ = styles[name]
            ax.stairs(shares, edges, fill=True, color=colour, alpha=0.16)
            ax.stairs(shares, edges, color=colour, linestyle=dash, linewidth=1.6)
        room = 1.1 + 0.1 * len(heights)  # for the names above
        top = room * max((max(shares) for shares in heights.values()), default=1.0)
        ax.set(xlim=span, ylim=(0, top or 1.0), xlabel=x, ylabel="share of the answers")
        for place, (name, series) in enumerate(values.items()):
            where: Any = {"transform": ax.transAxes, "ha": "right", "va": "top"}
            text = f"{shorten(name)} (n = {len(series):,})"
            ax.text(0.98, 0.97 - 0.085 * place, text, color=styles[name].colour, fontweight="bold", **where)
        format_axis_percent(ax.yaxis)
        format_axis_percent(ax.xaxis)

    means = (f"{name}: n = {len(v):,}, mean {percent(sum(v) / len(v))}" for name, v in values.items() if v)
    return draw(paint, f"Distribution of {x}. {'; '.join(means)}")


def _bin_shares(values: Sequence[float], bins: int, span: tuple[float, float]) -> list[float]:
    """Returns for each bin its share of the values inside the span; the last bin includes its upper end."""
    low, high = span
    inside = [v for v in values if low <= v <= high]
    counts = [0] * bins
    for v in inside:
        counts[min(int((v - low) / (high - low) * bins), bins - 1)] += 1
    return [c / max(len(inside), 1) for c in counts]


def interpolate(line: Sequence[Point], x: float) -> float:
    """Returns the height at x of a line through points sorted by x; beyond its ends, that of the end."""
    before = [p for p in line if p[0] <= x]
    after = [p for p in line if p[0] > x]
    if not before:
        return after[0][1]
    if not after:
        return before[-1][1]
    left, left_height = before[-1]
    right, right_height = after[0]
    return left_height + (right_height - left_height) * (x - left) / (right - left)


def finite_points(points: Iterable[Sequence[float]], positive: bool = False) -> list[Point]:
    """Returns the finite points; runs that diverge have others. `positive`: only those above zero."""
    return [(p[0], p[1]) for p in points if math.isfinite(p[0]) and math.isfinite(p[1]) and (p[1] > 0 or not positive)]


def best_point(points: Sequence[Point], which: Best) -> Point:
    """Returns the lowest point for "min", else the highest."""
    if which == "min":
        return min(points, key=lambda p: p[1])
    return max(points, key=lambda p: p[1])


def thin_out(points: Sequence[Point]) -> list[Point]:
    """Returns at most `MOST` points: the first, the last, and means of runs of neighbours between."""
    if len(points) <= MOST:
        return list(points)
    inner = points[1:-1]
    runs = MOST - 2
    # Runs differ by at most one point in length.
    cuts = [round(n * len(inner) / runs) for n in range(runs + 1)]
    means = []
    for start, end in pairwise(cuts):
        part = inner[start:end]
        means.append((sum(p[0] for p in part) / len(part), sum(p[1] for p in part) / len(part)))
    return [points[0], *means, points[-1]]


def _wrap_label(name: str) -> str:
    """Returns a name wrapped into lines narrow enough to stand beside a plot."""
    return "\n".join(part for line in name.split("\n") for part in wrap(line, 14)[:3])


def height_for_labels(names: Iterable[str], least: float = 2.9) -> float:
    """Returns the height in inches of a figure with room for all these names beside its axes, at least `least`."""
    lines = sum(_wrap_label(name).count("\n") + 1 for name in names)
    return max(least, lines * _LINE + _BELOW_AXES)


def label_line_ends(ax: Axes, ends: Sequence[tuple[str, Point, str]], axes_height: float | None = None) -> None:
    """Writes names right of the axes at the height where their lines end, moved apart where they would overlap.

    `ends` are (name, last point, colour). `axes_height` is in inches; without it the figure has these axes alone.
    """
    ax.get_xlim()  # matplotlib computes the limits only when asked for them
    top = ax.get_ylim()[1]
    names = [_wrap_label(name) for name, _, _ in ends]
    if axes_height is None:
        axes_height = ax.get_figure(root=True).get_figheight() - _BELOW_AXES  # type: ignore[union-attr]
    line_height = _LINE / axes_height
    heights = [line_height * (name.count("\n") + 1) for name in names]
    # Heights are shares of the axes, so that names are moved by visible distances on a logarithmic axis, too.
    to_axes = ax.transData + ax.transAxes.inverted()
    places = [float(to_axes.transform((x, min(y, top)))[1]) for _, (x, y), _ in ends]
    order = sorted(range(len(ends)), key=places.__getitem__)
    floor = 0.0
    for n in order:  # each above the one below it …
        places[n] = max(places[n], floor + heights[n] / 2)
        floor = places[n] + heights[n] / 2
    roof = 1.08
    for n in reversed(order):  # … and those pushed out at the top move down again, and push others
        places[n] = min(places[n], roof - heights[n] / 2)
        roof = places[n] - heights[n] / 2
    for name, (_, _, colour), y in zip(names, ends, places, strict=True):
        where: Any = {"transform": ax.transAxes, "va": "center", "linespacing": 1.15}
        ax.text(1.02, y, name, color=colour, fontweight="bold", **where)


def format_axis_percent(axis: Axis) -> None:
    """Labels an axis of shares in percent."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}%"))


def format_axis_numbers(axis: Axis, log: bool = False, whole: bool = False) -> None:
    """Labels an axis with a few rounded numbers; on a logarithmic one, those that begin with 1, 2 or 5.

    `whole`: only whole numbers, as for steps and epochs.
    """
    from matplotlib.ticker import Formatter, LogLocator, MaxNLocator, NullLocator

    class Numbers(Formatter):
        def __call__(self, value: float, pos: int | None = None) -> str:
            return number(float(value))

        def format_ticks(self, values: Sequence[float]) -> list[str]:
            return format_marks([float(value) for value in values])

    if log:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
    else:
        axis.set_major_locator(MaxNLocator(5, integer=whole))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(Numbers())


def format_marks(values: Sequence[float]) -> list[str]:
    """Returns the marks of an axis as texts with enough digits to differ: 5.2741 and 5.2742, not 5.274 twice."""
    written = [number(value) for value in values]
    if len(set(written)) == len(written) or len(set(values)) < len(values):
        return written
    step = min(b - a for a, b in pairwise(sorted(values)))
    for digits in range(1, 16):
        if all(abs(round(value, digits) - value) < step / 100 for value in values):
            return [f"{value:,.{digits}f}" for value in values]
    return written


def format_axis_decades(axis: Axis) -> None:
    """Labels a logarithmic axis with powers of ten if it spans more than three, else also between them."""
    from matplotlib.ticker import LogLocator

    format_axis_numbers(axis, log=True)
    low, high = axis.get_view_interval()
    if high > 1e3 * low:
        axis.set_major_locator(LogLocator(numticks=7))
