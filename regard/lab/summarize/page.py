"""The page of the experiment "summarize": what a model writes about an article, and what that is worth.

`summarize_page(results)` takes plain data, as JSON has it:

    command, device, seed, seconds, versions {name: version}, compare {rates, features, …}, model {summary}
    data      generated, pairs {split: n}, words {articles, summaries}, k, vocabulary, source, target, cut [articles,
              summaries], examples [[article, summary]]
    models    [name, run, base, mechanism, features, rate, parameters, steps, seconds, best_step, dev {loss, perplexity,
              token_accuracy}, curve [{step, loss}], evaluations [{step, dev/loss}]]
    best      names of the best base model and the best performer; baseline: the name of the first words
    scores    {split: {name: n, words, copied {n: share}, rouge {measure: [mean, low, high]}, above {likewise}}}
    facts     {name: right, confused, invented, missing, facts, n, perfect, odd, untold, claimed,
              wrong [[article, reference, text]]}; empty unless pairs were generated
    examples  [article, reference, lead, by {name: {beams [[text, score]], samples [[text, score]]}}]
    masks     matrices {encoder, causal, decoder, cross}, source, target
    attention read, written, heads [{layer, head, weights}], summary
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from regard.lab.summarize.mask_captions import MASK_CAPTIONS
from regard.report import plots
from regard.report.chart import Axis, Series, chart
from regard.report.heat import heat
from regard.report.markup import Markup, code, duration, join, number, percent, strong, tag
from regard.report.masks import mask_picture
from regard.report.page import (
    Page,
    build_part,
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

Results = Mapping[str, Any]
MEASURES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
REFERENCE = "reference"


def summarize_page(results: Results) -> Page:
    """The page for these results; a part that is not as described is a ReportError that names it."""
    page = Page("One line about an article", build_part("scores", _lead, results, __name__))
    for title, key, build in SECTIONS:
        if results.get(key):
            page.add(heading(title), *build_part(key, build, results, __name__))
    return page


def _drawn(results: Results) -> dict[str, Style]:
    """One style a mechanism everywhere: the base first."""
    names = list(dict.fromkeys(_kind(row) for row in results["models"]))
    kinds = {name: style(n) for n, name in enumerate(names)}
    return kinds | {row["name"]: kinds[_kind(row)] for row in results["models"]}


def _kind(row: Mapping[str, Any]) -> str:
    return str(row["mechanism"]) if row["base"] else f"performer {row['features']}"


def _lead(results: Results) -> Markup:
    data, best, baseline = results["data"], results["best"], results["baseline"]
    scores = results["scores"]["test"]
    what = "generated biographies" if data["generated"] else "articles"
    said: list[object] = [
        f"Encoder-decoders read {data['pairs']['train']:,} {what} with a summary each. On {data['pairs']['test']:,} "
        f"that none of them has seen, {best[0]} reaches ROUGE-1 ",
        strong(_points(scores[best[0]]["rouge"]["rouge1"])),
        " and ROUGE-L ",
        strong(_points(scores[best[0]]["rouge"]["rougeL"])),
        f"; the {baseline} reach ",
        strong(_points(scores[baseline]["rouge"]["rouge1"])),
        " and ",
        strong(_points(scores[baseline]["rouge"]["rougeL"])),
    ]
    if len(best) > 1:
        said.append(f". {_against(results)}")
    return join(*said, "." if len(best) < 2 else "")


def _against(results: Results) -> str:
    """How far the best performer's loss is from the best base model's."""
    loss = {row["name"]: row["dev"]["loss"] for row in results["models"]}
    base, other = results["best"][:2]
    off = loss[other] / loss[base] - 1
    return (
        f"The best performer ({other}) has a dev loss of {loss[other]:.3f} against {loss[base]:.3f}: "
        f"{abs(off):.1%} {'more' if off > 0 else 'less'}."
    )


def _points(estimate: Any) -> str:
    return f"{100 * estimate[0]:.1f}"


def _interval(estimate: Any) -> Markup:
    mean, low, high = estimate
    return join(f"{100 * mean:.1f}", tag("small", f"{100 * low:.1f}\u2060–\u2060{100 * high:.1f}"))


def _difference(estimate: Any) -> Markup:
    mean, low, high = (f"{100 * x:+.1f}".replace("-", "−") for x in estimate)
    return join(mean, tag("small", f"{low} to {high}"))


def _outcome(results: Results) -> Iterable[Markup]:
    drawn, baseline = _drawn(results), results["baseline"]
    for split in ("test", "dev"):
        scores = {name: row for name, row in results["scores"][split].items() if row["rouge"]}
        rows = []
        for name in (*results["best"], baseline):
            row = scores[name]
            cells = [_interval(row["rouge"][m]) for m in MEASURES]
            above = "–" if name == baseline else _difference(row["above"]["rougeL"])
            rows.append([name, *cells, above])
        caption = (
            f"{split.capitalize()} pairs (n = {next(iter(scores.values()))['n']:,}): F1 in points with 95% intervals "
            f"of a bootstrap over articles. Last column: ROUGE-L above the {baseline}, article by article."
        )
        shown = table(rows, ["", *MEASURES.values(), "ROUGE-L above"], caption, highlight=[0])
        yield shown if split == "test" else details("The same on the dev pairs", shown)
    pictures = []
    test = results["scores"]["test"]
    for measure in ("rouge1", "rougeL"):
        bars = [(name, *test[name]["rouge"][measure], test[name]["n"]) for name in results["best"]]
        line = {baseline: test[baseline]["rouge"][measure][0]}
        svg = plots.bars(bars, line, x=MEASURES[measure], styles=drawn)
        text = f"Thin lines are 95% intervals, the dashed line is the {baseline} of each article."
        pictures.append(figure(svg, text, f"{MEASURES[measure]}, test pairs"))
    yield figures(*pictures)


def _compared(results: Results) -> Iterable[Markup]:
    drawn, rows = _drawn(results), results["models"]
    kinds = list(dict.fromkeys(map(_kind, rows)))
    rates = sorted({row["rate"] for row in rows})
    pictures = []
    if len(rates) > 1:
        lines = [
            Series(k, sorted((r["rate"], r["dev"]["loss"]) for r in rows if _kind(r) == k), drawn[k]) for k in kinds
        ]
        svg = chart(lines, Axis("learning rate", log=True, ticks=rates), Axis("dev loss a token"), values=True)
        pictures.append(figure(svg, "Lower is better. Each point is one training.", "Dev loss against learning rate"))
    random = [row for row in rows if not row["base"]]
    if len({row["features"] for row in random}) > 1:
        best = {F: min(r["dev"]["loss"] for r in random if r["features"] == F) for F in {r["features"] for r in random}}
        base = min(row["dev"]["loss"] for row in rows if row["base"])
        points = sorted(best.items())
        flat = [(points[0][0], base), (points[-1][0], base)]
        name = next(_kind(row) for row in rows if row["base"])
        lines = [Series("performer", points, style(1)), Series(name, flat, style(0), marked=False)]
        svg = chart(lines, Axis("random features", log=True, ticks=sorted(best)), Axis("dev loss a token"), values=True)
        pictures.append(
            figure(svg, "The best learning rate of each; the level line has no features.", "Dev loss against features")
        )
    yield figures(*pictures)
    if len(results["best"]) > 1:
        yield paragraph(_against(results))
    cells = [
        [row["name"], row["dev"]["loss"], row["dev"]["perplexity"], percent(row["dev"]["token_accuracy"]),
         row["parameters"], row["steps"], row["best_step"], duration(row["seconds"]), code(row["run"])]
        for row in sorted(rows, key=lambda r: r["dev"]["loss"])
    ]  # fmt: skip
    columns = ["", "dev loss", "perplexity", "right tokens", "parameters", "steps", "best step", "time", "folder"]
    caption = (
        "Every training, the best first. Loss without label smoothing at the best checkpoint; perplexity is its "
        "exponential; right tokens: the likeliest next token, given the right ones before."
    )
    yield table(cells, columns, caption, highlight=[0])


def _facts(results: Results) -> Iterable[Markup]:
    yield paragraph(
        "The people are invented and all about them is known, so each fact that a summary states can be judged. ",
        strong("Confused"),
        ": it stands in the article in another role, such as the place where somebody lives. ",
        strong("Invented"),
        ": it does not stand there at all.",
    )
    rows = []
    for name, row in results["facts"].items():
        said = max(row["right"] + row["confused"] + row["invented"], 1)
        cells = [percent(row[key] / said) for key in ("right", "confused", "invented")]
        claimed = percent(row["claimed"] / row["untold"]) if row["untold"] else "–"
        rows.append(
            [
                name,
                *cells,
                percent(row["missing"] / row["facts"]),
                claimed,
                percent(row["perfect"] / row["n"]),
                row["odd"],
            ]
        )
    columns = ["", "right", "confused", "invented", "left out", "place made up", "all right", "other form"]
    caption = (
        "Shares of the facts that summaries of test articles state; left out: of those they should state; place made "
        "up: of the articles that do not say where somebody was born, how many summaries do; all right: summaries that "
        "are the reference word for word; other form: summaries that are no such line at all."
    )
    yield table(rows, columns, caption, highlight=[0])
    for name, row in results["facts"].items():
        if row["wrong"]:
            shown = table(row["wrong"], ["article", "reference", "summary"], "Summaries with a wrong fact.")
            yield details(f"Wrong facts by {name}", shown)


def _copying(results: Results) -> Iterable[Markup]:
    rows = []
    for name, row in results["scores"]["test"].items():
        rows.append([name, *(percent(row["copied"][n]) for n in ("1", "2", "3")), f"{row['words']:.1f}"])
    caption = "Share of the summaries' words, pairs and triples of words that stand in the article, and mean length."
    yield table(rows, ["", "words", "pairs", "triples", "words each"], caption)


def _examples(results: Results) -> Iterable[Markup]:
    yield paragraph(
        "Of each article the likeliest summaries by beam search, with log p / length, and others that were drawn "
        "(temperature 0.8), with log p."
    )
    for n, row in enumerate(results["examples"]):
        lines: list[list[object]] = [["reference", row["reference"], ""], [results["baseline"], row["lead"], ""]]
        for name, found in row["by"].items():
            for how, label in (("beams", "beam"), ("samples", "drawn")):
                lines += [
                    [f"{name}, {label} {i}", text, f"{score:.2f}"] for i, (text, score) in enumerate(found[how], 1)
                ]
        shown = join(samples([row["article"]]), table(lines, ["by", "summary", "score"], "Summaries of this article."))
        best = next(iter(row["by"].values()))["beams"]
        title = best[0][0] if best else row["reference"]
        yield details(title, shown) if n else shown


def _masks(results: Results) -> Iterable[Markup]:
    given = results["masks"]
    yield paragraph(
        "Two pairs of unequal length in one batch: the shorter one is filled up. These are the masks under which its "
        "tokens attend, as the model computed with them."
    )
    keys = {"encoder": "source", "cross": "source", "decoder": "target"}
    pictures = []
    for name, caption in MASK_CAPTIONS.items():
        matrix = given["matrices"][name]
        there = given[keys[name]] if name in keys else [1] * len(matrix[0])
        pictures.append(figure(mask_picture(matrix, there, caption.queries, caption.keys), caption.text, caption.title))
    yield figures(*pictures)


def _attention(results: Results) -> Iterable[Markup]:
    given = results["attention"]
    yield paragraph(
        "Where the decoder looks in the article before it writes each token of “",
        given["summary"],
        "”. A row is the token "
        "that it writes next, a column a word of the article; every row is scaled by its own largest weight.",
    )
    for head in given["heads"]:
        svg = heat(head["weights"], given["written"], given["read"])
        yield figure(
            svg,
            "A dark column beside the tokens of a word: it is being copied.",
            f"Layer {head['layer']}, head {head['head']}",
        )


def _learning(results: Results) -> Iterable[Markup]:
    drawn, ranked = _drawn(results), sorted(results["models"], key=lambda row: row["dev"]["loss"])
    best = {_kind(row): row for row in reversed(ranked)}
    tried = {kind: [(e["step"], e["dev/loss"]) for e in row["evaluations"]] for kind, row in best.items()}
    losses = {kind: [(c["step"], c["loss"]) for c in row["curve"]] for kind, row in best.items()}
    yield paragraph("Each mechanism with its best learning rate.")
    yield figures(
        figure(
            plots.curves(tried, y="dev loss a token", mark_best="min", styles=drawn),
            "Pairs that were not in training, without label smoothing; the dot is the best evaluation.",
            "Dev loss on the way",
        ),
        figure(
            plots.curves(losses, y="training loss a token", styles=drawn),
            "With label smoothing, and with the passages that are copied for practice.",
            "Training loss",
        ),
    )


def _made(results: Results) -> Iterable[Markup]:
    data = results["data"]
    yield paragraph("The same seed on the same machine, with as many threads, gives the same numbers:")
    yield listing(results["command"])
    settings = {
        **{f"{name} pairs": n for name, n in data["pairs"].items()},
        "words of an article": data["words"]["articles"],
        "words of a summary": data["words"]["summaries"],
        "tokens known": data["vocabulary"],
        f"articles cut after {data['source']} tokens": data["cut"][0],
        f"summaries cut after {data['target']} tokens": data["cut"][1],
        "device": results["device"],
        "time in all": duration(results.get("seconds")),
    }
    yield details("Settings", facts(settings))
    yield details("Pairs that it learned from", table(data["examples"], ["article", "summary"], "Training pairs."))
    yield details("The model, part by part", listing(results["model"]["summary"]))
    yield details("Versions", facts({name: number(version) for name, version in results["versions"].items()}))


SECTIONS: tuple[tuple[str, str, Callable[[Results], Iterable[Markup]]], ...] = (
    ("Outcome", "scores", _outcome),
    ("Softmax against performer", "models", _compared),
    ("True, confused and invented", "facts", _facts),
    ("Copying and length", "scores", _copying),
    ("Side by side", "examples", _examples),
    ("Who may see whom", "masks", _masks),
    ("Where it looks", "attention", _attention),
    ("Learning", "models", _learning),
    ("How it was made", "data", _made),
)
