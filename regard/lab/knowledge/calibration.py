"""Sections of the page of "knowledge" about single answers: which are right, how sure the model is, where it looks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from regard.data.scores import chance_of_order
from regard.lab.knowledge.results import (
    FEWEST,
    SPLITS,
    AnsweredQuestion,
    CalibrationCurve,
    KnowledgeResults,
    NameForm,
    RecordedHead,
    UnwrittenAnswers,
)
from regard.report import plots
from regard.report.heat import heads_grid, heat, token_label
from regard.report.markup import Markup, count_noun, percent, shorten, strong
from regard.report.page import details, figure, figures, paragraph, share_bar, table
from regard.report.palette import Style, style

EXAMPLES = 12
LONGEST = 60  # characters of an answer on the page: a model that has learned little writes on until it must stop

T = TypeVar("T")


def model_styles(results: KnowledgeResults) -> dict[str, Style]:
    """Returns the style of each model, the same everywhere: the last has the first colour."""
    names = [model.name for model in results.models or ()][::-1]
    parts: tuple[Mapping[str, Any] | None, ...] = (
        results.answers,
        results.calibration,
        results.coverage,
        results.unwritten,
    )
    names += [name for part in parts for name in part or ()]
    names += [stage.name for stage in results.stages or () if stage.name != "pretraining"]
    return {name: style(n) for n, name in enumerate(dict.fromkeys(names))}


def main_model(results: KnowledgeResults, part: Mapping[str, Any]) -> str:
    """Returns the model that the page is about, or else any that this part of the results has."""
    for model in reversed(results.models or ()):
        if model.name in part:
            return model.name
    return next(iter(part))


def answers(results: KnowledgeResults) -> Iterable[Markup]:
    """Yields a dozen right and a dozen wrong answers of the main model; those of the others are folded."""
    given = results.answers or {}
    model = main_model(results, given)
    split = SPLITS[results.answers_of or "dev"].capitalize()
    yield paragraph(
        f"{split} questions, as the model {model} answers them. Confidence is the probability that it gives to its "
        "answer. Each table goes evenly from the surest to the least sure of all such answers."
    )
    yield from _answer_tables(model, given[model])
    for name in given:
        if name != model:
            yield details(f"Right and wrong answers {name}", *_answer_tables(name, given[name]))


def show_answer(text: str) -> str:
    """Returns an answer as it can be seen: a page shows neither an empty text nor spaces at its ends or in a row."""
    if not text:
        return "(nothing)"
    if text != " ".join(text.split()):
        text = re.sub(r"^ (?! )|(?<! ) $", "␣", text)
        text = re.sub(" {2,}", lambda spaces: f"␣×{len(spaces[0])} ", text).rstrip()
    return shorten(text, LONGEST)


def _answer_tables(model: str, answers: Sequence[AnsweredQuestion]) -> Iterable[Markup]:
    ranked = sorted(answers, key=lambda a: -a.confidence)
    right = [a for a in ranked if a.right]
    wrong = [a for a in ranked if not a.right]
    if right:
        rows: list[list[object]] = [
            [a.question, show_answer(a.predicted), share_bar(a.confidence)] for a in _spread(right, EXAMPLES)
        ]
        caption = f"{len(rows)} of {count_noun(len(right), 'right answer')} {model}."
        yield table(rows, ["question", "answer", "confidence"], caption)
    else:
        yield paragraph("No answer is right.", quiet=True)
    if wrong:
        rows = [
            [a.question, show_answer(a.predicted), a.expected, share_bar(a.confidence)]
            for a in _spread(wrong, EXAMPLES)
        ]
        caption = f"{len(rows)} of {count_noun(len(wrong), 'wrong answer')} {model}."
        yield table(rows, ["question", "answer", "expected", "confidence"], caption)
    else:
        yield paragraph("No answer is wrong.", quiet=True)


def _spread(items: Sequence[T], most: int) -> list[T]:
    """Returns at most `most` of the items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(n * (len(items) - 1) / (most - 1))] for n in range(most)]


def calibration(results: KnowledgeResults) -> Iterable[Markup]:
    """Yields the calibration curves of all models, and the table of what their confidences are worth."""
    curves = results.calibration or {}
    judged = {name: curve.ece for name, curve in curves.items() if curve.ece is not None and curve.is_judged}
    said: list[object] = ["When it says that it is 80% sure, is it right in 80% of the cases?"]
    if judged:
        model = main_model(results, judged)
        said += [f" The model {model} is off by ", strong(percent(judged[model])), " on average"]
        said += [" (expected calibration error: the distance from the diagonal, averaged over all answers)."]
    unjudged = [
        f"{name} ({curve.right:,} of {curve.n:,} right)" for name, curve in curves.items() if name not in judged
    ]
    if unjudged:
        said.append(
            f" It cannot be told of the model {' nor '.join(unjudged)}: who is never right is well calibrated by being "
            "sure of nothing."
        )
    yield paragraph(*said)
    svg = plots.calibration({name: curve.rows for name, curve in curves.items()}, judged, model_styles(results))
    caption = "Each point is a group of answers of like confidence; the larger, the more answers. "
    yield figure(svg, caption + "On the diagonal the model is right as often as it says.")
    yield worth_of_confidence(curves)


def worth_of_confidence(curves: Mapping[str, CalibrationCurve]) -> Markup:
    """Returns the table of calibration error, separation and skill, with a constant confidence for comparison."""
    rows = []
    for name, curve in curves.items():
        cells: list[object] = [name, percent(curve.right / max(1, curve.n)), percent(curve.mean_confidence)]
        if curve.is_judged:
            cells += [percent(curve.ece), percent(curve.separation), percent(curve.skill)]
        else:
            cells += ["–", "–", "–"]
        rows.append(cells)
    rows.append(["always stating the share of right answers", "–", "–", "0.0%", "50.0%", "0.0%"])
    caption = (
        "The calibration error alone does not tell a model that knows something from one that knows nothing. Told "
        "apart: of a right and a wrong answer, how often the right one is the surer (50% is chance). Skill: how much "
        "smaller the squared error of its confidence is than that of always stating the share of right answers. "
        f"A dash: fewer than {FEWEST} right or wrong answers to judge by."
    )
    return table(rows, ["", "right", "mean confidence", "calibration error", "told apart", "skill"], caption)


def coverage(results: KnowledgeResults) -> Iterable[Markup]:
    """Yields what a model gains where it may stay silent."""
    lines = {name: sorted((float(x), float(y)) for x, y in line) for name, line in (results.coverage or {}).items()}
    model = main_model(results, lines)
    half = plots.interpolate(lines[model], 0.5)
    whole = lines[model][-1][1]
    worth = "worth little"
    if half > whole + 0.02:
        worth = "worth something"
    yield paragraph(
        f"A model that may stay silent answers only what it is surest of. When the model {model} may stay silent on "
        "half of the questions, it is right in ",
        strong(percent(half)),
        " of the others, against ",
        strong(percent(whole)),
        f" when it has to answer all: its confidence is {worth}.",
    )
    caption = "From right to left the model stays silent more often, where it is least sure first. Dots mark one half."
    yield figure(plots.coverage(lines, model_styles(results)), caption)


def unwritten(results: KnowledgeResults) -> Iterable[Markup]:
    """Yields the answers about people whom no document names, and how confident the model is in them."""
    by_model = results.unwritten or {}
    model = main_model(results, by_model)
    found = by_model[model]
    said: list[object] = [
        f"It was also asked about {found.n:,} people of whom it never read, so that no answer can be known. It "
        "answers all the same, on average ",
        strong(percent(found.mean_confidence)),
        " sure",
    ]
    is_compared = bool(found.written_confidences and found.unwritten_confidences)
    if is_compared:
        said += _compare_confidences(found, (results.calibration or {}).get(model))
    yield paragraph(*said, ".")
    if is_compared:
        values = {"read of": found.written_confidences, "never read of": found.unwritten_confidences}
        svg = plots.histogram(values, styles={"read of": style(0), "never read of": style(3)})
        caption = "The farther apart the two, the better its confidence tells the known from the unknown."
        yield figure(svg, caption, f"Confidence {model}")
    if found.top_answers:
        top = ", ".join(f"{show_answer(place)} ({n:,})" for place, n in found.top_answers[:8])
        yield paragraph("What it answers most often then: ", top, ".")
    if found.by_form:
        yield from _forms(found.by_form)


def _compare_confidences(found: UnwrittenAnswers, curve: CalibrationCurve | None) -> list[object]:
    """Returns in words how well confidence separates people of whom the model read from others.

    `curve` is that of its answers about people of whom it read: if few are right, confidence cannot rest on knowledge.
    """
    known = found.written_confidences
    chance = chance_of_order(known, found.unwritten_confidences)
    verdict = "it mostly knows what it does not know"
    if curve is not None and curve.right < FEWEST:
        verdict = (
            f"that is about how names look, not about knowledge, for of those that it read of it gets {curve.right:,} "
            f"of {curve.n:,} right"
        )
    elif chance < 0.6:
        verdict = "it hardly knows what it does not know"
    elif chance < 0.8:
        verdict = "it knows a little of what it does not know"
    return [
        ", against ",
        strong(percent(sum(known) / len(known))),
        " for people of whom it read. Of two people, one of each kind, it is surer of the one that it read of in ",
        strong(percent(chance, 0)),
        f" of the cases (50% is chance): {verdict}",
    ]


def _forms(forms: Sequence[NameForm]) -> Iterable[Markup]:
    columns = [
        "form of the name",
        "people",
        "mean confidence",
        "different answers",
        "most frequent answer",
        "its share",
    ]
    rows = [
        [f.form, f.n, share_bar(f.mean_confidence), f.distinct, show_answer(f.top[0]), percent(f.top[1], 0)]
        for f in forms
    ]
    caption = "Unknown people by the form of their names. Where one answer is frequent, the form alone decides: a bias."
    yield table(rows, columns, caption)
    examples = [
        [f.form, question, show_answer(answer), share_bar(confidence)]
        for f in forms
        for question, answer, confidence in f.examples[:4]
    ]
    if examples:
        shown = table(examples, ["form", "question", "answer", "confidence"], "Answers about people never read of.")
        yield details("Examples of each form", shown)


def attention(results: KnowledgeResults) -> Iterable[Markup]:
    """Yields a figure for each head that has a note, or else for the first one of up to four layers; all others
    share one figure."""
    given = results.attention
    assert given is not None
    tokens = given.tokens
    first = {head.layer: head for head in reversed(given.heads)}
    cards = [head for head in given.heads if head.note] or _spread([first[n] for n in sorted(first)], 4)
    others = [head for head in given.heads if head not in cards]
    about = ""
    if given.question:
        about = f" The question is “{given.question}”"
    yield paragraph(
        "Each row is a token, each column one that it looks back at; the stronger the colour, the more weight. "
        f"Every row is scaled by its own largest weight.{about}"
    )
    yield figures(
        *(figure(heat(h.weights, tokens), h.note or _describe_head(h.weights, tokens), _place(h)) for h in cards)
    )
    if others:
        svg = heads_grid([h.weights for h in others], tokens, [_place(h) for h in others])
        together = figure(svg, "Rows and columns are the same tokens in every picture.")
        yield details(count_noun(len(others), "more head"), together)


def _describe_head(weights: Sequence[Sequence[float]], tokens: Sequence[str]) -> str:
    """Returns a sentence: how far back a head looks on average, and which token the last row attends to most."""
    back = sum(w * (i - j) for i, row in enumerate(weights) for j, w in enumerate(row)) / len(weights)
    most = max(range(len(tokens)), key=lambda j: abs(weights[-1][j]))
    where = f"“{token_label(tokens[most])}” ({percent(weights[-1][most], 0)})"
    return f"It looks {back:.1f} tokens back on average, from the last one mostly at {where}."


def _place(head: RecordedHead) -> str:
    return f"Layer {head.layer}, head {head.head}"
