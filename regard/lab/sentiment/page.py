"""The page of the experiment "sentiment": which sentences an encoder takes for positive, and how it learned to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from regard.lab.results import ResultsHeader, read_results
from regard.lab.sentiment.results import OptimizerModel, SentimentResults, SentimentScore
from regard.report import plots
from regard.report.canvas import draw
from regard.report.learning import (
    TrainAndDev,
    best_of,
    describe_overfitting,
    learning_caption,
    learning_figure,
    train_and_dev,
)
from regard.report.markup import Markup, code, duration, join, number, percent, strong, tag
from regard.report.page import Page, command_listing, details, facts, figure, figures, heading, paragraph, table
from regard.report.palette import INK, MUTED, SERIES, Style, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPLITS = ("train", "dev", "test")
CLASSES = ("negative", "positive")
CURVES: tuple[tuple[str, str, plots.Best], ...] = (
    ("accuracy", "Right answers, train and dev", "max"),
    ("loss", "Loss, train and dev", "min"),
)


def sentiment_page(document: Mapping[str, Any]) -> Page:
    """Returns the page of the content of results.json; raises ReportError, naming the part, if one does not fit."""
    results = read_results(SentimentResults, document)
    header = read_results(ResultsHeader, document)
    page = Page("Positive or negative?", _lead(results))
    for title, key, build in SECTIONS:
        if getattr(results, key):
            page.add(heading(title), *build(results))
    page.add(heading("How it was made"), *_describe_run(results, header))
    return page


def _model_styles(results: SentimentResults) -> dict[str, Style]:
    """Returns the style of each model, then of each baseline, the same everywhere."""
    return {row.name: style(n) for n, row in enumerate([*results.models, *results.baselines])}


def _lead(results: SentimentResults) -> Markup:
    best, data = results.best_model, results.data
    what = "generated sentences" if data.generated else "sentences"
    said: list[object] = [
        f"{results.encoder.name} learned from {data.sentences['train']:,} {what} which are positive and which "
        f"negative. Of {best.test.n:,} others it is right about ",
        strong(percent(best.test.accuracy)),
        f" ({_between(best.test)}) with {best.name}, {_why_best(results)}",
    ]
    for row in results.baselines:
        said.append(f"; {row.name}: {percent(row.test.accuracy)}")
    as_good = [row.name for row in results.baselines if row.test.accuracy >= best.test.accuracy]
    if as_good:
        said.append(f". No less is reached without an encoder: {', '.join(as_good)}")
    return join(*said, ".")


def _why_best(results: SentimentResults) -> str:
    """Returns in words why one optimiser's model is judged: it is best on dev, or the first of those that are."""
    alike = _best_on_dev(results)
    if len(results.models) == 1:
        return "the only optimiser"
    if len(alike) == 1:
        return "the best optimiser by dev"
    return f"the first of {len(alike)} optimisers that are right equally often on dev"


def _best_on_dev(results: SentimentResults) -> list[str]:
    """Returns the names of all models that have the most right answers on dev."""
    return [row.name for row in results.models if row.dev.accuracy == results.best_model.dev.accuracy]


def _between(score: SentimentScore) -> str:
    return f"95% interval {percent(score.low)} to {percent(score.high)}"


def _interval(score: SentimentScore) -> Markup:
    low = 100 * score.low
    high = 100 * score.high
    return join(percent(score.accuracy), tag("small", f"{low:.1f}\u2060–\u2060{high:.1f}"))


def _outcome(results: SentimentResults) -> Iterable[Markup]:
    models, n = results.models, results.data.sentences
    rows = []
    for row in (*models, *results.baselines):
        trained: list[object] = ["–", "–", "–"]
        if isinstance(row, OptimizerModel):
            trained = [number(row.rate), row.batch, f"{row.best_epoch:.3g}"]
        name = row.title if isinstance(row, OptimizerModel) else row.name
        rows.append([name, *trained, *(_interval(score) for score in row.scores.values())])
    columns = ["", "learning rate", "batch", "best epoch", *(f"{split}, n = {n[split]:,}" for split in SPLITS)]
    caption = (
        "Share of right answers with Wilson's 95% interval. Of each optimiser the checkpoint that is right most often "
        "on dev is judged; test had no say in anything. Baselines: one answer to all, and logistic regression on which "
        "words (and pairs of neighbouring words) occur, its penalty chosen on dev."
    )
    best = [place for place, row in enumerate(models) if row.name in _best_on_dev(results)]
    if len(best) == len(models) > 1:
        best = []  # none is better than another
    yield table(rows, columns, caption, highlight=best)
    bars = [(row.name, row.test.accuracy, row.test.low, row.test.high, row.test.n) for row in models]
    lines = {row.name: row.test.accuracy for row in results.baselines}
    svg = plots.bars(bars, lines, x="right on test", styles=_model_styles(results))
    shown = [figure(svg, "Thin lines are 95% intervals, dashed lines baselines.", "Right on test")]
    shown.append(
        figure(
            confusion(results.confusion),
            f"Test sentences by what they are and what {results.best}'s model says; off the diagonal it is wrong.",
            "Confusion matrix",
        )
    )
    yield figures(*shown)


def confusion(counts: Sequence[Sequence[int]], names: Sequence[str] = CLASSES) -> Markup:
    """Returns the picture of a confusion matrix: counts, and their shares of each true class as darkness."""

    def paint(made: Figure) -> None:
        import numpy as np
        from matplotlib.colors import to_rgb

        ax = made.add_subplot()
        given = np.asarray(counts, dtype=float)
        shares = given / np.maximum(given.sum(1, keepdims=True), 1)
        pixels = np.empty((*given.shape, 4))
        pixels[..., :3] = to_rgb(SERIES[0].light)
        pixels[..., 3] = 0.42 * shares  # so that ink stays readable on the darkest, on a dark page too
        ax.imshow(pixels, interpolation="none", aspect="auto")
        ax.grid(False)
        for i, row in enumerate(counts):
            for j, n in enumerate(row):
                ax.text(
                    j, i - 0.06, f"{n:,}", ha="center", va="center", fontweight="bold", color=INK.light, fontsize=13
                )
                share = f"{percent(float(shares[i, j]))} of the {names[i]}"
                ax.text(j, i + 0.22, share, ha="center", va="center", color=MUTED.light)
        places = range(len(names))
        ax.set_xticks(places, [f"says {name}" for name in names])
        ax.set_yticks(places, [f"is {name}" for name in names], rotation=90, va="center")
        ax.tick_params(length=0, colors=INK.light)

    said = "; ".join(
        f"{names[i]} taken for {names[j]}: {n:,}" for i, row in enumerate(counts) for j, n in enumerate(row)
    )
    return draw(paint, f"Confusion matrix. {said}", height=3.0)


def _optimisers(results: SentimentResults) -> Iterable[Markup]:
    models, drawn = results.models, _model_styles(results)
    yield paragraph(
        "All of them fine-tune the same encoder, begin with the same weights and see the same batches in the same "
        "order. Training loss and accuracy are measured as those of dev are, without dropout, on training sentences "
        "spread evenly over the file."
    )
    curves = {key: {row.name: _train_and_dev(row, key) for row in models} for key, _, _ in CURVES}
    pictures = []
    kept = {row.name: row.best_epoch for row in models}
    for key, title, best in CURVES:
        shares = key == "accuracy"
        svg = learning_figure(curves[key], "epoch", key, best=best, styles=drawn, shares=shares, kept=kept)
        pictures.append(figure(svg, learning_caption(best), title))
    yield figures(*pictures)
    yield paragraph(describe_overfitting({row.title: curves["loss"][row.name] for row in models}, "epoch"))
    rows = [
        [row.title, row.rate, row.batch, f"{row.epochs:.3g}", f"{row.best_epoch:.3g}", _best_train_epoch(row),
         percent(row.dev.accuracy), row.best_loss, duration(row.seconds), code(row.run)]
        for row in models
    ]  # fmt: skip
    columns = ["", "learning rate", "batch", "epochs", "best by dev", "best by train", "dev", "dev loss"]
    caption = (
        "Epochs done, and the best epoch of each optimiser by accuracy on dev (of equals the one that was kept) and on "
        "train (the first of equals)."
    )
    yield table(rows, [*columns, "time", "folder"], caption)


def _train_and_dev(model: OptimizerModel, quantity: str) -> TrainAndDev:
    """Returns the curves of a quantity over the epochs."""
    by_epoch = [row | {"step": row["epoch"]} for row in model.evaluations]
    return train_and_dev((), by_epoch, quantity)


def _best_train_epoch(model: OptimizerModel) -> str:
    best = best_of(_train_and_dev(model, "accuracy").train, "max")
    return "–" if best is None else f"{best[0]:.3g}"


def _kinds(results: SentimentResults) -> Iterable[Markup]:
    names = list(next(iter(results.kinds.values())))
    yield paragraph(
        "The sentences are made so that an adjective alone tells little: ",
        strong("negated"), " ones turn it round, ", strong("decoys"), " have one that turns nothing round, of a ",
        strong("contrast"), " the main clause counts, ", strong("mixed"), " ones are contrasts with a negation, ",
        strong("reported"), " ones tell what others think. ",
        f"{percent(results.data.unseen, 0)} of the adjectives do not occur in training.",
    )  # fmt: skip
    rows = []
    for kind, by in results.kinds.items():
        rows.append([kind, by[names[0]].n, *(_interval(by[name]) for name in names)])
    yield table(rows, ["kind", "n", *names], "Right on test by kind of sentence, with 95% intervals.")


def _wrong(results: SentimentResults) -> Iterable[Markup]:
    kinds = any(row.kind for row in results.wrong)
    rows = []
    for row in results.wrong:
        cells = [row.text, row.label, f"{100 * row.probability:.2g}%"]
        rows.append([*cells, row.kind] if kinds else cells)
    caption = "Test sentences whose label the model finds least likely, the worst first. A label may be wrong itself."
    columns = ["sentence", "is", "the model's probability of that"]
    if kinds:
        columns.append("kind")
    yield table(rows, columns, caption)


def _calibration(results: SentimentResults) -> Iterable[Markup]:
    found, name = results.calibration, results.best
    svg = plots.calibration({name: found.bins}, {name: found.error}, styles=_model_styles(results))
    text = (
        "A point is a tenth of the test sentences. Below the diagonal it is surer than it is right; on average it is "
        f"off by {percent(found.error)}."
    )
    if found.separation is not None:
        text += (
            f" Of a right and a wrong answer it is surer of the right one in {percent(found.separation, 0)} of the "
            f"cases (50% is chance), and its squared error is {_compare_errors(found.skill or 0.0)} that of always "
            "stating the share of right answers: a small calibration error means nothing where it is not smaller."
        )
    yield figure(svg, text, "How sure it is, and how often right")


def _compare_errors(skill: float) -> str:
    """Returns in words how much smaller or larger than another a squared error is that is 1 − skill times as large."""
    if skill < 0:
        return f"{percent(-skill, 0)} larger than"
    return f"{percent(skill, 0)} smaller than"


def _batch(results: SentimentResults) -> Iterable[Markup]:
    batch, data = results.batch, results.data
    rows = [[code(t.name), t.what, code(t.type), code(t.dtype), code(t.shape), code(t.device)] for t in batch.tensors]
    how = "the longest of the batch" if data.padding == "longest" else f"{data.length} tokens"
    yield paragraph(
        f"The batch of the first step. Sentences are cut after {data.length} tokens and filled up to {how}; "
        f"{percent(batch.padding)} of this batch is padding."
    )
    yield table(rows, ["tensor", "what it holds", "type", "dtype", "shape", "device"], "What a step reads.")
    cells = [[r.text, r.label, r.tokens, r.padding, code(" ".join(map(str, r.ids)) + " …")] for r in batch.rows]
    yield table(cells, ["row, decoded", "label", "tokens", "padding", "first ids"], "Its first rows.")


def _describe_run(results: SentimentResults, header: ResultsHeader) -> Iterable[Markup]:
    data = results.data
    encoder = results.encoder
    yield paragraph("The same seed on the same machine, with as many threads, gives the same numbers:")
    yield command_listing(header.command or "")
    settings = {
        "encoder": encoder.name,
        "class": encoder.class_,
        "parameters": encoder.parameters,
        "most tokens it can read": encoder.limit,
        **{
            f"{name} sentences": f"{n:,}, {percent(data.positive[name])} positive" for name, n in data.sentences.items()
        },
        "tokens of a sentence": data.tokens["mean"],
        "tokens of the longest": data.tokens["longest"],
        f"cut after {data.length} tokens": data.cut,
        "workers": data.workers,
        "device": header.device,
        "time in all": duration(header.seconds),
    }
    yield details("Settings", facts(settings))
    columns = ["sentence", "label"]
    if data.generated:
        columns.append("kind")
    rows = [row[: len(columns)] for row in data.examples]
    yield details("Sentences that it learned from", table(rows, columns, "The first training sentences."))
    yield details("Versions", facts({name: number(version) for name, version in (header.versions or {}).items()}))


SECTIONS: tuple[tuple[str, str, Callable[[SentimentResults], Iterable[Markup]]], ...] = (
    ("Outcome", "models", _outcome),
    ("Optimisers", "models", _optimisers),
    ("By kind of sentence", "kinds", _kinds),
    ("Most wrong", "wrong", _wrong),
    ("Calibration", "calibration", _calibration),
    ("One batch", "batch", _batch),
)
