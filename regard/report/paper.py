"""Figures for papers, by matplotlib: masks, positions and the weights of a model, as PNG, SVG or PDF.

Sizes are in inches and text in points, so that text in an unscaled figure is as large as its caption's. Nothing of
matplotlib's global state is changed, and the same call writes the same bytes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.errors import OptionError, did_you_mean
from regard.lens.trace.trace import RecordedAttention, Recording
from regard.nn.positions import Rotary, attend_to_offset, rotate, shift_matrix, sinusoids
from regard.report.chart import Axis, Series, paint_chart, select_drawn
from regard.report.markup import shorten
from regard.report.palette import INK, MUTED, RULE, SERIES, style
from regard.shapes import Mask
from regard.storage import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
LABELLED = 40  # the most tokens that get a label each
MOST_PANELS = 400
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "regard",  # ids that do not depend on the time
    "pdf.fonttype": 42,  # embeds TrueType fonts, as publishers ask
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
SEEN = "may be seen"
PADDING = "padding"
LATER = "comes later"
FAR = "outside the window"
OTHER = "another document"
# Colours in the order of the numbers that `_hidden_reasons` returns.
_REASONS = {SEEN: SERIES[0].light, PADDING: "#c9ced6", LATER: "#f3d9c8", FAR: "#e6e0b4", OTHER: "#e9cfe6"}


def plot_masks(path: str | Path, size: tuple[float, float] = (8.0, 4.2), length: int = 12) -> None:
    """Writes a figure of each kind of mask, with the reasons why keys are hidden: a row a query, a column a key.

    Self-attention is shown between `length` tokens; cross-attention from fewer target tokens to `length` source tokens.
    """
    if not 4 <= length <= 64:
        raise OptionError(f"length = {length}: expected 4 to 64 tokens")
    with figure_file(path, size) as fig:
        from matplotlib.patches import Patch

        panels = list(_example_masks(length))
        grid = fig.subplots(2, len(panels) // 2)
        for ax, panel in zip(grid.flat, panels, strict=True):
            _draw_mask(ax, panel)
            ax.set_title(panel.title)
        for ax in grid[-1]:
            ax.set_xlabel("keys", labelpad=1)
        for ax in grid[:, 0]:
            ax.set_ylabel("queries", labelpad=-3)
        for ax in grid[:, -1]:
            ax.set_xlabel("source", labelpad=1)
            ax.set_ylabel("target", labelpad=1)
        handles = [Patch(color=colour, label=name) for name, colour in _REASONS.items()]
        fig.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, handlelength=1.2)


class MaskPanel(NamedTuple):
    """One mask of the figure, with its numbers of queries and keys."""

    title: str
    mask: Mask
    queries: int
    keys: int


def _draw_mask(ax: Axes, panel: MaskPanel) -> None:
    """Draws a mask, each cell in the colour of its reason."""
    from matplotlib.colors import to_rgb

    colours = np.array([to_rgb(c) for c in _REASONS.values()])
    T, S = panel.queries, panel.keys
    ax.imshow(colours[_hidden_reasons(panel.mask, T, S)], interpolation="none", extent=(0, S, T, 0))
    ax.set_xticks(np.arange(S + 1), minor=True)
    ax.set_yticks(np.arange(T + 1), minor=True)
    ax.grid(True, which="minor", color="white", linewidth=0.6)
    ax.tick_params(which="both", length=0)
    ax.set_xticks([0.5, S - 0.5], ["1", str(S)])
    ax.set_yticks([0.5, T - 0.5], ["1", str(T)])
    ax.spines[:].set_visible(False)


def _example_masks(n: int) -> Iterator[MaskPanel]:
    """Yields the panels row by row: masks of self-attention between n tokens, and at the end one of cross-attention."""
    padding = max(1, n // 4)
    window = max(2, n // 3)
    target = max(2, 2 * n // 3)
    at = torch.arange(n)
    outside_hole = (at < n // 2) | (at >= n // 2 + padding)
    after_prefix = (at[None, :] > at[:, None]) & (at[None, :] >= window)
    padded = Mask(visible=(at < n - padding)[None])
    yield MaskPanel("padding at the end", padded, n, n)
    yield MaskPanel("causal", Mask(causal=True), n, n)
    yield MaskPanel("causal, padding first", Mask(causal=True, visible=(at >= padding)[None]), n, n)
    yield MaskPanel("causal, padding inside", Mask(causal=True, visible=outside_hole[None]), n, n)
    yield MaskPanel("cross-attention", Mask(), target, n)
    yield MaskPanel(f"window {window}", Mask(window=window), n, n)
    yield MaskPanel(f"causal, window {window}", Mask(causal=True, window=window), n, n)
    yield MaskPanel("packed documents", Mask(causal=True, documents=(at // (n / 3)).long()[None]), n, n)
    prefix = Mask(bias=torch.zeros(n, n).masked_fill(after_prefix, -math.inf))
    yield MaskPanel(f"prefix of {window}, by a bias", prefix, n, n)
    yield MaskPanel("cross, padding", padded, target, n)


def _hidden_reasons(mask: Mask, T: int, S: int) -> np.ndarray[Any, Any]:
    """Returns for each cell [T,S] the number of the reason why it is hidden; 0 if softmax gives it weight."""
    seen = mask.softmax(torch.zeros(1, 1, T, S))[0, 0] > 0
    reasons = torch.zeros(T, S, dtype=torch.long)
    number = {name: i for i, name in enumerate(_REASONS)}
    # Each rule by itself; if several hide a cell, the last one here is shown.
    if mask.documents is not None:
        reasons[~_allowed(mask.but(visible=None, causal=False, window=None), T, S)] = number[OTHER]
    if mask.window is not None:
        reasons[~_allowed(mask.but(visible=None, causal=False, documents=None), T, S)] = number[FAR]
    if mask.causal:
        reasons[~_allowed(mask.but(visible=None, window=None, documents=None, bias=None), T, S)] = number[LATER]
    if mask.visible is not None:
        reasons[:, ~mask.visible[0]] = number[PADDING]
    reasons[(reasons == 0) & ~seen] = number[LATER]  # hidden by a bias
    reasons[seen] = 0
    return reasons.numpy()


def _allowed(mask: Mask, T: int, S: int) -> Tensor:
    """Returns which keys a query may see [T,S]."""
    allowed = mask.allowed(T, S, torch.device("cpu"))
    assert allowed is not None
    return allowed[0, 0].expand(T, S)


def plot_positions(path: str | Path, size: tuple[float, float] = (7.0, 4.6), length: int = 64, width: int = 32) -> None:
    """Writes a figure of the kinds of positions.

    Above: the sinusoidal table, its shift matrix, and a head that by them attends to a fixed distance. Below: products
    of sinusoidal and of rotary positions by distance, and ALiBi's biases.
    """
    if not 8 <= length <= 4096 or not 4 <= width <= 512 or width % 2:
        raise OptionError(f"length = {length}, width = {width}: expected 8 to 4096, and an even width of 4 to 512")
    offset = -max(1, length // 8)
    with figure_file(path, size) as fig:
        axes = fig.subplots(2, 3)
        table = sinusoids(length, width)
        _draw_matrix(axes[0, 0], table, "sinusoidal positions", "dimension", "position", signed=True)
        _draw_matrix(axes[0, 1], shift_matrix(width), "shift matrix M: p(t+1) = M p(t)", "dimension", "", signed=True)
        looks = attend_to_offset(length, width, offset)[0, 0]
        _draw_matrix(axes[0, 2], looks, f"a head that looks at t − {-offset}", "key", "query")
        _draw_lines(axes[1, 0], "sinusoidal: p(t) · p(t+s)", "distance s", _sinusoidal_products(length, width))
        _draw_lines(axes[1, 1], f"rotary: q · k of a match, K = {width}", "distance", _rotary_products(length, width))
        _draw_lines(axes[1, 2], "ALiBi, 4 of 8 heads", "distance", _alibi_biases(length))


def _sinusoidal_products(length: int, width: int) -> dict[str, Tensor]:
    """Returns p(0)·p(s) over p(0)·p(0) [length] for a narrow and a wide table."""
    tables = {f"width {d}": sinusoids(length, d) for d in (width, 8 * width)}
    return {name: (table @ table[0]) / (table[0] @ table[0]) for name, table in tables.items()}


def _rotary_products(length: int, width: int) -> dict[str, Tensor]:
    """Returns q·k [length] at distances 0, 1, … for q and k of ones, divided by its value at distance 0."""
    at = torch.arange(length)[None]
    products = {}
    for base in (100.0, 10_000.0):
        rotation = Rotary(width, base).rotation(at, length, torch.double)
        # Rotary products depend on the distance only: the first vector serves as q.
        k = rotate(torch.ones(1, 1, length, width).double(), rotation)[0, 0]
        products[f"base {base:,.0f}"] = (k @ k[0]) / width
    return products


def _alibi_biases(length: int) -> dict[str, Tensor]:
    """Returns −slope · distance [length] for some of the slopes 2⁻¹ … 2⁻⁸ of eight heads, as computed by a mask."""
    slopes = torch.tensor([2.0**-n for n in (1, 3, 5, 8)])
    added = Mask(causal=True, slopes=slopes).adjusted_scores(torch.zeros(1, 4, length, length))[0, :, -1].flip(-1)
    return {f"slope 1/{round(1 / slope)}": row for slope, row in zip(slopes.tolist(), added, strict=True)}


def plot_weights(
    recording: Recording,
    path: str | Path,
    size: tuple[float, float] | None = None,
    layers: Sequence[int] = (),
    heads: Sequence[int] = (),
) -> None:
    """Writes a figure of a model's heads over a text: all, or some layers and heads.

    A row is a layer, a column a head; cross-attention has rows of its own.
    """
    rows, columns = _choose_heads(recording, layers, heads)
    single = len(rows) * len(columns) == 1
    if size is None:
        size = (7.0, 0.5 + 6.6 * len(rows) / max(len(columns), 3))
        if single:
            size = (4.2, 3.9)
    with figure_file(path, size) as fig:
        axes = fig.subplots(len(rows), len(columns), squeeze=False)
        image: Any = None
        for line, attended in zip(axes, rows, strict=True):
            for ax, head in zip(line, columns, strict=True):
                image = _draw_head(ax, recording, attended, head, single)
            line[0].set_ylabel(_layer_name(recording, attended))
        if single:
            fig.suptitle(f"{recording.model.name}, {_layer_name(recording, rows[0])}, head {columns[0]}", fontsize=8.5)
            axes[0, 0].set(xlabel="key", ylabel="query")
        else:
            for ax, head in zip(axes[0], columns, strict=True):
                ax.set_title(f"head {head}")
        bar = fig.colorbar(image, ax=axes, shrink=0.8 if single else 0.5, aspect=25, pad=0.015)
        bar.outline.set_visible(False)
        bar.set_label("weight" if single else "weight, of each head's largest")


def _choose_heads(
    recording: Recording, layers: Sequence[int], heads: Sequence[int]
) -> tuple[list[RecordedAttention], list[int]]:
    """Returns the attentions of these layers, and the numbers of these heads; all if none are given."""
    known = {a.layer for a in recording.attentions}
    missing = sorted(set(layers) - known)
    if missing:
        raise OptionError(f"no layer {missing[0]}: there are 0 to {max(known)}")
    rows = [a for a in recording.attentions if not layers or a.layer in layers]
    columns = list(heads) or list(range(max(a.heads for a in rows)))
    fewest = min(a.heads for a in rows)
    for head in heads:
        if not 0 <= head < fewest:
            raise OptionError(f"no head {head}: there are 0 to {fewest - 1}")
    if len(rows) * len(columns) > MOST_PANELS:
        raise OptionError(
            f"{len(rows)} × {len(columns)} heads are too many for one figure, at most {MOST_PANELS}; choose some with "
            "--layer and --head"
        )
    return rows, columns


def _layer_name(recording: Recording, attended: RecordedAttention) -> str:
    """Returns the name of an attention: its side if there are two, "cross" if it is that, and its layer."""
    words = [f"layer {attended.layer}"]
    if attended.kind == "cross":
        words.insert(0, "cross")
    if len({a.side for a in recording.attentions}) > 1:
        words.insert(0, attended.side)
    return " ".join(words)


def _draw_head(ax: Axes, recording: Recording, attended: RecordedAttention, head: int, single: bool) -> Any:
    """Draws the weights of one head and returns the image; several heads are each divided by their largest weight."""
    queries, keys = recording.query_and_key_tokens(attended)
    every_row = torch.arange(len(queries))
    head_weights = recording.head_weights(attended, [head], every_row)[0]
    weights = head_weights.numpy()
    high = float(head_weights.abs().amax().clamp(min=1e-9))  # a head may give no weight at all
    if not single:
        weights = weights / high
        high = 1.0
    low = -high if attended.signed else 0.0
    allowed = attended.rules.allowed(queries, keys, every_row)
    values = np.ma.masked_array(weights, ~allowed.numpy())
    image = ax.imshow(
        values, cmap=_colour_map(attended.signed), vmin=low, vmax=high, interpolation="none", aspect="auto"
    )
    ax.spines[:].set_color(RULE.light)
    if not single:
        ax.set_xticks([])
        ax.set_yticks([])
        ax.set_aspect("equal" if len(queries) == len(keys) else "auto")
    elif max(len(queries), len(keys)) <= LABELLED:
        ax.set_xticks(range(len(keys)), [_token_text(t) for t in keys.tokens], rotation=90)
        ax.set_yticks(range(len(queries)), [_token_text(t) for t in queries.tokens])
    else:
        ax.locator_params(nbins=8, integer=True)
    return image


def _token_text(token: str) -> str:
    """Returns a token as a label: white space is made visible, and long tokens are cut."""
    signs = {" ": "␣", "\n": "↵", "\t": "⇥"}
    text = "".join(signs.get(c, c if c.isprintable() else "·") for c in token.strip(" ") or token)
    return shorten(text, 14)


def _colour_map(signed: bool) -> Any:
    """Returns the colour map: white to blue, or, if signed, brown through white to blue; hidden cells are grey."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = ["#ffffff", "#8db7e2", SERIES[0].light, "#0a1e3c"]
    if signed:
        colours = ["#4d1b02", SERIES[1].light, "#eeb089", *colours]
    return LinearSegmentedColormap.from_list("regard", colours).with_extremes(bad="#eceef1")


def _draw_matrix(ax: Axes, x: Tensor, title: str, xlabel: str, ylabel: str, signed: bool = False) -> None:
    """Draws a matrix with a colour bar, whose range is symmetric about zero for a signed matrix."""
    high = float(x.abs().amax())
    low = -high if signed else 0
    image = ax.imshow(x.numpy(), cmap=_colour_map(signed), vmin=low, vmax=high, aspect="auto", interpolation="none")
    ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
    bar = ax.figure.colorbar(image, ax=ax, aspect=25, pad=0.02)
    bar.outline.set_visible(False)


def _draw_lines(ax: Axes, title: str, xlabel: str, lines: dict[str, Tensor]) -> None:
    """Draws named lines over 0, 1, … with a legend."""
    for n, (name, y) in enumerate(lines.items()):
        dash = ("-", "--", "-.", ":")[n % 4]
        ax.plot(range(len(y)), y.numpy(), color=style(n).colour, linestyle=dash, label=name)
    ax.set(title=title, xlabel=xlabel)
    ax.grid(True)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if any(lines):
        ax.legend(frameon=False, fontsize=7, handlelength=2.4)


def plot_chart(
    path: str | Path, series: Sequence[Series], x: Axis, y: Axis, size: tuple[float, float] = (5.2, 3.2)
) -> None:
    """Writes the same chart of series to a file as `chart` makes for pages, with their names at their ends."""
    series = select_drawn(series, y)
    with figure_file(path, size) as fig:
        ax = paint_chart(fig, series, [shorten(line.name) for line in series], x, y)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(True)
        ax.set_axisbelow(True)


def check_figure(path: str | Path) -> None:
    """Raises an OptionError if no figure can have this file name; to be called before long work for the figure."""
    kind = Path(path).suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise OptionError(f"{path}: the name of a figure ends in .png, .svg or .pdf.{did_you_mean(kind, FORMATS)}")


@contextmanager
def figure_file(path: str | Path, size: tuple[float, float]) -> Iterator[Figure]:
    """Yields a figure to draw on and writes it to a file at the end; an earlier file stays until this is on disk."""
    path = Path(path)
    check_figure(path)
    if not all(1 <= x <= 50 for x in size):
        raise OptionError(f"size = {size[0]:g} × {size[1]:g}: expected 1 to 50 inches each")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # an SVG's viewer may have it
        fig = Figure(figsize=size, layout="constrained")
        yield fig
        # Without dates the same call writes the same bytes.
        kind = path.suffix.removeprefix(".").lower()
        dates: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None, "ModDate": None}}
        with atomic_write(path) as file:
            fig.savefig(file, format=kind, dpi=300, facecolor="white", metadata=dates.get(kind))
