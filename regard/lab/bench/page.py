"""The page and the picture of a race."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.lab.bench.peers import PEERS
from regard.lab.bench.results import RaceResults, RaceRow
from regard.report.canvas import draw
from regard.report.chart import Axis, Series, chart
from regard.report.experiment import SectionBuilder, build_page
from regard.report.markup import Markup, code, join, number, strong
from regard.report.page import Page, ReportError, details, figure, figures, paragraph, samples, table
from regard.report.palette import MUTED, Style, styles
from regard.report.paper import figure_file
from regard.report.plots import Point, format_axis_decades

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The title of each pass.
PASSES = {"forward": "Forward", "training": "Forward and backward", "decode": "One more token"}
_WHOLE_PASSES = ("forward", "training")  # over all tokens at once
COLUMNS = ["", "tokens", "batch", "ms", "quartiles", "times the floor", "GFLOP/s", "GB/s", "peak MiB"]
_TALL = 3.9  # inches: room for a dozen names beside the lines


def bench_page(document: Mapping[str, Any]) -> Page:
    """Returns the page of a race, from what its results.json holds."""
    results = read_race(document)
    sections: list[SectionBuilder] = [("Time", _times)]
    if results.of_pass("decode"):
        sections.append(("Decoding", _decoding))
    sections += [("Memory", _memory), ("The roofline", _roofline), ("In numbers", _numbers)]
    if results.absent:
        sections.append(("Left out", _left_out))
    return build_page("A race of attention mechanisms", _lead, sections, results, document)


def read_race(document: Mapping[str, Any]) -> RaceResults:
    """Returns the typed results of a race; what they lack is a ReportError."""
    try:
        return RaceResults.from_dict(document)
    except (KeyError, TypeError, ValueError) as error:
        raise ReportError(
            f"the results of a race lack {error} ({type(error).__name__}); expected those of `regard bench`"
        ) from error


def _lead(results: RaceResults) -> Markup:
    """Returns who is fastest at the longest length, pass by pass."""
    words: list[object] = ["Nothing was measured. "]
    if results.rows:
        words = [f"On {_describe_machine(results)}. "]
    for passing in results.passes:
        rows = results.of_pass(passing)
        longest = max(row.N for row in rows)
        ranked = sorted((row for row in rows if longest == row.N), key=lambda row: row.median)
        fastest = ranked[0]
        words += [f"{PASSES[passing].capitalize()} at {longest:,} tokens: ", strong(fastest.what)]
        words += [f" takes {1e3 * fastest.median:.3g} ms"]
        softmax = [row for row in ranked if row.what == "softmax"]
        # The reader's own is told of too, wherever it came in.
        known = {"softmax", *(peer.name for peer in PEERS)}
        own = [row for row in ranked if row.peer and row.what not in known]
        told = [row for row in [*softmax, *own] if row is not fastest]
        words += [f", {row.what} {row.median / fastest.median:.2g} times that" for row in told]
        words += [". "]
    if results.interrupted:
        words += ["The race was interrupted: this is what was measured until then."]
    return join(*words)


def _describe_machine(results: RaceResults) -> str:
    """Returns the device and the sizes of a race in words."""
    config = results.config
    heads = f"{config['heads']} heads"
    if config["groups"] != config["heads"]:
        heads += f" ({config['groups']} of keys)"
    parts = [results.device.name, config["dtype"], f"{heads} of width {config['width']}"]
    parts.append("causal" if config["causal"] else "every token sees all")
    if config["total"]:
        parts.append(f"{config['total']:,} tokens in all")
    return ", ".join(parts)


def _styles(*races: RaceResults) -> dict[str, Style]:
    """Returns one style for each entrant, the same in all races."""
    return styles(name for results in races for name in results.entrants)


def _time_series(results: RaceResults, passing: str, known: Mapping[str, Style] | None = None) -> list[Series]:
    """Returns the times of one pass in ms over the number of tokens, with quartiles and, for ours, the least time."""
    known = known or _styles(results)
    lines = []
    for name in results.entrants:
        rows = [row for row in results.of_pass(passing) if row.what == name]
        points = [(row.N, 1e3 * row.median) for row in rows]
        band = [(1e3 * row.seconds[0], 1e3 * row.seconds[2]) for row in rows]
        lines.append(Series(name, points, known[name], band, floor=_floors(rows)))
    return lines


def _floors(rows: Sequence[RaceRow]) -> list[Point]:
    """Returns the least possible time in ms at each length where it is known; [] for a peer, which has that of ours."""
    return [(row.N, 1e3 * row.work.floor) for row in rows if row.work and row.work.floor and not row.peer]


def _length_axis(results: RaceResults, name: str = "tokens") -> Axis:
    """Returns the axis of the number of tokens."""
    return Axis(name, log=True, ticks=results.lengths)


def _times(results: RaceResults) -> Iterable[Markup]:
    """Yields the times of the passes over all tokens."""
    config = results.config
    sequences = f"batch {config['batch']}"
    if config["total"]:
        sequences = f"about {config['total']:,} tokens in all"
    yield paragraph(
        f"Medians of runs in turn, {sequences}; shaded: from the first to the third quartile. Thin and dashed, in the "
        "same colour: the floor, the larger of bytes that must be moved over the bandwidth and useful FLOPs over the "
        "peak."
    )
    yield figures(*(time_figure(results, passing) for passing in _WHOLE_PASSES if results.of_pass(passing)))


def time_figure(results: RaceResults, passing: str, x: str = "tokens") -> Markup:
    """Returns the chart of the times of one pass."""
    svg = chart(_time_series(results, passing), _length_axis(results, x), Axis("ms", log=True), height=_TALL)
    repeats = min(row.repeats for row in results.of_pass(passing))
    return figure(svg, f"{number(repeats)} runs of each size, or more.", PASSES[passing])


def _on_gpu(results: RaceResults) -> bool:
    """Returns whether the race was on a GPU."""
    return bool(results.config["device"].startswith("cuda"))


def _decoding(results: RaceResults) -> Iterable[Markup]:
    """Yields the time of one more token."""
    text = "What one more token costs when so many were read before: a cache is read whole, a state does not grow."
    if _on_gpu(results):
        text += " As a CUDA graph, as generating uses it."
    yield paragraph(text)
    yield time_figure(results, "decode", "tokens before")


def _memory(results: RaceResults) -> Iterable[Markup]:
    """Yields the memory at the peak of a run."""
    counted = "Tensors that operations give, while they live; what an operation needs inside is not seen."
    if _on_gpu(results):
        counted = "As PyTorch's allocator counts it."
    yield paragraph(f"At the peak of a run, above its inputs. {counted}")
    pictures = []
    for passing in _WHOLE_PASSES:
        lines = []
        for name, style in _styles(results).items():
            rows = [row for row in results.of_pass(passing) if row.what == name]
            if rows:
                lines.append(Series(name, [(row.N, row.peak / 2**20) for row in rows if row.peak], style))
        if lines:
            svg = chart(lines, _length_axis(results), Axis("MiB", log=True), height=_TALL)
            pictures.append(figure(svg, "One run.", PASSES[passing]))
    yield figures(*pictures)


def _roofline(results: RaceResults) -> Iterable[Markup]:
    """Yields the roofline: rates against arithmetic intensity, below what the machine can do."""
    device = results.device
    if not device.flops:
        yield paragraph(f"No peak is known of {device.name} at {results.config['dtype']}.")
        return
    source = "measured here" if device.measured else "as its maker states them"
    yield paragraph(
        f"Useful FLOPs for each byte that must be moved, against those done in a second. The roof is the bandwidth, "
        f"{number(device.bandwidth / 1e9)} GB/s, on the left and the peak, {number(device.flops / 1e9)} GFLOP/s, "
        f"on the right, {source}. A point is one size, larger with more tokens; hollow: with the backward pass, pale: "
        "decoding. What is done beside products (exponentials, sums) counts for nothing here."
    )

    def paint(fig: Figure) -> None:
        _draw_roofline(fig.add_subplot(), results)

    yield figure(draw(paint, _describe_roofline(results), 6.6, 4.2), "Nearer to the roof is better.")


def _rows_with_work(results: RaceResults) -> list[tuple[RaceRow, float, float]]:
    """Returns each row whose FLOPs are known with its FLOPs a byte and its FLOPs a second."""
    return [
        (row, row.work.flops / row.work.bytes, row.work.flops / row.median)
        for row in results.rows
        if row.work and row.work.flops
    ]


def _draw_roofline(ax: Axes, results: RaceResults) -> None:
    """Draws the roof and a point for every row whose FLOPs are known."""
    peak = results.device.flops
    bandwidth = results.device.bandwidth
    assert peak is not None
    points = _rows_with_work(results)
    ridge = peak / bandwidth  # left of it the bandwidth is the limit, right of it the peak
    intensities = [*(intensity for _, intensity, _ in points), ridge]
    low = min(intensities) / 2
    high = max(intensities) * 2
    ax.plot([low, ridge, high], [low * bandwidth / 1e9, peak / 1e9, peak / 1e9], color=MUTED.light)
    lengths = list(dict.fromkeys(row.N for row, _, _ in points))
    labelled: set[str] = set()
    for name, style in _styles(results).items():
        for row, intensity, rate in points:
            if row.what != name:
                continue
            how: dict[str, Any] = {"facecolors": style.colour, "label": None, "alpha": None}
            if name not in labelled:
                how["label"] = name
                labelled.add(name)
            if row.passing == "training":
                how["facecolors"] = "none"
            if row.passing == "decode":
                how["alpha"] = 0.35
            how |= {"s": 12 + 10 * lengths.index(row.N), "marker": style.marker}
            ax.scatter(intensity, rate / 1e9, edgecolors=style.colour, linewidths=1.0, **how)
    ax.set(xscale="log", yscale="log", xlabel="useful FLOPs a byte", ylabel="GFLOP/s")
    for axis in (ax.xaxis, ax.yaxis):
        format_axis_decades(axis)
    ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5), markerscale=1.0)


def _describe_roofline(results: RaceResults) -> str:
    """Returns the highest rate in words."""
    points = _rows_with_work(results)
    if not points:
        return "A roofline without points."
    best, _, rate = max(points, key=lambda point: point[2])
    return (
        f"A roofline. The most FLOPs a second: {best.what}, {best.passing}, {best.N} tokens: {rate / 1e9:.3g} GFLOP/s."
    )


def _numbers(results: RaceResults) -> Iterable[Markup]:
    """Yields a table for each pass."""
    for passing in results.passes:
        yield details(PASSES[passing], table(pass_table(results, passing), COLUMNS, "Medians, with quartiles."))


def pass_table(results: RaceResults, passing: str) -> list[list[Any]]:
    """Returns the table of one pass under `COLUMNS`, for the page and the terminal."""
    return [_table_row(row) for row in results.of_pass(passing)]


def _table_row(row: RaceRow) -> list[Any]:
    """Returns one row of a table; what is unknown is empty."""
    low, median, high = (1e3 * x for x in row.seconds)
    over_floor = flops_rate = bytes_rate = memory = ""
    if row.work and row.work.floor:
        over_floor = number(row.median / row.work.floor)
    if row.work and row.work.flops:
        flops_rate = number(row.work.flops / row.median / 1e9)
        bytes_rate = number(row.work.bytes / row.median / 1e9)
    if row.peak is not None:
        memory = number(row.peak / 2**20)
    quartiles = f"{number(low)} to {number(high)}"
    return [row.what, row.N, row.B, number(median), quartiles, over_floor, flops_rate, bytes_rate, memory]


def _left_out(results: RaceResults) -> Iterable[Markup]:
    """Yields who did not take part, where, and why."""
    lines = []
    for absence in results.absent:
        where = ", ".join(filter(None, (absence.what, absence.where)))
        lines.append(join(strong(where), ": ", code(absence.why)))
    yield samples(lines)


def picture(races: Sequence[RaceResults], path: str | Path, size: tuple[float, float] | None = None) -> None:
    """Writes races as one figure, a row for each: time forward, forward and backward, and of one more token."""
    passes = [[passing for passing in PASSES if results.of_pass(passing)] for results in races]
    columns = max(map(len, passes), default=0)
    known = _styles(*races)
    with figure_file(path, size or (7.2, 2.6 * len(races) + 0.2)) as fig:
        parts: Any = fig.subfigures(len(races), 1, squeeze=False)
        for part, results, own_passes in zip(parts[:, 0], races, passes, strict=True):
            part.suptitle(_describe_machine(results), fontsize=8.5)
            axes = part.subplots(1, columns, squeeze=False)[0]
            for ax, passing in zip(axes, own_passes, strict=False):
                _draw_panel(ax, results, passing, known)
            # One legend a race: every panel has the same entrants.
            handles, names = axes[0].get_legend_handles_labels()
            part.legend(handles, names, loc="outside right center", frameon=False, fontsize=7, handlelength=1.6)


def _draw_panel(ax: Axes, results: RaceResults, passing: str, known: Mapping[str, Style]) -> None:
    """Draws the times of one pass; an entrant without any still gets its place in the legend."""
    for line in _time_series(results, passing, known):
        colour, dash, marker = line.style
        how: Any = {"color": colour, "linestyle": dash, "marker": marker, "markersize": 3, "label": line.name}
        if not line.points:
            ax.plot([], [], **how)
            continue
        xs, ys = zip(*line.points, strict=True)
        low, high = zip(*line.band, strict=True)
        ax.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
        ax.plot(xs, ys, **how)
        if line.floor:
            ax.plot(*zip(*line.floor, strict=True), color=colour, linestyle=":", linewidth=0.8)
    ax.set(xscale="log", yscale="log", title=PASSES[passing], xlabel="tokens", ylabel="ms")
    ax.set_xticks(results.lengths, [_short_length(n) for n in results.lengths], minor=False)
    format_axis_decades(ax.yaxis)
    ax.minorticks_off()
    ax.grid(True)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _short_length(n: int) -> str:
    """Formats a number of tokens: 512, 4k."""
    if n >= 1024:
        return f"{n // 1024}k"
    return str(n)
