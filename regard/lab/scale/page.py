"""The page of the experiment `scale`: why scores are divided by √d."""

from __future__ import annotations

from collections.abc import Iterable

from regard.report.chart import Axis, Series, chart
from regard.report.experiment import Row, build_page, distinct_values, select_rows, share_axis, with_interval
from regard.report.heat import heads_grid
from regard.report.markup import Markup, join, number, percent, strong
from regard.report.page import Page, details, figure, figures, paragraph, table
from regard.report.palette import style


def scale_page(results: Row) -> Page:
    """Why scores are divided by √d."""
    parts = [
        ("Products grow with the width", _products),
        ("Saturation", _saturation),
        ("Who is looked at?", _sums),
        ("Queries that are their own keys", _identity),
    ]
    return build_page("Why divide by √d?", _scale_lead, parts, results)


def _scale_lead(results: Row) -> Markup:
    d = max(distinct_values(results["saturation"], "width"))
    plain = select_rows(results["saturation"], width=d, scaled=False)[0]
    scaled = select_rows(results["saturation"], width=d, scaled=True)[0]
    ratio = scaled["gradient"][1] / max(plain["gradient"][1], 1e-300)
    return join(
        f"The variance of q·k grows with the width d. Undivided, softmax over {results['config']['tokens']} random "
        f"keys {d:,} wide gives one of them ",
        strong(percent(plain["largest"][1], 2)),
        " of the weight, and the weights' gradient with respect to the query is ",
        strong(f"{number(ratio)} times"),
        " smaller than with 1/√d. There the largest weight is ",
        strong(percent(scaled["largest"][1])),
        ", and about that at any width (medians).",
    )


def _products(results: Row) -> Iterable[Markup]:
    yield paragraph(
        "For q, k ~ N(μ, σ²I): E[q·k] = ‖μ‖² and Var[q·k] = dσ⁴ + 2σ²‖μ‖². Both grow like d where all μᵢ are alike."
    )
    rows = results["products"]
    drawn = []
    for key, log in (("variance", True), ("mean", False)):
        lines = []
        for n, mean in enumerate(distinct_values(rows, "mean")):
            here = select_rows(rows, mean=mean)
            points = [(r["width"], r[f"measured_{key}"][0]) for r in here]
            band = [(r[f"measured_{key}"][1], r[f"measured_{key}"][2]) for r in here]
            law = [(r["width"], r[f"predicted_{key}"]) for r in here]
            lines.append(Series(f"μᵢ = {number(mean)}", points, style(n), band, predicted=law))
        across = Axis("width d", log=True, ticks=distinct_values(rows, "width")) if log else Axis("width d")
        caption = "Dashed: predicted. Points: measured; their intervals are smaller than the points."
        drawn.append(figure(chart(lines, across, Axis(f"{key} of q·k", log=log)), caption, key.capitalize()))
    yield figures(*drawn)
    cells = [
        [r["width"], number(r["mean"])]
        + [
            x
            for key, n in (("mean", 2), ("variance", 1))
            for x in (with_interval(r[f"measured_{key}"], n), r[f"predicted_{key}"])
        ]
        for r in rows
    ]
    columns = ["d", "μᵢ", "mean of q·k", "predicted", "variance of q·k", "predicted"]
    yield table(cells, columns, f"{results['config']['pairs']:,} pairs each, with 95% intervals.")


def _saturation(results: Row) -> Iterable[Markup]:
    rows, N = results["saturation"], results["config"]["tokens"]
    yield paragraph(
        f"One query, {N} keys, all components standard normal. Gradients reach q and k through softmax's Jacobian "
        "diag(p) − ppᵀ: where one weight is nearly one, it is nearly zero. Without 1/√d it is multiplied by larger "
        "keys, which at first makes up for that, and at large widths no longer does."
    )
    drawn = []
    shown = [
        ("largest", "Largest weight", share_axis("largest weight"), "Undivided, one key takes all."),
        ("entropy", "Entropy", share_axis("entropy / log N"), "100% is the same weight for all keys."),
        ("jacobian", "Jacobian of softmax", Axis("‖diag(p) − ppᵀ‖", log=True), "What a gradient has to pass."),
        ("gradient", "Gradient of the query", Axis("‖dp/dq‖", log=True), "How much the weights move with q."),
    ]
    for key, title, up, caption in shown:
        lines = []
        for n, scaled in enumerate((True, False)):
            here = select_rows(rows, scaled=scaled)
            points = [(r["width"], r[key][1]) for r in here]
            band = [(r[key][0], r[key][2]) for r in here]
            lines.append(Series("with 1/√d" if scaled else "without", points, style(n), band))
        across = Axis("width d", log=True, ticks=distinct_values(rows, "width"))
        drawn.append(figure(chart(lines, across, up, values=True), caption, title))
    yield figures(*drawn)
    draws = results["config"]["draws"]
    yield paragraph(f"Medians of {draws:,} draws; shaded: from the first to the third quartile.", quiet=True)
    cells = [
        [r["width"], "with" if r["scaled"] else "without"]
        + [f"{r[key][1]:.3g} ({r[key][0]:.2g} to {r[key][2]:.2g})" for key, *_ in shown]
        for r in rows
    ]
    yield details(
        "In numbers", table(cells, ["d", "1/√d", *(up.name for *_, up, _ in shown)], "Medians and quartiles.")
    )


def _sums(results: Row) -> Iterable[Markup]:
    rows, N = results["sums"], results["config"]["tokens"]
    off = max(r["given_off_one"] for r in rows)
    yield paragraph(
        f"What a query gives sums to one over the keys (here to within {off:.0e}). What a key gets, summed over {N} "
        "queries, does not: longer keys get more, the more so the narrower the heads, whose keys differ more in length."
    )
    kept = [rows[0], rows[len(rows) // 2], rows[-1]] if len(rows) > 2 else rows
    lines = [
        Series(f"K = {r['width']}", list(enumerate(r["sorted"], 1)), style(n), marked=False) for n, r in enumerate(kept)
    ]
    svg = chart(lines, Axis("keys, from the least to the most attended"), Axis("sum over queries", span=(0, None)))
    yield figure(svg, "Means over draws. Were all keys alike, the line would be level at 1.", "What each key gets")
    cells = [
        [
            r["width"],
            with_interval(r["least"]),
            with_interval(r["most"]),
            with_interval(r["std"], 3),
            f"{r['lengths']:.2f}",
        ]
        for r in rows
    ]
    columns = ["K", "least attended key", "most attended key", "std over keys", "correlation with ‖k‖²"]
    yield table(cells, columns, "Sums over queries: means over draws with 95% intervals.")


def _identity(results: Row) -> Iterable[Markup]:
    rows, N = results["identity"], results["config"]["tokens"]
    yield paragraph(
        "Where queries are the keys, a token's score with itself, ‖x‖²/√K ≈ √K, stands out from the others', about "
        "N(0, 1): the wider, the nearer the weights are to the identity. The prediction takes the others' sum at its "
        "mean: e^(r²/√K) / (e^(r²/√K) + (N−1)·e^(r²/2K)), averaged over r² ~ χ²(K)."
    )
    line = Series(
        "mean diagonal", [(r["width"], r["diagonal"][0]) for r in rows], style(0),
        predicted=[(r["width"], r["predicted"]) for r in rows],
    )  # fmt: skip
    across = Axis("width K", log=True, ticks=distinct_values(rows, "width"))
    svg = chart([line], across, share_axis("mean diagonal"))
    cells = [[r["width"], with_interval(r["diagonal"], 3), f"{r['predicted']:.3f}"] for r in rows]
    yield figure(svg, f"{N} tokens. Dashed: predicted.", "A token's weight on itself")
    draws = results["config"]["draws"]
    yield table(cells, ["K", "mean diagonal", "predicted"], f"{draws:,} draws, with 95% intervals.")
    pictures = results["pictures"]
    svg = heads_grid(
        [p["weights"] for p in pictures], ["·"] * len(pictures[0]["weights"]), [f"K = {p['width']}" for p in pictures],
        scale="all", across=3,
    )  # fmt: skip
    yield figure(svg, "One draw each. Rows are queries, columns keys.", "Softmax of Q = K")
