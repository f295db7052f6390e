"""The page of one head against two: how much the weight of a key swings when its length varies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from regard.report import plots
from regard.report.canvas import draw
from regard.report.markup import Markup, number
from regard.report.page import Page, figure, figures, heading, paragraph, table
from regard.report.palette import INK, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def two_heads_page(results: Mapping[str, Any]) -> Page:
    """From `rows` [beta, heads, key, mean, std], `drawn` {beta, lengths, one, two} and `config`."""
    rows, config = results["rows"], results["config"]
    stds = {heads: [row["std"] for row in rows if row["heads"] == heads] for heads in (1, 2)}
    page = Page(
        "One head against two",
        f"To average two values when the length of one key varies, one head is no good: the standard deviation of its "
        f"weights is {_range(stds[1])}. Of two heads that each read one value it is {_range(stds[2])}.",
    )
    page.add(
        heading("What was measured"),
        paragraph(
            f"{config['keys']} orthonormal keys, but key a comes as ε·a with ε drawn {config['draws']:,} times from a "
            f"normal distribution of mean 1 and variance {number(config['variance'])} (seed {config['seed']}). One "
            "head asks β(a + b). Two heads ask βa and βb, and the mean of their weights counts."
        ),
        figures(
            figure(_swings(rows), "Longer queries make one head worse: it tips between a and b. They do not hurt two."),
            figure(
                _scattered(results["drawn"]),
                "Each dot is one draw. One head jumps at ε = 1, in the middle of the draws; two heads only near ε = 0.",
            ),
        ),
        heading("Numbers"),
        table(
            [[f"{r['heads']}, key {r['key']}", r["beta"], r["mean"], r["std"]] for r in rows],
            ["heads", "β", "mean weight", "standard deviation"],
            "Weights of the two keys that are asked for",
        ),
    )
    return page


def _range(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _swings(rows: list[dict[str, Any]]) -> Markup:
    """Standard deviation against β. One head's two keys share what there is, and so have the same."""
    names = {(1, "a"): "one head", (2, "a"): "two heads, a", (2, "b"): "two heads, b"}
    series = {
        name: [(r["beta"], r["std"]) for r in rows if (r["heads"], r["key"]) == which] for which, name in names.items()
    }
    return plots.curves(series, x="β", y="standard deviation of the weight")


def _scattered(drawn: Mapping[str, Any]) -> Markup:
    def paint(made: Figure) -> None:
        ax = made.add_subplot()
        for n, (name, ys) in enumerate({"one head": drawn["one"], "two heads": drawn["two"]}.items()):
            colour, _, marker = style(n)
            ax.scatter(drawn["lengths"], ys, s=13, color=colour, marker=marker, alpha=0.7, edgecolors="none")
            spot: Any = {"color": colour, "fontweight": "bold", "ha": "right"}
            ax.text(max(drawn["lengths"]), (0.88, 0.39)[n], name, **spot)
        ax.axvline(1, color=INK.light, linewidth=0.8, linestyle=(0, (3, 2)))
        ax.set(xlabel="length ε of key a", ylabel="weight of key a", ylim=(-0.03, 1.03))

    said = (
        f"Weight of key a against its length at β = {number(drawn['beta'])}: one head jumps from 0 to 1 at length 1, "
    )
    return draw(paint, said + "two heads stay at one half for all positive lengths")
