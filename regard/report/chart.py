"""Charts of measurements and predictions: points with quartiles, fitted lines, and predicted lines, dashed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.report.canvas import draw
from regard.report.markup import Markup, number, shorten
from regard.report.palette import CARD, Style
from regard.report.plots import (
    Point,
    format_axis_decades,
    format_axis_numbers,
    format_axis_percent,
    label_line_ends,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DASH = (0, (4, 2.5))


class Series(NamedTuple):
    """One named line of a chart. All but the first three fields are optional parts of the drawing.

    `band` holds the lower and the upper end at each point. `fitted` is drawn instead of a line through the points, and
    `predicted` is drawn dashed. `floor` is a thin line below: a lower bound. `marked` is False if there are too many
    points for markers.
    """

    name: str
    points: Sequence[Point]
    style: Style
    band: Sequence[Point] = ()
    fitted: Sequence[Point] = ()
    predicted: Sequence[Point] = ()
    marked: bool = True
    floor: Sequence[Point] = ()


class Axis(NamedTuple):
    """The name and scale of an axis. `ticks`: the only values to be marked; `shares`: values are written in percent."""

    name: str
    log: bool = False
    ticks: Sequence[float] = ()
    span: tuple[float | None, float | None] = (None, None)
    shares: bool = False


def chart(series: Sequence[Series], x: Axis, y: Axis, values: bool = False, height: float = 2.9) -> Markup:
    """Returns the chart of the series with their names at their ends; `values` adds the last value below each name.

    On a logarithmic axis, values of zero are left out.
    """
    series = select_drawn(series, y)
    names = [shorten(line.name) for line in series]
    if values:
        names = [f"{name}\n{_format(line.points[-1][1], y)}" for name, line in zip(names, series, strict=True)]

    def paint(fig: Figure) -> None:
        paint_chart(fig, series, names, x, y)

    ranges = "; ".join(
        f"{line.name}: {_format(line.points[0][1], y)} at {number(line.points[0][0])}, "
        f"{_format(line.points[-1][1], y)} at {number(line.points[-1][0])}"
        for line in series
    )
    return draw(paint, f"{y.name} against {x.name}. {ranges}", height=height)


def select_drawn(series: Sequence[Series], y: Axis) -> list[Series]:
    """Returns the series that have points; on a logarithmic axis, with only their points above zero."""
    if y.log:
        series = [_keep_positive(line) for line in series]
    return [line for line in series if line.points]


def paint_chart(fig: Figure, series: Sequence[Series], names: Sequence[str], x: Axis, y: Axis) -> Axes:
    """Draws the series on a figure, each with its name at its end, and returns the axes."""
    ax = fig.add_subplot()
    if x.log:
        ax.set_xscale("log")
    if y.log:
        ax.set_yscale("log")
    for line in series:
        _draw_series(ax, line)
    ax.set(xlabel=x.name, ylabel=y.name)
    # The order matters: ticks depend on the limits, and the names at the ends on both.
    ax.set_ylim(*y.span)
    _format_axes(ax, x, y)
    ends = [(name, line.points[-1], line.style.colour) for name, line in zip(names, series, strict=True)]
    label_line_ends(ax, ends)
    return ax


def _keep_positive(line: Series) -> Series:
    """Returns the series with its points above zero only, and bands cut off a decade below the lowest of them."""
    kept = [n for n, (_, value) in enumerate(line.points) if value > 0]
    points = [line.points[n] for n in kept]
    # A band that reaches zero would reach down to −∞.
    floor = min((value for _, value in points), default=1.0) / 10
    band: list[Point] = []
    if line.band:
        band = [(max(line.band[n][0], floor), max(line.band[n][1], floor)) for n in kept]
    return line._replace(points=points, band=band)


def _draw_series(ax: Axes, line: Series) -> None:
    """Draws the parts that a series has, from the back to the front."""
    colour, dash, marker = line.style
    xs, ys = zip(*line.points, strict=True)
    if line.band:
        low, high = zip(*line.band, strict=True)
        ax.fill_between(xs, low, high, color=colour, alpha=0.14, linewidth=0)
    if line.predicted:
        ax.plot(*zip(*line.predicted, strict=True), color=colour, linestyle=_DASH, linewidth=1.1)
    if line.floor:
        ax.plot(*zip(*line.floor, strict=True), color=colour, linestyle=_DASH, linewidth=0.8, alpha=0.75)
    solid: Any = {"color": colour, "linestyle": dash, "linewidth": 1.6}
    if line.fitted:
        ax.plot(*zip(*line.fitted, strict=True), **solid)
    elif not line.predicted:
        ax.plot(xs, ys, **solid)
    if line.marked:
        ax.plot(xs, ys, marker, color=colour, markersize=5, markeredgecolor=CARD.light, markeredgewidth=0.7)


def _format_axes(ax: Axes, x: Axis, y: Axis) -> None:
    """Sets the ticks of both axes and how they are written."""
    from matplotlib.ticker import FixedLocator

    for settings, axis in ((x, ax.xaxis), (y, ax.yaxis)):
        if settings.shares:
            format_axis_percent(axis)
        elif settings.log:
            format_axis_decades(axis)
        else:
            format_axis_numbers(axis)
        if settings.ticks:
            axis.set_major_locator(FixedLocator(list(settings.ticks)))


def _format(value: float, y: Axis) -> str:
    """Returns a value of the y axis as text."""
    if y.shares:
        return f"{100 * value:.3g}%"
    return f"{value:.3g}"
