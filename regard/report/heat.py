"""Pictures of attention weights: a row a query, a column a key, the darker the more weight; another colour below zero.

A picture has one pixel for each weight, of a fixed colour and with the weight as opacity, which suits light and dark
pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from regard.errors import ShapeError
from regard.report.canvas import SIZE, draw
from regard.report.markup import Markup, percent, shorten
from regard.report.palette import INK, MUTED, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

Scale = Literal["row", "all"]
Matrix = Any  # anything that numpy.asarray takes: lists, arrays, tensors on the CPU
Array = np.ndarray[Any, Any]
_VISIBLE = str.maketrans({" ": "␣", "\n": "⏎", "\r": "⏎", "\t": "⇥"})
_POSITIVE = SERIES[0].light
_NEGATIVE = SERIES[1].light
_SMALLEST_TEXT = 4.5  # points; tokens are left out if their text would be smaller


def heat(matrix: Matrix, rows: Sequence[str], columns: Sequence[str] | None = None, scale: Scale = "row") -> Markup:
    """Returns the picture of one matrix of weights [T,S] with its tokens.

    The largest weight is darkest: of each row (`scale="row"`) or of the whole matrix ("all").
    """
    if columns is None:
        columns = rows
    weights = _as_weights(matrix, rows, columns)
    width = min(max(4.4, 0.16 * len(columns) + 0.8), 7.6)  # many tokens need room for their labels
    # Cells are square unless one side is much longer than the other.
    height = (width - 0.2) * min(max(len(rows) / len(columns), 0.3), 1.4) + 0.55

    def paint(fig: Figure) -> None:
        parts: Any = fig.subfigures(2, 1, height_ratios=[height - 0.5, 0.5])
        above, below = parts
        ax = above.add_subplot()
        _draw_map(ax, weights, rows, columns, scale, side=72 * (width - 0.8))
        ax.set(xlabel="attends to", ylabel="token")
        _draw_legend(below, signed=bool((weights < 0).any()), scale=scale)

    return draw(paint, f"Attention of {len(rows)} tokens. {_describe_strongest(weights, rows, columns)}", width, height)


def heads_grid(
    maps: Sequence[Matrix], tokens: Sequence[str], titles: Sequence[str], scale: Scale = "row", across: int = 4
) -> Markup:
    """Returns the pictures of many heads over the same tokens, `across` in a row, with tokens if they fit."""
    weights = [_as_weights(matrix, tokens, tokens) for matrix in maps]
    if len(weights) != len(titles):
        raise ShapeError(f"{len(weights)} maps and {len(titles)} titles: expected one title a map")
    across = min(across, len(weights)) or 1
    down = math.ceil(len(weights) / across) or 1
    side = 7.6 / across  # inches

    def paint(fig: Figure) -> None:
        parts: Any = fig.subfigures(2, 1, height_ratios=[side * down, 0.5])
        above, below = parts
        grid = above.subplots(down, across, squeeze=False)
        for n, ax in enumerate(grid.flat):
            if n >= len(weights):
                ax.set_visible(False)
                continue
            # Only the outer maps of the grid are labelled with tokens, which are the same for all.
            rows: Sequence[str] = ()
            columns: Sequence[str] = ()
            if n % across == 0:
                rows = tokens
            if n + across >= len(weights):
                columns = tokens
            _draw_map(ax, weights[n], rows, columns, scale, side=72 * (side - 0.35))
            ax.set_title(shorten(titles[n], 24))
        _draw_legend(below, signed=any(bool((w < 0).any()) for w in weights), scale=scale)

    strongest = "; ".join(
        f"{title}: {_describe_strongest(w, tokens, tokens)}" for title, w in zip(titles, weights, strict=True)
    )
    return draw(paint, f"Attention of {len(weights)} heads. {strongest}", 7.6, side * down + 0.55)


def token_label(token: str) -> str:
    """Returns a token as a label: spaces and line breaks made visible, a long one cut, an empty one as ∅."""
    return shorten(token.translate(_VISIBLE), 12) or "∅"


def _as_weights(matrix: Matrix, rows: Sequence[str], columns: Sequence[str]) -> Array:
    """Returns the matrix as float64 [rows, columns] with 0 for what is not finite, or raises a ShapeError."""
    weights = np.asarray(matrix, dtype=np.float64)
    if weights.shape != (len(rows), len(columns)) or not weights.size:
        raise ShapeError(
            f"weights of shape {list(weights.shape)} for {len(rows)} rows and {len(columns)} columns of tokens: "
            "expected one row a query and one column a key, at least one of each"
        )
    return np.nan_to_num(weights, nan=0.0, posinf=0.0, neginf=0.0)


def _pixels(weights: Array, largest: Any) -> Array:
    """Returns RGBA pixels [..., 4]: the colour is the sign of a weight, the opacity its size over the largest."""
    from matplotlib.colors import to_rgb

    pixels = np.empty((*weights.shape, 4))
    pixels[..., :3] = np.where((weights < 0)[..., None], to_rgb(_NEGATIVE), to_rgb(_POSITIVE))
    pixels[..., 3] = np.abs(weights) / largest
    return pixels


def _draw_map(ax: Axes, weights: Array, rows: Sequence[str], columns: Sequence[str], scale: Scale, side: float) -> None:
    """Draws one map, `side` points long, with its tokens if they fit; empty `rows` or `columns` are not labelled."""
    largest = np.abs(weights).max()
    if scale == "row":
        largest = np.abs(weights).max(axis=1, keepdims=True)
    # A row of zeros has no largest weight to divide by: it stays empty.
    ax.imshow(_pixels(weights, np.where(largest > 0, largest, 1)), interpolation="none", aspect="equal")
    ax.grid(False)
    _draw_thin_frame(ax)
    T, S = weights.shape
    size = min(SIZE, 1.05 * side / max(T, S))
    if size < _SMALLEST_TEXT:
        rows = ()
        columns = ()
    row_labels = [token_label(token) for token in rows]
    column_labels = [token_label(token) for token in columns]
    # Single characters need no rotation even in narrow columns.
    rotation = 90
    if all(len(label) == 1 for label in column_labels):
        rotation = 0
    ax.set_yticks(range(len(row_labels)), row_labels, fontsize=size)
    ax.set_xticks(range(len(column_labels)), column_labels, fontsize=size, rotation=rotation)
    ax.tick_params(colors=INK.light, pad=1.5)


def _draw_legend(fig: SubFigure, signed: bool, scale: Scale) -> None:
    """Draws the legend below the maps: a strip from zero, or from the most negative, to the largest weight."""
    lowest = 0
    names = ["0", "largest of all"]
    if scale == "row":
        names[-1] = "largest of the row"
    if signed:
        lowest = -1
        names.insert(0, "negative")
    ramp = np.linspace(lowest, 1, 65)
    ax = fig.add_axes((0.34, 0.62, 0.32, 0.28))
    extent = (float(ramp[0]), 1.0, 0.0, 1.0)
    ax.imshow(_pixels(ramp[None], 1.0), interpolation="none", aspect="auto", extent=extent)
    ax.grid(False)
    ax.set_xticks(range(lowest, 2), names)
    ax.set_yticks([])
    ax.tick_params(colors=MUTED.light, labelsize=0.9 * SIZE)
    _draw_thin_frame(ax)


def _draw_thin_frame(ax: Axes) -> None:
    """Draws a thin line around a picture."""
    for spine in ax.spines.values():
        spine.set(visible=True, linewidth=0.5)


def _describe_strongest(weights: Array, rows: Sequence[str], columns: Sequence[str]) -> str:
    """Returns the largest weight in words."""
    i, j = divmod(int(np.abs(weights).argmax()), weights.shape[1])
    query = f"{token_label(rows[i])} ({i + 1})"
    key = f"{token_label(columns[j])} ({j + 1})"
    return f"strongest: {query} to {key}, {percent(float(weights[i, j]))}"
