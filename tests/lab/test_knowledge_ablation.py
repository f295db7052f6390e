"""The script that compares settings of the knowledge recipe: what it holds out, what it leaves done, and its time."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path

import pytest

from regard.data.questions import read_questions

ROOT = Path(__file__).parents[2]
TINY = ["model.layers=1", "model.width=16", "model.attention.heads=2", "data.block=96", "train.batch=4"]
PLACES = ("Rome", "Bonn", "Oslo")


@pytest.fixture
def script(monkeypatch):
    path = ROOT / "benchmarks" / "reproductions" / "knowledge_ablation.py"
    spec = importlib.util.spec_from_file_location("knowledge_ablation", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    monkeypatch.setitem(made.CASES, "tiny", (TINY, []))
    monkeypatch.setitem(made.CASES, "tiny-average", ([*TINY, "train.average=0.9"], ["train.average=0.5"]))
    return made


@pytest.fixture
def files(tmp_path, script):
    """Documents about twenty people, and a question about each; about the first there are two answers."""
    people = [f"Ada{chr(97 + n)} Byron" for n in range(20)]
    born = {name: PLACES[n % 3] for n, name in enumerate(people)}
    lines = [f"Where was {name} born?\t{place}" for name, place in born.items()]
    lines.append(f"Where was {people[0]} born?\tLondon")
    (tmp_path / "documents.txt").write_text("".join(f"{name} was born in {place}.\n" for name, place in born.items()))
    (tmp_path / "questions.tsv").write_text("".join(f"{line}\n" for line in lines))
    parts = script.split(str(tmp_path / "questions.tsv"), 6, 4, tmp_path / "parts")
    return {"documents": str(tmp_path / "documents.txt"), **parts}


def test_every_person_is_in_one_part(files, script, tmp_path):
    parts = {name: read_questions(files[name], answers=True) for name in ("train", "dev", "test")}
    people = {name: {question.text for question in asked} for name, asked in parts.items()}
    assert {name: len(texts) for name, texts in people.items()} == {"train": 10, "dev": 4, "test": 6}
    assert len(set.union(*people.values())) == 20 and sum(map(len, parts.values())) == 21
    again = script.split(str(tmp_path / "questions.tsv"), 6, 4, tmp_path / "again")
    assert all(Path(again[name]).read_bytes() == Path(files[name]).read_bytes() for name in parts)
    with pytest.raises(SystemExit, match="asks about 20 people"):
        script.split(str(tmp_path / "questions.tsv"), 16, 4, tmp_path / "none")


def test_a_training_is_done_once_and_its_line_says_all_of_it(files, script, tmp_path, capsys):
    out = tmp_path / "results.jsonl"
    trainings = [script.Training(name, 0, files, 1.0, 2) for name in ("tiny", "tiny-average")]
    for one in script.pending(trainings, script.read_rows(out)):
        script.run((one, "cpu", str(out), time.time() + 1e6))
    rows = script.read_rows(out)
    assert [row["name"] for row in rows] == ["tiny", "tiny-average"] and not any("error" in row for row in rows), rows
    asked = len(read_questions(files["test"]))
    assert all(row["n"] == asked and row["steps"] == 2 and 0 <= row["test"] <= 1 for row in rows)
    assert str(tmp_path) not in out.read_text(), "files are told apart by what they hold, not by where they lie"
    assert rows[1]["settings"]["answering"] == ["train.average=0.5"]
    assert not script.pending(trainings, rows)
    more = [*trainings, script.Training("tiny", 1, files, 1.0, 2), script.Training("tiny", 0, files, 1.0, 3)]
    assert script.pending(more, rows) == more[2:], "another seed, and another length"
    script.show(rows)
    assert "tiny-average" in capsys.readouterr().out


def test_a_line_that_was_cut_off_is_trained_again(script, tmp_path, capsys):
    out = tmp_path / "results.jsonl"
    one, two = (script.Training("tiny", seed, {}, 1.0, 2) for seed in (0, 1))
    script.write_row(out, {"name": "tiny", "settings": one.settings, "seconds": 5.0})
    with out.open("a") as file:
        file.write(json.dumps({"name": "tiny", "settings": two.settings, "seconds": 5.0})[:-9])
    assert script.pending([one, two], script.read_rows(out)) == [two]
    script.write_row(out, {"name": "tiny", "settings": two.settings, "error": "out of memory", "seconds": 900.0})
    assert script.pending([one, two], script.read_rows(out)) == [two], "one that failed is tried again"
    script.write_row(out, {"name": "tiny", "settings": two.settings, "seconds": 6.0})
    assert not script.pending([one, two], script.read_rows(out))
    assert "cut off" in capsys.readouterr().err


def test_nothing_is_begun_that_would_not_end_in_time(script, tmp_path, capsys):
    out = tmp_path / "results.jsonl"
    assert script.has_time([], 1.0) and not script.has_time([], 0.0)
    script.write_row(out, {"name": "tiny", "settings": {}, "seconds": 100.0})
    assert script.has_time(script.read_rows(out), 101.0)
    script.run((script.Training("tiny", 0, {}, 1.0, 2), "cpu", str(out), time.time() + 50))
    assert len(script.read_rows(out)) == 1 and "left for another time" in capsys.readouterr().out


def test_every_case_is_a_recipe(script):
    from regard.train import recipe

    for name, (reading, answering) in script.CASES.items():
        read = recipe.load("knowledge/pretrain", reading, "full")
        asked = recipe.load("knowledge/finetune", answering, "full")
        assert read.task == "corruption" and asked.task == "questions", name
