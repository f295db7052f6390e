"""The moving average of weights: it is what is measured and saved, and training does not depend on it."""

from __future__ import annotations

import pytest
import torch
from training import CTRL_C, Crash, StopAt, Toy, answering, bits, gpt, pretraining, trainer

from regard.config import ConfigError
from regard.errors import Interrupted
from regard.models import load
from regard.train import stage
from regard.train.averaging import WeightAverage
from regard.train.progress import Progress
from regard.train.settings import TrainConfig

DECAY = 0.7


class Weights(Progress):
    """Keeps the weights after every step."""

    def __init__(self, model):
        self.model = model
        self.steps = [self._copy()]

    def show(self, step, total, values):
        if "lr" in values:
            self.steps.append(self._copy())

    def _copy(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


class Measuring(Toy):
    """Tells a number that depends on the weights that are measured, and keeps them."""

    def evaluate(self, model):
        self.seen = {name: p.detach().clone() for name, p in model.named_parameters()}
        return {"dev/loss": sum(float(p.double().sum()) for p in self.seen.values())}


def fit(folder, decay):
    model = gpt(0.1)
    progress = Weights(model)
    task = Measuring(metric="dev/loss")
    made = trainer(folder, task, model=model, progress=progress, average=decay, evaluation={"every": 0})
    made.fit()
    return progress.steps, task, made


def test_the_saved_model_is_the_average_of_the_weights_after_each_step(tmp_path):
    steps, task, _ = fit(tmp_path, DECAY)
    expected = {name: x.double() for name, x in steps[0].items()}
    for number, weights in enumerate(steps[1:], 1):
        decay = min(DECAY, (1 + number) / (10 + number))
        expected = {name: decay * x + (1 - decay) * weights[name].double() for name, x in expected.items()}
    saved = dict(load(tmp_path / "model").named_parameters())
    assert len(steps) == 9 and set(saved) == set(expected)
    for name, x in expected.items():
        torch.testing.assert_close(saved[name].double(), x, rtol=1e-5, atol=1e-7)
        assert torch.equal(saved[name], task.seen[name]), "what is measured is what is saved"
    assert any(not torch.equal(saved[name], steps[-1][name]) for name in saved)


def test_training_does_not_depend_on_the_average(tmp_path):
    ours, *_ = fit(tmp_path / "a", DECAY)
    theirs, *_ = fit(tmp_path / "b", 0.0)
    for mine, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in mine)
    saved = dict(load(tmp_path / "b" / "model").named_parameters())
    assert all(torch.equal(saved[name], theirs[-1][name]) for name in saved), "without one, the weights themselves"


def test_weights_come_back_where_measuring_fails():
    model = gpt()
    average = WeightAverage(model, DECAY)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    after = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(Crash), average.in_place():
        assert all(torch.equal(p, x) for p, x in zip(model.parameters(), before, strict=True))
        raise Crash
    assert all(torch.equal(p, x) for p, x in zip(model.parameters(), after, strict=True))


@pytest.mark.parametrize("stop", [StopAt(7), StopAt(7, CTRL_C)], ids=["killed", "interrupted"])
def test_a_training_with_an_average_goes_on_to_the_same_bits(stop, tmp_path):
    hard = ["model.dropout=0.1", "train.saving.every=5", "train.evaluation.every=2", f"train.average={DECAY}"]
    whole = stage.train(answering(*hard), tmp_path / "a")
    with pytest.raises((Crash, Interrupted)):
        stage.train(answering(*hard), tmp_path / "b", progress=stop)
    resumed = stage.resume(tmp_path / "b")
    assert bits(resumed) == bits(whole)
    plain = stage.train(answering(*hard[:-1]), tmp_path / "c")
    assert [row["loss"] for row in plain.metrics() if "lr" in row] == [
        row["loss"] for row in whole.metrics() if "lr" in row
    ]


def test_a_model_to_start_from_is_the_average(tmp_path):
    read = stage.train(pretraining(f"train.average={DECAY}"), tmp_path / "read")
    start = load(read.path / "model")
    checkpoint = load(read.path / "checkpoints" / "step-12")
    for ours, theirs in zip(start.parameters(), checkpoint.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_checkpoint_without_the_weights_does_not_fit(tmp_path):
    *_, made = fit(tmp_path, DECAY)
    saved = made.average.export_weights()
    saved.pop("weight.0")
    with pytest.raises(ConfigError, match=r"weight\.0"):
        made.average.import_weights(saved)
    with pytest.raises(ConfigError, match=r"weight\.1"):
        made.average.import_weights(made.average.export_weights() | {"weight.1": torch.zeros(3)})


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan")])
def test_a_decay_that_would_average_nothing_is_refused(decay):
    with pytest.raises(ConfigError, match=r"train\.average"):
        TrainConfig(average=decay)
