"""The knowledge experiment: what does a model know from reading alone?

Fine-tune on "Where was X born?" without and with pretraining on documents, and ask about people whose questions it has
never seen. Without pretraining it cannot know; with it, it has read the answer. Several mechanisms or settings are
compared on one page.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.data.questions import Question, prompt, read_documents, write_predictions
from regard.data.world import read_world
from regard.lab.base import REPORT, versions, write_results
from regard.lab.experiment import Session, experiment, read_log
from regard.lab.knowledge.answers import (
    about_strangers,
    answer,
    baselines,
    fits_model,
    list_answers,
    measure_confidence,
    score,
)
from regard.lab.knowledge.matrix import compare_knowledge, matrix_rows
from regard.lab.knowledge.page import knowledge_page
from regard.lab.knowledge.plan import FOLDERS, READING, STAGES, WITH, WITHOUT, Candidate, KnowledgePlan, plan
from regard.lab.knowledge.results import (
    SPLITS,
    AnswerAttention,
    AnsweredQuestion,
    AnswerScore,
    CalibrationCurve,
    CandidateResults,
    ConstantBaseline,
    KnowledgeComparisonResults,
    KnowledgeModel,
    KnowledgeResults,
    KnowledgeStage,
    KnowledgeWorld,
    RecordedHead,
    ScoredModel,
    UnwrittenAnswers,
)
from regard.lab.results import OutcomeTable, to_json
from regard.lens.recording.maps import attention_maps
from regard.models import Decoder, load
from regard.models.locate import MODEL
from regard.train.run import Run
from regard.train.tasks.corruption import KnowledgeFiles

FILES = ("documents", "train", "dev", "test", "strangers_file")


@experiment("knowledge", plan, knowledge_page, stages=STAGES, files=FILES, compares=True, compare=compare_knowledge)
def measure(
    session: Session, plan: KnowledgePlan, runs: Mapping[str, Run]
) -> KnowledgeResults | KnowledgeComparisonResults:
    """What does a model know from reading? It is asked about people, without and with having read about them."""
    found = [
        CandidateResults(one.name, one.folder, _measure_candidate(session, plan, one, runs)) for one in plan.candidates
    ]
    if not found[0].folder:
        return found[0].results
    header = {"experiment": session.name, "command": session.command, "device": session.machine, "versions": versions()}
    for one in found:  # each has a page of its own, too
        document = header | {"title": f"What does it know? {one.name}"} | to_json(one.results)
        write_results(session.out / one.folder, document)
        knowledge_page(document).write(session.out / one.folder / REPORT)
    best = max(found, key=_dev_accuracy)
    rows = matrix_rows({one.name: one.results for one in found})
    return KnowledgeComparisonResults(f"{best.folder}/{best.results.run}", found, _outcome(rows))


def _dev_accuracy(candidate: CandidateResults) -> float:
    """Returns the share of right answers on dev after reading."""
    score = (candidate.results.models or [])[-1].dev
    return 0.0 if score is None else score.accuracy


def _measure_candidate(
    session: Session, plan: KnowledgePlan, candidate: Candidate, trained: Mapping[str, Run]
) -> KnowledgeResults:
    """Asks the models of one candidate, without and with reading."""
    runs = {stage: trained[title] for stage, title in candidate.titles.items()}
    predictions = session.out / candidate.folder / "predictions"
    asked: dict[str, Sequence[Question]] = {name: plan.sets[name] for name in ("dev", "test") if name in plan.sets}
    examined: dict[str, Examination] = {}
    for name in (WITHOUT, WITH):
        model = load(runs[name].path / MODEL, session.device)
        assert isinstance(model, Decoder)
        session.shown.say(f"Asking the model {candidate.titles[name]} …")
        examined[name] = _examine(model, name, asked, predictions, plan.strangers)
    lines = [
        ConstantBaseline(row["name"], _as_score(row.get("dev")), _as_score(row.get("test")), row["answer"])
        for row in baselines(plan.sets["train"], asked)
    ]
    models = [found.scored for found in examined.values()]
    assert isinstance(model, Decoder)
    return KnowledgeResults(
        run=FOLDERS[WITH],
        seed=runs[WITH].config["train"]["seed"],
        mechanism=model.config.mechanism,
        world=_world(plan.files, plan.sets),
        model=KnowledgeModel(model.summary().total.parameters, str(model.summary())),
        stages=[_stage(name, run, _rows(name, plan), session.out / candidate.folder) for name, run in runs.items()],
        baselines=lines,
        models=models,
        answers={name: found.answers for name, found in examined.items()},
        answers_of=examined[WITH].answers_of,
        calibration={name: found.calibration for name, found in examined.items()},
        coverage={name: found.coverage for name, found in examined.items()},
        unwritten={name: found.unwritten for name, found in examined.items() if found.unwritten is not None},
        attention=_attention(model, examined[WITH].answers),
        outcome=_outcome([*lines, *models]),
    )


class Examination(NamedTuple):
    """The examination of one model: its scores, and its answers and calibration on the set `answers_of`."""

    scored: ScoredModel
    answers: list[AnsweredQuestion]
    answers_of: str
    calibration: CalibrationCurve
    coverage: list[tuple[float, float]]
    unwritten: UnwrittenAnswers | None


def _examine(
    model: Decoder[Any],
    name: str,
    sets: Mapping[str, Sequence[Question]],
    folder: Path,
    strangers: Mapping[str, Sequence[Question]],
) -> Examination:
    """Asks a model the questions of dev and test, writes its predictions, and scores them.

    Its confidence is judged on the last set whose answers are known. Those of dev always are.
    """
    scores: dict[str, AnswerScore | None] = {}
    for key, questions in sets.items():
        said = answer(model, questions)
        write_predictions(folder / f"{FOLDERS[name]}.{key}.txt", [a.text for a in said])
        scores[key] = _as_score(score([a.text for a in said], questions))
        if scores[key] is not None:
            answers_of = key
            listed = list_answers(questions, said)
            doubts = measure_confidence(questions, said)
    unwritten = _ask_about_strangers(model, strangers, [row.confidence for row in listed])
    scored = ScoredModel(name, scores.get("dev"), scores.get("test"))
    return Examination(scored, listed, answers_of, doubts.calibration, doubts.coverage, unwritten)


def _as_score(found: Mapping[str, Any] | None) -> AnswerScore | None:
    return None if found is None else AnswerScore(**found)


def _ask_about_strangers(
    model: Decoder[Any], strangers: Mapping[str, Sequence[Question]], confidences: list[float]
) -> UnwrittenAnswers | None:
    """Asks about people that no document names; `confidences` are those of answers about people of whom it read.

    A question that leaves no room for an answer is left out.
    """
    asked = [(form, question) for form, questions in strangers.items() for question in questions]
    asked = [(form, question) for form, question in asked if fits_model(model, question)]
    if not asked:
        return None
    questions = [question for _, question in asked]
    return about_strangers(questions, [form for form, _ in asked], answer(model, questions), confidences)


def _attention(model: Decoder[Any], answers: Sequence[AnsweredQuestion]) -> AnswerAttention:
    """Returns where heads look while an answer is written: the sharpest ones of each layer, for the surest right
    answer."""
    row = max(answers, key=lambda a: (a.right, a.confidence))
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(prompt(row.question) + row.predicted)[: model.limit]
    tokens = torch.tensor([ids], device=model.device)
    maps = [layer[0].float().cpu() for layer in attention_maps(model, tokens)]
    first = len(model.tokenizer.encode(prompt(row.question)))
    heads = []
    for number, layer in enumerate(maps):
        sharpness = layer[:, first - 1 :].amax(-1).mean(-1)  # while answering
        for head in sharpness.topk(min(2, len(sharpness))).indices.tolist():
            heads.append(RecordedHead(number, head, layer[head].tolist(), ""))
    return AnswerAttention([model.tokenizer.decode([i]) for i in ids], heads, row.question)


def _stage(name: str, run: Run, rows: int, folder: Path) -> KnowledgeStage:
    """Returns the steps, epochs and curves of a training whose epochs have `rows` rows. The path of its run is relative
    to `folder`, because candidates share equal trainings."""
    log = read_log(run)
    train = run.config["train"]
    return KnowledgeStage(
        name=name,
        run=Path(os.path.relpath(run.path, folder)).as_posix(),
        steps=log.steps,
        epochs=log.steps * train["batch"] / rows,
        tokens=log.tokens,
        seconds=log.seconds,
        best=run.best,
        curve=log.curve,
        evaluations=log.evaluations,
        train=train,
    )


def _rows(name: str, plan: KnowledgePlan) -> int:
    """Returns how many rows an epoch has: the documents that are read, or the questions that are answered."""
    if name == READING:
        return len(read_documents(plan.files.documents))
    return len(plan.sets["train"])


def _world(files: KnowledgeFiles, sets: Mapping[str, Sequence[Question]]) -> KnowledgeWorld:
    documents = read_documents(files.documents)
    people = None
    if files.unwritten is not None:
        people = sum(p.role != "unwritten" for p in read_world(files.unwritten.parent).people)
    return KnowledgeWorld(
        invented=files.unwritten is not None,
        people=people,
        documents=len(documents),
        questions={name: len(questions) for name, questions in sets.items()},
        example_documents=documents[:5],
        example_questions=[(q.text, q.answer or "") for q in sets["train"][:5]],
    )


def _outcome(rows: Sequence[ScoredModel]) -> OutcomeTable:
    """Returns the table that a terminal shows: right answers on each set whose answers are known."""
    counts = {split: score.n for row in rows for split in SPLITS if (score := row.on(split)) is not None}
    cells = [[row.name, *(_accuracy_cell(row.on(split)) for split in counts)] for row in rows]
    return OutcomeTable(["right answers", *(f"{split}, n = {n}" for split, n in counts.items())], cells)


def _accuracy_cell(score: AnswerScore | None) -> str:
    if score is None:
        return "–"
    return f"{score.accuracy:6.1%}  [{score.low:.1%}–{score.high:.1%}]"
