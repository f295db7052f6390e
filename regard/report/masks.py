"""Who may see whom: masks as pictures, a row a query, a column a key, and why a cell is hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.report.canvas import draw
from regard.report.markup import Markup, percent
from regard.report.palette import MUTED, RULE, SERIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEN, LATER, PADDING = "may be seen", "comes later", "padding"
_CLOSE: Any = {"columnspacing": 1.0, "handlelength": 1.0, "handletextpad": 0.4}
_COLOURS = {SEEN: (SERIES[0].light, 0.9), LATER: (SERIES[1].light, 0.55), PADDING: (MUTED.light, 0.3)}


def reasons(allowed: Any, keys: Sequence[int]) -> np.ndarray[Any, Any]:
    """Of each cell why it is as it is: 0 it may be seen, 1 it comes later, 2 its key is padding."""
    seen = np.asarray(allowed, dtype=bool)
    padding = ~np.asarray(keys, dtype=bool)[None, :] & ~seen
    return np.where(seen, 0, np.where(padding, 2, 1))


def mask_picture(allowed: Any, keys: Sequence[int], queries: str, seen: str) -> Markup:
    """One mask; `keys` says which keys are tokens and not padding."""
    why = reasons(allowed, keys)
    T, S = why.shape
    shares = {name: float((why == n).mean()) for n, name in enumerate(_COLOURS)}

    def paint(made: Figure) -> None:
        from matplotlib.colors import to_rgba
        from matplotlib.patches import Patch

        ax = made.add_subplot()
        ax.imshow(np.array([to_rgba(*x) for x in _COLOURS.values()])[why], interpolation="none", aspect="equal")
        ax.set_xticks(np.arange(-0.5, S), minor=True)
        ax.set_yticks(np.arange(-0.5, T), minor=True)
        ax.grid(False)
        if max(T, S) <= 64:
            ax.grid(True, which="minor", color=RULE.light, linewidth=0.3)
        ax.set(xlabel=seen, ylabel=queries)
        for axis, n in ((ax.xaxis, S), (ax.yaxis, T)):
            axis.set_ticks([0, n - 1], ["1", str(n)])
        for spine in ax.spines.values():
            spine.set(visible=True, linewidth=0.5)
        shown = [
            Patch(color=c, alpha=a, label=f"{n} {percent(shares[n], 0)}") for n, (c, a) in _COLOURS.items() if shares[n]
        ]
        made.legend(handles=shown, loc="outside lower center", ncols=len(shown), frameon=False, fontsize=8, **_CLOSE)

    height = 3.4 * min(max(T / S, 0.3), 1.0) + 1.0
    said = ", ".join(f"{name} {percent(share, 0)}" for name, share in shares.items() if share)
    return draw(paint, f"{T} queries over {S} keys: {said}", 4.4, height)


def captions() -> Mapping[str, tuple[str, str, str, str]]:
    """Title, caption, and what rows and columns are, of each of the four masks of an encoder-decoder."""
    article, summary = "the article's tokens", "the summary's tokens"
    return {
        "encoder": (
            "Encoder: padding",
            "Every token of the article sees every other; what only fills the row up is hidden from all.",
            article,
            article,
        ),
        "causal": (
            "Decoder: causal",
            "A token of the summary sees itself and those before it, never those that it is to predict.",
            summary,
            summary,
        ),
        "decoder": (
            "Decoder: causal and padding",
            "The same for a summary that is shorter than its neighbour in the batch.",
            summary,
            summary,
        ),
        "cross": (
            "Cross-attention: padding",
            "Every token of the summary sees the whole article, and none of its padding.",
            summary,
            article,
        ),
    }
