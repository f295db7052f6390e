"""The page of the experiment "summarize": what a model writes about an article, and what that is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from regard.lab.results import ResultsHeader, read_results
from regard.lab.summarize.mask_captions import MASK_CAPTIONS
from regard.lab.summarize.results import FactCounts, MeanInterval, SummarizeResults
from regard.report import plots
from regard.report.chart import Axis, Series, chart
from regard.report.heat import heat
from regard.report.learning import (
    best_of,
    describe_overfitting,
    learning_caption,
    learning_figure,
    train_and_dev,
)
from regard.report.markup import Markup, code, duration, join, number, percent, strong, tag
from regard.report.masks import mask_picture
from regard.report.page import (
    Page,
    command_listing,
    details,
    facts,
    figure,
    figures,
    heading,
    listing,
    paragraph,
    samples,
    table,
)
from regard.report.palette import Style, style

MEASURES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
REFERENCE = "reference"


def summarize_page(document: Mapping[str, Any]) -> Page:
    """Returns the page of the content of results.json; raises ReportError, naming the part, if one does not fit."""
    results = read_results(SummarizeResults, document)
    header = read_results(ResultsHeader, document)
    page = Page("One line about an article", _lead(results))
    for title, key, build in SECTIONS:
        if getattr(results, key):
            page.add(heading(title), *build(results))
    page.add(heading("How it was made"), *_describe_run(results, header))
    return page


def _styles(results: SummarizeResults) -> dict[str, Style]:
    """Returns the style of each mechanism and of its models, the same everywhere: the base first."""
    kinds = {kind: style(n) for n, kind in enumerate(dict.fromkeys(row.kind for row in results.models))}
    return kinds | {row.name: kinds[row.kind] for row in results.models}


def _lead(results: SummarizeResults) -> Markup:
    data = results.data
    best = results.best
    baseline = results.baseline
    scores = results.scores["test"]
    what = "articles"
    if data.generated:
        what = "generated biographies"
    said: list[object] = [
        f"Encoder-decoders read {data.pairs['train']:,} {what} with a summary each. On {data.pairs['test']:,} "
        f"that none of them has seen, {best[0]} reaches ROUGE-1 ",
        strong(_points(scores[best[0]].on("rouge1"))),
        " and ROUGE-L ",
        strong(_points(scores[best[0]].on("rougeL"))),
        f"; the {baseline} reach ",
        strong(_points(scores[baseline].on("rouge1"))),
        " and ",
        strong(_points(scores[baseline].on("rougeL"))),
    ]
    if len(best) < 2:
        return join(*said, ".")
    return join(*said, ". ", _against(results))


def _against(results: SummarizeResults) -> str:
    """Returns how far the best performer's loss is from the best base model's, in words."""
    loss = {row.name: row.loss for row in results.models}
    base, other = results.best[:2]
    off = loss[other] / loss[base] - 1
    word = "less"
    if off > 0:
        word = "more"
    return (
        f"The best performer ({other}) has a dev loss of {loss[other]:.3f} against {loss[base]:.3f}: "
        f"{abs(off):.1%} {word}."
    )


def _points(estimate: MeanInterval) -> str:
    return f"{100 * estimate[0]:.1f}"


def _interval(estimate: MeanInterval) -> Markup:
    mean, low, high = estimate
    return join(f"{100 * mean:.1f}", tag("small", f"{100 * low:.1f}\u2060–\u2060{100 * high:.1f}"))


def _highest(values: Sequence[float]) -> list[int]:
    """Returns [index] of the largest value; [] if several values are the largest."""
    places = [place for place, value in enumerate(values) if value == max(values)]
    return places if len(places) == 1 else []


def _difference(estimate: MeanInterval) -> Markup:
    mean, low, high = (f"{100 * x:+.1f}".replace("-", "−") for x in estimate)
    return join(mean, tag("small", f"{low} to {high}"))


def _outcome(results: SummarizeResults) -> Iterable[Markup]:
    baseline = results.baseline
    for split in ("test", "dev"):
        scores = results.scores[split]
        rows = []
        for name in (*results.best, baseline):
            above: object = "–"
            if name != baseline:
                above = _difference((scores[name].above or {})["rougeL"])
            rows.append([name, *(_interval(scores[name].on(m)) for m in MEASURES), above])
        caption = (
            f"{split.capitalize()} pairs (n = {scores[baseline].n:,}): F1 in points with 95% intervals "
            f"of a bootstrap over articles. Last column: ROUGE-L above the {baseline}, article by article."
        )
        reached = [scores[name].on("rougeL")[0] for name in (*results.best, baseline)]
        shown = table(rows, ["", *MEASURES.values(), "ROUGE-L above"], caption, highlight=_highest(reached))
        if split == "dev":
            shown = details("The same on the dev pairs", shown)
        yield shown
    pictures = []
    test = results.scores["test"]
    for measure in ("rouge1", "rougeL"):
        bars = [(name, *test[name].on(measure), test[name].n) for name in results.best]
        line = {baseline: test[baseline].on(measure)[0]}
        svg = plots.bars(bars, line, x=MEASURES[measure], styles=_styles(results))
        text = f"Thin lines are 95% intervals, the dashed line is the {baseline} of each article."
        pictures.append(figure(svg, text, f"{MEASURES[measure]}, test pairs"))
    yield figures(*pictures)


def _compared(results: SummarizeResults) -> Iterable[Markup]:
    drawn = _styles(results)
    rows = results.models
    kinds = list(dict.fromkeys(row.kind for row in rows))
    rates = sorted({row.rate for row in rows})
    pictures = []
    if len(rates) > 1:
        lines = [Series(k, sorted((r.rate, r.loss) for r in rows if r.kind == k), drawn[k]) for k in kinds]
        svg = chart(lines, Axis("learning rate", log=True, ticks=rates), Axis("dev loss a token"), values=True)
        pictures.append(figure(svg, "Lower is better. Each point is one training.", "Dev loss against learning rate"))
    random = [(row.features, row.loss) for row in rows if row.features is not None]
    if len({features for features, _ in random}) > 1:
        best = {F: min(loss for features, loss in random if features == F) for F, _ in random}
        base = min(row.loss for row in rows if row.base)
        points = sorted(best.items())
        flat = [(points[0][0], base), (points[-1][0], base)]
        name = next(row.kind for row in rows if row.base)
        lines = [Series("performer", points, style(1)), Series(name, flat, style(0), marked=False)]
        svg = chart(lines, Axis("random features", log=True, ticks=sorted(best)), Axis("dev loss a token"), values=True)
        pictures.append(
            figure(svg, "The best learning rate of each; the level line has no features.", "Dev loss against features")
        )
    yield figures(*pictures)
    if len(results.best) > 1:
        yield paragraph(_against(results))
    cells = [
        [row.name, row.loss, row.dev["perplexity"], percent(row.dev["token_accuracy"]),
         row.parameters, row.steps, row.best_step, duration(row.seconds), code(row.run)]
        for row in sorted(rows, key=lambda r: r.loss)
    ]  # fmt: skip
    columns = ["", "dev loss", "perplexity", "right tokens", "parameters", "steps", "best step", "time", "folder"]
    caption = (
        "Every training, the best first. Loss without label smoothing at the best checkpoint; perplexity is its "
        "exponential; right tokens: the likeliest next token, given the right ones before."
    )
    yield table(cells, columns, caption, highlight=[0])


def _facts(results: SummarizeResults) -> Iterable[Markup]:
    yield paragraph(
        "The people are invented and all about them is known, so each fact that a summary states can be judged. ",
        strong("Confused"),
        ": it stands in the article in another role, such as the place where somebody lives. ",
        strong("Invented"),
        ": it does not stand there at all.",
    )
    rows = [[name, *_fact_cells(counts)] for name, counts in results.facts.items()]
    columns = ["", "right", "confused", "invented", "left out", "place made up", "all right", "other form"]
    caption = (
        "Shares of the facts that summaries of test articles state; left out: of those they should state; place made "
        "up: of the articles that do not say where somebody was born, how many summaries do; all right: summaries that "
        "are the reference word for word; other form: summaries that are no such line at all."
    )
    perfect = [counts.perfect / counts.n for counts in results.facts.values()]
    yield table(rows, columns, caption, highlight=_highest(perfect))
    for name, row in results.facts.items():
        if row.wrong:
            shown = table(row.wrong, ["article", "reference", "summary"], "Summaries with a wrong fact.")
            yield details(f"Wrong facts by {name}", shown)


def _fact_cells(counts: FactCounts) -> list[object]:
    """Returns the shares of facts of one model, as cells of a table."""
    stated = max(counts.right + counts.confused + counts.invented, 1)
    shares = [percent(count / stated) for count in (counts.right, counts.confused, counts.invented)]
    claimed = "–"
    if counts.untold:
        claimed = percent(counts.claimed / counts.untold)
    missing = percent(counts.missing / counts.facts)
    return [*shares, missing, claimed, percent(counts.perfect / counts.n), counts.odd]


def _copying(results: SummarizeResults) -> Iterable[Markup]:
    rows = []
    for name, row in results.scores["test"].items():
        rows.append([name, *(percent(row.copied[n]) for n in ("1", "2", "3")), f"{row.words:.1f}"])
    caption = "Share of the summaries' words, pairs and triples of words that stand in the article, and mean length."
    yield table(rows, ["", "words", "pairs", "triples", "words each"], caption)


def _examples(results: SummarizeResults) -> Iterable[Markup]:
    yield paragraph(
        "Of each article the likeliest summaries by beam search, with log p / length, and others that were drawn "
        "(temperature 0.8), with log p."
    )
    for n, example in enumerate(results.examples):
        lines: list[list[object]] = [["reference", example.reference, ""], [results.baseline, example.lead, ""]]
        for name, written in example.by.items():
            for label, choices in (("beam", written.beams), ("drawn", written.samples)):
                for i, (text, score) in enumerate(choices, 1):
                    lines.append([f"{name}, {label} {i}", text or "(nothing)", f"{score:.2f}"])
        shown = join(samples([example.article]), table(lines, ["by", "summary", "score"], "Summaries of this article."))
        if n > 0:
            likeliest = [text for text, _ in next(iter(example.by.values())).beams]
            shown = details([*likeliest, example.reference][0], shown)
        yield shown


def _masks(results: SummarizeResults) -> Iterable[Markup]:
    yield paragraph(
        "Two pairs of unequal length in one batch: the shorter one is filled up. These are the masks under which its "
        "tokens attend, as the model computed with them."
    )
    masks = results.masks
    padding = {"encoder": masks.source, "cross": masks.source, "decoder": masks.target}
    pictures = []
    for name, caption in MASK_CAPTIONS.items():
        matrix = masks.matrices[name]
        there = padding.get(name, [1] * len(matrix[0]))
        pictures.append(figure(mask_picture(matrix, there, caption.queries, caption.keys), caption.text, caption.title))
    yield figures(*pictures)


def _attention(results: SummarizeResults) -> Iterable[Markup]:
    given = results.attention
    yield paragraph(
        "Where the decoder looks in the article before it writes each token of “",
        given.summary,
        "”. A row is the token "
        "that it writes next, a column a word of the article; every row is scaled by its own largest weight.",
    )
    for head in given.heads:
        svg = heat(head.weights, given.written, given.read)
        yield figure(
            svg,
            "A dark column beside the tokens of a word: it is being copied.",
            f"Layer {head.layer}, head {head.head}",
        )


def _learning(results: SummarizeResults) -> Iterable[Markup]:
    drawn = _styles(results)
    ranked = sorted(results.models, key=lambda row: row.loss)
    best = {row.kind: row for row in reversed(ranked)}
    losses = {kind: train_and_dev(row.curve, row.evaluations) for kind, row in best.items()}
    yield paragraph("Each mechanism with its best learning rate.")
    yield figure(
        learning_figure(losses, y="loss a token", styles=drawn),
        learning_caption("min") + " The training loss has label smoothing, where that is asked for, and the passages "
        "that are copied for practice; the dev loss has neither.",
        "Loss, train and dev",
    )
    yield paragraph(describe_overfitting(losses))
    rows = []
    for kind, curves in losses.items():
        steps = [best_of(points, "min") for points in curves[::-1]]
        rows.append([kind, *(cell for point in steps for cell in (point or ("–", "–"))[::-1])])
    columns = ["", "lowest dev loss", "at step", "lowest training loss", "at step"]
    yield table(rows, columns, "The best step of each mechanism, by dev and by the training data.")


def _describe_run(results: SummarizeResults, header: ResultsHeader) -> Iterable[Markup]:
    data = results.data
    yield paragraph("The same seed on the same machine, with as many threads, gives the same numbers:")
    yield command_listing(header.command or "")
    settings = {
        **{f"{name} pairs": n for name, n in data.pairs.items()},
        "words of an article": data.words["articles"],
        "words of a summary": data.words["summaries"],
        "tokens known": data.vocabulary,
        f"articles cut after {data.source} tokens": data.cut[0],
        f"summaries cut after {data.target} tokens": data.cut[1],
        "device": header.device,
        "time in all": duration(header.seconds),
    }
    yield details("Settings", facts(settings))
    yield details("Pairs that it learned from", table(data.examples, ["article", "summary"], "Training pairs."))
    yield details("The model, part by part", listing(results.model["summary"]))
    yield details("Versions", facts({name: number(version) for name, version in (header.versions or {}).items()}))


SECTIONS: tuple[tuple[str, str, Callable[[SummarizeResults], Iterable[Markup]]], ...] = (
    ("Outcome", "scores", _outcome),
    ("Softmax against performer", "models", _compared),
    ("True, confused and invented", "facts", _facts),
    ("Copying and length", "scores", _copying),
    ("Side by side", "examples", _examples),
    ("Who may see whom", "masks", _masks),
    ("Where it looks", "attention", _attention),
    ("Learning", "models", _learning),
)
