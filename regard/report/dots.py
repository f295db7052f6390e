"""Few numbers as they are: a lane for each thing, a dot for each measurement, their mean, and an interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.report.canvas import draw
from regard.report.markup import Markup, number, short
from regard.report.palette import CARD, INK, MUTED, Style
from regard.report.plots import in_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Lane(NamedTuple):
    """One row of dots. `note` stands at its end; `strong`: its mean is filled; `gap`: a little room above it."""

    name: str
    dots: Sequence[float]
    style: Style
    middle: float
    interval: tuple[float, float] | None = None
    note: str = ""
    strong: bool = True
    gap: bool = False


def dotted(lanes: Sequence[Lane], x: str, zero: bool = False, width: float = 4.7) -> Markup:
    """The lanes below each other; `zero`: with a line at zero, beside which there is no difference."""
    places: list[float] = []
    place = 0.0
    for lane in lanes:
        place += 1.45 if lane.gap and places else 1.0
        places.append(place)

    def paint(made: Figure) -> None:
        ax = made.add_subplot()
        if zero:
            ax.axvline(0, color=INK.light, linewidth=0.9)
        for lane, y in zip(lanes, places, strict=True):
            colour, _, marker = lane.style
            if lane.interval is not None:
                ax.plot(lane.interval, [y, y], color=colour, linewidth=1.6, solid_capstyle="butt")
            ax.plot(lane.dots, [y] * len(lane.dots), marker, color=colour, markersize=4, alpha=0.45, markeredgewidth=0)
            face = colour if lane.strong else CARD.light
            ax.plot(lane.middle, y, marker, color=colour, markersize=8, markerfacecolor=face, markeredgewidth=1.4)
            spot: Any = {"va": "center", "transform": ax.get_yaxis_transform(), "color": MUTED.light}
            ax.text(1.02, y, lane.note, **spot)
        ax.set(xlabel=x, ylim=(places[-1] + 0.7, 0.3))
        ax.set_yticks(places, [short(lane.name, 60) for lane in lanes], color=INK.light)
        ax.grid(False, axis="y")
        ax.spines["left"].set_visible(False)
        in_numbers(ax.xaxis)

    said = "; ".join(f"{lane.name}: {number(lane.middle)} {lane.note}".strip() for lane in lanes)
    return draw(paint, f"{x}. {said}", width, 0.75 + 0.235 * places[-1])
