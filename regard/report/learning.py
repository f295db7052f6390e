"""Learning curves: training and held-out data in one figure, the best value of each, and overfitting.

A training is given by the lines of its log: those of the learning curve {step, loss, …} and those of its evaluations
{step, "train/accuracy", "dev/accuracy", …}.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.report import palette
from regard.report.canvas import draw
from regard.report.markup import Markup, number, percent, shorten
from regard.report.palette import CARD, Style
from regard.report.plots import (
    Best,
    Point,
    best_point,
    finite_points,
    format_axis_numbers,
    format_axis_percent,
    height_for_labels,
    label_line_ends,
    thin_out,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Iterable[Mapping[str, Any]]
RISE = 0.02  # the dev loss has risen if it is above its lowest value by more than this share
_TRAIN_DASH: Any = (0, (1.5, 1.5))


class TrainAndDev(NamedTuple):
    """One quantity over a training, on training data and on held-out data; empty where it was not measured."""

    train: list[Point]
    dev: list[Point]


class Overfitting(NamedTuple):
    """The step at which overfitting starts, where the dev loss is lowest; `train` and `dev` are the losses (there,
    last).
    """

    start: float
    train: tuple[float, float]
    dev: tuple[float, float]


def train_and_dev(curve: Rows, evaluations: Rows, quantity: str = "loss") -> TrainAndDev:
    """Returns train/QUANTITY and dev/QUANTITY of the evaluations.

    If train/loss was not evaluated, the mean loss of the steps since the last evaluation takes its place, as that of a
    single batch varies with the batch.
    """
    evaluations = list(evaluations)
    train = _points(evaluations, f"train/{quantity}")
    dev = _points(evaluations, f"dev/{quantity}")
    if not train and quantity == "loss":
        train = _means_between(_points(curve, "loss"), [step for step, _ in dev])
    return TrainAndDev(train, dev)


def _means_between(points: Sequence[Point], ends: Sequence[float]) -> list[Point]:
    """Returns at each of `ends` the mean of the points since the last one; the points themselves if there are none."""
    if not ends:
        return list(points)
    means = []
    for start, end in pairwise([-math.inf, *ends]):
        inside = [y for x, y in points if start < x <= end]
        if inside:
            means.append((end, sum(inside) / len(inside)))
    return means


def _points(rows: Rows, key: str) -> list[Point]:
    return finite_points((row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float))


def find_overfitting(loss: TrainAndDev) -> Overfitting | None:
    """Returns where a training began to overfit; None if it did not, that is, unless the dev loss rises from its lowest
    value by more than 2% while the training loss falls."""
    if len(loss.dev) < 2 or len(loss.train) < 2:
        return None
    start, lowest = min(loss.dev, key=lambda point: point[1])
    _, last = loss.dev[-1]
    _, train_last = loss.train[-1]
    # The training loss at the measured step nearest to where overfitting began.
    _, train_start = min(loss.train, key=lambda point: abs(point[0] - start))
    if last <= lowest * (1 + RISE) or train_last >= train_start:
        return None
    return Overfitting(start, (train_start, train_last), (lowest, last))


def describe_overfitting(losses: Mapping[str, TrainAndDev], unit: str = "step") -> str:
    """Returns sentences that say from when on each training overfits, and which do not; "" if dev was not measured."""
    measured = {name: loss for name, loss in losses.items() if len(loss.dev) > 1 and len(loss.train) > 1}
    found = {name: find_overfitting(loss) for name, loss in measured.items()}
    said = [
        f"{name} overfits from {unit} {number(_rounded(start))} on: its dev loss rises from {number(dev[0])} to "
        f"{number(dev[1])} while its training loss falls from {number(train[0])} to {number(train[1])}."
        for name, (start, train, dev) in ((n, one) for n, one in found.items() if one is not None)
    ]
    others = [name for name, one in found.items() if one is None]
    if others:
        mark = "; " if any("," in name for name in others) else ", "  # such as "softmax, slow"
        listed = mark.join(others)
        said.append(f"No sign of overfitting, a dev loss that rises while the training loss falls: {listed}.")
    return " ".join(said)


def best_of(points: Sequence[Point], best: Best, kept: float | None = None) -> Point | None:
    """Returns the best point of a curve; None if the curve is empty.

    Among equal points it is the one of the step `kept`, the checkpoint that a training chose, or else the earliest.
    """
    if not points:
        return None
    found = best_point(points, best)
    return next((point for point in points if point == (kept, found[1])), found)


def _rounded(x: float) -> float:
    """Returns a whole number, such as a step, as an int, and any other, such as an epoch, rounded to three digits."""
    if x == int(x):
        return int(x)
    return float(f"{x:.3g}")


def learning_figure(
    series: Mapping[str, TrainAndDev],
    x: str = "step",
    y: str = "loss",
    log: bool = False,
    best: Best = "min",
    styles: Mapping[str, Style] | None = None,
    shares: bool = False,
    kept: Mapping[str, float | None] | None = None,
) -> Markup:
    """Returns train (dotted) and dev (solid) of each training in one figure, a dot at the best of each.

    The best values of dev and train are written below each name. `kept` has the step, as on the axis x, of the
    checkpoint that each training chose: among equal points of dev, that one has the dot.
    """
    styles = styles or palette.styles(series)
    chosen = kept or {}
    drawable = {name: _drawable(curves, log) for name, curves in series.items()}
    drawable = {name: curves for name, curves in drawable.items() if curves.train or curves.dev}
    write: Callable[[float], str] = percent if shares else number
    labels = {name: _label(name, curves, best, write) for name, curves in drawable.items()}

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        if log:
            ax.set_yscale("log")
        for name, curves in drawable.items():
            _draw_training(ax, curves, best, styles[name], chosen.get(name))
        ax.set(xlabel=x, ylabel=y)
        if shares:
            ax.set_ylim(bottom=0)
            format_axis_percent(ax.yaxis)
        else:
            format_axis_numbers(ax.yaxis, log)
        drawn = [point for curves in drawable.values() for line in curves for point in line]
        format_axis_numbers(ax.xaxis, whole=all(float(x).is_integer() for x, _ in drawn))
        ends = [(labels[n], (curves.dev or curves.train)[-1], styles[n].colour) for n, curves in drawable.items()]
        label_line_ends(ax, ends)

    texts = "; ".join(labels.values()).replace("\n", ", ") or "nothing to show"
    alt = f"{y} against {x} of training (dotted) and dev (solid), the best of each: {texts}"
    return draw(paint, alt, height=height_for_labels(labels.values()))


def _drawable(curves: TrainAndDev, log: bool) -> TrainAndDev:
    return TrainAndDev(finite_points(curves.train, log), finite_points(curves.dev, log))


def _label(name: str, curves: TrainAndDev, best: Best, write: Callable[[float], str]) -> str:
    lines = [shorten(name)]
    for which, points in (("dev", curves.dev), ("train", curves.train)):
        found = best_of(points, best)
        if found is not None:
            lines.append(f"{which} {write(found[1])}")
    return "\n".join(lines)


def _draw_training(ax: Axes, curves: TrainAndDev, best: Best, style: Style, kept: float | None) -> None:
    """Draws dev in the style of its series and train dotted behind it, each with a dot at its best point."""
    dotted: Any = {"linestyle": _TRAIN_DASH, "linewidth": 1.4, "alpha": 0.9}
    solid: Any = {"linestyle": style.dash}
    lines = ((curves.train, dotted, CARD.light, None), (curves.dev, solid, style.colour, kept))
    for points, how, face, chosen in lines:
        dot = best_of(points, best, chosen)
        if dot is None:
            continue
        ax.plot(*zip(*thin_out(points), strict=True), color=style.colour, **how)
        edge: Any = {"markerfacecolor": face, "markeredgecolor": style.colour, "markeredgewidth": 1.2}
        ax.plot(*dot, "o", markersize=5, clip_on=False, **edge)


def learning_caption(best: Best) -> str:
    """Returns a caption that says how to read a learning figure."""
    better = "Higher" if best == "max" else "Lower"
    return f"{better} is better. Solid: dev; dotted: training data. Dots mark the best of each (filled: dev)."
