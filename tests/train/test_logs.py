"""Metrics go where they were asked to go, as the libraries of those places want them."""

import sys
from types import ModuleType

import pytest
from training import answering

from regard.errors import ExtraMissingError, OptionError
from regard.train import train


class Tracker(ModuleType):
    """What trackio and wandb have in common, written down."""

    def __init__(self):
        super().__init__("tracker")
        self.began, self.rows, self.finished = None, [], 0

    def init(self, project, name, config):
        self.began = project, name, config["task"]

    def log(self, values, step):
        self.rows.append((step, values))

    def finish(self):
        self.finished += 1


@pytest.mark.parametrize("library", ["trackio", "wandb"])
def test_a_tracker_gets_what_the_metrics_have(library, tmp_path, monkeypatch):
    tracker = Tracker()
    monkeypatch.setitem(sys.modules, library, tracker)
    run = train(answering(f"train.saving.log=['{library}']"), tmp_path / "run")
    assert tracker.began == ("regard", "run", "questions") and tracker.finished == 1
    sent = [{"step": step, **values} for step, values in tracker.rows]
    assert sent == [{key: value for key, value in row.items() if value is not None} for row in run.metrics()]


def test_tensorboard_gets_each_number(tmp_path, monkeypatch):
    rows, closed = [], []

    class SummaryWriter:
        def __init__(self, folder):
            assert folder == str(tmp_path / "run" / "tensorboard")

        def add_scalar(self, name, value, step):
            rows.append((step, name, value))

        def close(self):
            closed.append(True)

    board = ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    run = train(answering("train.saving.log=['tensorboard']"), tmp_path / "run")
    wanted = [(row["step"], key, row[key]) for row in run.metrics() for key in row if key != "step"]
    assert rows == [row for row in wanted if row[2] is not None] and closed == [True]


def test_a_place_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ExtraMissingError, match="pip install wandb"):
        train(answering("train.saving.log=['wandb']"), tmp_path / "a")
    with pytest.raises(OptionError, match="Did you mean 'wandb'"):
        train(answering("train.saving.log=['wandbb']"), tmp_path / "b")
    assert not any(path.is_file() for path in tmp_path.rglob("*.toml") if path.name == "config.toml")
