"""Scores of heads over the steps of a training: one small chart a score, with a line for each head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import OptionError
from regard.report.palette import MUTED, SERIES, styles
from regard.report.paper import figure_file
from regard.report.plots import Point, format_axis_numbers, label_line_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 3
PANEL = (2.4, 1.75)  # inches
AXES_HEIGHT = 1.25  # inches of a panel without its title and numbers
NAMED = 4  # heads a chart that get a colour and a name
LOSS = "loss"


def plot_head_curves(path: str | Path, results: Mapping[str, Any], losses: Mapping[str, Sequence[Point]]) -> None:
    """Writes a figure of the results of `examine_checkpoints`: a chart of the losses, then one for each score.

    A score is drawn if it is a label of some head at some checkpoint. Heads with this label at the last checkpoint have
    a colour, and a dotted line marks the step from which on some head has it.
    """
    drawn = drawn_scores(results)
    losses = {name: points for name, points in losses.items() if points}
    panels = len(drawn) + bool(losses)
    if not panels:
        raise OptionError("no head does anything at any of the checkpoints, so there is no curve to draw")
    columns = min(COLUMNS, panels)
    rows = -(-panels // columns)
    with figure_file(path, (PANEL[0] * columns, PANEL[1] * rows)) as fig:
        axes = list(fig.subplots(rows, columns, squeeze=False).flat)
        if losses:
            _draw_losses(axes[0], losses)
        for ax, name in zip(axes[bool(losses) :], drawn, strict=False):
            _draw_score(ax, name, results)
        ends = [results["steps"][-1], *(points[-1][0] for points in losses.values())]
        for ax in axes[:panels]:
            _finish(ax, max(ends))
        for ax in axes[panels:]:
            ax.set_axis_off()
        for ax in axes[max(0, panels - columns) : panels]:
            ax.set_xlabel("step")
        for ax in axes[:panels:columns]:
            ax.set_ylabel("effect" if ax.get_title() in drawn else "nats")


def drawn_scores(results: Mapping[str, Any]) -> list[str]:
    """Returns the scores that some head does at some checkpoint: first those that last, in order of appearance."""
    done = {name for head in results["heads"] for names in head["does"] for name in names}
    appeared = [row["score"] for row in results["appeared"]]
    return appeared + sorted(done - set(appeared))


def head_name(head: Mapping[str, Any]) -> str:
    """Returns the name of a head with its side: decoder 3.5."""
    return f"{head['side']} {short_name(head)}".strip()


def short_name(head: Mapping[str, Any]) -> str:
    """Returns the name of a head without its side: 3.5."""
    return f"{head['layer']}.{head['head']}"


def naming(heads: Sequence[Mapping[str, Any]]) -> Callable[[Mapping[str, Any]], str]:
    """Returns the function that names the heads of a model: with their side (encoder, decoder) only if it has two."""
    return head_name if len({head["side"] for head in heads}) > 1 else short_name


def _draw_losses(ax: Axes, losses: Mapping[str, Sequence[Point]]) -> None:
    chosen = styles(losses)
    for name, points in losses.items():
        ax.plot(*zip(*points, strict=True), color=chosen[name].colour, linestyle=chosen[name].dash)
    ax.set_title(LOSS)
    ends = [(name.removesuffix("/loss"), points[-1], chosen[name].colour) for name, points in losses.items()]
    label_line_ends(ax, ends, AXES_HEIGHT)


def _draw_score(ax: Axes, name: str, results: Mapping[str, Any]) -> None:
    """Draws the effect of one score at all steps, a line a head; those that do it at the end stand out."""
    name_of = naming(results["heads"])
    curves = []
    for head in results["heads"]:
        effects = head["scores"].get(name, {}).get("effect", ())
        points = [(step, y) for step, y in zip(results["steps"], effects, strict=False) if y is not None]
        if points:
            curves.append((name in head["does"][-1], points, name_of(head)))
    curves.sort(key=lambda curve: (curve[0], curve[1][-1][1]))
    named = [curve for curve in curves if curve[0]][-NAMED:]
    for _, points, _ in curves:
        ax.plot(*zip(*points, strict=True), color=MUTED.light, linewidth=0.6, alpha=0.5)
    ends = []
    for n, (_, points, text) in enumerate(reversed(named)):
        colour = SERIES[n].light
        ax.plot(*zip(*points, strict=True), color=colour, linewidth=1.5)
        ends.append((text, points[-1], colour))
    row = next((row for row in results["appeared"] if row["score"] == name), None)
    if row is not None and row["before"] is not None:
        ax.axvline(row["step"], color=MUTED.light, linestyle=":", linewidth=0.9)
    low = min((y for _, points, _ in curves for _, y in points), default=0.0)
    ax.set_ylim(min(-0.05, low), 1.05)
    ax.set_title(name)
    label_line_ends(ax, ends, AXES_HEIGHT)


def _finish(ax: Axes, last: float) -> None:
    """Gives a chart a grid, and whole steps from 0 to the `last`."""
    ax.set_xlim(0, last)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(True)
    ax.set_axisbelow(True)
    format_axis_numbers(ax.xaxis, whole=True)
    ax.locator_params(axis="x", nbins=4)
