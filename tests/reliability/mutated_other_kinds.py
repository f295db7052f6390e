"""Kinds of files of regard's own that are not of a training: gradings, traces with memories, results, commits."""

from __future__ import annotations

import json
import random
import shutil
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import tomli_w
from mutated_kinds import (
    DRAWN,
    MAKERS,
    ask,
    damage_bytes,
    damage_json,
    damage_lines,
    damage_toml,
    damage_trace,
    kind,
    read_trace_file,
    replaced,
    use_model,
)

from regard.plugins import KEY
from regard.storage import COMMIT

RECALL = ["data.vocabulary=16", "data.dev=8", "train.steps=1", "train.batch=4", "train.evaluation.every=1"]
RECALL += ["data.train=[{length=16, pairs=2, examples=12}]", "data.test=[{length=16, pairs=2, examples=10}]"]
RECALL += ['compare.mechanisms=["softmax"]', "compare.widths=[8]"]

SPEC = """title = "Twice"
file = "twice.py"
source = "source.py"
template = '''
def twice(x): ...
'''
given = ["torch"]
cells = "exercise"
[limits]
seconds = 2.0
memory_mb = 500
[[exports]]
name = "twice"
kind = "function"
[[items]]
name = "values"
kind = "reference"
points = 3
cases = "usual"
reference = "right"
slips = ["thrice"]
tolerance = 1e-4
[[items]]
name = "shape"
kind = "shape"
cases = "usual"
reference = "right"
visibility = "hidden"
[slips]
thrice = "It is multiplied by three."
"""
SOURCE = "import torch\ndef usual(): ...\ndef right(x): return 2 * x\ndef thrice(x): return 3 * x\n"
NOTEBOOK: dict[str, Any] = {
    "cells": [
        {"cell_type": "markdown", "source": ["# Twice"], "metadata": {}},
        {"cell_type": "code", "source": ["%time\n", "import math\n"], "metadata": {"tags": ["exercise"]}},
        {"cell_type": "code", "source": "from __future__ import annotations\ndef twice(x):\n    return 2 * x\n"},
    ],
    "metadata": {},
    "nbformat": 4,
}


@kind("grading spec", "spec/spec.toml", damage_toml)
def read_spec(corpus: Path) -> None:
    from regard.grade.spec import load_spec

    load_spec(corpus / "spec" / "spec.toml")


@kind("notebook", "submitted.ipynb", damage_json)
def read_notebook(corpus: Path) -> None:
    from regard.grade.submissions import read_source

    source, notes = read_source(corpus / "submitted.ipynb")
    source.encode()
    json.dumps(notes, ensure_ascii=False).encode()


@kind("trace of memories", "memories.trace", damage_trace)
def read_memories(corpus: Path) -> None:
    read_trace_file(corpus / "memories.trace")


@kind("plugin records of a model", "plugged/config.json", damage_json)
def read_plugged(corpus: Path) -> None:
    use_model(corpus / "plugged")


@kind("plugin records of a run", "planned/config.toml", damage_toml)
def read_plugged_run(corpus: Path) -> None:
    from regard.train import stage

    with replaced(stage, "_build_trainer", lambda *given: Mock()):
        stage.resume(corpus / "planned")


@kind("commit", "committed/.commit", damage_json)
def read_commit(corpus: Path) -> None:
    use_model(corpus / "committed")


@kind("measurement results", "lab/results.json", damage_json)
def read_measurement(corpus: Path) -> None:
    _read_results(corpus / "lab")


@kind("recall results", "recalled/results.json", damage_json)
@kind("recall", "recalled/experiment.toml", damage_toml)
def read_recalled(corpus: Path) -> None:
    from regard.lab import experiment

    _read_results(corpus / "recalled")
    with replaced(experiment.TrainingExperiment, "carry_out", experiment.plan_trainings):
        experiment.resume(corpus / "recalled")


def _read_results(folder: Path) -> None:
    from regard.lab.runs.listing import _summarize_results
    from regard.reporting import _draw_again

    _summarize_results(folder)
    if random.random() < 20 * DRAWN:
        _draw_again(folder)


@kind("sweep results", "sweep/results.json", damage_json)
@kind("sweep database", "sweep/trials.db", damage_bytes)
def read_sweep_results(corpus: Path) -> None:
    from regard.lab.runs.listing import _summarize_results
    from regard.sweep.run import Sweep

    _summarize_results(corpus / "sweep")  # its page is that of the sweep, which results.json does not draw alone
    Sweep.open(corpus / "sweep").page()


@kind("strangers", "strangers.txt", damage_bytes)
def read_strangers_file(corpus: Path) -> None:
    from regard.data.questions import Question
    from regard.lab.knowledge.strangers import read_strangers

    read_strangers(corpus / "strangers.txt", [Question("Where was Ada born?")], ["Bob was born in Rome."])


@kind("texts with second texts", "pairs.txt", damage_bytes)
def read_sample_files(corpus: Path) -> None:
    from regard.cli.heads import _read_samples

    _read_samples(corpus / "texts.txt", corpus / "pairs.txt", corpus / "pairs.txt")


@kind("ablate request", "ablate.json", damage_json)
def ask_ablate(corpus: Path) -> None:
    ask("/ablate", (corpus / "ablate.json").read_bytes())


@kind("contributions request", "contributions.json", damage_json)
def ask_contributions(corpus: Path) -> None:
    ask("/contributions", (corpus / "contributions.json").read_bytes())


@kind("race results", "raced/results.json", damage_json)
@kind("tour results", "toured/results.json", damage_json)
@kind("compared results", "experiment/results.json", damage_json)
def read_raced(corpus: Path) -> None:
    from regard.lab.tour.run import _read_done
    from regard.reporting import _compare_experiments

    for name in ("raced", "toured"):
        _read_results(corpus / name)
    _read_done(corpus / "toured")
    if random.random() < 20 * DRAWN:
        _compare_experiments([corpus / "experiment", corpus / "recalled"])
        _compare_experiments([corpus / "experiment", corpus / "compared"])


@kind("measurement config", "begun/config.toml", damage_toml)
def read_begun(corpus: Path) -> None:
    from regard.lab.base import EXPERIMENTS
    from regard.lab.runs.listing import list_results

    EXPERIMENTS["scale"]._marks(corpus / "begun")
    list_results(corpus / "begun")


@kind("design outputs", "outputs.csv", damage_bytes)
def read_outputs(corpus: Path) -> None:
    from regard.cli.design import read_rows

    read_rows(corpus / "outputs.csv", open_rows=True)


@kind("articles", "pairs.jsonl", damage_lines)
@kind("articles of a table", "pairs.csv", damage_bytes)
def read_article_files(corpus: Path) -> None:
    from regard.data.pairs import read_articles

    read_articles(corpus / "pairs.jsonl")
    read_articles(corpus / "pairs.csv")


@kind("metrics of checkpoints", "run/metrics.jsonl", damage_lines)
def read_losses(corpus: Path) -> None:
    from regard.cli.heads_checkpoints import _read_losses

    _read_losses(corpus / "run")


def make_other_corpus(folder: Path) -> None:
    """Writes one good file of each of these kinds; `folder` has those of mutated_kinds.py already."""
    from memory_models import memory_gpt

    import regard
    from regard.lab import experiment

    for name in ("spec", "plugged", "committed", "planned"):
        (folder / name).mkdir()
    (folder / "spec" / "spec.toml").write_text(SPEC)
    (folder / "spec" / "source.py").write_text(SOURCE)
    (folder / "submitted.ipynb").write_text(json.dumps(NOTEBOOK))
    trace = regard.record(memory_gpt("gated-delta", layers=1), "ab")
    trace.save(folder / "memories.trace")
    _plug(folder)
    _leave_commit(folder)
    experiment.run("recall", folder / "recalled", RECALL)
    _race(folder)
    shutil.copytree(folder / "experiment", folder / "compared")
    (folder / "begun").mkdir()
    (folder / "begun" / "config.toml").write_text('lab = "scale"\n[versions]\ntorch = "2"\n[scale]\nseed = 1\n')
    (folder / "outputs.csv").write_text("1,2\n?\n\n3,-4e1\n")
    (folder / "strangers.txt").write_text("Where was Eva born?\nWhere was Jo L. Kent born?\n")
    (folder / "texts.txt").write_text("ab\n\ncd\n")
    (folder / "pairs.txt").write_text("ef\n\ngh\n")
    (folder / "ablate.json").write_text('{"heads": [["0", 1]], "text": "abc", "max_tokens": 2, "seed": 1}')
    (folder / "contributions.json").write_text('{"ids": [1, 2, 3], "position": 1, "token": "c"}')


def _race(folder: Path) -> None:
    """Writes the results of a race, and of a tour that has got as far as that race."""
    from regard.lab.bench.run import Race, race
    from regard.lab.results import to_json
    from regard.lab.tour.results import AskedLaw, CheckChapter, RaceChapter, TourResults

    sizes = {"tokens": (16,), "seconds": 0.001, "draws": 1, "heads": 1, "groups": 1, "width": 8, "passes": ("forward",)}
    raced = race(Race(**sizes), ("softmax", "elu")).as_dict()
    laws = [AskedLaw("blind", "It sees no later token.", "broken", 0.5, 1e-5, "at token 3", "import regard")]
    toured = TourResults(
        check=CheckChapter("regard check", 1.5, "leaky", "def leaky(): ...", 5, laws, "performer", laws),
        race=RaceChapter("regard bench", 2.0, "race.html", raced),
    )
    for name, document in (
        ("raced", {"lab": "bench", "command": "regard bench", **raced}),
        ("toured", {"experiment": "tour", "command": "regard run tour", "versions": {}, **to_json(toured)}),
    ):
        (folder / name).mkdir()
        (folder / name / "results.json").write_text(json.dumps(document))


def _plug(folder: Path) -> None:
    """Writes a model and a run whose mechanism is said to be of a user's file."""
    records = {"softmax": {"file": "mine.py", "sha256": "0" * 64}}
    for file in (folder / "run" / "model").iterdir():
        if file.name != "manifest.json":
            shutil.copy(file, folder / "plugged")
    document = json.loads((folder / "plugged" / "config.json").read_bytes())
    (folder / "plugged" / "config.json").write_text(json.dumps(document | {KEY: records}))
    shutil.copytree(folder / "unfinished", folder / "planned", dirs_exist_ok=True)
    config = tomllib.loads((folder / "planned" / "config.toml").read_text())
    (folder / "planned" / "config.toml").write_text(tomli_w.dumps(config | {KEY: records}))


def _leave_commit(folder: Path) -> None:
    """Writes a model that was committed and not moved to its place."""
    moves = {}
    for file in (folder / "run" / "model").iterdir():
        moves[file.name] = f".{file.name}.01234567.staged"
        shutil.copy(file, folder / "committed" / moves[file.name])
    (folder / "committed" / COMMIT).write_text(json.dumps(moves))


MAKERS.append(make_other_corpus)
