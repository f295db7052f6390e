"""Attention as pictures: a row a query, a column a key, the darker the more weight. Negative weights have a colour too.

A picture holds one pixel a weight. Its colour is fixed and its opacity is the weight, so that it suits a light page and
a dark one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from regard.errors import ShapeError
from regard.report.canvas import SIZE, draw
from regard.report.markup import Markup, percent, short
from regard.report.palette import INK, MUTED, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

Scale = Literal["row", "all"]
Matrix = Any  # what numpy makes an array of: lists, arrays, tensors on the CPU
_VISIBLE = str.maketrans({" ": "␣", "\n": "⏎", "\r": "⏎", "\t": "⇥"})
_POSITIVE, _NEGATIVE = SERIES[0].light, SERIES[1].light


def heat(matrix: Matrix, rows: Sequence[str], columns: Sequence[str] | None = None, scale: Scale = "row") -> Markup:
    """One matrix of weights with its tokens. `scale`: the darkest is the largest weight of each row, or of all."""
    columns = rows if columns is None else columns
    weights = _checked(matrix, rows, columns)

    def paint(made: Figure) -> None:
        parts: Any = made.subfigures(2, 1, height_ratios=[height - 0.5, 0.5])
        above, below = parts
        ax = above.add_subplot()
        _map(ax, weights, rows, columns, scale, side=72 * (width - 0.8))
        ax.set(xlabel="attends to", ylabel="token")
        _legend(below, signed=bool((weights < 0).any()), scale=scale)

    width = min(max(4.4, 0.16 * len(columns) + 0.8), 7.6)  # many tokens want room for their names
    height = (width - 0.2) * min(max(len(rows) / len(columns), 0.3), 1.4) + 0.55
    return draw(paint, f"Attention of {len(rows)} tokens. {_strongest(weights, rows, columns)}", width, height)


def heads_grid(
    maps: Sequence[Matrix], tokens: Sequence[str], titles: Sequence[str], scale: Scale = "row", across: int = 4
) -> Markup:
    """Many heads over the same tokens at a glance, `across` side by side; tokens are written where they fit."""
    made_of = [_checked(m, tokens, tokens) for m in maps]
    if len(made_of) != len(titles):
        raise ShapeError(f"{len(made_of)} maps and {len(titles)} titles: expected one title a map")
    across = min(across, len(made_of)) or 1
    down = math.ceil(len(made_of) / across) or 1
    each = 7.6 / across

    def paint(made: Figure) -> None:
        parts: Any = made.subfigures(2, 1, height_ratios=[each * down, 0.5])
        above, below = parts
        grid = above.subplots(down, across, squeeze=False)
        for n, ax in enumerate(grid.flat):
            if n >= len(made_of):
                ax.set_visible(False)
                continue
            left, lowest = n % across == 0, n + across >= len(made_of)
            _map(ax, made_of[n], tokens if left else (), tokens if lowest else (), scale, side=72 * (each - 0.35))
            ax.set_title(short(titles[n], 24))
        _legend(below, signed=any(bool((m < 0).any()) for m in made_of), scale=scale)

    said = "; ".join(f"{t}: {_strongest(m, tokens, tokens)}" for t, m in zip(titles, made_of, strict=True))
    return draw(paint, f"Attention of {len(made_of)} heads. {said}", 7.6, each * down + 0.55)


def label(token: str) -> str:
    """A token as a label: spaces and line breaks made visible, a long one cut."""
    return short(token.translate(_VISIBLE), 12) or "∅"


def _checked(matrix: Matrix, rows: Sequence[str], columns: Sequence[str]) -> np.ndarray[Any, Any]:
    weights = np.asarray(matrix, dtype=np.float64)
    if weights.shape != (len(rows), len(columns)) or not weights.size:
        raise ShapeError(
            f"weights of shape {list(weights.shape)} for {len(rows)} rows and {len(columns)} columns of tokens: "
            "expected one row a query and one column a key, at least one of each"
        )
    return np.nan_to_num(weights, nan=0.0, posinf=0.0, neginf=0.0)


def _map(
    ax: Axes, weights: np.ndarray[Any, Any], rows: Sequence[str], columns: Sequence[str], scale: Scale, side: float
) -> None:
    from matplotlib.colors import to_rgb

    largest = np.abs(weights).max(axis=1, keepdims=True) if scale == "row" else np.abs(weights).max()
    pixels = np.empty((*weights.shape, 4))
    pixels[..., :3] = np.where((weights < 0)[..., None], to_rgb(_NEGATIVE), to_rgb(_POSITIVE))
    pixels[..., 3] = np.abs(weights) / np.where(largest > 0, largest, 1)
    ax.imshow(pixels, interpolation="none", aspect="equal")
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set(visible=True, linewidth=0.5)
    T, S = weights.shape
    size = min(SIZE, 1.05 * side / max(T, S))
    fits = size >= 4.5
    names = [label(c) for c in columns]
    ax.set_yticks(range(T) if fits and rows else [], [label(r) for r in rows] if fits and rows else [], fontsize=size)
    upright = 0 if all(len(name) == 1 for name in names) else 90
    ax.set_xticks(range(S) if fits and names else [], names if fits else [], fontsize=size, rotation=upright)
    ax.tick_params(colors=INK.light, pad=1.5)


def _legend(made: SubFigure, signed: bool, scale: Scale) -> None:
    """A strip from nothing to the largest weight, or from the most negative through nothing, below the maps."""
    from matplotlib.colors import to_rgb

    ramp = np.linspace(-1 if signed else 0, 1, 65)
    pixels = np.empty((1, len(ramp), 4))
    pixels[..., :3] = np.where((ramp < 0)[None, :, None], to_rgb(_NEGATIVE), to_rgb(_POSITIVE))
    pixels[..., 3] = np.abs(ramp)
    ax = made.add_axes((0.34, 0.62, 0.32, 0.28))
    ax.imshow(pixels, interpolation="none", aspect="auto", extent=(float(ramp[0]), 1.0, 0.0, 1.0))
    ax.grid(False)
    where = "of the row" if scale == "row" else "of all"
    ax.set_xticks([-1, 0, 1] if signed else [0, 1], ["negative", "0", f"largest {where}"][0 if signed else 1 :])
    ax.set_yticks([])
    ax.tick_params(colors=MUTED.light, labelsize=0.9 * SIZE)
    for spine in ax.spines.values():
        spine.set(visible=True, linewidth=0.5)


def _strongest(weights: np.ndarray[Any, Any], rows: Sequence[str], columns: Sequence[str]) -> str:
    """The largest weight, in words."""
    i, j = divmod(int(np.abs(weights).argmax()), weights.shape[1])
    return f"strongest: {label(rows[i])} ({i + 1}) to {label(columns[j])} ({j + 1}), {percent(float(weights[i, j]))}"
