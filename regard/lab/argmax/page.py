"""The page of the experiment `argmax`: can attention learn where to look?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from regard.report.chart import Axis, Series, chart
from regard.report.experiment import Row, build_page, share_axis
from regard.report.markup import Markup, join, percent, strong
from regard.report.page import Page, figure, figures, paragraph, table
from regard.report.palette import style


def argmax_page(results: Row) -> Page:
    """Whether attention can learn where to look."""
    parts = [("Learning", _learning), ("What reaches q and k", _gradients), ("At the end", _ends)]
    return build_page("Learning to select", _argmax_lead, parts, results)


def _argmax_lead(results: Row) -> Markup:
    said: list[object] = ["A small model has to learn where to look in order to answer. "]
    for n, way in enumerate(results["ways"]):
        said += ["; " if n else "", way["name"].capitalize() if not n else way["name"], ": "]
        said += [strong(percent(_middle(way["final"]))), " right"]
    said += [f"; chance: {percent(results['chance'])}. "]
    return join(*said, "Argmax passes no gradient to queries and keys, and so never learns to look.")


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _learning(results: Row) -> Iterable[Markup]:
    config = results["config"]
    yield paragraph(
        f"Each row shows {config['tokens']} of {config['symbols']} symbols, each with one of {config['labels']} random "
        "labels, and asks for the label of one of them. Queries and keys are learned tables of the symbols: the model "
        "has to find out that a symbol should look for itself."
    )
    svg = chart(_ways(results, "accuracy"), Axis("step"), share_axis("right answers"), values=True)
    loss = chart(_ways(results, "loss"), Axis("step"), Axis("loss", log=True), values=True)
    note = f"Medians and quartiles of {config['runs']} trainings each."
    yield figures(figure(svg, f"Rows never seen. {note}", "Accuracy"), figure(loss, note, "Loss in training"))


def _ways(results: Row, key: str) -> list[Series]:
    lines = []
    for n, way in enumerate(results["ways"]):
        points = [(row["step"], row[key][1]) for row in way["curve"]]
        band = [(row[key][0], row[key][2]) for row in way["curve"]]
        lines.append(Series(way["name"], points, style(n), band, marked=False))
    return lines


def _gradients(results: Row) -> Iterable[Markup]:
    still = [way["name"] for way in results["ways"] if all(row["dq"][2] == 0 == row["dk"][2] for row in way["curve"])]
    none = f" For {', '.join(still)} both are exactly zero at every step, and cannot be drawn here." if still else ""
    yield paragraph(
        "The norm of the loss's gradient with respect to the tables of queries and keys. Where the answers are right "
        f"it fades, since nothing is left to learn.{none}"
    )
    drawn = []
    for key in ("dq", "dk"):
        svg = chart(_ways(results, key), Axis("step"), Axis(f"‖{key}‖", log=True), values=True)
        drawn.append(figure(svg, "Medians and quartiles.", "Queries" if key == "dq" else "Keys"))
    yield figures(*drawn)


def _ends(results: Row) -> Iterable[Markup]:
    rows = []
    for way in results["ways"]:
        cells = []
        for key in ("final", "read_by_argmax", "finds"):
            low, high = percent(min(way[key])), percent(max(way[key]))
            cells.append(f"{percent(_middle(way[key]))} ({low} to {high})")
        rows.append([way["name"], *cells])
    columns = ["trained by", "right answers", "right answers, read by argmax", "looks at the asked symbol"]
    yield table(rows, columns, "Medians, and the least and the most of all trainings.")
    yield paragraph(
        "Argmax is better than chance only as far as its first, random tables happen to find the asked symbol, which "
        "training cannot change: it is right where it looks at that symbol, and by chance elsewhere. A model trained "
        "by softmax may be read by argmax afterwards: once it looks at one symbol only, the two are the same."
    )
