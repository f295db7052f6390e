"""Plain numbers → pictures: curves, bars, calibration, coverage, histograms. Labels stand beside what they name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

from regard.report.canvas import SIZE, draw
from regard.report.markup import Markup, number, percent, short
from regard.report.palette import CARD, INK, MUTED, Style, styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Point = tuple[float, float]
Best = Literal["max", "min"] | None
_PLATE = {"facecolor": CARD.light, "edgecolor": "none", "alpha": 0.85, "pad": 1.0}  # keeps lines out of text
MOST = 300  # points of a curve that are drawn: more would be finer than its line


def curves(
    series: Mapping[str, Sequence[Point]],
    x: str = "step",
    y: str = "loss",
    log: bool = False,
    mark_best: Best = None,
    drawn: Mapping[str, Style] | None = None,
    shares: bool = False,
) -> Markup:
    """A line a series, its name at its end. `mark_best` puts a dot at each series' best point; `shares`: y in percent.

    A curve of more than 300 points is drawn through the means of that many runs of neighbours.
    """
    drawn = drawn or styles(series)
    kept = {name: _finite(points, log) for name, points in series.items()}
    kept = {name: points for name, points in kept.items() if points}
    best = {name: _best(points, mark_best) for name, points in kept.items()}

    def label(name: str) -> str:
        value = best[name][1] if mark_best else kept[name][-1][1]
        return f"{short(name)}\n{percent(value) if shares else number(value)}"

    def paint(made: Figure) -> None:
        ax = made.add_subplot()
        if log:
            ax.set_yscale("log")
        for name, points in kept.items():
            colour, dash, _ = drawn[name]
            thin = _thinned(points)
            ax.plot(*zip(*thin, strict=True), color=colour, linestyle=dash, marker="o" if len(thin) == 1 else None)
            if mark_best:
                ax.plot(*best[name], "o", color=colour, markersize=5.5, markeredgecolor=CARD.light)
        ax.set(xlabel=x, ylabel=y)
        if shares:
            ax.set_ylim(bottom=0)
            in_percent(ax, "y")
        else:
            in_numbers(ax.yaxis, log)
        in_numbers(ax.xaxis)
        ends = [(label(name), kept[name][-1], drawn[name].colour) for name in kept]
        at_ends(ax, ends)

    ends = "; ".join(map(label, kept)).replace("\n", " ") or "nothing to show"
    return draw(paint, f"{y} against {x}{', ' + str(mark_best) if mark_best else ', at the end'}: {ends}")


def bars(
    rows: Sequence[tuple[str, float, float, float, int]],
    baseline: Mapping[str, float] | None = None,
    x: str = "accuracy",
    drawn: Mapping[str, Style] | None = None,
) -> Markup:
    """Shares as bars with their 95% intervals and n: rows of (name, value, low, high, n); baselines as dashed lines."""
    drawn = drawn or styles(name for name, *_ in rows)
    lines = sorted((baseline or {}).items(), key=lambda item: item[1])
    top = max([high for _, _, _, high, _ in rows] + [value for _, value in lines] + [0.05])

    def paint(made: Figure) -> None:
        ax = made.add_subplot()
        for place, (name, value, low, high, n) in enumerate(rows):
            colour = drawn[name].colour
            ax.barh(place, value, height=0.46, color=colour, alpha=0.85)
            ax.plot([low, high], [place, place], color=INK.light, linewidth=1.3, solid_capstyle="butt")
            ax.plot([low, high], [place, place], "|", color=INK.light, markersize=7)
            ax.text(0, place - 0.36, short(name), va="bottom", color=colour, fontweight="bold", bbox=_PLATE)
            ax.text(high + 0.02 * top, place, f"{percent(value)}, n = {n:,}", va="center", bbox=_PLATE)
        for level, (name, value) in enumerate(lines):
            below = len(rows) - 0.42 + 0.36 * level
            ax.plot([value, value], [-0.4, below + 0.1], color=MUTED.light, linestyle=(0, (3, 2)), linewidth=1.1)
            ax.text(value + 0.012 * top, below, f"{short(name)} {percent(value)}", va="center", color=MUTED.light)
        ax.set(xlim=(0, 1.35 * top), ylim=(len(rows) - 0.25 + 0.36 * len(lines), -0.75), yticks=[], xlabel=x)
        ax.spines["left"].set_visible(False)
        ax.grid(False, axis="y")
        in_percent(ax, "x")

    said = [f"{name} {percent(v)} ({percent(a)} to {percent(b)}, n = {n:,})" for name, v, a, b, n in rows]
    said += [f"{name} {percent(value)}" for name, value in lines]
    return draw(paint, f"{x}: {'; '.join(said)}", height=0.75 + 0.62 * len(rows) + 0.24 * len(lines))


def calibration(
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    ece: Mapping[str, float] | None = None,
    drawn: Mapping[str, Style] | None = None,
) -> Markup:
    """Accuracy against stated confidence, one point a bin of answers, as large as the bin; the diagonal is honest."""
    drawn = drawn or styles(rows)
    most = max((row["n"] for bins in rows.values() for row in bins), default=1)

    def paint(made: Figure) -> None:
        ax = made.add_subplot()
        ax.plot([0, 1], [0, 1], color=MUTED.light, linewidth=1.1, linestyle=(0, (3, 2)))
        ax.text(0.03, 0.93, "right more often than it says", color=MUTED.light)
        ax.text(0.99, 0.03, "surer than it is right", color=MUTED.light, ha="right")
        ends = []
        for name, bins in rows.items():
            bins = [row for row in bins if row["n"]]
            if not bins:
                continue
            colour, dash, marker = drawn[name]
            xs, ys = [row["confidence"] for row in bins], [row["accuracy"] for row in bins]
            ax.plot(xs, ys, color=colour, linestyle=dash, linewidth=1.2)
            sizes = [14 + 150 * row["n"] / most for row in bins]
            ax.scatter(xs, ys, s=sizes, color=colour, marker=marker, alpha=0.8, edgecolors=CARD.light, linewidths=0.8)
            ends.append((short(name), (xs[-1], ys[-1]), colour))
        ax.set(xlim=(0, 1), ylim=(-0.03, 1.03), xlabel="stated confidence", ylabel="accuracy")
        in_percent(ax, "x")
        in_percent(ax, "y")
        at_ends(ax, ends)

    said = []
    for name, bins in rows.items():
        full = [row for row in bins if row["n"]]
        points = (f"{percent(r['accuracy'], 0)} at {percent(r['confidence'], 0)} (n = {r['n']:,})" for r in full)
        error = f", calibration error {percent(ece[name])}" if ece and name in ece else ""
        said.append(f"{name}{error}: {', '.join(points)}")
    return draw(paint, f"Accuracy against stated confidence. {'; '.join(said)}", height=3.3)


def coverage(points: Mapping[str, Sequence[Point]], drawn: Mapping[str, Style] | None = None) -> Markup:
    """Accuracy of the surest share of the answers, against that share."""
    drawn = drawn or styles(points)
    kept = {name: sorted(_finite(line)) for name, line in points.items()}
    kept = {name: line for name, line in kept.items() if line}

    def paint(made: Figure) -> None:
        ax = made.add_subplot()
        ends = []
        for name, line in kept.items():
            colour, dash, _ = drawn[name]
            ax.plot(*zip(*line, strict=True), color=colour, linestyle=dash)
            half = at(line, 0.5)
            ax.plot(0.5, half, "o", color=colour, markersize=5.5, markeredgecolor=CARD.light)
            ax.annotate(percent(half), (0.5, half), (5, 5), textcoords="offset points", color=colour, fontweight="bold")
            ends.append((short(name), line[-1], colour))
        ax.set(xlim=(0, 1), ylim=(0, 1.03), xlabel="share of the questions that it answers", ylabel="accuracy of those")
        in_percent(ax, "x")
        in_percent(ax, "y")
        at_ends(ax, ends)

    said = (
        f"{name} {percent(at(line, 0.5))} on the surest half, {percent(line[-1][1])} on all"
        for name, line in kept.items()
    )
    return draw(paint, f"Accuracy against coverage: {'; '.join(said)}", height=3.3)


def histogram(
    values: Mapping[str, Sequence[float]],
    x: str = "confidence",
    bins: int = 10,
    span: tuple[float, float] = (0.0, 1.0),
    drawn: Mapping[str, Style] | None = None,
) -> Markup:
    """The share of each series' values in each bin of the span, as outlined steps."""
    drawn = drawn or styles(values)
    low, high = span
    edges = [low + (high - low) * n / bins for n in range(bins + 1)]
    heights = {}
    for name, given in values.items():
        inside = [v for v in given if low <= v <= high]
        counts = [0] * bins
        for v in inside:
            counts[min(int((v - low) / (high - low) * bins), bins - 1)] += 1
        heights[name] = [c / max(len(inside), 1) for c in counts]

    def paint(made: Figure) -> None:
        ax = made.add_subplot()
        for name, shares in heights.items():
            colour, dash, _ = drawn[name]
            ax.stairs(shares, edges, fill=True, color=colour, alpha=0.16)
            ax.stairs(shares, edges, color=colour, linestyle=dash, linewidth=1.6)
        room = 1.1 + 0.1 * len(heights)  # for the names above
        top = room * max((max(shares) for shares in heights.values()), default=1.0)
        ax.set(xlim=span, ylim=(0, top or 1.0), xlabel=x, ylabel="share of the answers")
        for place, (name, given) in enumerate(values.items()):
            colour = drawn[name].colour
            text, y = f"{short(name)} (n = {len(given):,})", 0.97 - 0.085 * place
            where: Any = {"transform": ax.transAxes, "ha": "right", "va": "top"}
            ax.text(0.98, y, text, color=colour, fontweight="bold", **where)
        in_percent(ax, "y")
        in_percent(ax, "x")

    said = (f"{name}: n = {len(v):,}, mean {percent(sum(v) / len(v))}" for name, v in values.items() if v)
    return draw(paint, f"Distribution of {x}. {'; '.join(said)}")


def at(line: Sequence[Point], x: float) -> float:
    """The height of a line of points, sorted by x, at x; level beyond its ends."""
    before = [p for p in line if p[0] <= x]
    after = [p for p in line if p[0] > x]
    if not before or not after:
        return after[0][1] if after else before[-1][1]
    (a, u), (b, v) = before[-1], after[0]
    return u + (v - u) * (x - a) / (b - a)


def _finite(points: Iterable[Sequence[float]], positive: bool = False) -> list[Point]:
    """The points that can be drawn: a run that diverged has others."""
    return [(p[0], p[1]) for p in points if math.isfinite(p[0]) and math.isfinite(p[1]) and (p[1] > 0 or not positive)]


def _best(points: Sequence[Point], which: Best) -> Point:
    return (min if which == "min" else max)(points, key=lambda p: p[1])


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most `MOST` points: the first, the last, and means of runs of neighbours between."""
    if len(points) <= MOST:
        return list(points)
    inner, runs = points[1:-1], MOST - 2
    cuts = [round(n * len(inner) / runs) for n in range(runs + 1)]
    means = []
    for a, b in pairwise(cuts):
        part = inner[a:b]
        means.append((sum(p[0] for p in part) / len(part), sum(p[1] for p in part) / len(part)))
    return [points[0], *means, points[-1]]


def at_ends(ax: Axes, ends: Sequence[tuple[str, Point, str]]) -> None:
    """Names right of the axes at the height where their lines end, moved apart where they would overlap."""
    _, top = ax.get_xlim(), ax.get_ylim()[1]  # asked for, since axes settle their limits only then
    names = ["\n".join(part for line in name.split("\n") for part in wrap(line, 14)[:3]) for name, _, _ in ends]
    line = 1.3 * SIZE / (72 * 2.2)  # of the height of most axes
    heights = [line * (name.count("\n") + 1) for name in names]
    to_axes = ax.transData + ax.transAxes.inverted()
    places = [float(to_axes.transform((x, min(y, top)))[1]) for _, (x, y), _ in ends]
    order = sorted(range(len(ends)), key=places.__getitem__)
    floor, roof = 0.0, 1.08
    for n in order:  # each above the one below it …
        places[n] = max(places[n], floor + heights[n] / 2)
        floor = places[n] + heights[n] / 2
    for n in reversed(order):  # … and what was pushed out at the top goes down again and takes others with it
        places[n] = min(places[n], roof - heights[n] / 2)
        roof = places[n] - heights[n] / 2
    for name, (_, _, colour), y in zip(names, ends, places, strict=True):
        where: Any = {"transform": ax.transAxes, "va": "center", "linespacing": 1.15}
        ax.text(1.02, y, name, color=colour, fontweight="bold", **where)


def in_percent(ax: Axes, axis: Literal["x", "y"]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    which = ax.xaxis if axis == "x" else ax.yaxis
    which.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    which.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}%"))


def in_numbers(axis: Axis, log: bool = False) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8) if log else MaxNLocator(5))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(float(value))))


def in_decades(axis: Axis) -> None:
    """Powers of ten, as numbers, where a logarithmic axis spans many of them."""
    from matplotlib.ticker import LogLocator

    in_numbers(axis, log=True)
    axis.set_major_locator(LogLocator(numticks=7))
