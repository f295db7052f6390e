"""The loop: batches by (seed, step), parts of a batch, optimisers, schedules, the best, precision, and manners."""

import json
import math
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from training import CPU, CTRL_C, Crash, StopAt, Toy, answering, gpt, pretraining, trainer

import regard
from regard.config import ConfigError
from regard.data.batch import IGNORE, Batch
from regard.data.seeds import derive
from regard.devices import autocast_dtype
from regard.storage import write_manifest
from regard.train import Interrupted, Run, RunError, Task, TrainConfig, TrainingError, loop, recipe, stage, tasks
from regard.train.loggers import LOGGERS, Logger
from regard.train.loop import is_better
from regard.train.optimizer import (
    OPTIMIZERS,
    SCHEDULES,
    build_optimizer,
    export_state,
    import_state,
    lr_factor,
    split_by_decay,
)
from regard.train.settings import OptimizerConfig, ScheduleConfig, resolve_steps
from regard.train.tasks.base import TASKS, Order
from regard.train.tasks.corruption import Corruption
from regard.train.tasks.questions import Questions

# Batches


@given(rows=st.integers(1, 40), size=st.integers(1, 60), seed=st.integers(0, 9), steps=st.permutations(range(6)))
def test_rows_of_a_step_do_not_depend_on_what_was_asked_before(rows, size, seed, steps):
    asked = Order(rows, seed, CPU)
    got = {step: asked.at(step, size) for step in steps}
    for step in range(6):
        assert torch.equal(got[step], Order(rows, seed, CPU).at(step, size))
        assert len(got[step]) == size
    epochs = torch.cat([got[step] for step in range(6)])[: 6 * size // rows * rows].view(-1, rows)
    assert torch.equal(epochs.sort(1).values, torch.arange(rows).expand_as(epochs))  # every row once an epoch


def test_epochs_and_seeds_differ():
    first, second = Order(50, 0, CPU).at(0, 100).view(2, 50)
    assert not torch.equal(first, second)
    assert not torch.equal(first, Order(50, 1, CPU).at(0, 50))


@pytest.mark.parametrize("task", [Corruption, Questions])
def test_a_batch_is_a_function_of_seed_and_step(task, tmp_path):
    config = answering("data.mix=0.5").data
    one, other, seeded = (task(config, seed, CPU, tmp_path, None) for seed in (0, 0, 1))
    steps = [0, 1, 2, 15, 16, 17, 40]
    forwards = [one.batch(step, 8) for step in steps]
    backwards = [other.batch(step, 8) for step in reversed(steps)][::-1]
    for a, b in zip(forwards, backwards, strict=True):
        assert torch.equal(a.x, b.x) and torch.equal(a.y, b.y)
    assert not torch.equal(forwards[0].x, forwards[1].x)
    assert not torch.equal(forwards[0].x, seeded.batch(0, 8).x)
    assert len(one.batch(0, 500).x) == (500 if task is Corruption else 750)  # more than there are rows


def test_questions_are_mixed_with_documents(tmp_path):
    task = Questions(answering("data.mix=0.5").data, 0, CPU, tmp_path, None)
    plain = Questions(answering().data, 0, CPU, tmp_path, None)
    mixed, questions = task.batch(3, 8), plain.batch(3, 8)
    same = mixed.rows(0, 8).columns(questions.x.shape[1])
    assert torch.equal(same.x, questions.x) and torch.equal(same.y, questions.y) and len(mixed.x) == 12
    documents = mixed.rows(8, 12)
    assert ((documents.y != IGNORE).sum(1) > 4).all()
    stage.train(answering("data.mix=0.5", "train.steps=2"), tmp_path / "run")


def test_purposes_have_seeds_of_their_own():
    seeds = {derive(s, p, n) for s in range(5) for p in ("dropout", "order") for n in range(5)}
    assert len(seeds) == 50 and max(seeds) < 2**63


# Parts of a batch


class Uneven(Toy):
    """The first row has one target, the others all."""

    def batch(self, step, size):
        x, y, *_ = super().batch(step, size)
        y = y.clone()
        y[0, 1:] = IGNORE
        y[1] = IGNORE
        return Batch(x, y)


@pytest.mark.parametrize("task", [Toy, Uneven])
@pytest.mark.parametrize(
    "optimizer",
    ["adamw", {"name": "sgd", "options": {"momentum": 0.9}}, "adagrad"],
    ids=lambda o: o if isinstance(o, str) else o["name"],
)
def test_parts_of_a_batch_are_as_good_as_the_whole(task, optimizer, tmp_path):
    made = {}
    for micro in (0, 1, 2):
        work = trainer(
            tmp_path / str(micro), task(), gpt().double(), micro=micro, optimizer=optimizer, clip=0.5, steps=6
        )
        work.fit()
        made[micro] = torch.cat([p.detach().flatten() for p in work.model.parameters()])
    start = torch.cat([p.detach().flatten() for p in gpt().double().parameters()])
    assert (made[0] - start).abs().max() > 1e-3
    for micro in (1, 2):
        torch.testing.assert_close(made[micro], made[0], atol=1e-9, rtol=0)


def test_questions_in_parts(tmp_path):
    changes = ["model.dropout=0", "model.attention.dropout=0", "train.optimizer=sgd", "train.lr=0.5"]
    runs = [stage.train(answering(*changes, f"train.micro={n}"), tmp_path / str(n)) for n in (0, 2)]
    whole, parts = ([p for p in regard.load(run.path / "model").parameters()] for run in runs)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


# Optimisers


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_an_optimiser_trains_and_its_state_goes_there_and_back(name):
    def step(model, optimizer, seed):
        x = torch.randint(0, 10, (4, 7), generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model.loss(x[:, :-1], x[:, 1:]).backward()
        optimizer.step()

    def flat(model):
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    one, other = gpt(), gpt()
    first = build_optimizer(OptimizerConfig(name=name), one, 0.01)
    before = flat(one)
    for seed in range(3):
        step(one, first, seed)
    assert not torch.equal(flat(one), before) and flat(one).isfinite().all()
    second = build_optimizer(OptimizerConfig(name=name), other, 0.01)
    other.load_state_dict(one.state_dict())
    tensors, plain = export_state(first)
    import_state(second, {n: t.clone() for n, t in tensors.items()}, plain)
    for seed in (3, 4):
        step(one, first, seed)
        step(other, second, seed)
    assert torch.equal(flat(one), flat(other))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"name": "adamv"}, "train.optimizer.name = 'adamv'.*Did you mean 'adam"),
        ({"name": "sgd", "options": {"momentun": 0.9}}, "sgd has no 'momentun'. Did you mean 'momentum'"),
        ({"name": "adamw", "options": {"betas": [0.9, 2.0]}}, "adamw refuses.*[Ii]nvalid beta"),
        ({"options": {"lr": 1.0}}, "say train.lr instead"),
        ({"options": {"weight_decay": 1.0}}, "say train.optimizer.decay instead"),
    ],
)
def test_unknown_optimisers_and_options(changes, words):
    with pytest.raises(ConfigError, match=words):
        build_optimizer(OptimizerConfig().but(**changes), gpt(), 0.01)


@pytest.mark.parametrize("tied", [True, False])
def test_exactly_the_matrices_of_linear_layers_decay(tied):
    model = gpt(tied=tied)
    yes, no = split_by_decay(model)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} - tables
    assert {id(p) for p in yes} == matrices and len(matrices) >= 4
    assert {id(p) for p in no} == {id(p) for p in model.parameters()} - matrices
    groups = build_optimizer(OptimizerConfig(decay=0.3), model, 0.01).param_groups
    assert {id(p): g["weight_decay"] for g in groups for p in g["params"]} == {
        id(p): 0.3 if id(p) in matrices else 0.0 for p in model.parameters()
    }


def test_the_bias_of_a_synthesizer_does_not_decay_and_keeps_its_number():
    """b₂ [H,ℓ] has as many dimensions as a matrix. A state saved when it decayed still belongs to it."""
    model = gpt(mechanism="synthesizer")
    offsets = {id(p) for name, p in model.named_parameters() if name.endswith("mechanism.offset")}
    keys = {id(p) for name, p in model.named_parameters() if name.endswith("mechanism.keys")}
    groups = build_optimizer(OptimizerConfig(decay=0.3), model, 0.01).param_groups
    decay = {id(p): g["weight_decay"] for g in groups for p in g["params"]}
    assert offsets and {decay[i] for i in offsets} == {0.0} and {decay[i] for i in keys} == {0.3}
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.dim() >= 2 and id(p) not in tables]
    others = [p for p in model.parameters() if p.dim() < 2 or id(p) in tables]
    assert [id(p) for g in groups for p in g["params"]] == [id(p) for p in (*matrices, *others)]


# Schedules


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"noam"}))
@pytest.mark.parametrize("warmup", [0, 10, 0.1])
def test_a_schedule_rises_to_one_and_falls_to_its_floor(name, warmup):
    config, total = ScheduleConfig(name=name, warmup=warmup, floor=0.25), 100
    rates = [lr_factor(config, step, total) for step in range(total + 1)]
    rise = 10 if warmup else 0
    assert rates[:rise] == pytest.approx([(n + 1) / 10 for n in range(rise)])
    assert rates[rise] == 1.0
    fall = rates[rise:]
    assert all(a >= b for a, b in pairwise(fall))
    assert rates[-1] == pytest.approx(1.0 if name == "constant" else 0.25)
    middle = rates[rise + (total - rise) // 2]
    shape = {"cosine": 0.5, "linear": 0.5, "constant": 1.0, "root": math.sqrt(0.5), "trapezoid": 1.0}[name]
    assert middle == pytest.approx(0.25 + 0.75 * shape)


@pytest.mark.parametrize("warmup, floor", [(40, 0.0), (0.1, 0.0), (0, 0.0), (40, 0.5), (40, 1.0)])
def test_noam_is_the_schedule_of_the_paper(warmup, floor):
    """width^−½ · min(n^−½, n · warmup^−1.5) with n from 1, where the highest rate is (width·warmup)^−½."""
    width, total = 64, 400
    config = ScheduleConfig(name="noam", warmup=warmup, floor=floor)
    rise = max(1, resolve_steps(warmup, total))
    lr = (width * rise) ** -0.5
    for n in range(1, total + 1):
        published = width**-0.5 * min(n**-0.5, n * rise**-1.5)
        least = floor * lr if n > rise else 0.0
        assert lr * lr_factor(config, n - 1, total) == pytest.approx(max(published, least)), n


def test_the_rate_of_a_run_is_that_of_its_schedule(tmp_path):
    work = trainer(tmp_path, steps=10, lr=0.5, schedule={"name": "linear", "warmup": 2, "floor": 0})
    work.fit()
    rates = [row["lr"] for row in work.run.metrics() if "lr" in row]
    assert rates == pytest.approx([0.25, 0.5, *(0.5 * (1 - n / 8) for n in range(8))])


def test_shares_of_a_whole():
    assert [resolve_steps(x, 200) for x in (0, 0.001, 0.1, 0.5, 1, 7, 7.9)] == [0, 1, 20, 100, 1, 7, 7]


@pytest.mark.parametrize("section", ["schedule", "optimizer"])
def test_a_misspelt_name_is_told_before_the_first_step(section, tmp_path):
    with pytest.raises(ConfigError, match=f"train.{section}.name = 'adamcos'"):
        stage.train(pretraining(f"train.{section}=adamcos"), tmp_path / "run")
    stage.train(pretraining("train.steps=1"), tmp_path / "run")  # the folder is free for another try


@pytest.mark.parametrize("epochs, rows, steps", [(1, 10, 3), (0.3, 1000, 75), (0.01, 10, 1), (2.5, 8, 5)])
def test_epochs_as_steps(epochs, rows, steps):
    assert TrainConfig(epochs=epochs, batch=4).total(rows) == steps
    assert TrainConfig(epochs=epochs, batch=4, steps=7).total(rows) == 7


def test_how_long_must_be_said(tmp_path):
    with pytest.raises(ConfigError, match="both 0"):
        stage.train(pretraining("train.steps=0", "train.epochs=0"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    stage.train(pretraining("train.steps=0", "train.epochs=0.1"), tmp_path / "run")


# The best

UP = [{"dev/accuracy": a, "dev/loss": x} for a, x in [(0.1, 3.0), (0.5, 2.0), (0.3, 1.0), (0.5, 4.0)]]


@pytest.mark.parametrize("metric, best", [("dev/accuracy", 4), ("dev/loss", 6), ("", 4)])
def test_the_best_is_the_highest_accuracy_or_the_lowest_loss(metric, best, tmp_path):
    work = trainer(
        tmp_path,
        Toy(measured=UP, metric="dev/accuracy"),
        evaluation={"every": 2, "metric": metric},
        saving={"every": 1, "keep": 1},
    )
    work.fit()
    assert (tmp_path / "best").read_text() == f"step-{best}\n"
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [f"step-{best}", "step-8"]
    got, want = regard.load(tmp_path / "model"), regard.load(tmp_path / f"checkpoints/step-{best}")
    for name, tensor in want.state_dict().items():
        assert torch.equal(got.state_dict()[name], tensor)
        assert torch.equal(work.model.state_dict()[name], tensor)
    assert not work.model.training


def test_a_task_whose_own_metric_is_best_when_low(tmp_path):
    task = Toy(measured=[{"dev/surprise": x} for x in (3.0, 1.0, 2.0)], metric="dev/surprise")
    task.highest = False
    trainer(tmp_path, task, steps=3, evaluation={"every": 1}).fit()
    assert Run(tmp_path).best == 2


@pytest.mark.parametrize("highest, best", [(True, 6), (False, 4)])
def test_a_value_that_is_no_number_is_replaced_by_the_first_that_is(highest, best, tmp_path):
    """NaN is neither more nor less than anything: as the best it would stay for ever."""
    measured = [{"m": value} for value in (math.nan, 0.5, 0.7, math.nan)]
    task = Toy(measured=measured, metric="m")
    task.highest = highest
    made = trainer(tmp_path, task, evaluation={"every": 2}, saving={"every": 0, "keep": 9})
    made.fit()
    assert Run(tmp_path).best == best
    assert made.state.best == (0.7 if highest else 0.5) and made.state.stale == (1 if highest else 2)


@pytest.mark.parametrize("higher", [True, False])
def test_what_is_better(higher):
    assert is_better(2.0, 1.0, higher) == higher and is_better(1.0, 2.0, higher) != higher
    assert not is_better(1.0, 1.0, higher)
    for odd in (math.nan, math.inf, -math.inf):
        assert is_better(1.0, odd, higher) and not is_better(odd, 1.0, higher) and not is_better(odd, odd, higher)


TIES = {
    "the lower loss": ([(0.5, 3.0), (0.5, 1.0), (0.5, 2.0), (0.4, 0.5)], 4),
    "of equal losses the latest": ([(0.5, 1.0), (0.5, 2.0), (0.5, 1.0), (0.4, 0.5)], 6),
    "the latest where no loss is measured": ([(0.4, None), (0.5, None), (0.5, None), (0.1, None)], 6),
    "a loss that is a number": ([(0.5, math.nan), (0.5, 9.0), (0.5, math.nan), (0.1, 1.0)], 4),
    "the metric before the loss": ([(0.5, 1.0), (0.6, 9.0), (0.5, 0.5), (0.6, 9.5)], 4),
    "none but equals": ([(0.0, 4.0), (0.0, 3.0), (0.0, 2.0), (0.0, 1.0)], 8),
}


@pytest.mark.parametrize("measured, best", TIES.values(), ids=TIES)
@pytest.mark.parametrize("stop", [0, 3, 5])
def test_of_equal_checkpoints_the_one_with_the_lower_loss_is_kept(measured, best, stop, tmp_path):
    """Whether or not the training is stopped in between; patience counts from the first of equals on."""
    rows = [{"dev/accuracy": a} | ({} if loss is None else {"dev/loss": loss}) for a, loss in measured]

    def work(skip=0, progress=None):
        task = Toy(measured=rows, metric="dev/accuracy")
        task.evaluations = skip
        return trainer(tmp_path, task, progress=progress, evaluation={"every": 2}, saving={"every": 1, "keep": 9})

    made = work(progress=StopAt(stop, CTRL_C) if stop else None)
    if stop:
        with pytest.raises(Interrupted):
            made.fit()
        made = work(skip=stop // 2)
        assert made.resume() == stop
    made.fit()
    assert Run(tmp_path).best == best
    values = [a for a, _ in measured]
    assert made.state.stale == len(values) - 1 - values.index(max(values))
    kept, named = (regard.load(tmp_path / place) for place in ("model", f"checkpoints/step-{best}"))
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), named.parameters(), strict=True))


def test_a_run_of_an_earlier_version_goes_on_without_the_loss_of_its_best(tmp_path):
    """What it kept is not known to be the better of equals: the next equal one takes its place."""
    measured = [{"dev/accuracy": 0.5, "dev/loss": x} for x in (1.0, 2.0, 3.0, 2.5)]
    task = Toy(measured=measured, metric="dev/accuracy")
    settings = {"evaluation": {"every": 2}, "saving": {"every": 1, "keep": 9}}
    with pytest.raises(Interrupted):
        trainer(tmp_path, task, progress=StopAt(3, CTRL_C), **settings).fit()
    state = tmp_path / "checkpoints/step-3/state.json"
    document = json.loads(state.read_text())
    assert document["state"].pop("best_loss") == 1.0
    state.write_text(json.dumps(document))
    write_manifest(state.parent)
    made = trainer(tmp_path, task, **settings)
    assert made.resume() == 3 and made.state.best_loss is None
    made.fit()
    assert Run(tmp_path).best == 4


def test_without_a_measure_the_last_is_the_best(tmp_path):
    trainer(tmp_path, evaluation={"every": 3}).fit()
    assert Run(tmp_path).best == 8


@pytest.mark.parametrize("patience, last", [(1, 6), (2, 8), (0, 8)])
def test_patience_ends_early(patience, last, tmp_path):
    task = Toy(measured=UP, metric="dev/accuracy")
    trainer(tmp_path, task, evaluation={"every": 2, "patience": patience}).fit()
    run = Run(tmp_path)
    assert run.metrics()[-1]["step"] == last
    assert run.best == 4 and run.finished and (run.checkpoints / f"step-{last}").is_dir()


class Clocked(Toy):
    """A toy whose evaluations take a thousand seconds of a clock that else goes on by a second when it is read."""

    now = 0.0

    def evaluate(self, model):
        self.now += 1000
        return super().evaluate(model)

    def read_clock(self):
        self.now += 1
        return self.now


def test_speed_is_that_of_training_alone(tmp_path, monkeypatch):
    """Neither an evaluation nor what came before an interruption slows the steps behind it."""
    task = Clocked()
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=task.read_clock))
    changes = {"steps": 8, "evaluation": {"every": 2}, "saving": {"every": 2}}
    with pytest.raises(Crash):
        trainer(tmp_path / "run", task, progress=StopAt(5), **changes).fit()
    again = trainer(tmp_path / "run", task, **changes)
    assert again.resume() == 4
    again.fit()
    lines = [row for row in again.run.metrics() if "lr" in row]
    assert [row["step"] for row in lines] == list(range(1, 9))
    assert {row["tokens_per_second"] for row in lines} == {4 * task.length}
    assert lines[-1]["seconds"] > 3000  # which has the evaluations


def test_an_unknown_metric_lists_what_is_measured(tmp_path):
    task = Toy(measured=UP, metric="dev/accuracy")
    with pytest.raises(ConfigError, match=r"'dev/acuracy' is not measured here; there is dev/accuracy, dev/loss"):
        trainer(tmp_path, task, evaluation={"every": 2, "metric": "dev/acuracy"}).fit()


# What goes wrong


class Poison(Toy):
    """A loss that is NaN from some step on, or weights that become so without the loss."""

    def __init__(self, at, weights=False, **named):
        super().__init__(**named)
        self.at, self.weights, self.now = at, weights, 0

    def batch(self, step, size):
        self.now = step + 1
        return super().batch(step, size)

    def loss(self, model, batch, smoothing=0.0):
        if self.now < self.at:
            return super().loss(model, batch)
        root = torch.sqrt(0 * next(model.parameters()).sum()) if self.weights else torch.tensor(torch.nan)
        return super().loss(model, batch) + root  # the root's gradient at zero is infinite times zero


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("steps", [9, 900])  # of 900, a line is logged every fourth
def test_nan_ends_a_training_and_is_not_saved(weights, steps, tmp_path):
    work = trainer(
        tmp_path, Poison(5, weights), steps=steps, saving={"every": 1, "keep": 2}, evaluation={"every": 2}, clip=0
    )
    with pytest.raises(TrainingError, match=r"at step 5\b.*train.lr.*step 4 is as it was"):
        work.fit()
    assert Run(tmp_path).best == 4
    for step in (3, 4):
        model = regard.load(tmp_path / f"checkpoints/step-{step}")
        assert all(p.isfinite().all() for p in model.parameters())
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-3", "step-4"]
    assert all(math.isfinite(row.get("loss", 0)) for row in Run(tmp_path).metrics())


def test_a_rate_that_is_too_high(tmp_path):
    with pytest.raises(TrainingError, match="step"):
        trainer(tmp_path, lr=1e30, clip=0, optimizer="sgd", steps=50).fit()
    found = list(tmp_path.glob("checkpoints/*/model.safetensors"))
    assert all(p.isfinite().all() for path in found for p in regard.load(path.parent).parameters())


def test_a_run_is_never_written_over(tmp_path):
    run = stage.train(pretraining("train.steps=1"), tmp_path / "run")
    before = {p: p.stat().st_mtime_ns for p in sorted(run.path.rglob("*"))}
    with pytest.raises(RunError, match=r"holds results already.*--out.*--resume"):
        stage.train(pretraining("train.steps=2"), run.path)
    assert before == {p: p.stat().st_mtime_ns for p in sorted(run.path.rglob("*"))}
    (run.path / "config.toml").unlink()  # checkpoints of something else are in the way too
    with pytest.raises(RunError, match="holds results already"):
        stage.train(pretraining("train.steps=2"), run.path)


def test_a_folder_that_cannot_be_written_is_told_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    nobodys = [Path("/proc/run")] if sys.platform == "linux" else []
    for out in (tmp_path / "file", tmp_path / "file" / "run", *nobodys):
        with pytest.raises(RunError, match=r"cannot write into.*--out"):
            stage.train(pretraining(), out)


def test_a_folder_is_free_again_where_a_run_could_not_begin(tmp_path):
    with pytest.raises(regard.RegardError, match=r"none\.txt cannot be read"):
        stage.train(pretraining("data.documents=none.txt"), tmp_path / "runs" / "run")
    assert not (tmp_path / "runs").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(regard.RegardError, match=r"none\.txt cannot be read"):
        stage.train(pretraining("data.documents=none.txt"), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]
    assert stage.train(pretraining("train.steps=1"), tmp_path / "run").finished
    with pytest.raises(ConfigError, match="another world"):
        (tmp_path / "other").mkdir()
        (tmp_path / "run" / "data").rename(tmp_path / "other" / "data")
        stage.train(pretraining("data.world.people=14"), tmp_path / "other")


# Starting from a model


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    return stage.train(pretraining("train.steps=4", "train.seed=3"), tmp_path_factory.mktemp("read") / "run")


def after(run, *changes):
    return recipe.load("knowledge/finetune", [f"train.init={run}", "train.steps=2", "train.batch=4", *changes])


def test_a_start_gives_weights_data_and_shape(read, tmp_path):
    run = stage.train(after(read.path, "train.lr=0", "train.optimizer.decay=0"), tmp_path / "run")
    got, want = regard.load(run.path / "model"), regard.load(read.path / "model")
    for name, tensor in want.state_dict().items():
        assert torch.equal(got.state_dict()[name], tensor)
    assert run.config["data"]["world"] == read.config["data"]["world"]
    assert run.config["model"]["width"] == 16
    assert got.config == want.config


def test_a_start_with_other_dropout_and_the_same_data(read, tmp_path):
    run = stage.train(after(read.path, "model.dropout=0.3", "data.mix=0.25"), tmp_path / "run")
    assert regard.load(run.path / "model").config.dropout == 0.3
    assert run.config["data"]["mix"] == 0.25
    assert run.config["data"]["world"]["people"] == 12


def test_a_changed_start_is_resumed_as_it_was(read, tmp_path):
    recipe = after(read.path, "model.dropout=0.5", "train.steps=6", "train.saving.every=1")
    whole = stage.train(recipe, tmp_path / "a")
    with pytest.raises(Crash):
        stage.train(recipe, tmp_path / "b", progress=StopAt(1))
    stage.resume(tmp_path / "b")
    for name, tensor in regard.load(whole.path / "model").state_dict().items():
        assert torch.equal(regard.load(tmp_path / "b" / "model").state_dict()[name], tensor)


def test_wrong_starts(read, tmp_path):
    bare = tmp_path / "bare"
    speechless = gpt()
    speechless.tokenizer = None
    speechless.save(bare)
    cases = {
        (tmp_path / "nothing", ()): "nothing is no folder",
        (tmp_path, ()): "has no config.json",
        (bare, ()): "has no tokenizer.json",
        (read.path, ("model.width=32",)): r"does not fit the changes asked for; leave out model.width",
        (read.path, ("model.class=Encoder", "model.preset=nano")): "model.class = 'Encoder': train.init",
        (read.path, ("model.preset=char",)): "model.preset = 'char': train.init",
        (read.path, ("data.block=200",)): "reads 95 tokens, rows have 199; expected at most 95: lower data.block",
    }
    for (start, changes), words in cases.items():
        with pytest.raises(regard.RegardError, match=words):
            stage.train(after(start, *changes), tmp_path / "run")


# Precision and manners


def test_bfloat16_trains_on_a_cpu(tmp_path):
    losses = {}
    for name in ("float32", "bfloat16"):
        work = trainer(tmp_path / name, precision=name, steps=30)
        work.fit()
        losses[name] = [row["loss"] for row in work.run.metrics() if "lr" in row]
        assert all(p.dtype == torch.float32 for p in work.model.parameters())
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"][-1] == pytest.approx(losses["float32"][-1], rel=0.05)
    assert losses["bfloat16"][-1] < losses["bfloat16"][0]


def test_float16_trains_and_resumes_with_its_scale(tmp_path):
    names = ("a", "b")
    works = [trainer(tmp_path / n, precision="float16", steps=12, saving={"every": 1}) for n in names]
    for work in works:
        work.scaler.set_growth_interval(3)  # of steps without an overflow, after which the scale doubles
    works[0].fit()
    works[1].progress = StopAt(5)
    with pytest.raises(Crash):
        works[1].fit()
    again = trainer(tmp_path / "b", precision="float16", steps=12, saving={"every": 1})
    assert again.resume() == 4
    again.fit()
    assert again.scaler.get_scale() == works[0].scaler.get_scale() != trainer(tmp_path / "c").scaler.get_scale()
    for a, b in zip(works[0].model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    losses = [row["loss"] for row in again.run.metrics() if "lr" in row]
    assert len(losses) == 12 and losses[-1] < losses[0]


def test_precision_by_name():
    assert autocast_dtype("auto", CPU) is autocast_dtype("float32", CPU) is None
    assert autocast_dtype("bfloat16", CPU) is torch.bfloat16


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_callers_randomness_determinism_and_handlers_are_as_before(deterministic, tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        torch.manual_seed(7)
        want = torch.rand(3)
        torch.manual_seed(7)
        run = stage.train(pretraining("train.steps=2", f"train.deterministic={str(deterministic).lower()}"), tmp_path)
        assert torch.equal(torch.rand(3), want)
        torch.manual_seed(7)
        (run.path / "model" / "config.json").unlink()
        stage.resume(run.path)
        assert torch.equal(torch.rand(3), want)
        torch.manual_seed(7)
        stage.train(after(run.path, "train.steps=1", "model.dropout=0.2"), tmp_path / "next")
        assert torch.equal(torch.rand(3), want)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


def test_the_callers_randomness_changes_nothing(tmp_path):
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        run = stage.train(pretraining("train.steps=3"), tmp_path / str(seed))
        made.append(regard.load(run.path / "model").state_dict())
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(number, tmp_path):
    before = signal.getsignal(number)
    work = trainer(tmp_path, progress=StopAt(3, number), saving={"every": 0})
    with pytest.raises(Interrupted, match=rf"step 3 of 8.*regard train --resume {tmp_path}"):
        work.fit()
    assert (tmp_path / "checkpoints/step-3").is_dir() and signal.getsignal(number) is before
    assert trainer(tmp_path).resume() == 3


def test_a_second_signal_stops_at_once(tmp_path):
    class Twice(StopAt):
        def show(self, step, total, values):
            super().show(step, total, values)
            super().show(step, total, values)

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, progress=Twice(3, CTRL_C), saving={"every": 0}).fit()
    assert not list(tmp_path.glob("checkpoints/*"))


def test_a_signal_at_the_last_step_changes_nothing(tmp_path):
    trainer(tmp_path, progress=StopAt(8, CTRL_C)).fit()
    assert Run(tmp_path).finished


def test_training_in_another_thread(tmp_path):
    failed = []

    def work():
        try:
            trainer(tmp_path, steps=2).fit()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed and Run(tmp_path).finished


def test_a_light_import_stays_light():
    heavy = ["matplotlib", "transformers", "tokenizers", "triton", "scipy", "typer", "regard.train"]
    on_demand = [f"regard.{name}" for name in ("checking", "generate", "hub", "laws", "lens")]
    code = f"import sys, regard; print([m for m in {heavy + on_demand} if m in sys.modules])"
    code += f"; import regard.train; print([m for m in {heavy[:-1]} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == "[]\n[]\n"


def test_a_task_is_abstract():
    with pytest.raises(TypeError):
        Task()


# Names


def test_every_task_file_registers_the_task_of_its_name():
    """No list names them: a new file is a new task."""
    folder = Path(tasks.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "base"}
    assert files | {"distil"} <= set(TASKS)
    assert all(issubclass(TASKS[name], Task) for name in files)


def test_a_new_optimiser_a_schedule_and_a_logger_are_one_entry_each(tmp_path):
    seen = []

    class Halving(torch.optim.SGD):
        """SGD under another name."""

    class Kept(Logger):
        """Keeps what it is shown."""

        def __init__(self, run):
            self.path = run.path

        def show(self, step, total, values):
            seen.append((self.path.name, step))

    OPTIMIZERS.put("halving", Halving)
    SCHEDULES.put("halved", lambda done: 0.5)
    LOGGERS.put("kept", Kept)
    try:
        changes = ["train.optimizer=halving", "train.schedule={name = 'halved', warmup = 0, floor = 0}"]
        run = stage.train(pretraining(*changes, "train.steps=2", "train.saving.log=['kept']"), tmp_path / "run")
    finally:
        del OPTIMIZERS["halving"], SCHEDULES["halved"], LOGGERS["kept"]
    assert {row["lr"] for row in run.metrics() if "lr" in row} == {0.005}
    assert seen[-1] == ("run", 2)
