"""The page of the experiment "knowledge": what a model knows from reading, and whether it knows what it does not know.

`knowledge_page(results)` takes plain data, as JSON has it. A part that is missing, empty or None is left out, and the
page says so. Shares and confidences lie between 0 and 1; a score is {right, n, accuracy, low, high}.

    title, seed, device, seconds, versions {name: version}, mechanism, command
    world        invented, people, documents, questions {split: n}, example_documents [text],
                 example_questions [[question, answer]]
    model        parameters, summary
    stages       [name, run, steps, epochs, seconds, tokens, curve [{step, loss}], evaluations [{step, dev/accuracy}]]
    baselines    [name, dev score, test score]
    models       [name, dev score, test score]; the last is the one that the page is about
    answers      {model: [question, person, expected, predicted, confidence, right]}; answers_of: the split, else dev
    calibration  {model: {rows [{confidence, accuracy, n}], ece}}
    coverage     {model: [[share, accuracy]]}
    unwritten    {model: {n, mean_confidence, top_answers [[place, count]], written_confidences, unwritten_confidences,
                 by_form [{form, n, mean_confidence, distinct, top [place, share],
                 examples [[question, answer, confidence]]}]}}
    attention    tokens, heads [{layer, head, weights, note}], question
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from regard.lab.knowledge import calibration
from regard.lab.knowledge.names import SPLITS, Results, main, scored_split, styles_of
from regard.report import plots
from regard.report.markup import Markup, code, count_noun, duration, join, number, percent, strong, tag
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
from regard.report.palette import style


class Section(NamedTuple):
    """A part of the page: the results' key that it needs, what it is called, and why it may be missing."""

    key: str
    name: str
    absent: str
    build: Callable[[Results], Iterable[Markup]]


def knowledge_page(results: Results) -> Page:
    """The page for these results; a part that is not as described is a ReportError that names it."""
    page = Page(str(results.get("title") or "What does it know?"), build_part("models", _lead, results, __name__))
    missing = []
    for section in SECTIONS:
        if results.get(section.key):
            page.add(heading(section.name), *build_part(section.key, section.build, results, __name__))
        else:
            missing.append(join(strong(section.name), ": ", section.absent, "."))
    if results.get("models") and not any(m.get("test") for m in results["models"]):
        missing.append(join(strong("Accuracy on the test questions"), ": their file has no answers."))
    page.add(heading("How it was made"), *build_part("world", _made, results, __name__))
    if missing:
        page.add(heading("Left out"), samples(missing))
    return page


def _lead(results: Results) -> Markup:
    world, model = results.get("world") or {}, results.get("model") or {}
    read = []
    if world.get("documents"):
        read.append(count_noun(world["documents"], "document"))
    if world.get("people"):
        read.append(f"about {world['people']:,} {'invented ' if world.get('invented') else ''}people")
    size = f" of {number(model['parameters'])} parameters" if model.get("parameters") else ""
    kind = f" with {results['mechanism']} attention" if results.get("mechanism") else ""
    done = f"A small language model{size}{kind} read {' '.join(read) or 'a text'} "
    done += "and was then asked where people were born."
    split = scored_split(results)
    scored = [m for m in results.get("models") or [] if m.get(split)]
    if not scored:
        return join(done, " No answers were scored.")
    best, rest = scored[-1], scored[:-1]
    said: list[object] = [done, f" {best['name'].capitalize()} it gives "]
    said += [strong(percent(best[split]["accuracy"])), f" of {best[split]['n']:,} {SPLITS[split]} answers right"]
    said += [f" (95% interval {_interval(best[split])})"]
    for other in rest:
        said += [f"; {other['name']}, ", strong(percent(other[split]["accuracy"]))]
    lines = [b for b in results.get("baselines") or [] if b.get(split)]
    if lines:
        top = max(lines, key=lambda b: b[split]["accuracy"])
        said += [". The best baseline, ", top["name"], ", gets ", strong(percent(top[split]["accuracy"]))]
    return join(*said, ".")


def _interval(score: Mapping[str, Any]) -> str:
    return f"{100 * score['low']:.1f}\u2060–\u2060{percent(score['high'])}"  # stays on one line


def _accuracy(results: Results) -> Iterable[Markup]:
    models, lines, drawn = results["models"], results.get("baselines") or [], styles_of(results)
    split = scored_split(results)
    scored = [m for m in models if m.get(split)]
    tiles = {f"{m['name']}, {SPLITS[split]} questions": percent(m[split]["accuracy"]) for m in reversed(scored)}
    tiles |= {b["name"]: percent(b[split]["accuracy"]) for b in lines if b.get(split)}
    yield facts(tiles, big=True)
    shown = [s for s in SPLITS if any(m.get(s) for m in [*models, *lines])]

    def cell(score: Mapping[str, Any] | None) -> Markup:
        if not score:
            return tag("span", "no answers", class_="quiet")
        under = f"{_interval(score)} · {score['right']:,}\xa0of\xa0{score['n']:,}"
        return join(percent(score["accuracy"]), tag("small", under))

    rows = [[row["name"], *(cell(row.get(s)) for s in shown)] for row in [*reversed(models), *lines]]
    caption = "Share of questions answered exactly right, with its 95% interval and the counts."
    yield table(rows, ["", *(f"{SPLITS[s]} questions" for s in shown)], caption, highlight=[0])
    pictures = []
    for s in shown:
        bars = [
            (m["name"], m[s]["accuracy"], m[s]["low"], m[s]["high"], m[s]["n"]) for m in reversed(models) if m.get(s)
        ]
        if not bars:
            continue
        svg = plots.bars(bars, {b["name"]: b[s]["accuracy"] for b in lines if b.get(s)}, styles=drawn)
        pictures.append(figure(svg, _reading(bars), f"{SPLITS[s].capitalize()} questions"))
    yield figures(*pictures)


def _reading(bars: Sequence[tuple[str, float, float, float, int]]) -> str:
    """What the bars and their intervals say."""
    first = "Thin lines are 95% intervals, dashed lines are constant answers."
    if len(bars) < 2:
        return first
    (a, x, low, _, _), (b, y, _, high, _) = bars[0], bars[1]
    if low > high:
        times = f"{x / y:.1f} times as often as" if y > 0 else "more often than"
        return f"{first} {a.capitalize()} the model is right {times} {b}."
    return f"{first} The intervals meet: so few questions do not tell {a} from {b}."


def _stages(results: Results) -> Iterable[Markup]:
    stages, drawn = results["stages"], styles_of(results)
    reading = [s for s in stages if s["name"] == "pretraining" and s.get("curve")]
    asked = [s for s in stages if s["name"] != "pretraining"]
    pictures = []
    if reading:
        name = main(results, drawn) if drawn else "pretraining"
        line = {"pretraining": _points(reading[0]["curve"], "loss")}
        svg = plots.curves(line, y="loss a token", log=True, styles={"pretraining": drawn.get(name, style(0))})
        pictures.append(figure(svg, "It reads, with spans hidden that it has to fill in.", "Pretraining"))
    losses = {s["name"]: _points(s["curve"], "loss") for s in asked if s.get("curve")}
    if losses:
        svg = plots.curves(losses, y="loss a token", log=True, styles=drawn)
        text = (
            "It learns to answer the training questions. A low loss here is no knowledge: it may learn them by heart."
        )
        pictures.append(figure(svg, text, "Learning to answer"))
    tried = {s["name"]: _points(s.get("evaluations") or [], "dev/accuracy") for s in asked}
    tried = {name: points for name, points in tried.items() if points}
    if tried:
        svg = plots.curves(tried, y="accuracy", mark_best="max", styles=drawn, shares=True)
        text = "Questions that were not in training; the dot is the best evaluation."
        pictures.append(figure(svg, text, "Development questions on the way"))
    yield figures(*pictures)
    columns = ["stage", "steps", "epochs", "tokens", "time", "folder"]
    rows = [
        [
            s["name"],
            s.get("steps"),
            s.get("epochs"),
            s.get("tokens"),
            duration(s.get("seconds")),
            code(s.get("run", "–")),
        ]
        for s in stages
    ]
    yield details("The stages in numbers", table(rows, columns, "What each stage took."))


def _points(rows: Iterable[Mapping[str, Any]], key: str) -> list[plots.Point]:
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def _made(results: Results) -> Iterable[Markup]:
    world, model = results.get("world") or {}, results.get("model") or {}
    seed, mechanism = results.get("seed"), results.get("mechanism")
    command = results.get("command") or "regard run knowledge" + (
        f" model.mechanism={mechanism}" if mechanism and mechanism != "softmax" else ""
    ) + ("" if seed is None else f" --seed {seed}")
    yield paragraph("The same seed on the same machine, with as many threads, gives the same numbers:")
    yield listing(command)
    asked = {f"{SPLITS.get(s, s)} questions": n for s, n in (world.get("questions") or {}).items()}
    settings = {
        "attention": mechanism, "parameters": model.get("parameters"), "people": world.get("people"),
        "documents": world.get("documents"), **asked, "device": results.get("device"), "seed": seed,
        "time in all": None if results.get("seconds") is None else duration(results["seconds"]),
    }  # fmt: skip
    settings = {name: value for name, value in settings.items() if value is not None}
    if settings:
        yield details("Settings", facts(settings))
    if world.get("example_documents"):
        yield details("What it read: examples", samples(world["example_documents"]))
    if world.get("example_questions"):
        rows = [[question, answer] for question, answer in world["example_questions"]]
        yield details("What it was asked: examples", table(rows, ["question", "answer"], "Training questions"))
    if model.get("summary"):
        yield details("The model, part by part", listing(model["summary"]))
    if results.get("versions"):
        yield details("Versions", facts(results["versions"]))


SECTIONS = (
    Section("models", "Outcome", "the results score no model", _accuracy),
    Section("stages", "Learning", "the results hold no learning curves", _stages),
    Section("answers", "Right and wrong answers", "the results hold no single answers", calibration.answers),
    Section("calibration", "Does it know how sure to be?", "the results hold no confidences", calibration.calibration),
    Section("coverage", "When it may stay silent", "the results hold no confidences", calibration.coverage),
    Section(
        "unwritten",
        "People it never read of",
        "these questions name nobody of whom it did not read",
        calibration.unwritten,
    ),
    Section("attention", "Where it looks", "no attention was recorded", calibration.attention),
)
