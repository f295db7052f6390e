"""The page of one head against two: how much the weight of a key swings when its length varies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from regard.lab.results import read_results
from regard.lab.two_heads.results import DrawnWeights, TwoHeadsResults, WeightRow
from regard.report import plots
from regard.report.canvas import draw
from regard.report.experiment import SectionBuilder, build_page
from regard.report.markup import Markup, join, number
from regard.report.page import Page, figure, figures, paragraph, table
from regard.report.palette import INK, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def two_heads_page(document: Mapping[str, Any]) -> Page:
    """Returns the page of one head against two, from what results.json holds."""
    results = read_results(TwoHeadsResults, document)
    sections: list[SectionBuilder] = [("What was measured", _measured), ("Numbers", _numbers)]
    if results.over(positive=True):  # results of older versions have none
        sections.append(("Only where the key points to its query", _numbers_of_positive))
    return build_page("One head against two", _lead, sections, results, document)


def _lead(results: TwoHeadsResults) -> Markup:
    one_head, two_heads = (_std_range(results.over(positive=False), heads) for heads in (1, 2))
    return join(
        "To average two values when the length of one key varies, one head is no good: the standard deviation of its "
        f"weights is {one_head}. Of two heads that each read one value it is {two_heads}."
    )


def _measured(results: TwoHeadsResults) -> Iterable[Markup]:
    config = results.config
    yield paragraph(
        f"{config.keys} orthonormal keys, but key a comes as ε·a with ε drawn {config.draws:,} times from a "
        f"normal distribution of mean 1 and variance {number(config.variance)} (seed {config.seed}). One "
        "head asks β(a + b). Two heads ask βa and βb, and the mean of their weights counts."
    )
    curves = _std_curves(results.over(positive=False))
    dots = _scatter(results.drawn)
    yield figures(
        figure(curves, "Longer queries make one head worse: it tips between a and b. They do not hurt two."),
        figure(
            dots,
            "Each dot is one draw. One head jumps at ε = 1, in the middle of the draws; two heads only near ε = 0.",
        ),
    )


def _numbers(results: TwoHeadsResults) -> Iterable[Markup]:
    yield _weight_table(results.over(positive=False), "Weights of the two keys that are asked for")


def _numbers_of_positive(results: TwoHeadsResults) -> Iterable[Markup]:
    rows = results.over(positive=True)
    yield paragraph(
        "Some draws of ε are negative: there key a points away from its query, and no head finds it. Over the draws "
        f"with ε > 0 alone, the standard deviation is {_std_range(rows, 1)} with one head and {_std_range(rows, 2)} "
        "with two."
    )
    yield _weight_table(rows, "Weights over the draws with ε > 0")


def _weight_table(rows: Sequence[WeightRow], caption: str) -> Markup:
    cells = [[f"{row.heads}, key {row.key}", row.beta, row.mean, row.std] for row in rows]
    return table(cells, ["heads", "β", "mean weight", "standard deviation"], caption)


def _std_range(rows: Sequence[WeightRow], heads: int) -> str:
    """Returns the least and the largest standard deviation of so many heads."""
    stds = [row.std for row in rows if row.heads == heads]
    return f"{min(stds):.2f} to {max(stds):.2f}"


def _std_curves(rows: Sequence[WeightRow]) -> Markup:
    """Returns standard deviations against β. One head's two weights sum to nearly one: theirs are nearly equal."""
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
