"""The page of the experiment `heads`: positions and merges compared, and a merge that looks ahead."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from regard.lab.heads.results import HeadsComparison, HeadsResults, HeadsTraining
from regard.lab.results import read_results
from regard.report.chart import Axis, Series, chart
from regard.report.dots import Lane, dot_plot
from regard.report.experiment import build_page, signed_number
from regard.report.markup import Markup, count_noun, join, number, percent, strong, tag
from regard.report.page import Page, details, figure, figures, paragraph, samples, table
from regard.report.palette import Style, style
from regard.report.plots import Point

PLAIN = "concatenate"
SMALL = 0.05  # of a loss a token, below which nobody would notice
WORDS = {"train": "training text", "dev": "dev", "normal": "normal", "weird": "weird", "long": "long"}


def heads_page(document: Mapping[str, Any]) -> Page:
    """Returns the page of the content of results.json; a section about a merge that was not trained is left out."""
    results = read_results(HeadsResults, document)
    parts = [("Outcome", _outcome)]
    if results.comparisons:
        parts.append(("Which differences exceed the noise?", _differences))
    if _straightened(results):
        parts.append(("Shift is concatenate", _shift))
    if _cheats(results):
        parts.append(("One merge cheats", _cheating))
    parts += [("Learning", _learning), ("The text and the sentences", _text)]
    return build_page("Putting heads together", _lead, parts, results, document)


def _lead(results: HeadsResults) -> Markup:
    rows = results.trainings
    seeds = results.seeds
    said: list[object] = [
        f"A GPT of {number(rows[0].parameters)} parameters, with {' and '.join(results.positions)} positions and "
        f"{count_noun(len(results.merges), 'merge')} of its heads, was trained with "
        f"{count_noun(len(seeds), 'seed')} each: "
        f"{len(rows)} trainings. "
    ]
    tested = results.of_measure("dev")
    if tested and len(seeds) > 1:
        said += [
            "On dev ",
            strong(f"{sum(row.exceeds for row in tested)} of {len(tested)} differences"),
            " exceed what another seed changes. ",
        ]
    for merge in _cheats(results):
        own = results.of_merge(merge)
        whole, before = (exp(_written(own, key)) for key in ("whole", "before"))
        said += [
            strong(merge),
            " looks ahead: later tokens move its earlier logits by ",
            strong(percent(max(row.ahead.error for row in own))),
            ". Over whole windows its perplexity is ",
            strong(number(whole)),
            "; given nothing but the tokens before, as in writing a text, it is ",
            strong(number(before)),
            ".",
        ]
    return join(*said)


def exp(loss: float) -> float:
    """Returns the perplexity of a mean loss, finite however large that is."""
    return math.exp(min(loss, 700.0))


def _cheats(results: HeadsResults) -> list[str]:
    """Returns the merges that break the causality law."""
    return [merge for merge in results.merges if any(row.ahead.broken for row in results.of_merge(merge))]


def _straightened(results: HeadsResults) -> list[float]:
    """Returns how far models that shift are from their twins that concatenate."""
    return [row.straightened for row in results.trainings if row.straightened is not None]


def _written(rows: Iterable[HeadsTraining], key: str) -> float:
    """Returns the mean loss over places of windows, in one of the ways in which they are read."""
    return float(mean(place[key] for row in rows for place in row.writing))


def _styles(results: HeadsResults) -> dict[str, Style]:
    return {merge: style(n) for n, merge in enumerate(results.merges)}


def _outcome(results: HeadsResults) -> Iterable[Markup]:
    measures = list(WORDS)
    yield paragraph(
        "Losses are means over tokens, in nats; perplexity is the exponential of the mean loss. A sentence is read "
        "alone, in one pass. Windows of training text are measured without training on them, as dev is."
    )

    cells: list[list[object]] = []
    ranked: dict[int, float] = {}
    for position in results.positions:
        for merge in results.merges:
            own = results.of_model(position, merge)
            if not own[0].ahead.broken:
                ranked[len(cells)] = mean(row.losses["dev"] for row in own)
            cells.append([f"{position}, {merge}", *(_loss_cell([row.losses[m] for row in own]) for m in measures)])
            off = [row.off for row in own if row.off is not None]
            if off:
                without = (_loss_cell([losses[m] for losses in off]) for m in measures)
                cells.append([f"{position}, {merge}, off at inference", *without])
    best = sorted(ranked, key=ranked.__getitem__)[:1]
    spread = "one seed"
    if len(results.seeds) > 1:
        spread = "mean ± standard deviation over seeds"
    caption = f"Loss ({spread}), and below it the perplexity. Shaded: the lowest dev loss without looking ahead."
    yield table(cells, ["positions, merge", *WORDS.values()], caption, highlight=best)
    drawn = [figure(_lanes(results, m), f"{_where(results, m)} A small dot is one training.", WORDS[m].capitalize())
             for m in measures if m != "train"]  # fmt: skip
    yield figures(*drawn)


def _loss_cell(losses: Sequence[float]) -> Markup:
    """Returns the mean of losses with its spread over seeds, and below it the perplexity."""
    spread = ""
    if len(losses) > 1:
        spread = f"\xa0±\xa0{stdev(losses):.3f}"
    return join(f"{mean(losses):.3f}{spread}", tag("small", number(exp(mean(losses)))))


def _where(results: HeadsResults, measure: str) -> str:
    if measure == "dev":
        return f"{results.text.dev:,} tokens in windows of {results.text.window:,}."
    return f"A sentence of {results.sentences[measure].tokens} tokens."


def _lanes(results: HeadsResults, measure: str) -> Markup:
    lanes = []
    for merge in results.merges:
        name = merge  # stands beside the first of its lanes
        for n, position in enumerate(results.positions):
            losses = [row.losses[measure] for row in results.of_model(position, merge)]
            lanes.append(Lane(name, losses, style(n), mean(losses), note=position, gap=n == 0))
            name = ""
    return dot_plot(lanes, "loss a token")


def _differences(results: HeadsResults) -> Iterable[Markup]:
    seeds = len(results.seeds)
    m = len(results.of_measure("dev"))
    yield paragraph(
        "Trainings of one seed read the same windows in the same order, and those that differ in nothing but the merge "
        "begin with the same weights. So each difference is taken seed by seed, and Student's test asks whether the "
        f"mean of these differences could be zero. There are {m} of them for each measure; Holm's correction keeps the "
        "chance that any of these is called real by mistake below 5%."
    )
    if seeds < 2:
        yield paragraph(strong("One seed has no spread: nothing can be said. "), "Ask for more, e.g. data.seeds=5.")
        return
    lanes = [_lane(row) for row in results.of_measure("dev")]
    text = (
        "Left of the line: lower loss than what it is compared with. Lines: 95% intervals of each by itself. "
        "Filled: exceeds the noise after correction."
    )
    yield figure(dot_plot(lanes, "difference of the dev loss", zero=True, width=7.0), text, "Dev, seed by seed")
    yield _verdict(results)
    yield _power(results, m, seeds)
    cells = [_difference_cells(row) for row in results.comparisons]
    columns = ["", "difference", "95% interval", "p", "p, corrected", "exceeds the noise"]
    yield details("All differences", table(cells, columns, "Differences of the loss a token, for every measure."))


def _difference_cells(row: HeadsComparison) -> list[object]:
    """Returns the row of a table about a comparison of several seeds, which have an interval and a p-value."""
    assert row.low is not None and row.high is not None
    exceeds = "no"
    if row.exceeds:
        exceeds = "yes"
    interval = f"{signed_number(row.low, 3)} to {signed_number(row.high, 3)}"
    name = f"{_pair(row)}, {WORDS[row.measure]}"
    return [name, signed_number(row.mean, 3), interval, f"{row.p:.2g}", f"{row.corrected:.2g}", exceeds]


def _pair(row: HeadsComparison) -> str:
    a = row.of
    b = row.against
    if a.position == b.position:
        return f"{a.merge} − {b.merge}, {a.position}"
    return f"{a.position} − {b.position}, {a.merge}"


def _lane(row: HeadsComparison) -> Lane:
    """Returns the lane of a comparison of several seeds; those of positions have a colour of their own."""
    assert row.low is not None and row.high is not None
    colour = style(int(row.of.position != row.against.position))
    note = f"p = {row.corrected:.2g}"
    return Lane(_pair(row), row.differences, colour, row.mean, (row.low, row.high), note, row.exceeds)


def _verdict(results: HeadsResults) -> Markup:
    said = []
    for measure, name in WORDS.items():
        real = [row for row in results.of_measure(measure) if row.exceeds]
        told = "; ".join(f"{_pair(row)}: {signed_number(row.mean, 3)}" for row in real) or "none"
        said.append(join(strong(name.capitalize()), f": {told}."))
    return join(paragraph("Differences that exceed the noise:"), samples(said))


def _power(results: HeadsResults, m: int, seeds: int) -> Markup:
    own = dict(results.detectable)[seeds]
    others = ", ".join(f"{size:.1f} with {n} seeds" for n, size in results.detectable if n != seeds)
    few = ""
    if seeds < 6:
        few = (
            " So few seeds find large differences only: one that is not called real here may be real all the same, and "
            "the test leans on differences being about normal, which so few cannot show."
        )
    return paragraph(
        f"With {count_noun(seeds, 'seed')} a mean difference among {m} counts when it exceeds {own:.1f} times the "
        f"standard deviation of its differences ({others}).{few} More seeds: ",
        tag("code", "regard run heads data.seeds=10"),
        ".",
    )


def _shift(results: HeadsResults) -> Iterable[Markup]:
    worst = max(_straightened(results))
    yield paragraph(
        "Rotating the heads by one before the output projection is the same as concatenating them with the row blocks "
        "of W_o rotated back. The trained models that shift were rewritten so, and their logits differ from before by "
        f"at most {worst:.1e} of the largest: rounding. Whatever one of the two can compute, so can the other, and the "
        "weights they begin with are alike but for the order of independent draws."
    )
    found = [row for row in results.comparisons if (row.of.merge, row.against.merge) == ("shift", PLAIN)]
    if not found:
        return
    every = [d for row in found if row.measure == "dev" for d in row.differences]
    size = math.sqrt(mean(d * d for d in every))
    yield paragraph(
        "What separates them is therefore noise and nothing else, and shows how much there is: their dev losses differ "
        f"by {min(map(abs, every)):.3f} to {max(map(abs, every)):.3f}, ",
        strong(f"{size:.3f} in the root mean square"),
        " over pairs of trainings. A merge that differs from concatenate by no more has shown nothing.",
    )
    lanes = []
    for row in found:
        if row.measure != "train":
            name = f"{WORDS[row.measure]}, {row.of.position}"
            lanes.append(Lane(name, row.differences, style(0), row.mean, note=signed_number(row.mean, 3)))
    yield figure(dot_plot(lanes, "loss of shift − loss of concatenate", zero=True), "A dot is a seed.", "Pure noise")


def _cheating(results: HeadsResults) -> Iterable[Markup]:
    drawn = _styles(results)
    window = results.text.window
    yield paragraph(
        "The causality law changes the tokens of a window from some place on; the logits before it must not move. "
        f"It was asked of every trained model, in float64, with random tokens of {window:,} places."
    )
    cells = []
    for merge in drawn:
        own = results.of_merge(merge)
        error = max(row.ahead.error for row in own)
        verdict = strong("broken: looks ahead") if any(row.ahead.broken for row in own) else "holds"
        slopes = [row.slope for row in own]
        spread = f" ± {stdev(slopes):.2f}" if len(slopes) > 1 else ""
        gap = _written(own, "before") - _written(own, "whole")
        shown = percent(error) if error > 1e-4 else number(error)
        cells.append([merge, verdict, shown, f"{signed_number(mean(slopes))}{spread}", signed_number(gap, 3)])
    columns = ["merge", "causality", "earlier logits move by", "growth: exponent of T", "extra loss without the rest"]
    caption = (
        "Movement relative to the largest logit; exponent a of ‖merged‖/‖heads‖ ∝ Tᵃ; loss given only the tokens "
        "before, less the loss of the same tokens in a whole window."
    )
    yield table(cells, columns, caption)
    for merge in _cheats(results):
        yield from _caught(results, merge, drawn)


def _caught(results: HeadsResults, merge: str, drawn: Mapping[str, Style]) -> Iterable[Markup]:
    own = results.of_merge(merge)
    names = {"before": "only what came before", "state": "with a state", "off": "weighing off"}
    names = {key: name for key, name in names.items() if key in own[0].writing[0]}
    whole = _written(own, "whole")
    lines = [_extra(own, key, name, style(n)) for n, (key, name) in enumerate(names.items())]
    svg = chart(lines, Axis("token of the window"), Axis("extra loss a token"))
    note = "Loss of the same tokens, less that in a whole window; zero for a model that sees only what came before."
    growths = [_growth(results.of_merge(one), one, drawn[one], one == merge) for one in drawn]
    sizes = [point[0] for point in growths[0].points]
    grown = chart(growths, Axis("tokens T", log=True, ticks=sizes), Axis("‖merged‖ / ‖heads‖", log=True))
    yield figures(
        figure(svg, f"{note} Shaded: least and most of all trainings.", f"{merge}, by what it is given"),
        figure(grown, "Dashed: √T, from the last point back.", "Growth with the length"),
    )
    ways = [["the whole window at once, as in training", f"{whole:.3f}", number(exp(whole))]]
    told = {
        "before": "only the tokens before, prefix by prefix: how a text has to be written",
        "state": "with a state, each token weighed by itself (by_piece=true)",
        "off": "the whole window with the weighing switched off (at_inference=false)",
    }
    for key in names:
        loss = _written(own, key)
        ways.append([told[key], f"{loss:.3f}", number(exp(loss))])
    plain = results.of_merge(PLAIN)
    if plain:
        loss = _written(plain, "before")
        ways.append([f"for comparison: {PLAIN}, only the tokens before", f"{loss:.3f}", number(exp(loss))])
    yield table(ways, ["how the model reads", "loss", "perplexity"], f"The same tokens of dev, read by {merge}.")
    yield _moral(results, merge)


def _moral(results: HeadsResults, merge: str) -> Markup:
    """Returns the loss of sentences less that of dev, beside the same for the plain merge: a merge that depends on the
    length has never seen lengths as short as these in training."""
    said = []
    for name, sentence in results.sentences.items():
        gaps = [row.losses[name] - row.losses["dev"] for row in results.of_merge(merge)]
        plain = [row.losses[name] - row.losses["dev"] for row in results.of_merge(PLAIN)]
        beside = ""
        if plain:
            beside = f" ({PLAIN}: {signed_number(mean(plain), 2)})"
        said.append(f"{name}, {sentence.tokens} tokens: {signed_number(mean(gaps), 2)}{beside}")
    return paragraph(
        "The weight of a head is its length over the whole sequence, so it depends on tokens to come and on how many "
        f"there are. A window of training has {results.text.window:,} tokens, a sentence fewer. Loss of single "
        f"sentences less dev loss: {'; '.join(said)}. {_hidden(results.of_merge(merge))} A low loss over "
        "whole windows is no evidence that a model can write; ask the law first."
    )


def _hidden(rows: Sequence[HeadsTraining]) -> str:
    """Returns a sentence about what the loss over whole windows hides: the loss that is added without later tokens."""
    gap = _written(rows, "before") - _written(rows, "whole")
    if gap > SMALL:
        return f"Without the tokens to come it loses {gap:.2f} a token, which its loss over whole windows hides."
    return (
        f"Without the tokens to come its loss changes by {signed_number(gap, 3)} only: these models make little of "
        "what they see ahead. That they see it, the law shows all the same; larger models and longer windows have more "
        "to gain."
    )


def _extra(rows: Sequence[HeadsTraining], key: str, name: str, drawn: Style) -> Series:
    points = []
    band = []
    for places in zip(*(row.writing for row in rows), strict=True):
        gaps = [place[key] - place["whole"] for place in places]
        points.append((places[0]["tokens"], mean(gaps)))
        band.append((min(gaps), max(gaps)))
    return Series(name, points, drawn, band, marked=False)


def _growth(rows: Sequence[HeadsTraining], name: str, drawn: Style, law: bool) -> Series:
    points: list[Point] = []
    for sizes in zip(*(row.growth for row in rows), strict=True):
        points.append((sizes[0]["tokens"], mean(size["ratio"] for size in sizes)))
    T, last = points[-1]
    dashed = [(n, last * math.sqrt(n / T)) for n, _ in points] if law else ()
    return Series(name, points, drawn, fitted=points, predicted=dashed)


def _learning(results: HeadsResults) -> Iterable[Markup]:
    drawn = _styles(results)
    pictures = []
    for position in results.positions:
        curves = {merge: _curves(results.of_model(position, merge)) for merge in drawn}
        lines = [_band(merge, found, drawn[merge]) for merge, found in curves.items()]
        svg = chart(lines, Axis("step"), Axis("dev loss"), values=True)
        pictures.append(figure(svg, "Means; shaded: least and most of the seeds.", f"{position}: dev loss"))
        if PLAIN in curves:
            less = [
                _band(merge, _less(found, curves[PLAIN]), drawn[merge])
                for merge, found in curves.items()
                if merge != PLAIN
            ]
            svg = chart(less, Axis("step"), Axis("difference of the dev loss"))
            pictures.append(figure(svg, "The same seed, less concatenate.", f"{position}: against concatenate"))
    yield figures(*pictures)


Curve = list[Point]


def _curves(rows: Sequence[HeadsTraining]) -> list[Curve]:
    return [[(e["step"], e["dev/loss"]) for e in row.evaluations if "dev/loss" in e] for row in rows]


def _less(curves: Sequence[Curve], others: Sequence[Curve]) -> list[Curve]:
    return [[(x, y - v) for (x, y), (_, v) in zip(a, b, strict=True)] for a, b in zip(curves, others, strict=True)]


def _band(name: str, curves: Sequence[Curve], drawn: Style) -> Series:
    points = []
    band = []
    for places in zip(*curves, strict=True):
        values = [y for _, y in places]
        points.append((places[0][0], mean(values)))
        band.append((min(values), max(values)))
    return Series(name, points, drawn, band, marked=False)


def _text(results: HeadsResults) -> Iterable[Markup]:
    text = results.text
    yield paragraph(
        f"Text: {text.source}; {text.train:,} tokens to learn from and {text.dev:,} for dev, of a vocabulary "
        f"of {text.vocabulary:,}, in windows of {text.window:,}. The best checkpoint by dev loss is measured."
    )
    yield samples(join(strong(name), ": ", sentence.text) for name, sentence in results.sentences.items())
    cells: list[list[Any]] = [[row.run, row.best, *(row.losses[m] for m in WORDS)] for row in results.trainings]
    yield details("Every training", table(cells, ["folder", "best step", *WORDS.values()], "Losses of each training."))
