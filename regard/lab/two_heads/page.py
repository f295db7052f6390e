"""The page of one head against two: how much the weight of a key swings when its length varies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from regard.lab.results import read_results
from regard.lab.two_heads.results import DrawnWeights, TwoHeadsResults, WeightRow
from regard.report import plots
from regard.report.canvas import draw
from regard.report.markup import Markup, number
from regard.report.page import Page, figure, figures, heading, paragraph, table
from regard.report.palette import INK, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def two_heads_page(document: Mapping[str, Any]) -> Page:
    """Returns the page of one head against two, from what results.json holds."""
    results = read_results(TwoHeadsResults, document)
    config = results.config
    one_head, two_heads = (_std_range(results.rows, heads) for heads in (1, 2))
    page = Page(
        "One head against two",
        f"To average two values when the length of one key varies, one head is no good: the standard deviation of its "
        f"weights is {one_head}. Of two heads that each read one value it is {two_heads}.",
    )
    page.add(
        heading("What was measured"),
        paragraph(
            f"{config.keys} orthonormal keys, but key a comes as ε·a with ε drawn {config.draws:,} times from a "
            f"normal distribution of mean 1 and variance {number(config.variance)} (seed {config.seed}). One "
            "head asks β(a + b). Two heads ask βa and βb, and the mean of their weights counts."
        ),
        figures(
            figure(
                _std_curves(results.rows),
                "Longer queries make one head worse: it tips between a and b. They do not hurt two.",
            ),
            figure(
                _scatter(results.drawn),
                "Each dot is one draw. One head jumps at ε = 1, in the middle of the draws; two heads only near ε = 0.",
            ),
        ),
        heading("Numbers"),
        table(
            [[f"{row.heads}, key {row.key}", row.beta, row.mean, row.std] for row in results.rows],
            ["heads", "β", "mean weight", "standard deviation"],
            "Weights of the two keys that are asked for",
        ),
    )
    return page


def _std_range(rows: Sequence[WeightRow], heads: int) -> str:
    """Returns the least and the largest standard deviation of so many heads."""
    stds = [row.std for row in rows if row.heads == heads]
    return f"{min(stds):.2f} to {max(stds):.2f}"


def _std_curves(rows: Sequence[WeightRow]) -> Markup:
    """Returns standard deviations against β. One head's two keys share what there is, and so have the same."""
    names = {(1, "a"): "one head", (2, "a"): "two heads, a", (2, "b"): "two heads, b"}
    series = {
        name: [(row.beta, row.std) for row in rows if (row.heads, row.key) == which] for which, name in names.items()
    }
    return plots.curves(series, x="β", y="standard deviation of the weight")


def _scatter(drawn: DrawnWeights) -> Markup:
    """Returns the weight of key a against its length, a dot a draw."""
    right = max(drawn.lengths)

    def paint(fig: Figure) -> None:
        ax = fig.add_subplot()
        # Each name stands where its own dots leave room.
        for n, (name, weights, y) in enumerate((("one head", drawn.one, 0.88), ("two heads", drawn.two, 0.39))):
            colour, _, marker = style(n)
            ax.scatter(drawn.lengths, weights, s=13, color=colour, marker=marker, alpha=0.7, edgecolors="none")
            ax.text(right, y, name, color=colour, fontweight="bold", ha="right")
        ax.axvline(1, color=INK.light, linewidth=0.8, linestyle=(0, (3, 2)))
        ax.set(xlabel="length ε of key a", ylabel="weight of key a", ylim=(-0.03, 1.03))

    return draw(
        paint,
        f"Weight of key a against its length at β = {number(drawn.beta)}: one head jumps from 0 to 1 at length 1, "
        "two heads stay at one half for all positive lengths",
    )
