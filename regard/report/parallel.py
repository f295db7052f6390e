"""Many trials at once: a line a trial through an axis a setting to what came of it, and each setting by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.report.canvas import SIZE, draw
from regard.report.markup import Markup, number, short
from regard.report.palette import CARD, INK, MUTED, SERIES
from regard.report.plots import Point, at_ends, in_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_USUAL, _BEST = SERIES[0].light, SERIES[1].light
_BAND = 0.7  # of the room of a listed value that the lines through it spread over
_BELOW = -0.16  # where lines of trials without a value end
_PLATE: Any = {"facecolor": CARD.light, "edgecolor": "none", "alpha": 0.8, "pad": 1.2}


class Setting(NamedTuple):
    """One axis: its values in order where they were listed, else a range; `log`: by ratios."""

    name: str
    order: Sequence[object] = ()
    log: bool = False


class Tried(NamedTuple):
    """One trial: its value of each setting, and what came of it, None where it failed."""

    values: Sequence[Any]
    value: float | None


def parallel(settings: Sequence[Setting], trials: Sequence[Tried], outcome: str, maximize: bool) -> Markup:
    """A line a trial, the better the stronger, the best one bold; on the last axis the best stands highest.

    Lines through the same listed value stand side by side in the order of what came of them, so that each can be seen.
    """
    ranked = _ranked(trials, maximize)
    came = [t.value for t in ranked if t.value is not None]
    last = _Scale.through(came, log=_wide(came), falls=not maximize)
    scales = [_Scale.of(s, [t.values[n] for t in ranked]) for n, s in enumerate(settings)]
    heights = [_spread(scale, [t.values[n] for t in ranked]) for n, scale in enumerate(scales)]
    heights.append([_BELOW if t.value is None else last.at(t.value) for t in ranked])
    done = len(came)

    def paint(made: Figure) -> None:
        ax = made.add_subplot()
        for n in reversed(range(len(ranked))):
            line = [row[n] for row in heights]
            if ranked[n].value is None:
                _line(ax, line, color=MUTED.light, alpha=0.7, linewidth=1.0, linestyle=(0, (2, 2)))
            elif n:
                _line(ax, line, color=_USUAL, alpha=0.18 + 0.6 * (1 - n / done) ** 2, linewidth=1.3)
            else:
                _line(ax, line, color=_BEST, linewidth=2.8)
        if done < len(ranked):
            ax.text(len(settings), _BELOW - 0.05, "failed", ha="center", va="top", color=MUTED.light, bbox=_PLATE)
        for n, (scale, name) in enumerate(zip([*scales, last], [*(s.name for s in settings), outcome], strict=True)):
            _axis(ax, n, scale, name, right=n == len(settings))
        ax.set(xlim=(-0.35, len(settings) + 0.35), ylim=(-0.3 if done < len(ranked) else -0.08, 1.08))
        ax.axis("off")

    said = f"{len(ranked)} trials through {', '.join(s.name for s in settings)} to {outcome}. {_best(settings, ranked)}"
    return draw(paint, said, min(max(4.7, 1.35 * (len(settings) + 1)), 11.0), 3.5)


def slices(settings: Sequence[Setting], trials: Sequence[Tried], outcome: str, maximize: bool) -> Markup:
    """Each setting by itself: a dot a trial, what came of it against its value; the best filled with its own colour."""
    ranked = [t for t in _ranked(trials, maximize) if t.value is not None]
    ys = [t.value for t in ranked if t.value is not None]
    wide = _wide(ys)
    across = len(settings) if len(settings) <= 4 else 3
    down = math.ceil(len(settings) / across)

    def paint(made: Figure) -> None:
        grid = made.subplots(down, across, squeeze=False, sharey=True)
        for n, ax in enumerate(grid.flat):
            if n >= len(settings):
                ax.set_visible(False)
                continue
            setting = settings[n]
            xs = [setting.order.index(t.values[n]) if setting.order else t.values[n] for t in ranked]
            ax.plot(xs[1:], ys[1:], "o", color=_USUAL, alpha=0.55, markersize=5, markeredgewidth=0)
            ax.plot(xs[:1], ys[:1], "D", color=_BEST, markersize=7, markeredgecolor=CARD.light)
            _labelled(ax, setting)
            ax.set(xlabel=setting.name)
            if n % across == 0:
                ax.set(ylabel=outcome)
        if wide:
            grid[0, 0].set_yscale("log")
        in_numbers(grid[0, 0].yaxis, wide)

    said = f"{outcome} against {', '.join(s.name for s in settings)}. {_best(settings, ranked)}"
    return draw(paint, said, 1.3 + 1.9 * across, 2.6 * down)


def faint(
    others: Sequence[Sequence[Point]],
    best: Sequence[Point],
    failed: Sequence[Sequence[Point]],
    outcome: str,
    name: str,
    maximize: bool,
) -> Markup:
    """Curves of all trials, the best bold with its name and its best value; those that failed do not set the scale."""
    top = (max if maximize else min)(best, key=lambda p: p[1], default=(0.0, 0.0))
    wide = _wide([y for curve in (*others, best) for _, y in curve])

    def paint(made: Figure) -> None:
        ax = made.add_subplot()
        for curve in others:
            mark = "o" if len(curve) == 1 else None
            ax.plot(*zip(*curve, strict=True), color=_USUAL, alpha=0.3, linewidth=1.1, marker=mark, markersize=3)
        if best:
            ax.plot(*zip(*best, strict=True), color=_BEST, linewidth=2.6)
            ax.plot(*top, "o", color=_BEST, markersize=6, markeredgecolor=CARD.light)
        if wide:
            ax.set_yscale("log")
        span = ax.get_ylim() if others or best else (None, None)
        for curve in failed:
            ax.plot(*zip(*curve, strict=True), color=MUTED.light, linewidth=1.0, linestyle=(0, (2, 2)))
        ax.set_ylim(*span)
        ax.set(xlabel="step", ylabel=outcome)
        in_numbers(ax.xaxis)
        in_numbers(ax.yaxis, wide)
        if best:
            at_ends(ax, [(f"{short(name)}\n{number(top[1])}", best[-1], _BEST)])

    said = f"{name}: {number(top[1])} at step {number(top[0])}" if best else ""
    return draw(paint, f"{outcome} over the steps of {len(others) + len(failed) + bool(best)} trials. {said}", 6.4, 3.3)


class _Scale(NamedTuple):
    """Where a value stands on an axis of height 1, and what is written there."""

    marks: Sequence[tuple[float, str]]
    order: Sequence[object] = ()
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    falls: bool = False

    @classmethod
    def of(cls, setting: Setting, values: Sequence[Any]) -> _Scale:
        if not setting.order:
            return cls.through(values, setting.log)
        made = cls((), setting.order)
        return made._replace(marks=[(made.at(x), short(number(x), 16)) for x in setting.order])

    @classmethod
    def through(cls, values: Sequence[float], log: bool, falls: bool = False) -> _Scale:
        """A range that holds the values, with rounded marks."""
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        if low == high:
            low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
        made = cls((), (), low, high, log, falls)
        return made._replace(marks=[(made.at(x), number(x)) for x in _round_marks(low, high, log)])

    def at(self, value: Any) -> float:
        if self.order:
            return (self.order.index(value) + 0.5) / len(self.order)
        a, b, x = (math.log(z) if self.log else z for z in (self.low, self.high, value))
        share = (x - a) / (b - a)
        return 1 - share if self.falls else share


def _round_marks(low: float, high: float, log: bool) -> list[float]:
    from matplotlib.ticker import LogLocator, MaxNLocator

    if not log:
        return [float(x) for x in MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high) if low <= x <= high]
    for subs in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0)):
        found = [float(x) for x in LogLocator(subs=subs).tick_values(low, high) if low <= x <= high]
        if len(found) > 2:
            break
    return found or [low, high]


def _spread(scale: _Scale, values: Sequence[Any]) -> list[float]:
    """The heights of lines on an axis, those through one listed value side by side, better ones above."""
    if not scale.order:
        return [scale.at(x) for x in values]
    room = _BAND / len(scale.order)
    places = []
    for n, x in enumerate(values):
        same = [m for m, other in enumerate(values) if other == x]
        share = same.index(n) / (len(same) - 1) if len(same) > 1 else 0.5
        places.append(scale.at(x) + room * (0.5 - share))
    return places


def _line(ax: Axes, heights: Sequence[float], **how: Any) -> None:
    """A smooth line that crosses each axis level."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    points, codes = [(0.0, heights[0])], [Path.MOVETO]
    for n in range(1, len(heights)):
        points += [(n - 0.55, heights[n - 1]), (n - 0.45, heights[n]), (n, heights[n])]
        codes += [Path.CURVE4] * 3
    ax.add_patch(PathPatch(Path(points, codes), fill=False, capstyle="round", **how))


def _axis(ax: Axes, n: int, scale: _Scale, name: str, right: bool) -> None:
    ax.plot([n, n], [-0.04, 1.04], color=MUTED.light, linewidth=1.0, solid_capstyle="butt", zorder=3)
    for y, text in scale.marks:
        side, where = (0.05, "left") if right else (-0.05, "right")
        ax.text(n + side, y, text, ha=where, va="center", color=INK.light, fontsize=0.9 * SIZE, bbox=_PLATE, zorder=4)
    section, dot, key = name.rpartition(".")
    ax.text(
        n, 1.17, f"{section}{dot}\n{key}" if dot else name, ha="center", va="bottom", color=INK.light, weight="bold"
    )


def _labelled(ax: Axes, setting: Setting) -> None:
    if setting.order:
        names = [short(number(x), 12) for x in setting.order]
        turned = 30 if max(map(len, names)) * len(names) > 22 else 0
        ax.set_xticks(range(len(names)), names, rotation=turned, ha="right" if turned else "center")
        ax.set_xlim(-0.6, len(names) - 0.4)
        return
    if setting.log:
        ax.set_xscale("log")
        in_numbers(ax.xaxis, log=True)
        marks = _round_marks(*ax.get_xlim(), log=True)
        ax.set_xticks(marks[:: math.ceil(len(marks) / 4)])
    else:
        in_numbers(ax.xaxis)


def _wide(values: Sequence[float]) -> bool:
    """Whether values differ so much that only their ratios can be seen: one trial that went wrong is enough."""
    return bool(values) and min(values) > 0 and max(values) > 10 * min(values)


def _ranked(trials: Sequence[Tried], maximize: bool) -> list[Tried]:
    """The best first, those that failed last."""
    sign = -1 if maximize else 1
    return sorted(trials, key=lambda t: math.inf if t.value is None else sign * t.value)


def _best(settings: Sequence[Setting], ranked: Sequence[Tried]) -> str:
    if not ranked or ranked[0].value is None:
        return "None has ended well."
    with_ = ", ".join(f"{s.name} {number(v)}" for s, v in zip(settings, ranked[0].values, strict=True))
    return f"The best has {number(ranked[0].value)} with {with_}."
