"""Sections of the page of "knowledge" about single answers: which are right, how sure the model is, where it looks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from regard.lab.knowledge.names import SPLITS, Results, main, styles_of
from regard.report import plots
from regard.report.heat import heads_grid, heat, token_label
from regard.report.markup import Markup, count_noun, percent, strong
from regard.report.page import details, figure, figures, paragraph, share_bar, table
from regard.report.palette import style

EXAMPLES = 12


def answers(results: Results) -> Iterable[Markup]:
    """A dozen right and a dozen wrong answers of the main model; those of the others folded."""
    given = results["answers"]
    model = main(results, given)
    asked = SPLITS[results.get("answers_of") or "dev"].capitalize()
    yield paragraph(
        f"{asked} questions, as the model {model} answers them. Confidence is the probability that it gives to its "
        "answer. Each table goes evenly from the surest to the least sure of all such answers."
    )
    yield from _answer_tables(model, given[model])
    for name in given:
        if name != model:
            yield details(f"Right and wrong answers {name}", *_answer_tables(name, given[name]))


def _answer_tables(model: str, given: Sequence[Mapping[str, Any]]) -> Iterable[Markup]:
    for right in (True, False):
        every = sorted((a for a in given if bool(a["right"]) is right), key=lambda a: -a["confidence"])
        word = "right" if right else "wrong"
        if not every:
            yield paragraph(f"No answer is {word}.", quiet=True)
            continue
        keys = ["question", "predicted"] if right else ["question", "predicted", "expected"]
        rows = [[*(a[key] for key in keys), share_bar(a["confidence"])] for a in _spread(every, EXAMPLES)]
        caption = f"{len(rows)} of {count_noun(len(every), f'{word} answer')} {model}."
        yield table(rows, ["question", "answer", *keys[2:], "confidence"], caption)


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of them, evenly from the first to the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(n * (len(items) - 1) / (most - 1))] for n in range(most)]


def calibration(results: Results) -> Iterable[Markup]:
    """Whether the model is right as often as it says."""
    given = results["calibration"]
    errors = {name: found["ece"] for name, found in given.items() if found.get("ece") is not None}
    said: list[object] = ["When it says that it is 80% sure, is it right in 80% of the cases?"]
    if errors:
        model = main(results, errors)
        said += [f" The model {model} is off by ", strong(percent(errors[model])), " on average"]
        for name in errors:
            said += [f", {name} by ", strong(percent(errors[name]))] if name != model else []
        said += [" (expected calibration error: the distance from the diagonal, averaged over all answers)."]
    yield paragraph(*said)
    svg = plots.calibration({name: found["rows"] for name, found in given.items()}, errors, styles_of(results))
    caption = "Each point is a group of answers of like confidence; the larger, the more answers. "
    yield figure(svg, caption + "On the diagonal the model is right as often as it says.")


def coverage(results: Results) -> Iterable[Markup]:
    """What it gains where it may stay silent."""
    given = {name: sorted((float(x), float(y)) for x, y in line) for name, line in results["coverage"].items()}
    model = main(results, given)
    half, whole = plots.interpolate(given[model], 0.5), given[model][-1][1]
    worth = "worth something" if half > whole + 0.02 else "worth little"
    yield paragraph(
        f"A model that may stay silent answers only what it is surest of. When the model {model} may stay silent on "
        "half of the questions, it is right in ",
        strong(percent(half)),
        " of the others, against ",
        strong(percent(whole)),
        f" when it has to answer all: its confidence is {worth}.",
    )
    caption = "From right to left the model stays silent more often, where it is least sure first. Dots mark one half."
    yield figure(plots.coverage(given, styles_of(results)), caption)


def unwritten(results: Results) -> Iterable[Markup]:
    """What it says of people that no document names: does it know that it does not know?"""
    model = main(results, results["unwritten"])
    found = results["unwritten"][model]
    known, unknown = found.get("written_confidences") or [], found.get("unwritten_confidences") or []
    said: list[object] = [
        f"It was also asked about {found['n']:,} people of whom it never read, so that no answer can be known. It "
        "answers all the same, on average ",
        strong(percent(found["mean_confidence"])),
        " sure",
    ]
    if known and unknown:
        apart = _told_apart(known, unknown)
        verdict = "hardly knows" if apart < 0.6 else "knows a little" if apart < 0.8 else "mostly knows"
        said += [
            ", against ",
            strong(percent(sum(known) / len(known))),
            " for people of whom it read. Of two people, one ",
        ]
        said += [
            "of each kind, it is surer of the one that it read of in ",
            strong(percent(apart, 0)),
            " of the cases ",
        ]
        said += [f"(50% is chance): it {verdict} what it does not know"]
    yield paragraph(*said, ".")
    if known and unknown:
        drawn = {"read of": style(0), "never read of": style(3)}
        svg = plots.histogram({"read of": known, "never read of": unknown}, styles=drawn)
        caption = "The farther apart the two, the better its confidence tells the known from the unknown."
        yield figure(svg, caption, f"Confidence {model}")
    if found.get("top_answers"):
        top = ", ".join(f"{place} ({n:,})" for place, n in found["top_answers"][:8])
        yield paragraph("What it answers most often then: ", top, ".")
    if found.get("by_form"):
        yield from _forms(found["by_form"])


def _told_apart(known: Sequence[float], unknown: Sequence[float]) -> float:
    """The chance that a known person has more confidence than an unknown one; a tie counts half."""
    below = sorted(unknown)
    total = sum(bisect_left(below, x) + bisect_right(below, x) for x in known)
    return total / (2 * len(known) * len(unknown))


def _forms(forms: Sequence[Mapping[str, Any]]) -> Iterable[Markup]:
    columns = [
        "form of the name",
        "people",
        "mean confidence",
        "different answers",
        "most frequent answer",
        "its share",
    ]
    rows = [
        [f["form"], f["n"], share_bar(f["mean_confidence"]), f["distinct"], f["top"][0], percent(f["top"][1], 0)]
        for f in forms
    ]
    caption = "Unknown people by the form of their names. Where one answer is frequent, the form alone decides: a bias."
    yield table(rows, columns, caption)
    examples = [
        [f["form"], question, answer, share_bar(sure)]
        for f in forms
        for question, answer, sure in (f.get("examples") or [])[:4]
    ]
    if examples:
        shown = table(examples, ["form", "question", "answer", "confidence"], "Answers about people never read of.")
        yield details("Examples of each form", shown)


def attention(results: Results) -> Iterable[Markup]:
    """On a card each: the heads that have a note, else the first that is listed of some layers. The others together."""
    given = results["attention"]
    tokens, heads = given["tokens"], given["heads"]
    first = {head["layer"]: head for head in reversed(heads)}
    cards = [head for head in heads if head.get("note")] or _spread([first[n] for n in sorted(first)], 4)
    others = [head for head in heads if head not in cards]
    about = f" The question is “{given['question']}”" if given.get("question") else ""
    yield paragraph(
        "Each row is a token, each column one that it looks back at; the stronger the colour, the more weight. "
        f"Every row is scaled by its own largest weight.{about}"
    )
    yield figures(
        *(figure(heat(h["weights"], tokens), h.get("note") or _looks(h["weights"], tokens), _place(h)) for h in cards)
    )
    if others:
        svg = heads_grid([h["weights"] for h in others], tokens, [_place(h) for h in others])
        together = figure(svg, "Rows and columns are the same tokens in every picture.")
        yield details(count_noun(len(others), "more head"), together)


def _looks(weights: Sequence[Sequence[float]], tokens: Sequence[str]) -> str:
    """How far back a head looks, and where its last row does."""
    back = sum(w * (i - j) for i, row in enumerate(weights) for j, w in enumerate(row)) / len(weights)
    most = max(range(len(tokens)), key=lambda j: abs(weights[-1][j]))
    where = f"“{token_label(tokens[most])}” ({percent(weights[-1][most], 0)})"
    return f"It looks {back:.1f} tokens back on average, from the last one mostly at {where}."


def _place(head: Mapping[str, Any]) -> str:
    return f"Layer {head['layer']}, head {head['head']}"
