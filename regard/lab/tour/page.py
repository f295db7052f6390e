"""The report of the tour, as far as it has come: a chapter that is not done says what it will show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from regard.cost.crossing import Crossing
from regard.lab.bench.page import time_figure
from regard.lab.bench.run import crossings
from regard.lab.knowledge.page import accuracy
from regard.lab.knowledge.results import SPLITS, AnswerScore, KnowledgeWorld
from regard.lab.results import ResultsHeader, read_results
from regard.lab.tour.results import AskedLaw, CheckChapter, RaceChapter, SeeChapter, TourResults, TrainChapter
from regard.report.heat import heat
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
    table,
)

HEADS_SHOWN = 5
FASTEST = "forward"  # the pass that crossing points are told of


class Chapter(NamedTuple):
    """A chapter: its key in the results, its title, what a terminal says while it is done, and what it will show."""

    key: str
    title: str
    doing: str
    promise: str


CHAPTERS = (
    Chapter(
        "check",
        "Check",
        "a performer that leaks is put to the laws (seconds)",
        "A linear attention with a mistake that is easy to make is put to the laws of attention. The law that it "
        "breaks, and the smallest example that shows it, will stand here.",
    ),
    Chapter(
        "train",
        "Train",
        "what is known with and without reading (3 minutes)",
        "Two small models are asked where people were born whose questions neither has ever seen. One has read about "
        "them. How many answers are right, with intervals, will stand here beside the most frequent place.",
    ),
    Chapter(
        "see",
        "See",
        "the head that answers hang on the most (seconds)",
        "Each head of the trained model is silenced in turn. The one that answers hang on the most, and where it "
        "looks, will be shown here beside the same head before training.",
    ),
    Chapter(
        "race",
        "Race",
        "mechanisms over growing lengths (half a minute)",
        "Mechanisms run in turn over growing lengths. Their times, and the lengths from which on one is faster than "
        "softmax, will stand here.",
    ),
)


def tour_page(document: Mapping[str, Any]) -> Page:
    """Returns the page of the tour's results.json; raises ReportError, naming the part, if one does not fit."""
    results = read_results(TourResults, document)
    header = read_results(ResultsHeader, document)
    page = Page("A tour of regard", _lead(results))
    for number_, chapter in enumerate(CHAPTERS, 1):
        page.add(heading(f"{number_}. {chapter.title}"))
        found = getattr(results, chapter.key)
        if found is None:
            page.add(paragraph(strong("Not done yet. "), chapter.promise, quiet=True))
        else:
            page.add(*_BLOCKS[chapter.key](found))
    page.add(heading("How it was made"), *_describe_run(results, header))
    return page


def _lead(results: TourResults) -> Markup:
    """Returns what came out so far, a sentence a chapter."""
    said: list[object] = []
    if results.check is not None and results.check.broken:
        said += ["A linear attention that looks ahead is ", strong("caught"), ", with an example of a few tokens. "]
    if results.train is not None:
        said += _lead_of_training(results.train)
    if results.see is not None:
        said += ["Without ", strong(results.see.found.title), " it is ", strong(percent(results.see.found.accuracy, 0))]
        said += [". "]
    if results.race is not None:
        fast = [crossing for crossing in _crossings(results.race) if crossing.tokens is not None]
        if fast:
            first = min(fast, key=lambda crossing: crossing.tokens or 0)
            said += [strong(first.first), f" is faster than {first.second} {first.describe()}. "]
    left = [chapter.title for chapter in CHAPTERS if getattr(results, chapter.key) is None]
    if left:
        said.append(f"Still to come: {', '.join(left)}. Load this page again to see more.")
    return join(*said)


def _lead_of_training(chapter: TrainChapter) -> list[object]:
    split = chapter.knowledge.scored_split
    scores = [model.on(split) for model in chapter.knowledge.models or ()]
    without, reading = scores[0], scores[-1]
    baseline = chapter.baseline.on(split)
    assert without is not None and reading is not None and baseline is not None
    said: list[object] = ["A small model that has read about people knows ", strong(percent(reading.accuracy, 0))]
    said.append(f" of {reading.n:,} birthplaces that it was never asked about; without reading ")
    return [*said, f"{percent(without.accuracy, 0)}, the most frequent place {percent(baseline.accuracy, 0)}. "]


# Check


def _check(chapter: CheckChapter) -> Iterable[Markup]:
    """Yields the verdicts, and the example that shows the first broken law."""
    broken = chapter.broken
    yield paragraph(
        "A performer as it is often written: its keys are stabilised by the largest exponent of the whole sequence, "
        "so that a later token changes what earlier ones get. Nobody said what to look for. ",
        strong(f"{chapter.subject} breaks {len(broken)} of {count_noun(len(chapter.laws), 'law')}"),
        f" in {chapter.trials:,} trials.",
    )
    rows = [_law_cells(chapter.subject, law) for law in broken]
    rows += [_law_cells(f"regard's {chapter.own}", law) for law in chapter.own_laws]
    caption = f"The laws that {chapter.subject} breaks, and the same laws asked of regard's own {chapter.own}."
    yield table(rows, ["", "law", "verdict", "worst", "allowed"], caption, highlight=range(len(broken)))
    for law in broken[:1]:
        if law.reproducer:
            yield paragraph(
                f"The smallest example that breaks '{law.law}' ({law.claim}), found by shrinking; it runs as it stands:"
            )
            yield listing(law.reproducer)
    others = [[law.law, law.claim, _verdict(law)] for law in chapter.laws]
    yield details(
        "All laws that could be asked", table(others, ["law", "says", "verdict"], "A bare function of q, k, v.")
    )
    yield details(f"The source of {chapter.subject}", listing(chapter.source))
    yield _command(chapter.command, "an attention function or module of your own")


def _law_cells(name: str, law: AskedLaw) -> list[object]:
    return [name, law.law, _verdict(law), law.error, law.limit]


def _verdict(law: AskedLaw) -> str:
    if law.is_broken:
        return "✗ broken"
    return "✓ holds" if law.status == "holds" else law.status


# Train


def _train(chapter: TrainChapter) -> Iterable[Markup]:
    """Yields what is known with and without reading."""
    knowledge = chapter.knowledge
    world = knowledge.world or KnowledgeWorld()
    parameters = (knowledge.model.parameters if knowledge.model else None) or 0
    yield paragraph(
        f"Two models of {number(parameters)} parameters learn to answer “Where was X born?” from "
        f"{count_noun(world.questions.get('train', 0), 'question')}. One of them has read "
        f"{count_noun(world.documents or 0, 'document')} before. Both are "
        "asked about people that no question in training named: only reading can tell."
    )
    yield from accuracy(knowledge)
    yield paragraph(
        "The whole of it, with learning curves, single answers and what its confidence is worth: ",
        tag("a", "the report of the experiment", href=f"{chapter.folder}/report.html"),
        ".",
    )
    yield _command(chapter.command, "documents and questions of your own, with data.documents=FILE and data.train=FILE")


# See


def _see(chapter: SeeChapter) -> Iterable[Markup]:
    """Yields the head that was found, where it looks before and after training, and what each head costs."""
    found = chapter.found
    yield paragraph(
        f"Each of {len(chapter.heads)} heads is silenced in turn. ",
        strong(found.title.capitalize()),
        f" raises the loss the most: without it, {percent(found.accuracy, 0)} of {chapter.n:,} {SPLITS[chapter.split]} "
        f"questions are answered right, with it {percent(chapter.accuracy, 0)}. While an answer is written it puts ",
        strong(percent(found.on_name, 0)),
        f" of its weight on the person's name, before training {percent(found.untrained_on_name, 0)}.",
    )
    lens = f"{chapter.page}#view=head&a={found.layer}&h={found.head}"
    pair = f"{chapter.page}#view=compare&a={found.layer}&h={found.head}&r2=1&a2={found.layer}&h2={found.head}"
    pictures = [("Trained", chapter.trained, "From each letter of the answer to all before it.")]
    pictures.append(("Untrained", chapter.untrained, "The same head of the same model before its first step."))
    # One below the other: the same columns, and side by side they are cut off at the right on windows of 1000 pixels.
    for title, weights, text in pictures:
        yield figure(heat(weights, chapter.rows, chapter.columns), text, title)
    yield paragraph(
        f"“{chapter.question}” {chapter.answer}. Every head, weight and token in the lens: ",
        tag("a", "this head", href=lens),
        ", ",
        tag("a", "beside the untrained one", href=pair),
        ".",
    )
    rows = []
    for one in chapter.heads:
        shares = [percent(share, 0) for share in (one.accuracy, one.on_name, one.untrained_on_name)]
        rows.append([one.title, shares[0], one.loss - chapter.loss, *shares[1:]])
    columns = ["without", "right", "loss, more", "weight on the name", "untrained"]
    caption = (
        f"What is lost without each head: right answers of {chapter.n:,}, and nats a letter on the "
        f"{count_noun(chapter.chosen_by, 'development question')} by which the heads are put in order. The whole model "
        f"is right about {percent(chapter.accuracy, 0)}."
    )
    yield table(rows[:HEADS_SHOWN], columns, caption, highlight=[0])
    if rows[HEADS_SHOWN:]:
        yield details("The other heads", table(rows[HEADS_SHOWN:], columns, "The same of the others."))
    yield _command(chapter.command, "a run, a model folder, or a Hugging Face model")


# Race


def _race(chapter: RaceChapter) -> Iterable[Markup]:
    """Yields the times over length, and from which length on each is faster than softmax."""
    results = chapter.results
    config = results.config
    said = f"On {results.device.name}: {config['heads']} heads of width {config['width']}, {config['dtype']}. All run "
    said += "in turn at each length, so that whatever slows the machine slows all alike."
    if results.interrupted:
        said += " The race was interrupted: this is what was measured until then."
    yield paragraph(said)
    found = _crossings(chapter)
    if found:
        rows = [[one.first, one.describe()] for one in found]
        caption = "Between two lengths that were timed, by a straight line on the logarithmic axes of the figure."
        yield table(rows, ["", "takes less time than softmax"], caption)
    yield figures(*(time_figure(results, passing) for passing in results.passes if passing != "decode"))
    yield paragraph(
        "Shaded: from the first to the third quartile. Thin and dashed: the floor, the least time that this machine's "
        "bandwidth and peak allow.",
        quiet=True,
    )
    if results.absent:
        absent = [[row.what, row.where or "everywhere", row.why] for row in results.absent]
        yield details("Left out", table(absent, ["", "where", "why"], "Who did not run, and why."))
    yield paragraph(
        "Floors, memory and the roofline: ", tag("a", "the page of the race", href=chapter.page), ".", quiet=True
    )
    yield _command(chapter.command, "all mechanisms (name none), or one of your own with --plugin file.py:name")


def _crossings(chapter: RaceChapter) -> list[Crossing]:
    return crossings(chapter.results, FASTEST)


# What all share

_BLOCKS: dict[str, Callable[[Any], Iterable[Markup]]] = {"check": _check, "train": _train, "see": _see, "race": _race}


def _command(command: str, yours: str) -> Markup:
    """Returns a paragraph about the command that does a chapter by itself, with `yours` as what else it takes."""
    return join(paragraph(f"The command of this chapter takes {yours}:"), command_listing(command))


def _describe_run(results: TourResults, header: ResultsHeader) -> Iterable[Markup]:
    yield paragraph("The same seed on the same machine, with as many threads, gives the same numbers but for times:")
    yield command_listing(header.command or "regard run tour")
    times = {chapter.title: getattr(results, chapter.key) for chapter in CHAPTERS}
    took: dict[str, object] = {title: duration(found.seconds) for title, found in times.items() if found is not None}
    yield facts({"device": header.device or "–", **took, "in all": duration(header.seconds)})
    if header.versions:
        yield details("Versions", facts(header.versions))


def outcome_rows(results: TourResults) -> list[list[str]]:
    """Returns a row for each chapter that is done: its title, what came out in a few words, and its seconds."""
    rows = []
    for chapter in CHAPTERS:
        found = getattr(results, chapter.key)
        if found is not None:
            rows.append([chapter.title, _OUTCOMES[chapter.key](found), f"{found.seconds:,.0f}"])
    return rows


def _check_outcome(chapter: CheckChapter) -> str:
    names = " and ".join(law.law for law in chapter.broken) or "none"
    return f"{chapter.subject} breaks {names}, of {count_noun(len(chapter.laws), 'law')}"


def _train_outcome(chapter: TrainChapter) -> str:
    split = chapter.knowledge.scored_split
    models = chapter.knowledge.models or []
    without, reading = models[0].on(split), models[-1].on(split)
    constant = _right(chapter.baseline.on(split))
    return f"right with reading {_right(reading)}, without {_right(without)}; most frequent {constant}"


def _right(score: AnswerScore | None) -> str:
    if score is None:
        return "–"
    return f"{score.right} of {score.n}"


def _see_outcome(chapter: SeeChapter) -> str:
    found = chapter.found
    return f"without {found.title}: {percent(found.accuracy, 0)} right, not {percent(chapter.accuracy, 0)}"


def _race_outcome(chapter: RaceChapter) -> str:
    fast = [one for one in _crossings(chapter) if one.tokens is not None]
    if not fast:
        return f"nobody overtakes softmax up to {max(chapter.results.lengths, default=0):,} tokens"
    return "faster than softmax: " + ", ".join(f"{one.first} {one.describe()}" for one in fast)


_OUTCOMES: dict[str, Callable[[Any], str]] = {
    "check": _check_outcome,
    "train": _train_outcome,
    "see": _see_outcome,
    "race": _race_outcome,
}
