"""The knowledge experiment: what does a model know from reading alone?

Fine-tune on "Where was X born?" without and with pretraining on documents, and ask about people whose questions it has
never seen. Without pretraining it cannot know; with it, it has read the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.config import ConfigError
from regard.data.questions import Question, prompt, read_documents, read_questions, write_predictions
from regard.data.world import read_world
from regard.lab.experiment import Session, Training, TrainingPlan, experiment, read_log
from regard.lab.knowledge.answers import (
    about_strangers,
    answer,
    baselines,
    list_answers,
    measure_confidence,
    score,
)
from regard.lab.knowledge.page import knowledge_page
from regard.lab.knowledge.results import (
    SPLITS,
    AnswerAttention,
    AnsweredQuestion,
    AnswerScore,
    CalibrationCurve,
    ConstantBaseline,
    KnowledgeModel,
    KnowledgeResults,
    KnowledgeStage,
    KnowledgeWorld,
    RecordedHead,
    ScoredModel,
    UnwrittenAnswers,
)
from regard.lab.results import OutcomeTable
from regard.lens.recording.maps import attention_maps
from regard.models import Decoder, load
from regard.models.locate import MODEL
from regard.train.run import Run
from regard.train.tasks.corruption import KnowledgeData, KnowledgeFiles, data_files

WITHOUT, READING, WITH = "without pretraining", "pretraining", "with pretraining"
STAGES = ("scratch", "pretrain", "finetune")
FOLDERS = {name: name.replace(" ", "-") for name in (WITHOUT, READING, WITH)}


@dataclass(frozen=True)
class KnowledgePlan(TrainingPlan):
    """The three trainings, with the files that all of them read and the questions in these files."""

    files: KnowledgeFiles
    sets: Mapping[str, list[Question]]


def plan(session: Session) -> KnowledgePlan:
    """Returns three trainings: answering without reading, reading, and answering after reading."""
    for key in ("documents", "train", "dev", "test", "world"):
        session.refuse(f"data.{key}", f"all stages read the same data; say data.{key} for all of them", STAGES)
    probe = session.recipe("knowledge/pretrain").data
    assert isinstance(probe, KnowledgeData)
    files = data_files(probe, session.out)
    sets = _sets(files)
    if files.unwritten is not None:
        say = f"An invented world: {len(read_documents(files.documents)):,} biographies, "
    else:
        say = f"{len(read_documents(files.documents)):,} documents, "
    session.shown.say(say + f"{len(sets['train']):,} questions to learn from, {len(sets['dev']):,} to choose by (dev)")
    data = {
        "data": {key: str(path) for key, path in files._asdict().items() if path is not None and key != "unwritten"}
    }
    start = {"train": {"init": str((session.out / FOLDERS[READING]).resolve())}}
    recipes = {  # all of them before any training, so that a misspelt setting of the last is told at once
        WITHOUT: session.recipe("knowledge/scratch", "scratch", settings=data),
        READING: session.recipe("knowledge/pretrain", "pretrain", settings=data),
        # Its model is that of the pretraining, with the changes that were asked of it.
        WITH: session.recipe("knowledge/finetune", "finetune", settings=data | start, drop=("model",)),
    }
    stages = dict(zip(recipes, STAGES, strict=True))
    trainings = [Training(stages[name], name, FOLDERS[name], recipe) for name, recipe in recipes.items()]
    return KnowledgePlan(trainings, files, sets)


def _sets(files: KnowledgeFiles) -> dict[str, list[Question]]:
    """Returns the questions of each file, read before any training, so that a bad line is told at once."""
    for name in ("train", "dev"):
        if getattr(files, name) is None:
            raise ConfigError(f"data.{name} is missing: a file with `question<TAB>answer` on each line")
    assert files.train is not None and files.dev is not None
    sets = {"train": read_questions(files.train, answers=True), "dev": read_questions(files.dev, answers=True)}
    if files.test is not None:
        sets["test"] = read_questions(files.test)
    return sets


@experiment("knowledge", plan, knowledge_page, stages=STAGES, files=("documents", "train", "dev", "test"))
def measure(session: Session, plan: KnowledgePlan, runs: Mapping[str, Run]) -> KnowledgeResults:
    """What does a model know from reading? It is asked about people, without and with having read about them."""
    asked: dict[str, Sequence[Question]] = {name: plan.sets[name] for name in ("dev", "test") if name in plan.sets}
    examined: dict[str, Examination] = {}
    for name in (WITHOUT, WITH):
        model = load(runs[name].path / MODEL, session.device)
        assert isinstance(model, Decoder)
        session.shown.say(f"Asking the model {name} …")
        examined[name] = _examine(model, name, asked, session.out / "predictions", plan.files)
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
        stages=[_stage(name, run, _rows(name, plan)) for name, run in runs.items()],
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
    """What one model was asked and said: its scores, and what its confidence is worth on the set `answers_of`."""

    scored: ScoredModel
    answers: list[AnsweredQuestion]
    answers_of: str
    calibration: CalibrationCurve
    coverage: list[tuple[float, float]]
    unwritten: UnwrittenAnswers | None


def _examine(
    model: Decoder[Any], name: str, sets: Mapping[str, Sequence[Question]], folder: Path, files: KnowledgeFiles
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
    unwritten = None
    if files.unwritten is not None:
        unwritten = _ask_about_strangers(model, files.unwritten, [row.confidence for row in listed])
    scored = ScoredModel(name, scores.get("dev"), scores.get("test"))
    return Examination(scored, listed, answers_of, doubts.calibration, doubts.coverage, unwritten)


def _as_score(found: Mapping[str, Any] | None) -> AnswerScore | None:
    return None if found is None else AnswerScore(**found)


def _ask_about_strangers(model: Decoder[Any], path: Path, confidences: list[float]) -> UnwrittenAnswers | None:
    """Asks about people that no document names; `confidences` are those of answers about people of whom it read."""
    by_form = read_world(path.parent).unwritten
    if not by_form:
        return None
    questions = [question for asked in by_form.values() for question in asked]
    forms = [form for form, asked in by_form.items() for _ in asked]
    return about_strangers(questions, forms, answer(model, questions), confidences)


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


def _stage(name: str, run: Run, rows: int) -> KnowledgeStage:
    """Returns what a training took, of which an epoch has so many rows."""
    log = read_log(run)
    train = run.config["train"]
    return KnowledgeStage(
        name=name,
        run=run.path.name,
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
    return f"{score.accuracy:6.1%}  [{score.low:.1%}, {score.high:.1%}]"
