"""Measured against predicted: points with their quartiles, fitted lines, and the law as a dashed line beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.report.canvas import draw
from regard.report.markup import Markup, number, short
from regard.report.palette import CARD, Style
from regard.report.plots import Point, at_ends, in_decades, in_numbers, in_percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DASH = (0, (4, 2.5))


class Line(NamedTuple):
    """One series. `band` holds the lower and the upper end at each point; `fitted` is drawn instead of a line through
    the points; `predicted` is drawn dashed. `floor` is thin, below the line: what cannot be undercut. `marked` is False
    where there are too many points to tell apart."""

    name: str
    points: Sequence[Point]
    style: Style
    band: Sequence[Point] = ()
    fitted: Sequence[Point] = ()
    predicted: Sequence[Point] = ()
    marked: bool = True
    floor: Sequence[Point] = ()


class Axis(NamedTuple):
    """What an axis shows; `ticks` where only some values were measured; `shares`: as percent."""

    name: str
    log: bool = False
    ticks: Sequence[float] = ()
    span: tuple[float | None, float | None] = (None, None)
    shares: bool = False


def chart(lines: Sequence[Line], x: Axis, y: Axis, values: bool = False, height: float = 2.9) -> Markup:
    """The lines with their names at their ends; `values`: with the last value below each name.

    What is zero cannot stand on a logarithmic axis and is left out.
    """
    lines = [_above_zero(one) for one in lines] if y.log else lines
    lines = [one for one in lines if one.points]
    ends = [(f"{short(one.name)}\n{_said(one.points[-1][1], y)}" if values else short(one.name)) for one in lines]

    def paint(made: Figure) -> None:
        ax = made.add_subplot()
        if x.log:
            ax.set_xscale("log")
        if y.log:
            ax.set_yscale("log")
        for one in lines:
            _drawn(ax, one)
        ax.set(xlabel=x.name, ylabel=y.name)
        ax.set_ylim(*y.span)
        _settled(ax, x, y)
        at_ends(ax, [(name, one.points[-1], one.style.colour) for name, one in zip(ends, lines, strict=True)])

    said = "; ".join(
        f"{one.name}: {_said(one.points[0][1], y)} at {number(one.points[0][0])}, "
        f"{_said(one.points[-1][1], y)} at {number(one.points[-1][0])}"
        for one in lines
    )
    return draw(paint, f"{y.name} against {x.name}. {said}", height=height)


def _above_zero(one: Line) -> Line:
    """The points above zero and their bands, cut off a decade below the lowest point."""
    kept = [n for n, (_, value) in enumerate(one.points) if value > 0]
    points = [one.points[n] for n in kept]
    floor = min((value for _, value in points), default=1.0) / 10
    band = [(max(one.band[n][0], floor), max(one.band[n][1], floor)) for n in kept] if one.band else ()
    return one._replace(points=points, band=band)


def _drawn(ax: Axes, one: Line) -> None:
    colour, dash, marker = one.style
    xs, ys = zip(*one.points, strict=True)
    if one.band:
        low, high = zip(*one.band, strict=True)
        ax.fill_between(xs, low, high, color=colour, alpha=0.14, linewidth=0)
    if one.predicted:
        ax.plot(*zip(*one.predicted, strict=True), color=colour, linestyle=_DASH, linewidth=1.1)
    if one.floor:
        ax.plot(*zip(*one.floor, strict=True), color=colour, linestyle=_DASH, linewidth=0.8, alpha=0.75)
    line: Any = {"color": colour, "linestyle": dash, "linewidth": 1.6}
    if one.fitted:
        ax.plot(*zip(*one.fitted, strict=True), **line)
    elif not one.predicted:
        ax.plot(xs, ys, **line)
    if one.marked:
        ax.plot(xs, ys, marker, color=colour, markersize=5, markeredgecolor=CARD.light, markeredgewidth=0.7)


def _settled(ax: Axes, x: Axis, y: Axis) -> None:
    from matplotlib.ticker import FixedLocator

    for which, axis in ((x, ax.xaxis), (y, ax.yaxis)):
        if which.shares:
            in_percent(ax, "x" if which is x else "y")
        else:
            low, high = axis.get_view_interval()
            if which.log and high > 1e3 * low:
                in_decades(axis)
            else:
                in_numbers(axis, which.log)
        if which.ticks:
            axis.set_major_locator(FixedLocator(list(which.ticks)))


def _said(value: float, y: Axis) -> str:
    return f"{100 * value:.3g}%" if y.shares else f"{value:.3g}"
