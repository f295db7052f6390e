"""The page of a conversion: what it cost, what teaching brought back, which heads are still off, and what it saves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from regard.report import plots
from regard.report.canvas import SIZE, draw
from regard.report.chart import Axis, Series, chart
from regard.report.dots import Lane, dot_plot
from regard.report.experiment import Row, build_page, select_rows
from regard.report.markup import Markup, count_noun, join, number, percent, strong, tag
from regard.report.page import Page, figure, figures, paragraph, table
from regard.report.palette import INK, SERIES, Style, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {
    "original": "original",
    "surgery": "right after surgery",
    "distillation": "distilled",
    "uptraining": "uptrained",
    "control": "control",
}


def convert_page(results: Row) -> Page:
    """The page; parts that were not done are left out."""
    parts = [("Outcome", _outcome), ("Which heads are off?", _heads)]
    if any(row["steps"] for row in results["stages"]):
        parts.append(("Learning", _learning))
    if results["states"]:
        parts.append(("What it saves", _saves))
    return build_page(f"Converted: {_kind(results['change'])}", _lead, parts, results)


def _kind(change: Row) -> str:
    """The change in a few words."""
    said = []
    before, after = change["kv_heads"]
    if before != after:
        said.append(f"{before} → {count_noun(after, 'key/value head')}")
    old, new = change["mechanisms"]
    names = list(dict.fromkeys(b for a, b in zip(old, new, strict=True) if a != b))
    if names:
        said.append(f"{old[change['layers'][0]]} → {', '.join(names)}")
    return ", ".join(said) or "new options"


def _where(change: Row) -> str:
    layers, of_all = change["layers"], change["of"]
    if len(layers) == of_all:
        return f"all {of_all} layers" if of_all > 1 else "its one layer"
    return f"{'layer' if len(layers) == 1 else 'layers'} {', '.join(map(str, layers))} of {of_all}"


def _row(results: Row, name: str) -> Row | None:
    return next(iter(select_rows(results["stages"], name=name)), None)


def _last(results: Row) -> Row:
    return select_rows(results["stages"], name=results["run"])[0]


def _styles() -> dict[str, Style]:
    return {name: style(n) for n, name in enumerate(NAMES)}


def _lead(results: Row) -> Markup:
    change, stages = results["change"], results["stages"]
    said: list[object] = [f"{results['source']}, {_where(change)}: ", strong(_kind(change)), ". "]
    if "perplexity" in stages[0]:
        told = [f"{NAMES[row['name']]} {number(row['perplexity'])}" for row in stages]
        said += ["Perplexity: ", strong(", ".join(told)), ". "]
    else:
        told = [f"{NAMES[row['name']]} {percent(row['change'])}" for row in stages[1:]]
        said += ["Its vectors are off by: ", strong(", ".join(told)), ". "]
    for key, first in stages[0].get("answers", {}).items():
        last = _last(results)["answers"][key]
        kept = last["accuracy"] / first["accuracy"] if first["accuracy"] else math.nan
        said += [f"Right answers ({key}): {percent(first['accuracy'])} before, {percent(last['accuracy'])} after: "]
        said += [strong(f"{percent(kept)} kept"), ". "]
    if results["states"]:
        row = results["states"][-1]
        before, after = row["before"]["bytes"], row["after"]["bytes"]
        said += [
            f"After {row['tokens']:,} tokens its state has {_bytes(after)} instead of {_bytes(before)} (",
            strong(f"{before / after:.3g} times less" if before >= after else f"{after / before:.3g} times more"),
            ").",
        ]
    return join(*said)


def _bytes(n: float) -> str:
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"


def _outcome(results: Row) -> Iterable[Markup]:
    stages, task = results["stages"], results["task"]
    control = _row(results, "control")
    text = (
        f"Measured on {results['measured']['tokens']:,} tokens that are not learned from, the same for all."
        if task == "lm"
        else f"Measured by the loss of the model's own task, {task}, on the same rows for all."
    )
    if control is not None:
        text += (
            f" The control starts right after surgery as well, and spends the {control['steps']:,} steps of "
            "distillation and uptraining together on the ordinary loss alone."
        )
    if results["trained"]:
        share = sum(row["steps"] for row in stages if row["name"] != "control") / results["trained"]
        text += (
            f" The model itself was trained for {results['trained']:,} steps: converting took {percent(share)} of that."
        )
    yield paragraph(text)
    yield _stages(results)
    if "loss" in stages[0]:
        lanes = [_lane(row, stages[0]) for row in stages]
        note = "The loss is the logarithm of the perplexity."
        yield figure(dot_plot(lanes, "loss a token", width=6.0), note, "Loss by stage")
    named = {NAMES[name]: one for name, one in _styles().items()}
    drawn = []
    for key in stages[0].get("answers", {}):
        bars = [_bar(NAMES[row["name"]], row["answers"][key]) for row in stages]
        drawn.append(figure(plots.bars(bars, styles=named), "Lines: 95% intervals.", f"Right answers, {key}"))
    if drawn:
        yield figures(*drawn)


def _bar(name: str, found: Row) -> tuple[str, float, float, float, int]:
    return name, found["accuracy"], found["low"], found["high"], found["n"]


def _lane(row: Row, first: Row) -> Lane:
    more = "" if row is first else f", ×{number(math.exp(min(row['loss'] - first['loss'], 700)))}"
    note = f"perplexity {number(row['perplexity'])}{more}"
    return Lane(NAMES[row["name"]], [], _styles()[row["name"]], row["loss"], note=note)


def _stages(results: Row) -> Markup:
    stages = results["stages"]
    asked = list(stages[0].get("answers", {}))
    measure = "perplexity" if "perplexity" in stages[0] else "change of the vectors"
    columns = [
        "",
        "steps",
        measure,
        *(f"right answers, {key}" for key in asked),
        "error of attention",
        "time",
    ]
    rows = []
    for row in stages:
        value = number(row["perplexity"]) if "perplexity" in row else percent(row["change"])
        cells: list[object] = [NAMES[row["name"]], number(row["steps"]) if row["steps"] else "–", value]
        for key in asked:
            found = row["answers"][key]
            cells.append(f"{percent(found['accuracy'])} ({percent(found['low'], 0)} to {percent(found['high'], 0)})")
        seconds = f"{row['seconds']:.0f} s" if row["steps"] else "–"
        rows.append([*cells, percent(row["error"], 0) if "error" in row else "–", seconds])
    best = [n for n, row in enumerate(stages) if row["name"] == results["run"]]
    return table(rows, columns, "Shaded: the model that came out.", highlight=best)


def _errors(row: Row) -> list[float]:
    return [error for heads in row.get("heads", {}).values() for error in heads]


def _heads(results: Row) -> Iterable[Markup]:
    rows = [row for row in results["stages"] if "heads" in row]
    yield paragraph(
        "Each converted layer was given what the same layer of the original was given. The error of a head is "
        "‖a′ − a‖ / ‖a‖ of what it adds to the stream, through its part of the output projection: 0% is the original's "
        "head, and 100% is as far off as adding nothing. Uptraining follows the ordinary loss and may move heads away.",
    )
    if results["change"]["kv_heads"][0] != results["change"]["kv_heads"][1]:
        yield paragraph(
            "Heads that were pooled share keys and values, so that none can be what it was, and they divide the work "
            "anew. What is taught is their sum: its error is that of attention in the table above."
        )
    most = max(max(_errors(row)) for row in rows)
    drawn = [figure(_map(row["heads"], most), _worst(row["heads"]), NAMES[row["name"]].capitalize()) for row in rows]
    yield figures(*drawn)
    yield paragraph(
        tag("a", "Both models over one text", href="lens.html"),
        ": choose Compare on the page to see the weights of a head side by side, and as a difference.",
    )


def _worst(heads: Row) -> str:
    error, layer, head = max((error, layer, n) for layer, row in heads.items() for n, error in enumerate(row))
    return f"Furthest off: layer {layer}, head {head}, by {percent(error, 0)}."


def _map(heads: Row, most: float) -> Markup:
    """A cell for each head, the darker the further off, with its error in percent."""
    from matplotlib.colors import to_rgb

    layers, values = list(heads), np.array(list(heads.values()), dtype=float)
    across, down = values.shape[1], values.shape[0]
    width = min(max(2.6, 0.42 * across + 0.9), 7.6)
    side = (width - 0.9) / across
    fits = side > 0.24

    def paint(made: Figure) -> None:
        ax = made.add_subplot()
        pixels = np.empty((*values.shape, 4))
        pixels[..., :3] = to_rgb(SERIES[1].light)
        pixels[..., 3] = 0.85 * values / max(most, 1e-12)
        ax.imshow(pixels, interpolation="none", aspect="auto")
        ax.grid(False)
        for spine in ax.spines.values():
            spine.set(visible=True, linewidth=0.5)
        if fits:
            for (y, x), value in np.ndenumerate(values):
                ax.text(x, y, f"{100 * value:.0f}", ha="center", va="center", fontsize=0.85 * SIZE, color=INK.light)
        every = max(1, round(0.3 / side))
        ax.set_xticks(range(0, across, every), [str(n) for n in range(0, across, every)])
        ax.set_yticks(range(down), layers)
        ax.set(xlabel="head" + (", error in %" if fits else ""), ylabel="layer")

    said = "; ".join(f"layer {n}: {', '.join(percent(x, 0) for x in row)}" for n, row in heads.items())
    return draw(paint, f"Error of each head. {said}", width, 0.3 * down + 0.75)


def _learning(results: Row) -> Iterable[Markup]:
    drawn, styles = [], _styles()
    taught = _row(results, "distillation")
    if taught is not None:
        begun = select_rows(results["stages"], name="surgery")[0]["error"]
        line = Series("error", [(0, begun), *map(tuple, taught["errors"])], styles["distillation"])
        svg = chart([line], Axis("step"), Axis("relative error", shares=True, span=(0, None)), values=True)
        note = (
            "Of what attention adds to the stream, after the output projection: the root of the mean over converted "
            "layers of ‖A′ − A‖² / ‖A‖², on text that is not learned from."
        )
        drawn.append(figure(svg, note, "Distillation"))
    lines = []
    for name, shift in (("uptraining", taught["steps"] if taught is not None else 0), ("control", 0)):
        row = _row(results, name)
        if row is not None:
            points = [(step + shift, loss) for step, loss in row["curve"]]
            lines.append(Series(NAMES[name], points, styles[name], marked=False))
    if lines:
        svg = chart(lines, Axis("step, distillation counted in"), Axis("loss in training", log=True), values=True)
        drawn.append(figure(svg, "The ordinary loss of batches as they are learned from.", "Uptraining"))
    yield figures(*drawn)


def _saves(results: Row) -> Iterable[Markup]:
    rows = []
    for row in results["states"]:
        before, after = row["before"], row["after"]
        cells = [_bytes(before["bytes"]), _bytes(after["bytes"]), f"{before['bytes'] / after['bytes']:.3g}×"]
        rows.append([number(row["tokens"]), *cells, _bytes(before["each"]), _bytes(after["each"])])
    columns = ["tokens", "before", "after", "ratio", "with each token: before", "after"]
    yield table(
        rows, columns, "Bytes of the state that one sequence keeps while it is generated, all layers, as declared."
    )
    count = results["parameters"]
    yield paragraph(f"Parameters: {number(count['before'])} before, {number(count['after'])} after.")
    speed = results["speed"]
    if speed is None:
        return
    ratio = speed["ratio"]
    lanes = [
        Lane(name, speed[key], style(n), median(speed[key]), note=f"{number(round(median(speed[key])))} tokens/s")
        for n, (name, key) in enumerate((("original", "before"), ("converted", "after")))
    ]
    note = (
        f"{speed['sequences']} sequences of {speed['prompt']} tokens continued by {speed['tokens']} each, both models "
        f"in turn. Converted against original: {ratio['median']:.2f}× (of {len(speed['after'])} rounds: "
        f"{ratio['low']:.2f} to {ratio['high']:.2f})."
    )
    yield figure(dot_plot(lanes, "tokens a second"), note, "Speed of generating")
