"""The knowledge experiment: what does a model know from reading alone?

Fine-tune on "Where was X born?" without and with pretraining on documents, and ask about people whose questions it has
never seen. Without pretraining it cannot know; with it, it has read the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regard.config import ConfigError
from regard.data.questions import Question, prompt, read_documents, read_questions, write_predictions
from regard.data.world import read_world
from regard.lab.experiment import Session, Training, TrainingPlan, experiment, read_log
from regard.lab.knowledge.answers import about_strangers, answer, baselines, doubts, listed, score
from regard.lab.knowledge.page import knowledge_page
from regard.lens.recording.maps import attention_maps
from regard.models import Decoder, load
from regard.models.locate import MODEL
from regard.train.run import Run, versions
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
    """The questions of each file, read before any training, so that a bad line is told at once."""
    for name in ("train", "dev"):
        if getattr(files, name) is None:
            raise ConfigError(f"data.{name} is missing: a file with `question<TAB>answer` on each line")
    assert files.train is not None and files.dev is not None
    sets = {"train": read_questions(files.train, answers=True), "dev": read_questions(files.dev, answers=True)}
    return sets if files.test is None else sets | {"test": read_questions(files.test)}


@experiment("knowledge", plan, knowledge_page, stages=STAGES, files=("documents", "train", "dev", "test"))
def measure(session: Session, plan: KnowledgePlan, runs: Mapping[str, Run]) -> dict[str, Any]:
    """What does a model know from reading? It is asked about people, without and with having read about them."""
    results = _results(session, plan.files, plan.sets, runs)
    return results | {"outcome": _outcome(results)}


def _results(
    session: Session, files: KnowledgeFiles, sets: Mapping[str, list[Question]], runs: Mapping[str, Run]
) -> dict[str, Any]:
    asked: dict[str, Sequence[Question]] = {name: sets[name] for name in ("dev", "test") if name in sets}
    results: dict[str, Any] = {
        "experiment": session.name,
        "run": FOLDERS[WITH],
        "command": session.command,
        "device": session.machine,
        "versions": versions(),
        "seed": runs[WITH].config["train"]["seed"],
        "world": _world(files, sets),
        "stages": [_stage(name, run, _rows(name, files, sets)) for name, run in runs.items()],
        "baselines": baselines(sets["train"], asked),
        "models": [],
        "answers": {},
        "calibration": {},
        "coverage": {},
        "unwritten": {},
    }
    for name in (WITHOUT, WITH):
        model = load(runs[name].path / MODEL, session.device)
        assert isinstance(model, Decoder)
        session.shown.say(f"Asking the model {name} …")
        _ask(model, name, asked, session.out / "predictions", results)
        if files.unwritten is not None:
            _ask_strangers(model, name, files.unwritten, results)
    assert isinstance(model, Decoder)
    results["mechanism"] = model.config.mechanism
    results["model"] = {"parameters": model.summary().total.parameters, "summary": str(model.summary())}
    results["attention"] = _attention(model, results["answers"][WITH])
    return results


def _ask(
    model: Decoder[Any], name: str, sets: Mapping[str, Sequence[Question]], folder: Path, results: dict[str, Any]
) -> None:
    """Answers to dev and test: predictions, scores, and on the last set with answers what its confidence is worth."""
    row: dict[str, Any] = {"name": name}
    for key, questions in sets.items():
        said = answer(model, questions)
        write_predictions(folder / f"{FOLDERS[name]}.{key}.txt", [a.text for a in said])
        row[key] = score([a.text for a in said], questions)
        if row[key] is not None:
            results["answers"][name] = listed(questions, said)
            results["answers_of"] = key
            measured = doubts(questions, said)
            results["calibration"][name], results["coverage"][name] = measured["calibration"], measured["coverage"]
    results["models"].append(row)


def _ask_strangers(model: Decoder[Any], name: str, path: Path, results: dict[str, Any]) -> None:
    by_form = read_world(path.parent).unwritten
    if not by_form:
        return
    questions = [q for asked in by_form.values() for q in asked]
    forms = [form for form, asked in by_form.items() for _ in asked]
    said = answer(model, questions)
    results["unwritten"][name] = about_strangers(questions, forms, said) | {
        "written_confidences": [row["confidence"] for row in results["answers"][name]],
        "unwritten_confidences": [a.confidence for a in said],
    }


def _attention(model: Decoder[Any], answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Where heads look while an answer is written: the sharpest ones of each layer, for the surest right answer."""
    row = max(answers, key=lambda a: (a["right"], a["confidence"]))
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(prompt(row["question"]) + row["predicted"])[: model.limit]
    tokens = torch.tensor([ids], device=model.device)
    maps = [layer[0].float().cpu() for layer in attention_maps(model, tokens)]
    first = len(model.tokenizer.encode(prompt(row["question"])))
    heads = []
    for number, layer in enumerate(maps):
        sharp = layer[:, first - 1 :].amax(-1).mean(-1)  # while answering
        for head in sharp.topk(min(2, len(sharp))).indices.tolist():
            heads.append({"layer": number, "head": head, "weights": layer[head].tolist(), "note": ""})
    return {"tokens": [model.tokenizer.decode([i]) for i in ids], "heads": heads, "question": row["question"]}


def _stage(name: str, run: Run, rows: int) -> dict[str, Any]:
    """Returns what a training took, of which an epoch has so many rows."""
    log = read_log(run)
    return {
        "name": name,
        "run": run.path.name,
        "steps": log.steps,
        "tokens": log.tokens,
        "seconds": log.seconds,
        "epochs": log.steps * run.config["train"]["batch"] / rows,
        "best": run.best,
        "curve": log.curve,
        "evaluations": log.evaluations,
        "train": run.config["train"],
    }


def _rows(name: str, files: KnowledgeFiles, sets: Mapping[str, Sequence[Question]]) -> int:
    """Returns how many rows an epoch has: the documents that are read, or the questions that are answered."""
    return len(read_documents(files.documents)) if name == READING else len(sets["train"])


def _world(files: KnowledgeFiles, sets: Mapping[str, Sequence[Question]]) -> dict[str, Any]:
    documents = read_documents(files.documents)
    people = None
    if files.unwritten is not None:
        people = sum(p.role != "unwritten" for p in read_world(files.unwritten.parent).people)
    return {
        "invented": files.unwritten is not None,
        "people": people,
        "documents": len(documents),
        "questions": {name: len(questions) for name, questions in sets.items()},
        "example_documents": documents[:5],
        "example_questions": [[q.text, q.answer] for q in sets["train"][:5]],
    }


def _outcome(results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the table that a terminal shows: right answers on each set whose answers are known."""
    rows = [*results["baselines"], *results["models"]]
    counts = {key: row[key]["n"] for row in rows for key in ("dev", "test") if row.get(key)}
    cells = [[row["name"], *(_accuracy_cell(row.get(key)) for key in counts)] for row in rows]
    return {"columns": ["right answers", *(f"{key}, n = {n}" for key, n in counts.items())], "rows": cells}


def _accuracy_cell(score: Mapping[str, Any] | None) -> str:
    if not score:
        return "–"
    return f"{score['accuracy']:6.1%}  [{score['low']:.1%}, {score['high']:.1%}]"
