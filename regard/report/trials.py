"""Pictures of many trials: parallel coordinates of their settings and outcomes, slices by setting, and curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.report.canvas import SIZE, draw
from regard.report.markup import Markup, number, shorten
from regard.report.palette import CARD, INK, MUTED, SERIES
from regard.report.plots import Point, format_axis_numbers, label_line_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_USUAL = SERIES[0].light
_BEST = SERIES[1].light
_BELOW = -0.16  # height at which lines of failed trials end
_DOTS: Any = (0, (2, 2))
_PLATE: Any = {"facecolor": CARD.light, "edgecolor": "none", "alpha": 0.8, "pad": 1.2}


class Dimension(NamedTuple):
    """One setting in which trials differ: its values in `order` if they were listed, else a range.

    A `log` range is drawn on a logarithmic axis.
    """

    name: str
    order: Sequence[object] = ()
    log: bool = False


class TrialPoint(NamedTuple):
    """One trial: its value of each setting, and its outcome; None if it failed."""

    values: Sequence[Any]
    outcome: float | None


def parallel_coordinates(
    dimensions: Sequence[Dimension], trials: Sequence[TrialPoint], outcome: str, maximize: bool
) -> Markup:
    """Returns parallel coordinates: a line for each trial through an axis for each setting to its outcome.

    Better trials have stronger lines; the best one is bold and ends highest. Lines cross each axis at their value.
    """
    ranked = _rank(trials, maximize)
    outcomes = [t.outcome for t in ranked if t.outcome is not None]
    last = AxisScale.over_range(outcomes, log=_needs_log(outcomes), falling=not maximize)
    scales = [AxisScale.for_dimension(d, [t.values[n] for t in ranked]) for n, d in enumerate(dimensions)]
    heights = [[scale.height(t.values[n]) for t in ranked] for n, scale in enumerate(scales)]
    heights.append([_BELOW if t.outcome is None else last.height(t.outcome) for t in ranked])
    names = [*(d.name for d in dimensions), outcome]
    ended = len(outcomes)

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        for n in reversed(range(len(ranked))):  # the best last, on top of all others
            line = [row[n] for row in heights]
            if ranked[n].outcome is None:
                _draw_line(ax, line, color=MUTED.light, alpha=0.7, linewidth=1.0, linestyle=_DOTS)
            elif n:
                _draw_line(ax, line, color=_USUAL, alpha=0.18 + 0.6 * (1 - n / ended) ** 2, linewidth=1.3)
            else:
                _draw_line(ax, line, color=_BEST, linewidth=2.8)
        bottom = -0.08
        if ended < len(ranked):
            bottom = -0.3
            ax.text(len(dimensions), _BELOW - 0.05, "failed", ha="center", va="top", color=MUTED.light, bbox=_PLATE)
        for n, (scale, name) in enumerate(zip([*scales, last], names, strict=True)):
            _draw_axis(ax, n, scale, name, right=n == len(dimensions))
        ax.set(xlim=(-0.35, len(dimensions) + 0.35), ylim=(bottom, 1.08))
        ax.axis("off")

    through = ", ".join(d.name for d in dimensions)
    alt = f"{len(ranked)} trials through {through} to {outcome}. {_describe_best(dimensions, ranked)}"
    return draw(paint, alt, min(max(4.7, 1.35 * (len(dimensions) + 1)), 11.0), 3.5)


def slice_plots(dimensions: Sequence[Dimension], trials: Sequence[TrialPoint], outcome: str, maximize: bool) -> Markup:
    """Returns a plot for each setting: a dot for each trial, outcome against value; the best has its own colour."""
    ranked = [t for t in _rank(trials, maximize) if t.outcome is not None]
    ys = [t.outcome for t in ranked if t.outcome is not None]
    log = _needs_log(ys)
    across = len(dimensions)
    if across > 4:
        across = 3
    down = math.ceil(len(dimensions) / across)

    def paint(fig: Figure) -> None:
        grid = fig.subplots(down, across, squeeze=False, sharey=True)
        for n, ax in enumerate(grid.flat):
            if n >= len(dimensions):
                ax.set_visible(False)
                continue
            dimension = dimensions[n]
            xs = [t.values[n] for t in ranked]
            if dimension.order:
                xs = [dimension.order.index(x) for x in xs]
            ax.plot(xs[1:], ys[1:], "o", color=_USUAL, alpha=0.55, markersize=5, markeredgewidth=0)
            ax.plot(xs[:1], ys[:1], "D", color=_BEST, markersize=7, markeredgecolor=CARD.light)
            _format_slice(ax, dimension)
            ax.set(xlabel=dimension.name)
            if n % across == 0:
                ax.set(ylabel=outcome)
        if log:
            grid[0, 0].set_yscale("log")
        format_axis_numbers(grid[0, 0].yaxis, log)
        if len(set(ys)) == 1:
            grid[0, 0].set_yticks(ys[:1], [number(ys[0])])

    alt = f"{outcome} against {', '.join(d.name for d in dimensions)}. {_describe_best(dimensions, ranked)}"
    return draw(paint, alt, 1.3 + 1.9 * across, 2.6 * down)


def trial_curves(
    others: Sequence[Sequence[Point]],
    best: Sequence[Point],
    failed: Sequence[Sequence[Point]],
    outcome: str,
    name: str,
    maximize: bool,
) -> Markup:
    """Returns the curves of all trials, the best bold with its name and its best value.

    Curves of trials that failed do not set the scale.
    """
    choose = max if maximize else min
    top = choose(best, key=lambda p: p[1], default=(0.0, 0.0))
    log = _needs_log([y for curve in (*others, best) for _, y in curve])

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        for curve in others:
            marker = None
            if len(curve) == 1:
                marker = "o"  # a line through one point would not be seen
            ax.plot(*zip(*curve, strict=True), color=_USUAL, alpha=0.3, linewidth=1.1, marker=marker, markersize=3)
        if best:
            ax.plot(*zip(*best, strict=True), color=_BEST, linewidth=2.6)
            ax.plot(*top, "o", color=_BEST, markersize=6, markeredgecolor=CARD.light)
        if log:
            ax.set_yscale("log")
        # The limits are taken before failed trials are drawn, whose values may be huge.
        span: tuple[float | None, float | None] = (None, None)
        if others or best:
            span = ax.get_ylim()
        for curve in failed:
            ax.plot(*zip(*curve, strict=True), color=MUTED.light, linewidth=1.0, linestyle=_DOTS)
        ax.set_ylim(*span)
        ax.set(xlabel="step", ylabel=outcome)
        format_axis_numbers(ax.xaxis, whole=True)
        format_axis_numbers(ax.yaxis, log)
        levels = {y for curve in (*others, best, *failed) for _, y in curve}
        if len(levels) == 1:  # marks around it could be impossible values, such as an accuracy below 0
            ax.set_yticks([*levels], [number(y) for y in levels])
        if best:
            label_line_ends(ax, [(f"{shorten(name)}\n{number(top[1])}", best[-1], _BEST)])

    alt = f"{outcome} over the steps of {len(others) + len(failed) + bool(best)} trials. "
    if best:
        alt += f"{name}: {number(top[1])} at step {number(top[0])}"
    return draw(paint, alt, 6.4, 3.3)


class AxisScale(NamedTuple):
    """The scale of an axis of height 1: from values to heights, and the marks (height, text) on it."""

    marks: Sequence[tuple[float, str]]
    order: Sequence[object] = ()
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    falling: bool = False

    @classmethod
    def for_dimension(cls, dimension: Dimension, values: Sequence[Any]) -> AxisScale:
        """Returns the scale of a setting: its listed values, or a range that holds the values."""
        if not dimension.order:
            return cls.over_range(values, dimension.log)
        scale = cls((), dimension.order)
        return scale._replace(marks=[(scale.height(x), shorten(number(x), 16)) for x in dimension.order])

    @classmethod
    def over_range(cls, values: Sequence[float], log: bool, falling: bool = False) -> AxisScale:
        """Returns a scale that spans the values, with rounded marks; a `falling` one has the smallest at the top."""
        low = min(values, default=0.0)
        high = max(values, default=1.0)
        if low == high and log:
            low /= 2
            high *= 2
        elif low == high:  # one mark: others could be impossible values, such as an accuracy below 0
            return cls([(0.5, number(low))], (), low - 0.5, high + 0.5, log, falling)
        scale = cls((), (), low, high, log, falling)
        return scale._replace(marks=[(scale.height(x), number(x)) for x in _rounded_marks(low, high, log)])

    def height(self, value: Any) -> float:
        """Returns the height of a value: 0 at the bottom of the axis, 1 at its top."""
        if self.order:
            return (self.order.index(value) + 0.5) / len(self.order)
        low, high, x = (math.log(z) if self.log else z for z in (self.low, self.high, value))
        share: float = (x - low) / (high - low)
        if self.falling:
            return 1 - share
        return share


def _rounded_marks(low: float, high: float, log: bool) -> list[float]:
    """Returns rounded numbers from low to high; on a logarithmic axis, with as few leading digits as give three."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    if not log:
        return [float(x) for x in MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high) if low <= x <= high]
    for subs in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0)):
        marks = [float(x) for x in LogLocator(subs=subs).tick_values(low, high) if low <= x <= high]
        if len(marks) > 2:
            break
    return marks or [low, high]


def _draw_line(ax: Axes, heights: Sequence[float], **how: Any) -> None:
    """Draws a smooth line that is horizontal where it crosses an axis."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    points = [(0.0, heights[0])]
    codes = [Path.MOVETO]
    # Cubic Bézier curves whose inner control points have the heights of their ends.
    for n in range(1, len(heights)):
        points += [(n - 0.55, heights[n - 1]), (n - 0.45, heights[n]), (n, heights[n])]
        codes += [Path.CURVE4] * 3
    ax.add_patch(PathPatch(Path(points, codes), fill=False, capstyle="round", **how))


def _draw_axis(ax: Axes, n: int, scale: AxisScale, name: str, right: bool) -> None:
    """Draws the n-th axis with its marks, left or right of it, and its name above, with a dotted name in two lines."""
    ax.plot([n, n], [-0.04, 1.04], color=MUTED.light, linewidth=1.0, solid_capstyle="butt", zorder=3)
    beside: Any = {"x": n - 0.05, "ha": "right"}
    if right:
        beside = {"x": n + 0.05, "ha": "left"}
    for y, text in scale.marks:
        ax.text(y=y, s=text, va="center", color=INK.light, fontsize=0.9 * SIZE, bbox=_PLATE, zorder=4, **beside)
    section, dot, key = name.rpartition(".")
    if dot:
        name = f"{section}.\n{key}"
    ax.text(n, 1.17, name, ha="center", va="bottom", color=INK.light, weight="bold")


def _format_slice(ax: Axes, dimension: Dimension) -> None:
    """Sets the scale and the marks of the x axis for one setting."""
    if dimension.order:
        names = [shorten(number(x), 12) for x in dimension.order]
        turned: Any = {"rotation": 0, "ha": "center"}
        if max(map(len, names)) * len(names) > 22:
            turned = {"rotation": 30, "ha": "right"}
        ax.set_xticks(range(len(names)), names, **turned)
        ax.set_xlim(-0.6, len(names) - 0.4)
    elif dimension.log:
        ax.set_xscale("log")
        format_axis_numbers(ax.xaxis, log=True)
        marks = _rounded_marks(*ax.get_xlim(), log=True)
        ax.set_xticks(marks[:: math.ceil(len(marks) / 4)])
    else:
        format_axis_numbers(ax.xaxis)


def _needs_log(values: Sequence[float]) -> bool:
    """Returns whether a logarithmic axis is needed: positive values that differ by more than a factor of ten."""
    return bool(values) and min(values) > 0 and max(values) > 10 * min(values)


def _rank(trials: Sequence[TrialPoint], maximize: bool) -> list[TrialPoint]:
    """Returns the trials, the best first and failed ones last."""
    sign = -1 if maximize else 1
    return sorted(trials, key=lambda t: math.inf if t.outcome is None else sign * t.outcome)


def _describe_best(dimensions: Sequence[Dimension], ranked: Sequence[TrialPoint]) -> str:
    """Returns the best trial in words."""
    if not ranked or ranked[0].outcome is None:
        return "All trials have failed."
    settings = ", ".join(f"{d.name} {number(v)}" for d, v in zip(dimensions, ranked[0].values, strict=True))
    return f"The best has {number(ranked[0].outcome)} with {settings}."
