"""Dot plots of few measurements: a lane for each thing, with a dot for each measurement, their mean and interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.report.canvas import draw
from regard.report.markup import Markup, number, shorten
from regard.report.palette import CARD, INK, MUTED, Style
from regard.report.plots import format_axis_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Lane(NamedTuple):
    """One row of dots. `note` is written at its end; `strong` fills the marker of the mean; `gap` adds room above."""

    name: str
    dots: Sequence[float]
    style: Style
    mean: float
    interval: tuple[float, float] | None = None
    note: str = ""
    strong: bool = True
    gap: bool = False


def dot_plot(lanes: Sequence[Lane], x: str, zero: bool = False, width: float = 4.7) -> Markup:
    """Returns the lanes one below the other; `zero` adds a line at zero, which means no difference."""
    heights: list[float] = []
    height = 0.0
    for lane in lanes:
        step = 1.0
        if lane.gap and heights:
            step = 1.45
        height += step
        heights.append(height)

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        if zero:
            ax.axvline(0, color=INK.light, linewidth=0.9)
        for lane, y in zip(lanes, heights, strict=True):
            _draw_lane(ax, lane, y)
        ax.set(xlabel=x, ylim=(heights[-1] + 0.7, 0.3))
        ax.set_yticks(heights, [shorten(lane.name, 60) for lane in lanes], color=INK.light)
        ax.grid(False, axis="y")
        ax.spines["left"].set_visible(False)
        format_axis_numbers(ax.xaxis)

    means = "; ".join(f"{lane.name}: {number(lane.mean)} {lane.note}".strip() for lane in lanes)
    return draw(paint, f"{x}. {means}", width, 0.75 + 0.235 * heights[-1])


def _draw_lane(ax: Axes, lane: Lane, y: float) -> None:
    """Draws the interval, the dots, their mean and the note of one lane at height y."""
    colour, _, marker = lane.style
    if lane.interval is not None:
        ax.plot(lane.interval, [y, y], color=colour, linewidth=1.6, solid_capstyle="butt")
    ax.plot(lane.dots, [y] * len(lane.dots), marker, color=colour, markersize=4, alpha=0.45, markeredgewidth=0)
    face = CARD.light
    if lane.strong:
        face = colour
    ax.plot(lane.mean, y, marker, color=colour, markersize=8, markerfacecolor=face, markeredgewidth=1.4)
    # x in shares of the axes, y as in the data: just right of the axes, level with the lane.
    beside: Any = {"va": "center", "transform": ax.get_yaxis_transform(), "color": MUTED.light}
    ax.text(1.02, y, lane.note, **beside)
