"""The page and the picture of a race, from what `regard.lab.bench.race` found.

rows      what, like, peer, pass, N, B, seconds [first quartile, median, third], repeats, peak, flops, bytes, floor
absent    what, why, and where it is not all of the race: pass, N
device    name, flops, bandwidth, measured
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.report.canvas import draw
from regard.report.chart import Axis, Series, chart
from regard.report.experiment import SectionBuilder, build_page, distinct_values, select_rows
from regard.report.markup import Markup, code, join, number, strong
from regard.report.page import Page, details, figure, figures, paragraph, samples, table
from regard.report.palette import MUTED, Style, styles
from regard.report.paper import figure_file
from regard.report.plots import format_axis_decades

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Found = Mapping[str, Any]
PASSES = {
    "forward": ("Forward", "ms for all tokens"),
    "training": ("Forward and backward", "ms for all tokens"),
    "decode": ("One more token", "ms a token"),
}
_TALL = 3.9  # inches: room for a dozen names beside the lines


def bench_page(results: Found) -> Page:
    """The page of a race."""
    parts: list[SectionBuilder] = [("Time", _times), ("Memory", _memory), ("The roofline", _roofline)]
    if any(row["pass"] == "decode" for row in results["rows"]):
        parts.insert(1, ("Decoding", _decoding))
    parts.append(("In numbers", _numbers))
    if results["absent"]:
        parts.append(("Left out", _absent))
    return build_page("A race of attention mechanisms", _lead, parts, results)


def _lead(results: Found) -> Markup:
    said: list[object] = [f"On {_machine(results)}. " if results["rows"] else "Nothing was measured. "]
    for passing in distinct_values(results["rows"], "pass"):
        rows = select_rows(results["rows"], **{"pass": passing})
        longest = max(row["N"] for row in rows)
        here = sorted(select_rows(rows, N=longest), key=_median)
        what = PASSES[passing][0].lower() if passing != "decode" else "one more token"
        said += [f"{what[0].upper()}{what[1:]} at {longest:,} tokens: ", strong(here[0]["what"])]
        said += [f" takes {1e3 * _median(here[0]):.3g} ms"]
        softmax = select_rows(here, what="softmax")
        if softmax and here[0]["what"] != "softmax":
            said += [f", softmax {_median(softmax[0]) / _median(here[0]):.2g} times that"]
        said += [". "]
    if results["interrupted"]:
        said += ["The race was interrupted: this is what was measured until then."]
    return join(*said)


def _machine(results: Found) -> str:
    config, device = results["config"], results["device"]
    heads = f"{config['heads']} heads" + (
        f" ({config['groups']} of keys)" if config["groups"] != config["heads"] else ""
    )
    rule = "causal" if config["causal"] else "every token sees all"
    total = f", {config['total']:,} tokens in all" if config["total"] else ""
    return f"{device['name']}, {config['dtype']}, {heads} of width {config['width']}, {rule}{total}"


def _median(row: Found) -> float:
    return float(row["seconds"][1])


def _styles(*results: Found) -> dict[str, Style]:
    return styles(row["what"] for one in results for row in one["rows"])


def _lines(results: Found, passing: str, known: Mapping[str, Style] | None = None) -> list[Series]:
    lines, known = [], known or _styles(results)
    for name in distinct_values(results["rows"], "what"):
        drawn = known[name]
        rows = select_rows(results["rows"], what=name, **{"pass": passing})
        points = [(row["N"], 1e3 * _median(row)) for row in rows]
        band = [(1e3 * row["seconds"][0], 1e3 * row["seconds"][2]) for row in rows]
        floor = [(row["N"], 1e3 * row["floor"]) for row in rows if row.get("floor") and not row["peer"]]
        lines.append(Series(name, points, drawn, band, floor=floor))
    return lines


def _across(results: Found, name: str = "tokens") -> Axis:
    return Axis(name, log=True, ticks=distinct_values(results["rows"], "N"))


def _times(results: Found) -> Iterable[Markup]:
    config = results["config"]
    every = f"about {config['total']:,} tokens in all" if config["total"] else f"batch {config['batch']}"
    yield paragraph(
        f"Medians of runs in turn, {every}; shaded: from the first to the third quartile. Thin and dashed, in the same "
        "colour: the floor, the larger of bytes that must be moved over the bandwidth and useful FLOPs over the peak."
    )
    yield figures(
        *(
            figure(
                chart(_lines(results, p), _across(results), Axis("ms", log=True), height=_TALL),
                f"{number(_repeats(results, p))} runs of each size, or more.",
                PASSES[p][0],
            )
            for p in ("forward", "training")
            if select_rows(results["rows"], **{"pass": p})
        )
    )


def _repeats(results: Found, passing: str) -> int:
    return int(min(row["repeats"] for row in select_rows(results["rows"], **{"pass": passing})))


def _decoding(results: Found) -> Iterable[Markup]:
    yield paragraph(
        "What one more token costs when so many were read before: a cache is read whole, a state does not grow."
        + (" As a CUDA graph, as generating uses it." if results["config"]["device"].startswith("cuda") else "")
    )
    svg = chart(_lines(results, "decode"), _across(results, "tokens before"), Axis("ms", log=True), height=_TALL)
    yield figure(svg, f"{number(_repeats(results, 'decode'))} runs of each size, or more.", PASSES["decode"][0])


def _memory(results: Found) -> Iterable[Markup]:
    yield paragraph(
        "At the peak of a run, above its inputs. "
        + (
            "As PyTorch's allocator counts it."
            if results["config"]["device"].startswith("cuda")
            else "Tensors that operations give, while they live; what an operation needs inside is not seen."
        )
    )
    drawn = []
    for passing in ("forward", "training"):
        lines = [
            Series(name, [(r["N"], r["peak"] / 2**20) for r in rows if r["peak"]], style)
            for name, style in _styles(results).items()
            if (rows := select_rows(results["rows"], what=name, **{"pass": passing}))
        ]
        if lines:
            svg = chart(lines, _across(results), Axis("MiB", log=True), height=_TALL)
            drawn.append(figure(svg, "One run.", PASSES[passing][0]))
    yield figures(*drawn)


def _roofline(results: Found) -> Iterable[Markup]:
    device = results["device"]
    if not device["flops"]:
        yield paragraph(f"No peak is known of {device['name']} at {results['config']['dtype']}.")
        return
    source = "measured here" if device["measured"] else "as its maker states them"
    yield paragraph(
        f"Useful FLOPs for each byte that must be moved, against those done in a second. The roof is the bandwidth, "
        f"{number(device['bandwidth'] / 1e9)} GB/s, on the left and the peak, {number(device['flops'] / 1e9)} GFLOP/s, "
        f"on the right, {source}. A point is one size, larger with more tokens; hollow: with the backward pass, pale: "
        "decoding. What is done beside products (exponentials, sums) counts for nothing here."
    )

    def paint(made: Figure) -> None:
        _roof(made.add_subplot(), results)

    yield figure(draw(paint, _said_of_roof(results), 6.6, 4.2), "Nearer to the roof is better.")


def _roof(ax: Axes, results: Found) -> None:
    device, rows = results["device"], [row for row in results["rows"] if row.get("flops")]
    intensity = [row["flops"] / row["bytes"] for row in rows]
    ridge = device["flops"] / device["bandwidth"]
    low, high = min([*intensity, ridge]) / 2, max([*intensity, ridge]) * 2
    ax.plot([low, ridge, high], [low * device["bandwidth"] / 1e9, *[device["flops"] / 1e9] * 2], color=MUTED.light)
    sizes = {N: 12 + 10 * n for n, N in enumerate(distinct_values(rows, "N"))}
    for name, style in _styles(results).items():
        for n, row in enumerate(select_rows(rows, what=name)):
            hollow, pale = row["pass"] == "training", row["pass"] == "decode"
            ax.scatter(
                row["flops"] / row["bytes"], row["flops"] / _median(row) / 1e9, s=sizes[row["N"]], marker=style.marker,
                facecolors="none" if hollow else style.colour, edgecolors=style.colour, linewidths=1.0,
                alpha=0.35 if pale else None, label=None if n else name,
            )  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel="useful FLOPs a byte", ylabel="GFLOP/s")
    for axis in (ax.xaxis, ax.yaxis):
        format_axis_decades(axis)
    ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5), markerscale=1.0)


def _said_of_roof(results: Found) -> str:
    best = max((r for r in results["rows"] if r.get("flops")), key=lambda r: r["flops"] / _median(r), default=None)
    if best is None:
        return "A roofline without points."
    rate = best["flops"] / _median(best) / 1e9
    return (
        f"A roofline. The most FLOPs a second: {best['what']}, {best['pass']}, {best['N']} tokens: {rate:.3g} GFLOP/s."
    )


def _numbers(results: Found) -> Iterable[Markup]:
    for passing in distinct_values(results["rows"], "pass"):
        cells = [_cells(row) for row in select_rows(results["rows"], **{"pass": passing})]
        yield details(PASSES[passing][0], table(cells, COLUMNS, "Medians, with quartiles."))


COLUMNS = ["", "tokens", "batch", "ms", "quartiles", "times the floor", "GFLOP/s", "GB/s", "peak MiB"]


def _cells(row: Found) -> list[object]:
    """One line of a table; also the terminal's."""
    low, middle, high = (1e3 * x for x in row["seconds"])
    work = row.get("flops")
    return [
        row["what"],
        row["N"],
        row["B"],
        number(middle),
        f"{number(low)} to {number(high)}",
        number(_median(row) / row["floor"]) if row.get("floor") else "",
        number(work / _median(row) / 1e9) if work else "",
        number(row["bytes"] / _median(row) / 1e9) if work else "",
        "" if row["peak"] is None else number(row["peak"] / 2**20),
    ]


def cells(results: Found, passing: str) -> list[list[str]]:
    """The table of one pass, as text."""
    return [[str(cell) for cell in _cells(row)] for row in select_rows(results["rows"], **{"pass": passing})]


def _absent(results: Found) -> Iterable[Markup]:
    yield samples([join(strong(_where(one)), ": ", code(one["why"])) for one in results["absent"]])


def _where(one: Found) -> str:
    return str(one["what"]) + (f", {one['pass']}, from {one['N']:,} tokens on" if "N" in one else "")


def picture(results: Sequence[Found], path: str | Path, size: tuple[float, float] | None = None) -> None:
    """Races as one figure, a row for each: time forward, forward and backward, and of one more token."""
    shown = [[p for p in PASSES if select_rows(one["rows"], **{"pass": p})] for one in results]
    columns, known = max(map(len, shown), default=0), _styles(*results)
    with figure_file(path, size or (7.2, 2.6 * len(results) + 0.2)) as made:
        parts: Any = made.subfigures(len(results), 1, squeeze=False)
        for part, one, passes in zip(parts[:, 0], results, shown, strict=True):
            part.suptitle(_machine(one), fontsize=8.5)
            axes = part.subplots(1, columns, squeeze=False)[0]
            for ax, passing in zip(axes, passes, strict=False):
                _panel(ax, one, passing, known)
            handles, names = axes[0].get_legend_handles_labels()
            part.legend(handles, names, loc="outside right center", frameon=False, fontsize=7, handlelength=1.6)


def _panel(ax: Axes, results: Found, passing: str, known: Mapping[str, Style]) -> None:
    for line in _lines(results, passing, known):
        colour, dash, marker = line.style
        if not line.points:
            ax.plot([], [], color=colour, linestyle=dash, marker=marker, markersize=3, label=line.name)
            continue
        xs, ys = zip(*line.points, strict=True)
        low, high = zip(*line.band, strict=True)
        ax.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
        ax.plot(xs, ys, color=colour, linestyle=dash, marker=marker, markersize=3, label=line.name)
        if line.floor:
            ax.plot(*zip(*line.floor, strict=True), color=colour, linestyle=":", linewidth=0.8)
    ax.set(xscale="log", yscale="log", title=PASSES[passing][0], xlabel="tokens", ylabel="ms")
    ticks = distinct_values(results["rows"], "N")
    ax.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ticks], minor=False)
    format_axis_decades(ax.yaxis)
    ax.minorticks_off()
    ax.grid(True)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
