"""The knowledge experiment: what does a model know from reading alone?

Fine-tune on "Where was X born?" without and with pretraining on documents, and ask about people whose questions it has
never seen. Without pretraining it cannot know; with it, it has read the answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from regard.config import ConfigError
from regard.data.questions import Question, prompt, read_documents, read_questions, write_predictions
from regard.data.world import read_world
from regard.lab.experiment import Experiment, experiment
from regard.lab.knowledge.answers import about_strangers, answer, baselines, doubts, listed, score
from regard.lab.knowledge.page import knowledge_page
from regard.lens.recording.maps import attention_maps
from regard.models import Decoder, load
from regard.models.locate import MODEL
from regard.report.canvas import require_matplotlib
from regard.train.run import Run, versions
from regard.train.tasks.corruption import KnowledgeData, KnowledgeFiles, data_files

WITHOUT, READING, WITH = "without pretraining", "pretraining", "with pretraining"
FOLDERS = {name: name.replace(" ", "-") for name in (WITHOUT, READING, WITH)}


@experiment("knowledge", stages=("scratch", "pretrain", "finetune"), files=("documents", "train", "dev", "test"))
def knowledge(this: Experiment) -> Mapping[str, Any]:
    """What does a model know from reading? It is asked about people, without and with having read about them."""
    require_matplotlib()  # an error about a missing library comes before minutes of training
    began = time.perf_counter()
    probe = this.recipe("knowledge/pretrain", "pretrain", {}).data
    assert isinstance(probe, KnowledgeData)
    files = data_files(probe, this.out)
    sets = _sets(files)
    if files.unwritten is not None:
        say = f"An invented world: {len(read_documents(files.documents)):,} biographies, "
    else:
        say = f"{len(read_documents(files.documents)):,} documents, "
    this.shown.say(say + f"{len(sets['train']):,} questions to learn from, {len(sets['dev']):,} to choose by (dev)")
    data = {
        "data": {key: str(path) for key, path in files._asdict().items() if path is not None and key != "unwritten"}
    }
    start = {"train": {"init": str((this.out / FOLDERS[READING]).resolve())}}
    recipes = {  # all of them before any training, so that a misspelt setting of the last is told at once
        WITHOUT: this.recipe("knowledge/scratch", "scratch", data),
        READING: this.recipe("knowledge/pretrain", "pretrain", data),
        WITH: this.recipe("knowledge/finetune", "finetune", data | start, drop=("model",)),
    }
    runs = {name: this.train(recipe, FOLDERS[name], name) for name, recipe in recipes.items()}
    results = _results(this, files, sets, runs)
    earlier = sum(row["seconds"] for row in results["stages"])
    results["seconds"] = max(time.perf_counter() - began, earlier)
    this.write(results)
    knowledge_page(results).write(this.out / "report.html")
    return results


def _sets(files: KnowledgeFiles) -> dict[str, list[Question]]:
    """The questions of each file, read before any training, so that a bad line is told at once."""
    for name in ("train", "dev"):
        if getattr(files, name) is None:
            raise ConfigError(f"data.{name} is missing: a file with `question<TAB>answer` on each line")
    assert files.train is not None and files.dev is not None
    sets = {"train": read_questions(files.train, answers=True), "dev": read_questions(files.dev, answers=True)}
    return sets if files.test is None else sets | {"test": read_questions(files.test)}


def _results(
    this: Experiment, files: KnowledgeFiles, sets: dict[str, list[Question]], runs: dict[str, Run]
) -> dict[str, Any]:
    asked: dict[str, Sequence[Question]] = {name: sets[name] for name in ("dev", "test") if name in sets}
    results: dict[str, Any] = {
        "experiment": this.name,
        "run": FOLDERS[WITH],
        "device": this.machine,
        "versions": versions(),
        "seed": runs[WITH].config["train"]["seed"],
        "world": _world(files, sets),
        "stages": [_stage(name, run) for name, run in runs.items()],
        "baselines": baselines(sets["train"], asked),
        "models": [],
        "answers": {},
        "calibration": {},
        "coverage": {},
        "unwritten": {},
    }
    for name in (WITHOUT, WITH):
        model = load(runs[name].path / MODEL, this.device)
        assert isinstance(model, Decoder)
        this.shown.say(f"Asking the model {name} …")
        _ask(model, name, asked, this.out / "predictions", results)
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


def _stage(name: str, run: Run) -> dict[str, Any]:
    rows = run.metrics()
    curve = [row for row in rows if "lr" in row]
    measured = [row for row in rows if "lr" not in row]
    last = curve[-1]
    keys = ("steps", "tokens", "seconds")
    values = (last["step"], last["tokens"], last["seconds"])
    return {
        "name": name,
        "run": run.path.name,
        **dict(zip(keys, values, strict=True)),
        "epochs": run.config["train"]["epochs"],
        "best": run.best,
        "curve": curve,
        "evaluations": measured,
        "train": run.config["train"],
    }


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
