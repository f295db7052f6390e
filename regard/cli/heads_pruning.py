"""`regard heads --prune`: preparing, and printing the curve over heads left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.cli.show import align_right, console, table
from regard.data.sentences import Sentence
from regard.errors import OptionError
from regard.lens.heads.measures import Examples, is_classifier, knows_reviews, split_sentences, split_texts
from regard.lens.heads.pruning import PRUNING_ORDERS, Pruning, prepare_pruning
from regard.lens.models import RecordableModel, Sample
from regard.report.chart import Axis, Series
from regard.report.palette import styles
from regard.report.paper import plot_chart

PRUNE_HELP = "Remove heads one by one, in the order importance, greedy or label, and in random orders."
BAR = 22  # characters of the longest bar
NAMES = {"loss": "loss", "accuracy": "accuracy", "change": "change of the last vectors"}
_EIGHTHS = " ▏▎▍▌▋▊▉"


def prepare(
    recordable: RecordableModel,
    order: str,
    labels: Sequence[Mapping[str, Any]],
    texts: Sequence[str | Sample] | None,
    sentences: Sequence[Sentence] | None,
    seed: int,
) -> Pruning:
    """Returns a pruning that is ready to run: on sentences with a label for a classifier, otherwise on texts."""
    examples: tuple[Examples, Examples]
    if is_classifier(recordable) and (sentences is not None or (texts is None and knows_reviews(recordable))):
        examples = split_sentences(recordable, sentences)
    elif sentences is not None:
        raise OptionError(
            f"--sentences are for a classifier, and {recordable.card.name} gives no label to a text; use --texts"
        )
    else:
        examples = split_texts(recordable, texts)
    return prepare_pruning(recordable, order, labels, *examples, seed)


def print_cost(pruning: Pruning) -> None:
    """Prints to stderr what is about to be computed and how long it will take."""
    choose, judge = pruning.passes
    chosen = f"{choose:,} passes to choose the order"
    if not choose:
        chosen = "no pass to choose the order"
    console(stderr=True).print(
        f"Pruning {len(pruning.heads)} heads, order {pruning.order} ({PRUNING_ORDERS.find(pruning.order).what}): "
        f"{chosen}, {judge:,} for the curves; about {_duration(pruning.seconds)}",
        soft_wrap=True,
    )


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    if seconds < 6000:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def print_pruning(results: Mapping[str, Any]) -> None:
    """Prints the curve over the heads left as a table with bars, beside the mean of random orders."""
    measure = results["measure"]
    unit = results["unit"]
    out = console()
    out.print(f"\nHeads removed one after the other: {NAMES[measure]}", style="bold", soft_wrap=True)
    chosen = f"chosen on {results['chosen_on']} {unit}"
    if results["order"] == "label":
        chosen = "by the labels above"
    out.print(
        f"Order {results['order']}, {chosen}; measured on {results['measured_on']} other {unit} ({results['source']}).",
        soft_wrap=True,
    )
    rows = [*results["curve"], *results["random"]]
    values = [row[measure] for row in rows]
    base = 0.0
    legend = f"█ {measure}, ┃ at random"
    if measure == "loss":  # even the best model's is far from zero
        base = min(values)
        legend = f"█ loss above {base:.2f}, ┃ at random"
    made = table("left", measure, f"in {results['random_orders']} random orders", legend)
    for row, other in zip(results["curve"], results["random"], strict=True):
        spread = f"{_format(other[measure], measure)} ({_format(other['low'], measure)} to "
        spread += f"{_format(other['high'], measure)})"
        bar = _draw_bar(row[measure] - base, other[measure] - base, max(values) - base)
        made.add_row(str(row["left"]), _format(row[measure], measure), spread, bar)
    align_right(made, 0)
    made.columns[-1].justify = "left"
    out.print(made)
    out.print(_describe(results), soft_wrap=True)


def _draw_bar(value: float, other: float, top: float) -> str:
    """Returns a bar as long as the value, with a mark where the other value is."""
    length = max(0.0, value) / max(top, 1e-12) * BAR
    bar = "█" * int(length) + _EIGHTHS[int(length % 1 * 8)].strip()
    mark = round(max(0.0, other) / max(top, 1e-12) * BAR)
    bar = bar.ljust(mark + 1)
    return f"{bar[:mark]}┃{bar[mark + 1 :]}"


def _describe(results: Mapping[str, Any]) -> str:
    """Returns the sentences below the table: how many heads suffice, chance accuracy, and labels."""
    measure = results["measure"]
    suffice = results["suffice"]
    tolerance = f"{suffice['tolerance']:.0%}"
    kept = {
        "loss": f"the loss rises by at most {tolerance}",
        "change": f"the last vectors change by at most {tolerance}",
        "accuracy": f"at most {100 * suffice['tolerance']:.0f} points of accuracy are lost",
    }[measure]
    total = results["curve"][0]["left"]
    text = f"With {suffice['order']} of {total} heads {kept}; in random order it takes {suffice['random']:.0f}."
    if results["chance"] is not None:
        text += f" Always saying the most frequent label is right in {results['chance']:.1%}."
    if results["order"] == "label":
        text += f" {results['specialised']} heads have a label other than first or separator, and go last."
    return text


def _format(value: float, measure: str) -> str:
    """Returns a value of the measure as text: a loss in nats, the others in percent."""
    if measure == "loss":
        return f"{value:.3f}"
    return f"{value:.1%}"


def plot_pruning(results: Mapping[str, Any], path: Path) -> None:
    """Writes the figure of the curve, with the mean of random orders and their band."""
    measure = results["measure"]
    order = f"order {results['order']}"
    chosen = styles([order, "random orders"])
    curve = results["curve"][::-1]  # names stand at the last points, on the right
    random = results["random"][::-1]
    lines = [
        Series(order, [(row["left"], row[measure]) for row in curve], chosen[order]),
        Series(
            "random orders",
            [(row["left"], row[measure]) for row in random],
            chosen["random orders"],
            band=[(row["low"], row["high"]) for row in random],
        ),
    ]
    plot_chart(path, lines, Axis("heads left"), Axis(NAMES[measure], shares=measure != "loss"))
