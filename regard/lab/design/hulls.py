"""Pictures of keys: the hull of the others, the query, and the plane between; in two dimensions, in three, and edge-on.

All take plain rows of numbers. Wanted keys are discs, others squares, each with its number beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from regard.report.canvas import draw
from regard.report.markup import Markup, number
from regard.report.palette import CARD, INK, MUTED, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]
Rows = Sequence[Sequence[float]]
_WANTED, _OTHER, _QUERY = SERIES[1].light, SERIES[0].light, SERIES[2].light


def plane(
    keys: Rows,
    members: Collection[int],
    q: Sequence[float] | None = None,
    meet: Sequence[float] | None = None,
    replaced: tuple[int, Sequence[float]] | None = None,
) -> Markup:
    """Keys of two dimensions with the hull of the others; q as an arrow from the origin and the line it divides by.

    `meet`: the point that proves that there is no q. `replaced`: a key's number and what stands in its place.
    """
    points, rest = np.array(keys, dtype=float), [j for j in range(len(keys)) if j not in members]

    def paint(made: Figure) -> None:
        ax = made.add_subplot()
        shown = np.vstack([points, np.zeros((1, 2)), *([np.array([replaced[1]])] if replaced else [])])
        low, high = _frame(shown)
        ax.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal", xlabel="first", ylabel="second")
        ax.plot(0, 0, "+", color=MUTED.light, markersize=9)
        _outline(ax, points[rest])
        if meet is not None and len(members) > 1:
            start, *_, end = points[list(members)]
            if (start != end).any():
                ax.axline(start, end, color=_WANTED, linewidth=1, linestyle=(0, (3, 2)))
        if q is not None and np.any(q):
            scored = points.copy()
            if replaced is not None:
                scored[replaced[0]] = replaced[1]
            _query(ax, scored, members, rest, np.array(q, dtype=float), float((high - low).max()))
        _dots(ax, points, members)
        if meet is not None:
            ax.plot(*meet, "x", color=INK.light, markersize=9, markeredgewidth=1.8)
        if replaced is not None:
            new, old = replaced[1], points[replaced[0]]
            arrow: Any = {"arrowstyle": "->", "color": _WANTED, "linestyle": "--"}
            ax.annotate("", (new[0], new[1]), (old[0], old[1]), arrowprops=arrow)
            ax.plot(*new, "*", color=_WANTED, markersize=13, markeredgecolor=CARD.light)

    return draw(paint, _said(len(keys), members, "in the plane", q), 4.7, 4.2)


def edge_on(keys: Rows, members: Collection[int], q: Sequence[float]) -> Markup:
    """Keys of any width as the query sees them: across, how far along q; up, the widest direction that q cannot see."""
    points, rest = np.array(keys, dtype=float), [j for j in range(len(keys)) if j not in members]
    unit = np.array(q, dtype=float) / np.linalg.norm(q)
    along = points @ unit
    unseen = points - along[:, None] * unit
    _, _, axes = np.linalg.svd(unseen - unseen.mean(0))
    flat = np.stack([along, unseen @ axes[0]], 1)

    def paint(made: Figure) -> None:
        ax = made.add_subplot()
        low, high = _frame(flat)
        ax.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), xlabel="along the query", ylabel="across it")
        _outline(ax, flat[rest])
        if rest:
            _between(ax, along, members, rest)
        _dots(ax, flat, members)

    return draw(paint, _said(len(keys), members, "seen along the plane that the query divides by", q), 4.7, 3.4)


def space(
    keys: Rows, members: Collection[int], q: Sequence[float] | None = None, meet: Sequence[float] | None = None
) -> Markup:
    """Keys of three dimensions with the hull of the others, the query from the origin, and the plane it divides by."""
    points, rest = np.array(keys, dtype=float), [j for j in range(len(keys)) if j not in members]

    def paint(made: Figure) -> None:
        from mpl_toolkits.mplot3d.art3d import Poly3DCollection

        ax: Any = made.add_subplot(projection="3d")
        faces = points[rest][_faces(points[rest])]
        ax.add_collection3d(Poly3DCollection(faces, facecolor=_OTHER, edgecolor=_OTHER, alpha=0.14, linewidths=1.2))
        reach = float(np.abs(points).max()) or 1.0
        if q is not None and np.any(q):
            unit = np.array(q, dtype=float) / np.linalg.norm(q)
            ax.quiver(0, 0, 0, *(unit * reach), color=_QUERY, linewidth=2, arrow_length_ratio=0.1)
            ax.text(*(unit * reach * 1.12), "q", color=_QUERY, fontweight="bold")
            if rest:
                _, _, axes = np.linalg.svd(unit[None])
                scores = points @ unit
                middle = unit * (min(scores[j] for j in members) + max(scores[j] for j in rest)) / 2
                sides = 0.9 * reach * np.array([axes[1] + axes[2], axes[1] - axes[2]])
                corners = middle + np.array([sides[0], sides[1], -sides[0], -sides[1]])
                sheet = Poly3DCollection([corners], facecolor=_QUERY, edgecolor=_QUERY, alpha=0.13)
                ax.add_collection3d(sheet)
        for group, colour, marker in ((members, _WANTED, "o"), (rest, _OTHER, "s")):
            chosen = points[list(group)]
            ax.scatter(*chosen.T, color=colour, marker=marker, s=34, depthshade=False)
            for j in group:
                ax.text(*(points[j] + [0, 0, 0.09 * reach]), str(j), color=colour, fontweight="bold")
        if meet is not None:
            ax.scatter(*meet, color=INK.light, marker="x", s=70)
        ax.set(xlabel="first", ylabel="second", zlabel="third")
        for axis in (ax.xaxis, ax.yaxis, ax.zaxis):
            axis.set_pane_color((0, 0, 0, 0))
            axis.set_major_locator(_few())
        ax.set_box_aspect((1, 1, 1), zoom=0.95)

    return draw(paint, _said(len(keys), members, "in space", q), 4.7, 4.4)


def outline(points: Array) -> Array:
    """The corners of the hull of points in the plane, anticlockwise; two at most where all lie on one line."""
    order = sorted({(float(x), float(y)) for x, y in points})

    def half(run: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        kept: list[tuple[float, float]] = []
        for p in run:
            while len(kept) > 1 and _turn(kept[-2], kept[-1], p) <= 0:
                kept.pop()
            kept.append(p)
        return kept[:-1]

    corners = half(order) + half(order[::-1]) if len(order) > 1 else order
    return np.array(corners, dtype=float).reshape(-1, 2)


def _turn(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def _faces(points: Array) -> NDArray[np.int64]:
    """Triangles of the hull of points in space; flat or small sets have triangles too, or one with a side of zero."""
    if len(points) < 4:
        return np.array([[0, 1 % len(points), 2 % len(points)]]) if len(points) else np.zeros((0, 3), int)
    from scipy.spatial import ConvexHull

    found: NDArray[np.int64] = ConvexHull(points, qhull_options="QJ").simplices
    return found


def _frame(points: Array) -> tuple[Array, Array]:
    low, high = points.min(0), points.max(0)
    pad = 0.16 * float((high - low).max() or 1.0)
    return low - pad, high + pad


def _outline(ax: Axes, points: Array) -> None:
    corners = outline(points)
    ax.fill(*corners.T, facecolor=_OTHER, edgecolor=_OTHER, alpha=0.14, linewidth=1.2)
    ax.plot(*np.vstack([corners, corners[:1]]).T, color=_OTHER, linewidth=1)


def _query(ax: Axes, points: Array, members: Collection[int], rest: list[int], q: Array, size: float) -> None:
    unit = q / np.linalg.norm(q)
    tip = 0.3 * size * unit
    arrow: Any = {"arrowstyle": "-|>", "color": _QUERY, "linewidth": 2, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", (tip[0], tip[1]), (0, 0), arrowprops=arrow)
    beside = tip + 0.05 * size * unit[::-1] * [-1, 1]
    ax.text(beside[0], beside[1], "q", color=_QUERY, fontweight="bold", ha="center", va="center")
    if rest:
        scores = points @ unit
        middle = unit * (min(scores[j] for j in members) + max(scores[j] for j in rest)) / 2
        ax.axline(middle, middle + unit[::-1] * [-1, 1], color=_QUERY, linewidth=1.2, linestyle=(0, (5, 2)))


def _between(ax: Axes, along: Array, members: Collection[int], rest: list[int]) -> None:
    """The margin as a band, and the plane in its middle as a line."""
    front, back = min(along[j] for j in members), max(along[j] for j in rest)
    ax.axvspan(back, front, color=_QUERY, alpha=0.1, linewidth=0)
    ax.axvline((front + back) / 2, color=_QUERY, linewidth=1.2, linestyle=(0, (5, 2)))


def _dots(ax: Axes, points: Array, members: Collection[int]) -> None:
    middle = points.mean(0)
    for j, p in enumerate(points):
        colour, marker = (_WANTED, "o") if j in members else (_OTHER, "s")
        ax.plot(*p, marker, color=colour, markersize=7, markeredgecolor=CARD.light)
        # Away from the middle, where the hull's lines are.
        side = np.where(p >= middle, 9, -9)
        spot: Any = {"textcoords": "offset points", "color": colour, "fontweight": "bold", "ha": "center"}
        ax.annotate(str(j), p, tuple(side), va="center", **spot)


def _few() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(4)


def _said(n: int, members: Collection[int], where: str, q: Sequence[float] | None) -> str:
    wanted = ", ".join(map(str, members))
    query = f"; query ({', '.join(number(float(x)) for x in list(q)[:8])})" if q is not None else "; no query"
    return f"{n} keys {where}; wanted: {wanted}{query}"
