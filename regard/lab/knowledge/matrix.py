"""The page that compares models of the experiment "knowledge": {mechanism or setting} × {without, with reading} × {dev,
test}, with the baselines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import comb
from posixpath import join as join_paths
from posixpath import normpath
from typing import Any

from regard.data.scores import chance_of_order
from regard.lab.knowledge.calibration import worth_of_confidence
from regard.lab.knowledge.results import (
    FEWEST,
    SPLITS,
    AnswerScore,
    CalibrationCurve,
    ConstantBaseline,
    KnowledgeComparisonResults,
    KnowledgeResults,
    KnowledgeStage,
    ScoredModel,
)
from regard.lab.results import ResultsHeader, read_results
from regard.report import plots
from regard.report.learning import (
    best_of,
    describe_overfitting,
    learning_caption,
    learning_figure,
    train_and_dev,
)
from regard.report.markup import Markup, code, count_noun, duration, join, number, percent, strong, tag
from regard.report.page import Page, command_listing, details, facts, figure, figures, heading, paragraph, table
from regard.report.palette import Style, styles

READINGS = ("without reading", "with reading")
Candidates = Mapping[str, KnowledgeResults]


def comparison_page(document: Mapping[str, Any]) -> Page:
    """Draws an experiment with several mechanisms or settings."""
    found = read_results(KnowledgeComparisonResults, document)
    header = read_results(ResultsHeader, document)
    folders = {one.name: one.folder for one in found.candidates}
    page = matrix_page({one.name: one.results for one in found.candidates}, folders)
    page.add(heading("How it was made"))
    page.add(paragraph("The same seed on the same machine, with as many threads, gives the same numbers:"))
    page.add(command_listing(header.command or ""))
    page.add(details("Settings", facts({"device": header.device, "time in all": duration(header.seconds)})))
    page.add(details("Versions", facts(header.versions or {})))
    return page


def compare_knowledge(documents: Mapping[str, Mapping[str, Any]]) -> Page:
    """Draws several experiments, by the names of their folders, in the same way."""
    candidates: dict[str, KnowledgeResults] = {}
    folders: dict[str, str] = {}
    for folder, document in documents.items():
        if "candidates" in document:
            for one in read_results(KnowledgeComparisonResults, document).candidates:
                candidates[f"{folder}: {one.name}"] = one.results
                folders[f"{folder}: {one.name}"] = f"{folder}/{one.folder}"
        else:
            candidates[folder] = read_results(KnowledgeResults, document)
            folders[folder] = folder
    page = matrix_page(candidates, folders)
    page.add(heading("How they were made"))
    for folder, document in documents.items():
        page.add(paragraph(strong(folder)), command_listing(read_results(ResultsHeader, document).command or ""))
    return page


def matrix_page(candidates: Candidates, folders: Mapping[str, str]) -> Page:
    """Returns the page of several models: the matrix, who is better than whom, learning, and confidence."""
    page = Page("What do they know from reading?", _lead(candidates))
    page.add(heading("Outcome"), *_matrix(candidates))
    page.add(heading("Which is better?"), *_against_best(candidates))
    page.add(heading("Learning"), *_learning(candidates, folders))
    page.add(heading("Do they know what they do not know?"), *_confidence(candidates))
    page.add(heading("The models"), _models(candidates, folders))
    return page


def matrix_rows(candidates: Candidates) -> list[ScoredModel]:
    """Returns every score by name: baselines, then each candidate without and with reading."""
    rows: list[ScoredModel] = list(common_baselines(candidates).values())
    for name, results in candidates.items():
        for reading, model in zip(READINGS, results.models or (), strict=False):
            rows.append(ScoredModel(f"{name}, {reading}", model.dev, model.test))
    return rows


def common_baselines(candidates: Candidates) -> dict[str, ConstantBaseline]:
    """Returns the baselines by name. Where experiments asked different questions, each has its own."""
    found: dict[str, list[tuple[ConstantBaseline, list[str]]]] = {}  # by name, those that differ, and whose they are
    for name, results in candidates.items():
        experiment = name.partition(": ")[0]
        for row in results.baselines or ():
            rows = found.setdefault(row.name, [])
            place = next((n for n, (other, _) in enumerate(rows) if _agree(row, other)), None)
            if place is None:
                rows.append((row, [experiment]))
            else:
                other, owners = rows[place]
                rows[place] = (replace(other, dev=other.dev or row.dev, test=other.test or row.test), owners)
                owners.append(experiment)
    common = {}
    for name, rows in found.items():
        for row, owners in rows:
            own_name = name
            if len(rows) > 1:
                own_name = f"{name}, {', '.join(dict.fromkeys(owners))}"
            common[own_name] = replace(row, name=own_name)
    return common


def _agree(first: ScoredModel, second: ScoredModel) -> bool:
    """Returns whether two baselines have the same score on each set whose answers both know."""
    pairs = [(first.on(split), second.on(split)) for split in SPLITS]
    return all(ours is None or theirs is None or ours == theirs for ours, theirs in pairs)


def _split(candidates: Candidates) -> str:
    """Returns the set that counts: test where all candidates have its answers."""
    has_test = all(results.scored_split == "test" for results in candidates.values())
    return "test" if has_test else "dev"


def _score(results: KnowledgeResults, reading: str, split: str) -> AnswerScore | None:
    models = results.models or []
    place = READINGS.index(reading)
    return models[place].on(split) if place < len(models) else None


def _ranked(candidates: Candidates, split: str) -> list[tuple[str, AnswerScore]]:
    """Returns the candidates that have a score after reading, the best first."""
    scores = {name: _score(results, READINGS[1], split) for name, results in candidates.items()}
    known = [(name, score) for name, score in scores.items() if score is not None]
    return sorted(known, key=lambda pair: -pair[1].accuracy)


def _lead(candidates: Candidates) -> Markup:
    split = _split(candidates)
    ranked = _ranked(candidates, split)
    said: list[object] = [f"{count_noun(len(candidates), 'model')} read and were then asked where people were born"]
    if not ranked:
        return join(*said, ". No answers were scored.")
    best = _best(ranked)
    _, score = ranked[0]
    if best:
        said += [". Most is known by ", strong(" and ".join(best)), ": ", strong(percent(score.accuracy))]
        said += [f" of {score.n:,} {SPLITS[split]} answers are right (95% interval {_interval(score)})"]
        for name, other in ranked[len(best) :]:
            said += [f"; {name}, ", strong(percent(other.accuracy))]
    else:
        said.append(f". None of them gives a right answer to one of {score.n:,} {SPLITS[split]} questions")
        said.append(f" (95% interval {_interval(score)})")
    lines = [(row.name, found) for row in common_baselines(candidates).values() if (found := row.on(split)) is not None]
    if lines:
        name, found = max(lines, key=lambda pair: pair[1].accuracy)
        said += [". The best baseline, ", name, ", gets ", strong(percent(found.accuracy))]
        if found.accuracy >= score.accuracy:
            said.append(": that is no less than any of them, and takes no knowledge")
    return join(*said, ".")


def _best(ranked: Sequence[tuple[str, AnswerScore]]) -> list[str]:
    """Returns the names of the candidates with the most right answers, several if they tie; [] if none has any."""
    if not ranked or ranked[0][1].right == 0:
        return []
    most = ranked[0][1].accuracy
    return [name for name, score in ranked if score.accuracy == most]


def _interval(score: AnswerScore) -> str:
    return f"{100 * score.low:.1f}\u2060–\u2060{percent(score.high)}"  # stays on one line


def _cell(score: AnswerScore | None) -> Markup:
    if score is None:
        return tag("span", "–", class_="quiet")
    return join(percent(score.accuracy), tag("small", f"{_interval(score)} · {score.right:,}\xa0of\xa0{score.n:,}"))


def _styles(candidates: Candidates) -> dict[str, Style]:
    return styles(candidates)


def _matrix(candidates: Candidates) -> Iterable[Markup]:
    """Yields the matrix of right answers, and the bars of those after reading."""
    splits = [split for split in SPLITS if _ranked(candidates, split)]
    columns = ["", *(f"{reading}, {split}" for split in splits for reading in READINGS)]
    ranked = _ranked(candidates, _split(candidates))
    order = [name for name, _ in ranked]
    order += [name for name in candidates if name not in order]
    rows: list[list[object]] = []
    for name in order:
        scores = [_score(candidates[name], reading, split) for split in splits for reading in READINGS]
        rows.append([name, *map(_cell, scores)])
    for baseline in common_baselines(candidates).values():
        cells: list[object] = [baseline.name]
        for split in splits:
            cells += [_cell(baseline.on(split)), tag("span", "–", class_="quiet")]
        rows.append(cells)
    caption = (
        "Share of questions answered exactly right, with Wilson's 95% interval and the counts; the best after reading "
        "first. Below: what always giving one answer reaches, which takes no reading."
    )
    yield table(rows, columns, caption, highlight=range(len(_best(ranked))))
    pictures = []
    for split in splits:
        bars = [(name, s.accuracy, s.low, s.high, s.n) for name, s in _ranked(candidates, split)]
        lines = {row.name: s.accuracy for row in common_baselines(candidates).values() if (s := row.on(split))}
        svg = plots.bars(bars, lines, styles=_styles(candidates))
        caption = "After reading. Thin lines are 95% intervals, dashed lines are constant answers."
        pictures.append(figure(svg, caption, f"{SPLITS[split].capitalize()} questions"))
    yield figures(*pictures)


def _against_best(candidates: Candidates) -> Iterable[Markup]:
    """Yields each model against the best one, question by question, where both were asked the same."""
    split = _split(candidates)
    ranked = _ranked(candidates, split)
    if len(ranked) < 2:
        yield paragraph("Left out: fewer than two models have scores.", quiet=True)
        return
    best = ranked[0][0]
    rows = []
    for name, score in ranked[1:]:
        counts = _paired_counts(candidates[best], candidates[name], split)
        cells: list[object] = [name, percent(ranked[0][1].accuracy - score.accuracy)]
        if counts is None:
            reason = "other questions"
            if any((candidates[one].answers_of or "dev") != split for one in (best, name)):
                reason = f"answers on {split} were not kept"
            rows.append([*cells, "–", "–", "–", reason])
            continue
        both, only_best, only_other = counts
        p = sign_test(only_best, only_other)
        verdict = "better" if p < 0.05 else "cannot be told"
        rows.append([*cells, both, only_best, only_other, f"{verdict} (p = {p:.2g})"])
    columns = ["", f"behind {best}", "both right", f"only {best}", "only this", f"is {best} better?"]
    caption = (
        f"Right answers after reading, {SPLITS[split]} questions, one by one. The last column is an "
        "exact sign test of the questions that only one of the two gets right; of many such tests some are below 5% "
        "by chance."
    )
    yield table(rows, columns, caption)


def _paired_counts(first: KnowledgeResults, second: KnowledgeResults, split: str) -> tuple[int, int, int] | None:
    """Returns how many questions of a set both, only the first and only the second get right.

    None where they were asked different ones, or the answers that are kept are those of another set.
    """
    lists = []
    for results in (first, second):
        if (results.answers_of or "dev") != split:
            return None
        models = results.models or []
        lists.append((results.answers or {}).get(models[-1].name, []) if models else [])
    ours, theirs = lists
    if not ours or [a.question for a in ours] != [a.question for a in theirs]:
        return None
    pairs = [(a.right, b.right) for a, b in zip(ours, theirs, strict=True)]
    return pairs.count((True, True)), pairs.count((True, False)), pairs.count((False, True))


def sign_test(wins: int, losses: int) -> float:
    """Returns the chance of a difference at least so large, were both outcomes equally likely: two-sided, exact."""
    n = wins + losses
    tail: float = sum(comb(n, k) for k in range(max(wins, losses), n + 1)) / 2**n
    return min(1.0, 2 * tail)


def _stages(candidates: Candidates, title: str) -> dict[str, KnowledgeStage]:
    """Returns the training of one kind of each candidate that has it."""
    found = {}
    for name, results in candidates.items():
        for stage in results.stages or ():
            if stage.name == title:
                found[name] = stage
    return found


def _learning(candidates: Candidates, folders: Mapping[str, str]) -> Iterable[Markup]:
    """Yields a figure for each quantity with train and dev of all candidates, overfitting, and a table of trainings."""
    drawn = _styles(candidates)
    answering = _stages(candidates, "with pretraining")
    reading = {name: stage for name, stage in _stages(candidates, "pretraining").items() if stage.curve}
    pictures = []
    if reading:
        lines = {name: [(r["step"], r["loss"]) for r in stage.curve if "loss" in r] for name, stage in reading.items()}
        svg = plots.curves(lines, y="loss a token", log=True, styles=drawn)
        pictures.append(figure(svg, "Reading, with spans hidden that it has to fill in.", "Reading"))
    shown: tuple[tuple[str, plots.Best], ...] = (("accuracy", "max"), ("loss", "min"))
    for quantity, best in shown:
        curves = {name: train_and_dev(stage.curve, stage.evaluations, quantity) for name, stage in answering.items()}
        kept = {name: stage.best for name, stage in answering.items()}
        shares = quantity == "accuracy"
        svg = learning_figure(curves, y=quantity, best=best, styles=drawn, shares=shares, kept=kept)
        pictures.append(figure(svg, learning_caption(best), f"Answering after reading: {quantity}, train and dev"))
    yield figures(*pictures)
    losses = {name: train_and_dev(stage.curve, stage.evaluations) for name, stage in answering.items()}
    said = describe_overfitting({f"fine-tuning {name}": loss for name, loss in losses.items()})
    if said:
        yield paragraph(said[0].upper() + said[1:])
    rows = []
    for name, results in candidates.items():
        rows += [[f"{name}, {stage.name}", *stage_cells(stage, folders[name])] for stage in results.stages or ()]
    yield details("The trainings in numbers", table(rows, ["training", *STAGE_COLUMNS], STAGE_CAPTION))


STAGE_COLUMNS = ("steps", "epochs", "tokens", "time", "best on dev", "best on train", "folder")
STAGE_CAPTION = "What each training took, in steps and epochs done, and its best accuracy on dev and on train."


def stage_cells(stage: KnowledgeStage, folder: str = "") -> list[object]:
    """Returns what a training took, for a table with these columns; its run is named as seen from `folder`."""
    curves = train_and_dev((), stage.evaluations, "accuracy")
    best = [_describe_best(stage, curves.dev, stage.best), _describe_best(stage, curves.train)]
    epochs = None if stage.epochs is None else f"{stage.epochs:.4g}"
    return [
        stage.steps,
        epochs,
        stage.tokens,
        duration(stage.seconds),
        *best,
        code(normpath(join_paths(folder, stage.run))),
    ]


def _describe_best(stage: KnowledgeStage, accuracies: Sequence[plots.Point], kept: int | None = None) -> str | None:
    """Returns the best accuracy of a training in words, with its step and epoch unless it is 0."""
    found = best_of(accuracies, "max", kept)
    if found is None:
        return None
    step, accuracy = found
    if accuracy == 0:
        return percent(accuracy)
    said = f"{percent(accuracy)} at step {number(step)}"
    if stage.epochs is not None and stage.steps:
        said += f", epoch {step * stage.epochs / stage.steps:.3g}"
    return said


def _confidence(candidates: Candidates) -> Iterable[Markup]:
    """Yields the calibration of all candidates after reading, and their confidences about people never read of."""
    curves: dict[str, CalibrationCurve] = {}
    strangers = []
    for name, results in candidates.items():
        models = results.models or []
        own = (results.calibration or {}).get(models[-1].name) if models else None
        if own is not None:
            curves[name] = own
        found = (results.unwritten or {}).get(models[-1].name) if models else None
        if found is not None and found.written_confidences and found.unwritten_confidences:
            apart = chance_of_order(found.written_confidences, found.unwritten_confidences)
            mean = sum(found.written_confidences) / len(found.written_confidences)
            told_apart = percent(apart)
            if own is not None and own.right < FEWEST:
                told_apart = "–"
            strangers.append([name, found.n, percent(mean), percent(found.mean_confidence), told_apart])
    if curves:
        yield worth_of_confidence(curves)
    if strangers:
        columns = ["", "strangers", "sure of people read of", "sure of strangers", "told apart"]
        caption = (
            "Mean confidence in answers about people of whom a model read and about strangers, of whom no document "
            "tells. Told apart: of one of each, how often it is surer of the one it read of (50% is chance). A dash: "
            f"fewer than {FEWEST} right answers, so that there is no knowledge to be surer of."
        )
        yield table(strangers, columns, caption)
    if not curves and not strangers:
        yield paragraph("Left out: the results hold no confidences.", quiet=True)


def _models(candidates: Candidates, folders: Mapping[str, str]) -> Markup:
    rows: list[Sequence[object]] = []
    for name, results in candidates.items():
        parameters = results.model.parameters if results.model else None
        world = results.world
        asked = sum(world.questions.values()) if world else None
        read = world.documents if world else None
        rows.append([name, results.mechanism, parameters, results.seed, read, asked, code(folders[name])])
    columns = ["", "attention", "parameters", "seed", "documents", "questions", "folder"]
    return table(rows, columns, "The folder of each has a page of its own, report.html.")
