"""The page of the experiment "knowledge": what a model knows from reading, and whether it knows what it does not know.

A part of the results that is missing, empty or None is left out, and the page says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from regard.lab.knowledge import calibration
from regard.lab.knowledge.calibration import main_model, model_styles
from regard.lab.knowledge.matrix import STAGE_CAPTION, STAGE_COLUMNS, comparison_page, stage_cells
from regard.lab.knowledge.results import (
    SPLITS,
    AnswerScore,
    KnowledgeModel,
    KnowledgeResults,
    KnowledgeWorld,
    ScoredModel,
)
from regard.lab.results import ResultsHeader, read_results
from regard.report import plots
from regard.report.learning import describe_overfitting, learning_caption, learning_figure, train_and_dev
from regard.report.markup import Markup, count_noun, duration, join, number, percent, strong, tag
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
from regard.report.palette import style

READING = "pretraining"


class PageSection(NamedTuple):
    """A section of the page: the part of the results that it needs, its title, and why it may be missing."""

    key: str
    title: str
    absent: str
    build: Callable[[KnowledgeResults], Iterable[Markup]]


def knowledge_page(document: Mapping[str, Any]) -> Page:
    """Returns the page of the content of results.json; raises ReportError, naming the part, if one does not fit."""
    if "candidates" in document:
        return comparison_page(document)
    results = read_results(KnowledgeResults, document)
    header = read_results(ResultsHeader, document)
    page = Page(header.title or "What does it know?", _lead(results))
    missing = []
    for section in SECTIONS:
        if getattr(results, section.key):
            page.add(heading(section.title), *section.build(results))
        else:
            missing.append(join(strong(section.title), ": ", section.absent, "."))
    if results.models and not any(model.test for model in results.models):
        missing.append(join(strong("Accuracy on the test questions"), ": their file has no answers."))
    page.add(heading("How it was made"), *_describe_run(results, header))
    if missing:
        page.add(heading("Left out"), samples(missing))
    return page


def _lead(results: KnowledgeResults) -> Markup:
    """Returns the first paragraph: what was read, and how many answers are right."""
    said: list[object] = [_what_was_done(results)]
    split = results.scored_split
    scored = _scores(results.models, split)
    if not scored:
        return join(*said, " No answers were scored.")
    *others, (main, known) = scored
    said += [f" {main.name.capitalize()} it gives ", strong(percent(known.accuracy))]
    said += [f" of {known.n:,} {SPLITS[split]} answers right (95% interval {_interval(known)})"]
    for model, other in others:
        said += [f"; {model.name}, ", strong(percent(other.accuracy))]
    baselines = _scores(results.baselines, split)
    if baselines:
        top, score = max(baselines, key=lambda pair: pair[1].accuracy)
        said += [". The best baseline, ", top.name, ", gets ", strong(percent(score.accuracy))]
        if score.accuracy >= known.accuracy:
            said.append(": that is no less, and takes no knowledge")
    return join(*said, ".")


def _what_was_done(results: KnowledgeResults) -> str:
    world = results.world or KnowledgeWorld()
    read = []
    if world.documents:
        read.append(count_noun(world.documents, "document"))
    if world.people:
        invented = "invented " * world.invented
        read.append(f"about {world.people:,} {invented}people")
    model = "A small language model"
    if results.model and results.model.parameters:
        model += f" of {number(results.model.parameters)} parameters"
    if results.mechanism:
        model += f" with {results.mechanism} attention"
    return f"{model} read {' '.join(read) or 'a text'} and was then asked where people were born."


def _scores(models: Sequence[ScoredModel] | None, split: str) -> list[tuple[ScoredModel, AnswerScore]]:
    """Returns the models that have a score on a set, each with that score."""
    return [(model, score) for model in models or () if (score := model.on(split)) is not None]


def _interval(score: AnswerScore) -> str:
    return f"{100 * score.low:.1f}\u2060–\u2060{percent(score.high)}"  # stays on one line


def accuracy(results: KnowledgeResults) -> Iterable[Markup]:
    """Yields the shares of right answers as numbers, in a table and as bars, beside constant answers."""
    models = results.models or []
    baselines = results.baselines or []
    split = results.scored_split
    tiles = {f"{m.name}, {SPLITS[split]} questions": percent(s.accuracy) for m, s in _scores(models[::-1], split)}
    yield facts(tiles | {b.name: percent(s.accuracy) for b, s in _scores(baselines, split)}, big=True)
    splits = [name for name in SPLITS if _scores([*models, *baselines], name)]
    listed: list[ScoredModel] = [*reversed(models), *baselines]
    rows = [[row.name, *(_score_cell(row.on(name)) for name in splits)] for row in listed]
    caption = "Share of questions answered exactly right, with its 95% interval and the counts."
    columns = ["", *(f"{SPLITS[name]} questions" for name in splits)]
    yield table(rows, columns, caption, highlight=_better_than_all_others(listed, split))
    pictures = []
    for name in splits:
        bars = [(m.name, s.accuracy, s.low, s.high, s.n) for m, s in _scores(models[::-1], name)]
        if bars:
            lines = {b.name: s.accuracy for b, s in _scores(baselines, name)}
            svg = plots.bars(bars, lines, styles=model_styles(results))
            pictures.append(figure(svg, _read_bars(bars), f"{SPLITS[name].capitalize()} questions"))
    yield figures(*pictures)


def _better_than_all_others(rows: Sequence[ScoredModel], split: str) -> list[int]:
    """Returns the index of the row with the most right answers, in a list; [] if several tie."""
    scores = {place: score.accuracy for place, row in enumerate(rows) if (score := row.on(split)) is not None}
    most = max(scores.values(), default=0.0)
    best = [place for place, accuracy in scores.items() if accuracy == most]
    return best if len(best) == 1 else []


def _score_cell(score: AnswerScore | None) -> Markup:
    if score is None:
        return tag("span", "no answers", class_="quiet")
    under = f"{_interval(score)} · {score.right:,}\xa0of\xa0{score.n:,}"
    return join(percent(score.accuracy), tag("small", under))


def _read_bars(bars: Sequence[tuple[str, float, float, float, int]]) -> str:
    """Returns what the bars and their intervals say."""
    first = "Thin lines are 95% intervals, dashed lines are constant answers."
    if len(bars) < 2:
        return first
    better, accuracy, low, *_ = bars[0]
    other, lesser, *_ = bars[1]
    high = bars[1][3]
    if low <= high:
        return f"{first} The intervals meet: so few questions do not tell {better} from {other}."
    times = "more often than"
    if lesser > 0:
        times = f"{accuracy / lesser:.1f} times as often as"
    return f"{first} {better.capitalize()} the model is right {times} {other}."


def _stages(results: KnowledgeResults) -> Iterable[Markup]:
    stages = results.stages or []
    styles = model_styles(results)
    answering = [stage for stage in stages if stage.name != READING]
    pictures = []
    for stage in stages:
        if stage.name == READING and stage.curve:
            same = style(0)
            if styles:
                same = styles[main_model(results, styles)]
            line = {READING: _points(stage.curve, "loss")}
            svg = plots.curves(line, y="loss a token", log=True, styles={READING: same})
            pictures.append(figure(svg, "It reads, with spans hidden that it has to fill in.", "Pretraining"))
    shown: tuple[tuple[str, plots.Best, str], ...] = (
        ("accuracy", "max", "Dev: questions that were not in training."),
        ("loss", "min", "A low training loss is no knowledge: it may learn the training questions by heart."),
    )
    kept = {stage.name: stage.best for stage in answering}
    for quantity, best, text in shown:
        curves = {stage.name: train_and_dev(stage.curve, stage.evaluations, quantity) for stage in answering}
        if any(line.train or line.dev for line in curves.values()):
            shares = quantity == "accuracy"
            svg = learning_figure(
                curves, y=quantity, log=not shares, best=best, styles=styles, shares=shares, kept=kept
            )
            caption = f"{learning_caption(best)} {text}"
            pictures.append(figure(svg, caption, f"Learning to answer: {quantity}, train and dev"))
    yield figures(*pictures)
    losses = {f"fine-tuning {stage.name}": train_and_dev(stage.curve, stage.evaluations) for stage in answering}
    said = describe_overfitting(losses)
    if said:
        yield paragraph(said[0].upper() + said[1:])
    rows = [[stage.name, *stage_cells(stage)] for stage in stages]
    yield details("The stages in numbers", table(rows, ["stage", *STAGE_COLUMNS], STAGE_CAPTION))


def _points(rows: Iterable[Mapping[str, Any]], key: str) -> list[plots.Point]:
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def _describe_run(results: KnowledgeResults, header: ResultsHeader) -> Iterable[Markup]:
    world = results.world or KnowledgeWorld()
    model = results.model or KnowledgeModel()
    yield paragraph("The same seed on the same machine, with as many threads, gives the same numbers:")
    yield command_listing(header.command or _old_command(results))
    settings = {
        "attention": results.mechanism,
        "parameters": model.parameters,
        "people": world.people,
        "documents": world.documents,
        **{f"{SPLITS.get(split, split)} questions": n for split, n in world.questions.items()},
        "device": header.device,
        "seed": results.seed,
    }
    if header.seconds is not None:
        settings["time in all"] = duration(header.seconds)
    settings = {name: value for name, value in settings.items() if value is not None}
    if settings:
        yield details("Settings", facts(settings))
    if world.example_documents:
        yield details("What it read: examples", samples(world.example_documents))
    if world.example_questions:
        rows = [[question, answer] for question, answer in world.example_questions]
        yield details("What it was asked: examples", table(rows, ["question", "answer"], "Training questions"))
    if model.summary:
        yield details("The model, part by part", listing(model.summary))
    if header.versions:
        yield details("Versions", facts(header.versions))


def _old_command(results: KnowledgeResults) -> str:
    """Returns a command made from the settings, for results of versions that did not write their command down."""
    command = "regard run knowledge"
    if results.mechanism and results.mechanism != "softmax":
        command += f" model.mechanism={results.mechanism}"
    if results.seed is not None:
        command += f" --seed {results.seed}"
    return command


SECTIONS = (
    PageSection("models", "Outcome", "the results score no model", accuracy),
    PageSection("stages", "Learning", "the results hold no learning curves", _stages),
    PageSection("answers", "Right and wrong answers", "the results hold no single answers", calibration.answers),
    PageSection(
        "calibration", "Does it know how sure to be?", "the results hold no confidences", calibration.calibration
    ),
    PageSection("coverage", "When it may stay silent", "the results hold no confidences", calibration.coverage),
    PageSection(
        "unwritten",
        "People it never read of",
        "these questions name nobody of whom it did not read",
        calibration.unwritten,
    ),
    PageSection("attention", "Where it looks", "no attention was recorded", calibration.attention),
)
