"""Trainings side by side: each in a process of its own with one thread, with the numbers of one after the other."""

import json

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from regard.errors import RunError
from regard.lab import experiment
from regard.lab.side_by_side import Worker, one_thread, train_side_by_side
from regard.train import checkpoint
from regard.train.run import Run

TOY = ["data.vocabulary=16", "data.dev=8", "train.steps=3", "train.batch=4", "train.evaluation.every=1"]
TOY += ["data.train=[{length=16, pairs=2, examples=12}]", "data.test=[{length=16, pairs=2, examples=10}]"]
TOY += ['compare.mechanisms=["gated-delta", "elu"]', "compare.widths=[8]"]


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_they_give_the_numbers_of_one_after_the_other(tmp_path, two_threads):
    said = []
    shown = experiment.Shown(said.append)
    together = experiment.run("recall", tmp_path / "together", TOY, shown=shown)
    assert torch.get_num_threads() == 2
    assert together["threads"] == 1 and together["device"] == "cpu, 1 thread, 2 trainings at a time"
    assert sum("step 3 of 3" in line and "accuracy" in line for line in said) == 2
    with one_thread():
        alone = experiment.run("recall", tmp_path / "alone", TOY)
    assert alone["device"] == "cpu, 1 thread"
    timed = {"seconds"}
    for a, b in zip(together["trainings"], alone["trainings"], strict=True):
        assert {k: x for k, x in a.items() if k not in timed} == {k: x for k, x in b.items() if k not in timed}
    for run in ("gated-delta-8-4-0.01-0", "elu-8-4-0.01-0"):
        weights = [load_file(tmp_path / name / run / "model" / "model.safetensors") for name in ("together", "alone")]
        assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())


def begin(folder, words):
    """Writes what an experiment has asked for, as it begins."""
    asked = experiment.read_overrides(experiment.find_experiment("recall"), words)
    folder.mkdir()
    (folder / experiment.ASKED).write_text(tomli_w.dumps({"experiment": "recall", "device": "cpu", "asked": asked}))


def test_a_worker_that_is_stopped_saves_its_training(tmp_path):
    begin(tmp_path / "run", [*TOY, "train.steps=10000", "train.evaluation.every=0", "train.saving.every=0"])
    with Worker(tmp_path / "run", ()) as worker:
        worker.start(1, "elu", lambda line: None)
        worker.follow()  # it says how far it is
        assert worker.training == "elu"
    assert worker.process.returncode == 0
    run = Run(tmp_path / "run" / "elu-8-4-0.01-0")
    assert not run.finished and checkpoint.newest(run.checkpoints) > 0


def test_what_fails_is_an_error_with_the_name_of_the_training(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"^elu, 8 wide: .*empty is no experiment"):
        train_side_by_side(tmp_path / "empty", {0: "elu, 8 wide"}, 2, print)


def test_a_worker_that_dies_is_an_error(tmp_path):
    with Worker(tmp_path, ()) as worker, pytest.raises(RunError, match=r"softmax: .* ended with exit code -9"):
        worker.start(0, "softmax", print)
        worker.process.kill()
        worker.follow()


def test_lines_that_come_in_pieces_are_put_together(tmp_path, monkeypatch):
    shown = []
    with Worker(tmp_path, ()) as worker:
        worker.start(0, "softmax", shown.append)
        worker.process.kill()
        line = json.dumps({"step": 2, "total": 4, "values": {"loss": 1.5, "lr": 0.1}}) + "\n"
        parts = [line[:7].encode(), (line[7:] + '{"ended": "softmax"}\n').encode()]
        monkeypatch.setattr("os.read", lambda *place: parts.pop(0))
        worker.follow()
        assert worker.training == "softmax" and shown == []
        worker.follow()
    assert worker.training is None and shown == ["softmax: step 2 of 4  loss 1.5"]
