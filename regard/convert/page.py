"""The page of a conversion: loss after each stage, errors of heads, learning curves, and what is saved."""

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

# The names of the stages on the page, in the order of their colours.
NAMES = {
    "original": "original",
    "surgery": "right after surgery",
    "distillation": "distilled",
    "uptraining": "uptrained",
    "control": "control",
}


def convert_page(results: Row) -> Page:
    """Returns the page of a conversion; parts that were not done are left out."""
    parts = [("Outcome", _outcome), ("Which heads are off?", _heads)]
    if any(row["steps"] for row in results["stages"]):
        parts.append(("Learning", _learning))
    if results["states"]:
        parts.append(("What it saves", _savings))
    return build_page(f"Converted: {_describe_change(results['change'])}", _lead, parts, results)


def _describe_change(change: Row) -> str:
    """Returns the change in a few words: 4 → 1 key/value head, softmax → performer."""
    texts = []
    before, after = change["kv_heads"]
    if before != after:
        texts.append(f"{before} → {count_noun(after, 'key/value head')}")
    old, new = change["mechanisms"]
    names = list(dict.fromkeys(b for a, b in zip(old, new, strict=True) if a != b))
    if names:
        texts.append(f"{old[change['layers'][0]]} → {', '.join(names)}")
    return ", ".join(texts) or "new options"


def _describe_layers(change: Row) -> str:
    """Returns which layers were converted, in words."""
    layers = change["layers"]
    total = change["of"]
    if total == len(layers) == 1:
        return "its one layer"
    if len(layers) == total:
        return f"all {total} layers"
    noun = "layer"
    if len(layers) != 1:
        noun = "layers"
    return f"{noun} {', '.join(map(str, layers))} of {total}"


def _find_stage(results: Row, name: str) -> Row | None:
    """Returns the row of a stage, or None if it was not done."""
    return next(iter(select_rows(results["stages"], name=name)), None)


def _last_stage(results: Row) -> Row:
    """Returns the row of the stage whose model is the final one."""
    return select_rows(results["stages"], name=results["run"])[0]


def _styles() -> dict[str, Style]:
    """Returns the colour and marker of each stage, the same on every page."""
    return {name: style(n) for n, name in enumerate(NAMES)}


def _lead(results: Row) -> Markup:
    """Returns the paragraph at the top: what was converted, its scores, and the size of its state."""
    change = results["change"]
    stages = results["stages"]
    parts: list[object] = [f"{results['source']}, {_describe_layers(change)}: ", strong(_describe_change(change)), ". "]
    if "perplexity" in stages[0]:
        values = [f"{NAMES[row['name']]} {number(row['perplexity'])}" for row in stages]
        parts += ["Perplexity: ", strong(", ".join(values)), ". "]
    else:
        values = [f"{NAMES[row['name']]} {percent(row['change'])}" for row in stages[1:]]
        parts += ["Its vectors are off by: ", strong(", ".join(values)), ". "]
    for split, first in stages[0].get("answers", {}).items():
        last = _last_stage(results)["answers"][split]
        kept = math.nan
        if first["accuracy"]:
            kept = last["accuracy"] / first["accuracy"]
        parts += [f"Right answers ({split}): {percent(first['accuracy'])} before, {percent(last['accuracy'])} after: "]
        parts += [strong(f"{percent(kept)} kept"), ". "]
    if results["states"]:
        parts += _compare_states(results["states"][-1])
    return join(*parts)


def _compare_states(row: Row) -> list[object]:
    """Returns the sentence about the bytes of a state before and after, in parts for `join`."""
    before = row["before"]["bytes"]
    after = row["after"]["bytes"]
    if before == after:
        text = f"After {row['tokens']:,} tokens its state has {_format_bytes(after)}, "
        return [text, strong("as much as before"), ": within a window every mechanism keeps keys and values."]
    ratio = f"{before / after:.3g} times less"
    if before < after:
        ratio = f"{after / before:.3g} times more"
    text = f"After {row['tokens']:,} tokens its state has {_format_bytes(after)} instead of {_format_bytes(before)} ("
    return [text, strong(ratio), ")."]


def _format_bytes(n: float) -> str:
    """Formats a number of bytes with three digits: 1.54 MB."""
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"


def _outcome(results: Row) -> Iterable[Markup]:
    """Yields the table of the stages, and pictures of their losses and right answers."""
    stages = results["stages"]
    yield paragraph(_describe_measuring(results))
    yield _stage_table(results)
    if "loss" in stages[0]:
        lanes = [_loss_lane(row, stages[0]) for row in stages]
        note = "The loss is the logarithm of the perplexity."
        yield figure(dot_plot(lanes, "loss a token", width=6.0), note, "Loss by stage")
    styles = {NAMES[name]: stage_style for name, stage_style in _styles().items()}
    pictures = []
    for split in stages[0].get("answers", {}):
        bars = [_answer_bar(NAMES[row["name"]], row["answers"][split]) for row in stages]
        pictures.append(figure(plots.bars(bars, styles=styles), "Lines: 95% intervals.", f"Right answers, {split}"))
    if pictures:
        yield figures(*pictures)


def _describe_measuring(results: Row) -> str:
    """Returns a paragraph: what the stages are measured on, what the control is, and how many steps were taken."""
    task = results["task"]
    text = f"Measured by the loss of the model's own task, {task}, on the same rows for all."
    if task == "lm":
        text = f"Measured on {results['measured']['tokens']:,} held-out tokens, the same for all."
    control = _find_stage(results, "control")
    if control is not None:
        text += (
            f" The control starts right after surgery as well, and spends the {control['steps']:,} steps of "
            "distillation and uptraining together on the ordinary loss alone."
        )
    if results["trained"]:
        share = sum(row["steps"] for row in results["stages"] if row["name"] != "control") / results["trained"]
        text += (
            f" The model itself was trained for {results['trained']:,} steps: converting took {percent(share)} of that."
        )
    return text


def _answer_bar(name: str, score: Row) -> tuple[str, float, float, float, int]:
    """Returns a bar of right answers with its interval, as `plots.bars` takes it."""
    return name, score["accuracy"], score["low"], score["high"], score["n"]


def _loss_lane(row: Row, first: Row) -> Lane:
    """Returns the dot of a stage's loss, with its perplexity and the ratio to the original's perplexity."""
    note = f"perplexity {number(row['perplexity'])}"
    if row is not first:
        note += f", ×{number(math.exp(min(row['loss'] - first['loss'], 700)))}"  # e^709 is the most that a float holds
    return Lane(NAMES[row["name"]], [], _styles()[row["name"]], row["loss"], note=note)


def _stage_table(results: Row) -> Markup:
    """Returns the table with a row for each stage; a dash for values that a stage does not have."""
    stages = results["stages"]
    splits = list(stages[0].get("answers", {}))
    measure = "change of the vectors"
    if "perplexity" in stages[0]:
        measure = "perplexity"
    columns = [
        "",
        "steps",
        measure,
        *(f"right answers, {split}" for split in splits),
        "error of attention",
        "time",
    ]
    best = [n for n, row in enumerate(stages) if row["name"] == results["run"]]
    rows = [_stage_cells(row, splits) for row in stages]
    return table(rows, columns, "Shaded: the final model.", highlight=best)


def _stage_cells(row: Row, splits: Iterable[str]) -> list[object]:
    """Returns the cells of one stage in the order of `_stage_table`'s columns."""
    steps = seconds = error = "–"
    value = number(row["perplexity"]) if "perplexity" in row else percent(row["change"])
    if row["steps"]:
        steps = number(row["steps"])
        seconds = f"{row['seconds']:.0f} s"
    if "error" in row:
        error = percent(row["error"], 0)
    cells: list[object] = [NAMES[row["name"]], steps, value]
    for split in splits:
        score = row["answers"][split]
        cells.append(f"{percent(score['accuracy'])} ({percent(score['low'], 0)} to {percent(score['high'], 0)})")
    return [*cells, error, seconds]


def _heads(results: Row) -> Iterable[Markup]:
    """Yields an explanation of the error of a head, and a map of the errors after each stage but the control."""
    rows = [row for row in results["stages"] if "heads" in row]
    yield paragraph(
        "Each converted layer gets the input of the same layer of the original. The error of a head is "
        "‖a′ − a‖ / ‖a‖ of what it adds to the residual stream, through its part of the output projection: 0% is the "
        "original's head, and 100% is as wrong as adding nothing. Uptraining follows the ordinary loss, which may "
        "change heads.",
    )
    if results["change"]["kv_heads"][0] != results["change"]["kv_heads"][1]:
        yield paragraph(
            "Heads that were pooled share keys and values, so that none can be what it was. Distillation trains "
            "their sum: its error is that of attention in the table above."
        )
    # All stages have the same scale of shades, so that they can be compared.
    most = max(error for row in rows for layer in row["heads"].values() for error in layer)
    maps = [
        figure(_draw_errors(row["heads"], most), _worst_head(row["heads"]), NAMES[row["name"]].capitalize())
        for row in rows
    ]
    yield figures(*maps)
    yield paragraph(
        tag("a", "Both models over one text", href="lens.html"),
        ": choose Compare on the page to see the weights of a head side by side, and as a difference.",
    )


def _worst_head(heads: Row) -> str:
    """Returns a sentence that names the head with the largest error."""
    error, layer, head = max((error, layer, n) for layer, row in heads.items() for n, error in enumerate(row))
    return f"Largest error: layer {layer}, head {head}, {percent(error, 0)}."


def _draw_errors(heads: Row, most: float) -> Markup:
    """Returns a picture with a cell for each head, the darker the larger its error, with the error in percent."""
    from matplotlib.colors import to_rgb

    layers = list(heads)
    errors = np.array(list(heads.values()), dtype=float)
    down, across = errors.shape
    # In inches; 0.9 of the width are labels.
    width = min(max(2.6, 0.42 * across + 0.9), 7.6)
    side = (width - 0.9) / across
    numbered = side > 0.24

    def paint(canvas: Figure) -> None:
        ax = canvas.add_subplot()
        pixels = np.empty((*errors.shape, 4))
        pixels[..., :3] = to_rgb(SERIES[1].light)
        pixels[..., 3] = 0.85 * errors / max(most, 1e-12)
        ax.imshow(pixels, interpolation="none", aspect="auto")
        ax.grid(False)
        for spine in ax.spines.values():
            spine.set(visible=True, linewidth=0.5)
        label = "head"
        if numbered:
            label = "head, error in %"
            for (y, x), error in np.ndenumerate(errors):
                ax.text(x, y, f"{100 * error:.0f}", ha="center", va="center", fontsize=0.85 * SIZE, color=INK.light)
        every = max(1, round(0.3 / side))
        ax.set_xticks(range(0, across, every), [str(n) for n in range(0, across, every)])
        ax.set_yticks(range(down), layers)
        ax.set(xlabel=label, ylabel="layer")

    description = "; ".join(f"layer {n}: {', '.join(percent(x, 0) for x in row)}" for n, row in heads.items())
    return draw(paint, f"Error of each head. {description}", width, 0.3 * down + 0.75)


def _learning(results: Row) -> Iterable[Markup]:
    """Yields the curves of distillation, uptraining and the control."""
    pictures = []
    lines = []
    distilled = _find_stage(results, "distillation")
    offset = 0
    if distilled is not None:
        offset = distilled["steps"]
        pictures.append(_draw_distillation(results, distilled))
    # The control starts where distillation starts, uptraining where it ends.
    for name, shift in (("uptraining", offset), ("control", 0)):
        row = _find_stage(results, name)
        if row is not None:
            points = [(step + shift, loss) for step, loss in row["curve"]]
            lines.append(Series(NAMES[name], points, _styles()[name], marked=False))
    if lines:
        svg = chart(lines, Axis("step, distillation counted in"), Axis("loss in training", log=True), values=True)
        pictures.append(figure(svg, "The ordinary loss of training batches.", "Uptraining"))
    yield figures(*pictures)


def _draw_distillation(results: Row, distilled: Row) -> Markup:
    """Returns the curve of the error of attention, from right after surgery on."""
    begin = select_rows(results["stages"], name="surgery")[0]["error"]
    line = Series("error", [(0, begin), *map(tuple, distilled["errors"])], _styles()["distillation"])
    svg = chart([line], Axis("step"), Axis("relative error", shares=True, span=(0, None)), values=True)
    note = (
        "Error of what attention adds to the residual stream, after the output projection: the root of the mean over "
        "converted layers of ‖A′ − A‖² / ‖A‖², on held-out text."
    )
    return figure(svg, note, "Distillation")


def _savings(results: Row) -> Iterable[Markup]:
    """Yields bytes of the state, parameters and speed, before and after."""
    rows = []
    for row in results["states"]:
        before = row["before"]
        after = row["after"]
        ratio = f"{before['bytes'] / after['bytes']:.3g}×"
        sizes = [before["bytes"], after["bytes"], before["each"], after["each"]]
        old, new, old_growth, new_growth = map(_format_bytes, sizes)
        rows.append([number(row["tokens"]), old, new, ratio, old_growth, new_growth])
    columns = ["tokens", "before", "after", "ratio", "with each token: before", "after"]
    yield table(
        rows, columns, "Bytes of the state that one sequence keeps while it is generated, all layers, as declared."
    )
    count = results["parameters"]
    yield paragraph(f"Parameters: {number(count['before'])} before, {number(count['after'])} after.")
    if results["speed"] is not None:
        yield _draw_speed(results["speed"])


def _draw_speed(speed: Row) -> Markup:
    """Returns a picture of the tokens a second of each round, and the ratio of the two models."""
    ratio = speed["ratio"]
    lanes = []
    for n, (name, key) in enumerate({"original": "before", "converted": "after"}.items()):
        middle = median(speed[key])
        lanes.append(Lane(name, speed[key], style(n), middle, note=f"{number(round(middle))} tokens/s"))
    note = (
        f"{speed['sequences']} sequences of {speed['prompt']} tokens continued by {speed['tokens']} each, both models "
        f"in turn. Converted against original: {ratio['median']:.2f}× (of {len(speed['after'])} rounds: "
        f"{ratio['low']:.2f} to {ratio['high']:.2f})."
    )
    return figure(dot_plot(lanes, "tokens a second"), note, "Speed of generating")
