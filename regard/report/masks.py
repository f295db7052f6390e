"""Pictures of masks: a row a query, a column a key, and colours that say why a key is hidden."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.report.canvas import draw
from regard.report.markup import Markup, percent
from regard.report.palette import MUTED, RULE, SERIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEN = "may be seen"
LATER = "comes later"
PADDING = "padding"
# Colour and opacity of each reason, in the order of the numbers that `hidden_reasons` returns.
_COLOURS = {SEEN: (SERIES[0].light, 0.9), LATER: (SERIES[1].light, 0.55), PADDING: (MUTED.light, 0.3)}
_TIGHT: Any = {"columnspacing": 1.0, "handlelength": 1.0, "handletextpad": 0.4}
_MOST_RULED = 64  # tokens; with more, lines between cells would hide the cells


def hidden_reasons(allowed: Any, keys: Sequence[int]) -> np.ndarray[Any, Any]:
    """Returns a number for each cell [T,S]: 0 if it may be seen, 1 if its key comes later, 2 if its key is padding.

    `allowed` [T,S] is the mask; `keys` [S] says which keys are tokens and not padding.
    """
    seen = np.asarray(allowed, dtype=bool)
    padding = ~np.asarray(keys, dtype=bool)[None, :] & ~seen
    return np.where(seen, 0, np.where(padding, 2, 1))


def mask_picture(allowed: Any, keys: Sequence[int], query_name: str, key_name: str) -> Markup:
    """Returns the picture of one mask [T,S]; `keys` [S] says which keys are tokens and not padding."""
    reasons = hidden_reasons(allowed, keys)
    T, S = reasons.shape
    shares = {name: float((reasons == n).mean()) for n, name in enumerate(_COLOURS)}
    shares = {name: share for name, share in shares.items() if share}

    def paint(fig: Figure) -> None:
        from matplotlib.colors import to_rgba
        from matplotlib.patches import Patch

        ax = fig.add_subplot()
        colours = np.array([to_rgba(*colour) for colour in _COLOURS.values()])
        ax.imshow(colours[reasons], interpolation="none", aspect="equal")
        ax.set_xticks(np.arange(-0.5, S), minor=True)
        ax.set_yticks(np.arange(-0.5, T), minor=True)
        ax.grid(False)
        if max(T, S) <= _MOST_RULED:
            ax.grid(True, which="minor", color=RULE.light, linewidth=0.3)
        ax.set(xlabel=key_name, ylabel=query_name)
        for axis, n in ((ax.xaxis, S), (ax.yaxis, T)):
            axis.set_ticks([0, n - 1], ["1", str(n)])
        for spine in ax.spines.values():
            spine.set(visible=True, linewidth=0.5)
        handles = []
        for name, share in shares.items():
            colour, opacity = _COLOURS[name]
            handles.append(Patch(color=colour, alpha=opacity, label=f"{name} {percent(share, 0)}"))
        fig.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8, **_TIGHT)

    height = 3.4 * min(max(T / S, 0.3), 1.0) + 1.0
    parts = ", ".join(f"{name} {percent(share, 0)}" for name, share in shares.items())
    return draw(paint, f"{T} queries over {S} keys: {parts}", 4.4, height)
