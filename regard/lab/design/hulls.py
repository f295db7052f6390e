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
_WANTED = SERIES[1].light
_OTHER = SERIES[0].light
_QUERY = SERIES[2].light
_DASH: Any = (0, (5, 2))


def plane(
    keys: Rows,
    members: Collection[int],
    q: Sequence[float] | None = None,
    meet: Sequence[float] | None = None,
    replaced: tuple[int, Sequence[float]] | None = None,
) -> Markup:
    """Returns keys of two dimensions with the hull of the others; q is an arrow from the origin, with the line it
    divides by.

    `meet` is the point that proves that there is no q. `replaced` is a key's number and what stands in its place.
    """
    points = np.array(keys, dtype=float)
    rest = _others(points, members)
    shown = np.vstack([points, np.zeros((1, 2))])
    scored = points.copy()
    if replaced is not None:
        shown = np.vstack([shown, np.array([replaced[1]])])
        scored[replaced[0]] = replaced[1]

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        low, high = _frame(shown)
        ax.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal", xlabel="first", ylabel="second")
        ax.plot(0, 0, "+", color=MUTED.light, markersize=9)
        _draw_hull(ax, points[rest])
        if meet is not None and len(members) > 1:
            start, *_, end = points[list(members)]
            if (start != end).any():
                ax.axline(start, end, color=_WANTED, linewidth=1, linestyle=(0, (3, 2)))
        if q is not None and np.any(q):
            _draw_query(ax, scored, members, rest, np.array(q, dtype=float), float((high - low).max()))
        _draw_keys(ax, points, members)
        if meet is not None:
            ax.plot(*meet, "x", color=INK.light, markersize=9, markeredgewidth=1.8)
        if replaced is not None:
            new = replaced[1]
            old = points[replaced[0]]
            arrow: Any = {"arrowstyle": "->", "color": _WANTED, "linestyle": "--"}
            ax.annotate("", (new[0], new[1]), (old[0], old[1]), arrowprops=arrow)
            ax.plot(*new, "*", color=_WANTED, markersize=13, markeredgecolor=CARD.light)

    return draw(paint, _describe(len(keys), members, "in the plane", q), 4.7, 4.2)


def edge_on(keys: Rows, members: Collection[int], q: Sequence[float]) -> Markup:
    """Returns keys of any width as the query sees them.

    Across is how far along q a key lies, up is the direction of the largest spread that q cannot see.
    """
    points = np.array(keys, dtype=float)
    rest = _others(points, members)
    unit = np.array(q, dtype=float) / np.linalg.norm(q)
    along = points @ unit
    unseen = points - along[:, None] * unit
    _, _, axes = np.linalg.svd(unseen - unseen.mean(0))
    flat = np.stack([along, unseen @ axes[0]], 1)

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        low, high = _frame(flat)
        ax.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), xlabel="along the query", ylabel="across it")
        _draw_hull(ax, flat[rest])
        if rest:
            _draw_margin(ax, along, members, rest)
        _draw_keys(ax, flat, members)

    return draw(paint, _describe(len(keys), members, "seen along the plane that the query divides by", q), 4.7, 3.4)


def space(
    keys: Rows, members: Collection[int], q: Sequence[float] | None = None, meet: Sequence[float] | None = None
) -> Markup:
    """Returns keys of three dimensions with the hull of the others, the query, and the plane that it divides by."""
    points = np.array(keys, dtype=float)
    rest = _others(points, members)

    def paint(fig: Figure) -> None:
        from matplotlib.ticker import MaxNLocator
        from mpl_toolkits.mplot3d.art3d import Poly3DCollection

        ax: Any = fig.add_subplot(projection="3d")
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
                middle = unit * _threshold(scores, members, rest)
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
            axis.set_major_locator(MaxNLocator(4))
        ax.set_box_aspect((1, 1, 1), zoom=0.95)

    return draw(paint, _describe(len(keys), members, "in space", q), 4.7, 4.4)


def outline(points: Array) -> Array:
    """Returns the corners of the hull of points in the plane, anticlockwise; two at most where all lie on one line.

    This is Andrew's monotone chain: the lower half from left to right, then the upper one back.
    """
    order = sorted({(float(x), float(y)) for x, y in points})

    def half(run: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """Returns the corners of one half, without its last, with which the other half begins."""
        kept: list[tuple[float, float]] = []
        for p in run:
            while len(kept) > 1 and _turn(kept[-2], kept[-1], p) <= 0:
                kept.pop()
            kept.append(p)
        return kept[:-1]

    corners = order
    if len(order) > 1:
        corners = half(order) + half(order[::-1])
    return np.array(corners, dtype=float).reshape(-1, 2)


def _others(points: Array, members: Collection[int]) -> list[int]:
    """Returns the numbers of the keys that are not wanted."""
    return [j for j in range(len(points)) if j not in members]


def _threshold(scores: Array, members: Collection[int], rest: list[int]) -> Any:
    """Returns the score halfway between the lowest member and the highest other key."""
    return (min(scores[j] for j in members) + max(scores[j] for j in rest)) / 2


def _turn(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> float:
    """Returns the cross product of b − a and c − a: positive where the way a, b, c turns left."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def _faces(points: Array) -> NDArray[np.int64]:
    """Returns the triangles [·,3] of the hull of points in space; fewer than four points have one, or none."""
    if not len(points):
        return np.zeros((0, 3), int)
    if len(points) < 4:
        return np.array([[0, 1 % len(points), 2 % len(points)]])
    from scipy.spatial import ConvexHull

    # QJ moves points a little, so that flat sets have triangles too.
    faces: NDArray[np.int64] = ConvexHull(points, qhull_options="QJ").simplices
    return faces


def _frame(points: Array) -> tuple[Array, Array]:
    """Returns the lower and the upper corner of a box around the points, with a margin."""
    low = points.min(0)
    high = points.max(0)
    pad = 0.16 * float((high - low).max() or 1.0)
    return low - pad, high + pad


def _draw_hull(ax: Axes, points: Array) -> None:
    """Draws the hull of points in the plane."""
    corners = outline(points)
    ax.fill(*corners.T, facecolor=_OTHER, edgecolor=_OTHER, alpha=0.14, linewidth=1.2)
    ax.plot(*np.vstack([corners, corners[:1]]).T, color=_OTHER, linewidth=1)


def _draw_query(ax: Axes, points: Array, members: Collection[int], rest: list[int], q: Array, size: float) -> None:
    """Draws the direction of q as an arrow from the origin, and the line that divides the members from the rest."""
    unit = q / np.linalg.norm(q)
    tip = 0.3 * size * unit
    arrow: Any = {"arrowstyle": "-|>", "color": _QUERY, "linewidth": 2, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", (tip[0], tip[1]), (0, 0), arrowprops=arrow)
    beside = tip + 0.05 * size * unit[::-1] * [-1, 1]
    ax.text(beside[0], beside[1], "q", color=_QUERY, fontweight="bold", ha="center", va="center")
    if rest:
        scores = points @ unit
        middle = unit * _threshold(scores, members, rest)
        ax.axline(middle, middle + unit[::-1] * [-1, 1], color=_QUERY, linewidth=1.2, linestyle=_DASH)


def _draw_margin(ax: Axes, along: Array, members: Collection[int], rest: list[int]) -> None:
    """Draws the margin as a band, and the plane in its middle as a line."""
    front = min(along[j] for j in members)
    back = max(along[j] for j in rest)
    ax.axvspan(back, front, color=_QUERY, alpha=0.1, linewidth=0)
    ax.axvline((front + back) / 2, color=_QUERY, linewidth=1.2, linestyle=_DASH)


def _draw_keys(ax: Axes, points: Array, members: Collection[int]) -> None:
    """Draws every key with its number: a disc where it is wanted, else a square."""
    middle = points.mean(0)
    for j, p in enumerate(points):
        colour = _OTHER
        marker = "s"
        if j in members:
            colour = _WANTED
            marker = "o"
        ax.plot(*p, marker, color=colour, markersize=7, markeredgecolor=CARD.light)
        # Away from the middle, where the hull's lines are.
        side = np.where(p >= middle, 9, -9)
        spot: Any = {"textcoords": "offset points", "color": colour, "fontweight": "bold", "ha": "center"}
        ax.annotate(str(j), p, tuple(side), va="center", **spot)


def _describe(n: int, members: Collection[int], where: str, q: Sequence[float] | None) -> str:
    """Returns the picture in words."""
    query = "no query"
    if q is not None:
        query = f"query ({', '.join(number(float(x)) for x in list(q)[:8])})"
    return f"{n} keys {where}; wanted: {', '.join(map(str, members))}; {query}"
