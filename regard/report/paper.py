"""Figures for papers, by matplotlib: masks, positions and the weights of a model, as PNG, SVG or PDF.

Sizes are in inches and text in points, so that a figure placed at its own size has text as large as the caption's.
Nothing of matplotlib's global state is touched, and the same call writes the same bytes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from regard.data.files import staged
from regard.errors import OptionError, did_you_mean
from regard.lens.trace.trace import Attended, Recording
from regard.nn.positions import Rotary, attend_to_offset, rotate, shift_matrix, sinusoids
from regard.report.canvas import available
from regard.report.palette import INK, MUTED, RULE, SERIES, style
from regard.shapes import Mask

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
LABELLED = 40  # tokens that still get a label each
MOST_PANELS = 400
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "regard",
    "pdf.fonttype": 42,  # letters stay letters, as publishers ask
    "text.parse_math": False,  # a token may be "$"
    "font.family": ["DejaVu Sans"],
    "font.size": 8.0,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.0,
    "xtick.labelsize": 7.0,
    "ytick.labelsize": 7.0,
    "legend.fontsize": 8.0,
    "axes.edgecolor": MUTED.light,
    "axes.labelcolor": INK.light,
    "axes.titlecolor": INK.light,
    "text.color": INK.light,
    "xtick.color": MUTED.light,
    "ytick.color": MUTED.light,
    "axes.linewidth": 0.6,
    "xtick.major.size": 2.0,
    "ytick.major.size": 2.0,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "lines.linewidth": 1.3,
    "grid.color": RULE.light,
    "grid.linewidth": 0.5,
}
SEEN, PADDING, LATER, FAR, OTHER = "may be seen", "padding", "comes later", "outside the window", "another document"
_REASONS = {SEEN: SERIES[0].light, PADDING: "#c9ced6", LATER: "#f3d9c8", FAR: "#e6e0b4", OTHER: "#e9cfe6"}


def masks(path: str | Path, size: tuple[float, float] = (7.0, 4.3), length: int = 12) -> None:
    """Who may see whom under each kind of mask, and why not: a row a query, a column a key."""
    if not 4 <= length <= 64:
        raise OptionError(f"length = {length}: expected 4 to 64 tokens")
    with figure_file(path, size) as made:
        from matplotlib.colors import to_rgb
        from matplotlib.patches import Patch

        colours = np.array([to_rgb(c) for c in _REASONS.values()])
        panels = list(_masks(length))
        grid = made.subplots(2, len(panels) // 2)
        for ax, (title, mask, T, S) in zip(grid.flat, panels, strict=True):
            why = _why(mask, T, S)
            ax.imshow(colours[why], interpolation="none", extent=(0, S, S, S - T))
            ax.set_title(title)
            ax.set_xticks(np.arange(S + 1), minor=True)
            ax.set_yticks(np.arange(S - T, S + 1), minor=True)
            ax.grid(True, which="minor", color="white", linewidth=0.6)
            ax.tick_params(which="both", length=0)
            ax.set_xticks([0.5, S - 0.5], ["1", str(S)])
            ax.set_yticks([S - T + 0.5, S - 0.5], [str(S - T + 1), str(S)])
            ax.spines[:].set_visible(False)
        for ax in grid[-1]:
            ax.set_xlabel("keys", labelpad=1)
        for ax in grid[:, 0]:
            ax.set_ylabel("queries", labelpad=-3)
        shown = [Patch(color=c, label=name) for name, c in _REASONS.items()]
        made.legend(handles=shown, loc="outside lower center", ncols=len(shown), frameon=False, handlelength=1.2)


def _masks(n: int) -> Iterator[tuple[str, Mask, int, int]]:
    """Title, mask, queries and keys of each panel."""
    short, window = max(1, n // 4), max(2, n // 3)
    at = torch.arange(n)
    inside = (at < n // 2) | (at >= n // 2 + short)
    prefix = (at[None, :] > at[:, None]) & (at[None, :] >= window)
    yield "padding at the end", Mask(visible=(at < n - short)[None]), n, n
    yield "causal", Mask(causal=True), n, n
    yield "causal, padding first", Mask(causal=True, visible=(at >= short)[None]), n, n
    yield "causal, padding inside", Mask(causal=True, visible=inside[None]), n, n
    yield f"window {window}", Mask(window=window), n, n
    yield f"causal, window {window}", Mask(causal=True, window=window), n, n
    yield "packed documents", Mask(causal=True, documents=(at // (n / 3)).long()[None]), n, n
    yield f"prefix of {window}, by a bias", Mask(bias=torch.zeros(n, n).masked_fill(prefix, -math.inf)), n, n


def _why(mask: Mask, T: int, S: int) -> np.ndarray[Any, Any]:
    """Of each cell why it is hidden, 0 where it is not: as softmax over equal scores has it."""
    seen = mask.softmax(torch.zeros(1, 1, T, S))[0, 0] > 0
    why = torch.zeros(T, S, dtype=torch.long)
    number = {name: n for n, name in enumerate(_REASONS)}
    alone = {
        LATER: mask.but(visible=None, window=None, documents=None, bias=None) if mask.causal else None,
        FAR: mask.but(visible=None, causal=False, documents=None) if mask.window is not None else None,
        OTHER: mask.but(visible=None, causal=False, window=None) if mask.documents is not None else None,
    }
    for name, rule in reversed(alone.items()):
        if rule is not None:
            why[~_allowed(rule, T, S)] = number[name]
    if mask.visible is not None:
        why[:, ~mask.visible[0]] = number[PADDING]
    why[(why == 0) & ~seen] = number[LATER]
    why[seen] = 0
    return why.numpy()


def _allowed(mask: Mask, T: int, S: int) -> Tensor:
    found = mask.allowed(T, S, torch.device("cpu"))
    assert found is not None
    return found[0, 0].expand(T, S)


def positions(path: str | Path, size: tuple[float, float] = (7.0, 4.6), length: int = 64, width: int = 32) -> None:
    """How models know where a token stands: the sinusoidal table and its shift matrix, a head that looks at a fixed
    distance by them, rotary products over distance, and ALiBi's slopes."""
    if not 8 <= length <= 4096 or not 4 <= width <= 512 or width % 2:
        raise OptionError(f"length = {length}, width = {width}: expected 8 to 4096, and an even width of 4 to 512")
    offset = -max(1, length // 8)
    with figure_file(path, size) as made:
        axes = made.subplots(2, 3)
        table = sinusoids(length, width)
        _matrix(made, axes[0, 0], table, "sinusoidal positions", "dimension", "position", signed=True)
        _matrix(made, axes[0, 1], shift_matrix(width), "shift matrix M: p(t+1) = M p(t)", "dimension", "", signed=True)
        looks = attend_to_offset(length, width, offset)[0, 0]
        _matrix(made, axes[0, 2], looks, f"a head that looks at t − {-offset}", "key", "query")
        _lines(axes[1, 0], "sinusoidal: p(t) · p(t+s)", "distance s", _products(length, width))
        _lines(axes[1, 1], f"rotary: q · k of a match, K = {width}", "distance", _rotary(length, width))
        _lines(axes[1, 2], "ALiBi, 4 of 8 heads", "distance", _alibi(length))


def _products(length: int, width: int) -> dict[str, Tensor]:
    """How alike positions are, over their likeness to themselves: narrow and wide."""
    tables = {f"width {d}": sinusoids(length, d) for d in (width, 8 * width)}
    return {name: (table @ table[0]) / (table[0] @ table[0]) for name, table in tables.items()}


def _rotary(length: int, width: int) -> dict[str, Tensor]:
    """q·k of q = k = 1 everywhere, turned to distances 0, 1, …: what remains of a match, over its value at 0."""
    at = torch.arange(length)[None]
    found = {}
    for base in (100.0, 10_000.0):
        turned = rotate(
            torch.ones(1, 1, length, width).double(), Rotary(width, base).rotation(at, length, torch.double)
        )
        found[f"base {base:,.0f}"] = (turned[0, 0] @ turned[0, 0, 0]) / width
    return found


def _alibi(length: int) -> dict[str, Tensor]:
    """−slope · distance with the slopes 2⁻¹ … 2⁻⁸ of eight heads, as a mask adds it to equal scores."""
    slopes = torch.tensor([2.0**-n for n in (1, 3, 5, 8)])
    added = Mask(causal=True, slopes=slopes).adjusted_scores(torch.zeros(1, 4, length, length))[0, :, -1].flip(-1)
    return {f"slope {_fraction(s)}": row for s, row in zip(slopes.tolist(), added, strict=True)}


def _fraction(slope: float) -> str:
    return f"1/{round(1 / slope)}"


def weights(
    recording: Recording,
    path: str | Path,
    size: tuple[float, float] | None = None,
    layers: Sequence[int] = (),
    heads: Sequence[int] = (),
) -> None:
    """Heads of a model over a text: all, or some layers and heads; cross-attention has rows of its own."""
    rows = [a for a in recording.attentions if not layers or a.layer in layers]
    wrong = sorted(set(layers) - {a.layer for a in recording.attentions})
    if wrong:
        raise OptionError(f"no layer {wrong[0]}: there are 0 to {max(a.layer for a in recording.attentions)}")
    columns = list(heads) or list(range(max(a.heads for a in rows)))
    outside = [h for h in columns if not 0 <= h < min(a.heads for a in rows)] if heads else []
    if outside:
        raise OptionError(f"no head {outside[0]}: there are 0 to {min(a.heads for a in rows) - 1}")
    if len(rows) * len(columns) > MOST_PANELS:
        raise OptionError(
            f"{len(rows)} × {len(columns)} heads are too many for one figure, at most {MOST_PANELS}; choose some with "
            "--layer and --head"
        )
    single = len(rows) * len(columns) == 1
    size = size or ((4.2, 3.9) if single else (7.0, 0.5 + 6.6 * len(rows) / max(len(columns), 3)))
    with figure_file(path, size) as made:
        axes = made.subplots(len(rows), len(columns), squeeze=False)
        shown: Any = None
        for line, attended in zip(axes, rows, strict=True):
            for ax, head in zip(line, columns, strict=True):
                shown = _head(ax, recording, attended, head, single)
            line[0].set_ylabel(_place(recording, attended) if not single else "query")
        if single:
            made.suptitle(f"{recording.model.name}, {_place(recording, rows[0])}, head {columns[0]}", fontsize=8.5)
            axes[0, 0].set_xlabel("key")
        else:
            for ax, head in zip(axes[0], columns, strict=True):
                ax.set_title(f"head {head}")
        bar = made.colorbar(shown, ax=axes, shrink=0.8 if single else 0.5, aspect=25, pad=0.015)
        bar.outline.set_visible(False)
        bar.set_label("weight" if single else "weight, of each head's largest")


def _place(recording: Recording, attended: Attended) -> str:
    sides = {a.side for a in recording.attentions}
    crossing = "cross " if attended.kind == "cross" else ""
    return f"{attended.side + ' ' if len(sides) > 1 else ''}{crossing}layer {attended.layer}"


def _head(ax: Axes, recording: Recording, attended: Attended, head: int, single: bool) -> Any:
    queries, keys = recording.read(attended)
    cells = recording.cells(attended, [head], torch.arange(len(queries)))[0]
    top = float(cells.abs().amax().clamp(min=1e-9))
    seen = attended.rules.seen(queries, keys, torch.arange(len(queries)))
    values = np.ma.masked_array(cells.numpy() / (1 if single else top), ~seen.numpy())
    low, high = (-1.0 if attended.signed else 0.0), 1.0
    if single:
        low, high = low * top, top
    shown = ax.imshow(values, cmap=_ramp(attended.signed), vmin=low, vmax=high, interpolation="none", aspect="auto")
    ax.spines[:].set_color(RULE.light)
    if single and max(len(queries), len(keys)) <= LABELLED:
        ax.set_xticks(range(len(keys)), [_token(t) for t in keys.tokens], rotation=90)
        ax.set_yticks(range(len(queries)), [_token(t) for t in queries.tokens])
    elif single:
        ax.locator_params(nbins=8, integer=True)
    else:
        ax.set_xticks([])
        ax.set_yticks([])
        ax.set_aspect("equal" if len(queries) == len(keys) else "auto")
    return shown


def _token(text: str) -> str:
    """A token as it can be read: white space gets a sign, and what is long is cut."""
    signs = {" ": "␣", "\n": "↵", "\t": "⇥"}
    text = "".join(signs.get(c, c if c.isprintable() else "·") for c in text.strip(" ") or text)
    return text if len(text) <= 14 else text[:13] + "…"


def _ramp(signed: bool) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    blue = ["#ffffff", "#8db7e2", SERIES[0].light, "#0a1e3c"]
    colours = ["#4d1b02", SERIES[1].light, "#eeb089", *blue] if signed else blue
    hidden = "#eceef1"
    return LinearSegmentedColormap.from_list("regard", colours).with_extremes(bad=hidden)


def _matrix(made: Figure, ax: Axes, x: Tensor, title: str, across: str, down: str, signed: bool = False) -> None:
    top = float(x.abs().amax())
    shown = ax.imshow(
        x.numpy(), cmap=_ramp(signed), vmin=-top if signed else 0, vmax=top, aspect="auto", interpolation="none"
    )
    ax.set(title=title, xlabel=across, ylabel=down)
    bar = made.colorbar(shown, ax=ax, aspect=25, pad=0.02)
    bar.outline.set_visible(False)


def _lines(ax: Axes, title: str, across: str, lines: dict[str, Tensor]) -> None:
    for n, (name, y) in enumerate(lines.items()):
        drawn = style(n)
        ax.plot(range(len(y)), y.numpy(), color=drawn.colour, linestyle=("-", "--", "-.", ":")[n % 4], label=name)
    ax.set(title=title, xlabel=across)
    ax.grid(True)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if any(lines):
        ax.legend(frameon=False, fontsize=7, handlelength=2.4)


@contextmanager
def figure_file(path: str | Path, size: tuple[float, float]) -> Iterator[Figure]:
    """A figure to draw on, written to a file at the end; an earlier file stays until this one is on disk."""
    path = Path(path)
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise OptionError(f"{path}: the name of a figure ends in .png, .svg or .pdf.{did_you_mean(kind, FORMATS)}")
    if not all(1 <= x <= 50 for x in size):
        raise OptionError(f"size = {size[0]:g} × {size[1]:g}: expected 1 to 50 inches each")
    available()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # an SVG's reader may have it
        made = Figure(figsize=size, layout="constrained")
        yield made
        dates: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None, "ModDate": None}}
        with staged(path) as file:
            made.savefig(file, format=kind, dpi=300, facecolor="white", metadata=dates.get(kind))
