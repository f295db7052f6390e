"""Sweeps: every combination once; stopped or killed they go on as if nothing had been; the page of what came out."""

import json
import math
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sqlalchemy import event
from sqlalchemy.engine import Engine
from training import Crash, StopAt, bits

from regard.cli import app
from regard.cli.sweep import _print_results, repeat_options
from regard.config import ConfigError
from regard.errors import OptionError, RegardError
from regard.lab.base import Shown
from regard.models import load
from regard.models.locate import model_folder
from regard.report.page import Page
from regard.report.trials import (
    AxisScale,
    Dimension,
    TrialPoint,
    parallel_coordinates,
    slice_plots,
    trial_curves,
)
from regard.sweep import run as sweeps
from regard.sweep.page import sweep_page
from regard.sweep.results import best_value
from regard.sweep.run import Sweep
from regard.sweep.settings import asked
from regard.sweep.space import Choices, Range, check_values, combinations, parse_parameters, split_values
from regard.sweep.study import MAX_DEATHS, Study, SweepError
from regard.train import Run, stage
from regard.train.loop import Interrupted
from regard.train.progress import Progress

TEXT = "to be, or not to be: that is the question. " * 20
TINY = ["data.text=a.txt", "data.block=8", "model.width=8", "model.layers=1", "model.attention.heads=2"]
TINY += ["train.steps=4", "train.batch=2", "train.evaluation.every=2", "train.saving.every=1"]
GRID = ["train.lr=1e-3,1e-2", "model.mechanism=softmax,elu"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder with a text in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    Path("a.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


@pytest.fixture(autouse=True)
def hurried():
    """Databases that do not wait for the disk: these tests kill processes, not machines."""

    def hurry(connection, record):
        connection.execute("PRAGMA synchronous = OFF")

    event.listen(Engine, "connect", hurry)
    yield
    event.remove(Engine, "connect", hurry)


@pytest.fixture
def regard_(monkeypatch, capsys):
    """Types a command; its exit code, output and errors."""

    def typed(*words):
        monkeypatch.setattr(sys, "argv", ["regard", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            app.main()
        return left.value.code, *capsys.readouterr()

    return typed


class Fake:
    """In place of trainings and pages: a run whose dev loss is what a function says of its recipe."""

    def __init__(self, monkeypatch, value, steps=2):
        self.trained, self.value, self.steps = [], value, steps
        monkeypatch.setattr(stage, "train", self.train)
        monkeypatch.setattr(stage, "resume", self.resume)
        monkeypatch.setattr(sweeps, "sweep_page", lambda results: Page("", ""))

    def train(self, recipe, path, device, progress):
        self.trained.append(Path(path).name)
        return self.measured(Run.create(path, recipe.as_dict()), recipe)

    def resume(self, path, device, progress):
        raise AssertionError(f"{path} was begun twice")

    def measured(self, run, recipe):
        for step in range(1, self.steps + 1):
            run.log({"step": step, "dev/loss": self.value(recipe) + 1 / step, "dev/accuracy": 1 / step})
        return run


def grid(*pairs, **options):
    return asked("lm", TINY, grid=pairs or GRID, **options)


def search(*pairs, trials=12, **options):
    return asked(
        "lm", TINY, search=pairs or ["train.lr=1e-4..1e-1:log", "model.dropout=0.1..0.3:0.1"], trials=trials, **options
    )


def settings(sweep):
    return [row["settings"] for row in sweep.results()["trials"]]


def test_pairs_that_follow_an_option_belong_to_it():
    issue = ["RECIPE", "--grid", "train.batch=64,128,256", "train.lr=1e-4,5e-5", "train.epochs=2,5"]
    each = ["RECIPE", "--grid", issue[2], "--grid", issue[3], "--grid", issue[4]]
    assert repeat_options(issue) == each == repeat_options(each)
    assert repeat_options(["--grid=a.b=1,2", "c.d=3", "lm", "e.f=4"]) == [
        "--grid=a.b=1,2",
        "--grid",
        "c.d=3",
        "lm",
        "e.f=4",
    ]
    assert repeat_options(["lm", "a.b=1", "--search", "c.d=1..2", "--trials", "3", "e.f=4"]) == [
        *["lm", "a.b=1", "--search", "c.d=1..2", "--trials", "3", "e.f=4"]
    ]


def test_values_are_read_as_a_recipe_reads_them():
    found, single = parse_parameters(
        ["a.b=64,128", "a.c={x=1, y=2},[3, 4],'5,6'", "a.d=../p,../q", "a.e=7", "a.f=true,false"], True
    )
    assert [p.choices for p in found] == [
        *[[64, 128], ["{x=1, y=2}", "[3, 4]", "5,6"], ["../p", "../q"], [True, False]]
    ]
    assert single == ["a.e=7"]
    ranges, _ = parse_parameters(["a.b=1..4", "a.c=1e-5..1e-3:log", "a.d=0.1..0.5:0.1", "a.e=64..256:64"], True)
    assert ranges == [
        Range("a.b", 1, 4, None, False),
        Range("a.c", 1e-5, 1e-3, None, True),
        Range("a.d", 0.1, 0.5, 0.1, False),
        Range("a.e", 64, 256, 64, False),
    ]
    assert [r.whole for r in ranges] == [True, False, False, True]
    assert [r.axis_values for r in ranges] == [[1, 2, 3, 4], [], [], [64, 128, 192, 256]]
    assert split_values("") == [""] and split_values("a,'b,c',{d=[1,2],e=3}") == ["a", "'b,c'", "{d=[1,2],e=3}"]


@pytest.mark.parametrize(
    "pair, told",
    {
        "lr": "expected section.key=values",
        "lr=1,2": "expected section.key=values",
        "train.lr=1e-3,,2": "a value is empty",
        "train.lr=0.1,1e-1": "1e-1 is named twice",
        "train.lr=2..1": "a range that rises",
        "train.lr=0..1:log": "begins above 0",
        "train.lr=1..4:0": "a step above 0",
        "train.lr=1..4:0.5": "whole steps",
        "train.lr=1..4:2": "end at 3, not at 4",
    }.items(),
)
def test_values_that_cannot_be_read_say_why(pair, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        parse_parameters([pair], ranges=True)


def test_a_range_belongs_to_a_search():
    with pytest.raises(ConfigError, match="a range is for --search"):
        parse_parameters(["train.lr=1..4"], ranges=False)
    with pytest.raises(ConfigError, match="varied twice"):
        parse_parameters(["train.lr=1,2", "train.lr=3,4"], ranges=False)


def test_every_combination_once_the_last_key_fastest():
    found = combinations([Choices("a", ("1", "2")), Choices("b", ("x", "y", "z"))])
    assert found == [{"a": a, "b": b} for a, b in product("12", "xyz")]
    with pytest.raises(ConfigError, match="1,000,000 combinations"):
        combinations([Choices(c, tuple(map(str, range(100)))) for c in "abc"])


def test_a_value_is_refused_where_no_combination_can_be_and_only_there():
    """3 fits nowhere; 4 fits with "y" alone, which is enough."""
    values = [Choices("a.b", ("3", "4")), Choices("a.c", ("x", "y"))]

    def attempt(texts):
        if texts["a.b"] == "3" or (texts["a.c"] == "x" and texts["a.b"] == "4"):
            raise ConfigError(f"not {texts['a.b']}")

    for is_grid in (True, False):
        with pytest.raises(ConfigError, match=r"a\.b=3: not 3"):
            check_values(values, is_grid, attempt)
        with pytest.raises(ConfigError, match=r"a\.c=x: not 4"):
            check_values([Choices("a.b", ("4",)), values[1]], is_grid, attempt)
        check_values([Choices("a.b", ("4", "5")), values[1]], is_grid, attempt)


@pytest.mark.parametrize(
    "words, told",
    {
        "--grid train.lrr=1,2": "Did you mean 'lr'?",
        "--grid train.lr=1e-3,fast": "train.lr=fast: train.lr = 'fast': expected a number",
        "--grid model.mechanism=softmax,performr": "Did you mean 'performer'?",
        "--grid train.optimizer=adamw,adamx": "no such optimiser in torch.optim. Did you mean 'adamax'?",
        "--grid train.schedule=cosine,cosin": "Did you mean 'cosine'?",
        "--grid model.attention.heads=2,3": "model.attention.heads=3: width 8 does not divide into 3 heads",
        "--grid data.text=a.txt,b.txt": "there is no such file",
        "train.lr=1 --grid train.lr=1,2": "train.lr is varied and also set",
        "--grid train.lr=1e-3": "nothing is varied",
        "--search train.lr=1e-4..1e-2": "needs a number of trials",
        "--grid train.lr=1,2 --trials 3": "a grid has as many trials as combinations",
        "--grid train.lr=1,2 --search train.lr=1,2": "both --grid and --search",
        "--trials 2 --search train.clip=-1..4": "train.clip=-1: train.clip = -1: expected 0 or more",
        "": "neither --grid nor --search",
        "--grid train.lr=1,2 --variant small": "has no variant 'small'",
    }.items(),
)
def test_what_cannot_be_is_refused_before_anything_is_written(words, told, regard_):
    code, _, err = regard_("sweep", "lm", *(w for w in TINY if w.partition("=")[0] not in words), *words.split())
    assert code == 2 and told in err.replace("\n", " "), err
    assert os.listdir() == ["a.txt"]


def test_a_name_that_is_no_recipe_is_refused(regard_):
    for name, told in {
        "summarise": "no recipe 'summarise'. Did you mean 'summarize'?",
        "knowledge": "knowledge/pretrain",
    }.items():
        code, _, err = regard_("sweep", name, "--grid", "train.lr=1,2")
        assert code == 2 and told in err, err


def test_a_combination_that_cannot_be_fails_alone_and_the_exit_code_says_so(monkeypatch, regard_):
    Fake(monkeypatch, lambda recipe: recipe.train.lr)
    code, out, err = regard_("sweep", "lm", *TINY[:-3], "--grid", "train.batch=2,4", "train.micro=1,4", "--out", "s")
    assert code == 1, err
    found = Sweep.open("s").results()
    assert [row["state"] for row in found["trials"]] == ["finished", "failed", "finished", "finished"]
    assert "train.micro = 4 does not divide train.batch = 2" in found["trials"][1]["error"]
    assert "train.micro = 4 does not divide" in out and "Traceback" in Path("s/trial-001/error.txt").read_text()
    assert found["counts"] == {"finished": 3, "failed": 1}


def test_a_loss_that_is_no_number_is_noted_and_others_go_on():
    sweep = Sweep.create("s", grid("train.lr=1e-3,1e12", "train.optimizer=sgd"))
    rows = sweep.run()["trials"]
    assert [row["state"] for row in rows] == ["finished", "failed"]
    assert rows[1]["error"].startswith("TrainingError: ") and "Lower train.lr" in rows[1]["error"]


def test_failed_trials_are_tried_again_only_when_asked(monkeypatch, regard_):
    broken = Fake(monkeypatch, lambda recipe: 1 / 0 if recipe.train.lr > 5e-3 else 1.0)
    assert regard_("sweep", "lm", *TINY, "--grid", *GRID, "--out", "s")[0] == 1
    assert regard_("sweep", "s")[0] == 1 and len(broken.trained) == 4
    for name in ("trial-002", "trial-003"):
        (Path("s") / name / "config.toml").unlink()
    mended = Fake(monkeypatch, lambda recipe: recipe.train.lr)
    code, out, err = regard_("sweep", "s", "--retry", "--json")
    found = json.loads(out)
    assert code == 0 and mended.trained == ["trial-002", "trial-003"], err
    assert [(row["trial"], row["state"]) for row in found["trials"]] == [(n, "finished") for n in range(4)]


@pytest.mark.parametrize("metric, better, best", [(None, None, 0), ("dev/loss", True, 2), ("dev/accuracy", None, 0)])
def test_the_best_is_the_least_loss_or_the_most_of_what_is_named(metric, better, best, monkeypatch):
    """The best of a run is that of its evaluations, not its last."""
    Fake(monkeypatch, lambda recipe: recipe.train.lr)
    config = asked("lm", TINY, grid=["train.lr=1,2,3"], metric=metric, maximize=better)
    found = Sweep.create("s", config).run()
    assert found["maximize"] is (metric is not None) and found["best"] == best
    want = {None: 1.5, "dev/loss": 4.0, "dev/accuracy": 1.0}[metric]
    assert found["trials"][best]["value"] == want and found["run"] == f"trial-00{best}"
    assert ("train.evaluation.metric=dev/accuracy" in config.fixed) == (metric == "dev/accuracy")


def test_a_metric_that_is_not_measured_is_told_with_what_there_is():
    run = Run.create("r", {})
    run.log({"step": 1, "loss": 3.0, "lr": 0.1})
    run.log({"step": 1, "dev/loss": 2.0})
    run.log({"step": 2, "loss": 4.0, "lr": 0.1})
    assert best_value(run, "dev/loss", False)[:2] == (2.0, 1) and best_value(run, "loss", False)[:2] == (4.0, 2)
    with pytest.raises(SweepError, match=r"'dev/los' is not measured in r\. Did you mean 'dev/loss'"):
        best_value(run, "dev/los", False)
    run.log({"step": 3, "dev/loss": math.nan})
    run.log({"step": 4, "dev/loss": math.inf})
    assert best_value(run, "dev/loss", True)[:2] == (2.0, 1)
    run.log({"step": 4, "dev/accuracy": math.nan})
    with pytest.raises(SweepError, match="'dev/accuracy' is never a finite number in r"):
        best_value(run, "dev/accuracy", True)


def test_from_the_command_line_to_the_page(regard_):
    """What a newcomer types, on real trainings: a table, a best run that other commands take, a page, JSON."""
    code, out, err = regard_("sweep", "lm", *TINY, "--grid", *GRID, "--out", "s")
    assert code == 0, err
    assert "4 trials: 4 finished" in out and err.count("→ dev/loss") == 4
    found = json.loads(Path("s/results.json").read_text())
    assert [r["settings"] for r in found["trials"]] == [
        {"train.lr": lr, "model.mechanism": m} for lr, m in product([1e-3, 1e-2], ["softmax", "elu"])
    ]
    for row in found["trials"]:
        run = Run.open(Path("s") / row["folder"])
        assert run.config["train"]["lr"] == row["settings"]["train.lr"] and run.finished
        assert row["value"] == min(r["dev/loss"] for r in run.metrics() if "dev/loss" in r)
    best = min(found["trials"], key=lambda r: r["value"])
    assert found["best"] == best["trial"] and model_folder("s") == Path("s") / best["folder"] / "model"
    command = re.search("^Best: regard (.*)$", out, re.M)[1]
    assert regard_(*command.split(), "--out", "again")[0] == 0
    want, got = (load(f"{name}/model").state_dict() for name in (f"s/{best['folder']}", "again"))
    assert all(torch.equal(want[name], got[name]) for name in want)
    page = Path("s/report.html").read_text()
    assert all(text in page for text in ("train.mechanism", "trial-000", "All trials at a glance")[1:])
    assert regard_("report", "s", "--out", "p.html")[0] == 0 and Path("p.html").read_text() == page
    code, out, _ = regard_("sweep", "s", "--json")
    assert code == 0 and json.loads(out) == found


def test_a_trial_that_has_ended_keeps_its_model_and_no_checkpoint(regard_):
    regard_("sweep", "lm", *TINY, "--grid", "train.lr=1e-3,1e-2", "--out", "s")
    regard_("sweep", "lm", *TINY, "train.saving.keep=1", "--grid", "train.lr=1e-3,1e-2", "--out", "t")
    for trial in ("trial-000", "trial-001"):
        assert load(f"s/{trial}") is not None and not Path(f"s/{trial}/checkpoints").exists()
        assert [path.name for path in Path(f"t/{trial}/checkpoints").iterdir()] == ["step-4"]


def test_the_training_data_are_measured_where_dev_is_best():
    run = Run.create("r", {})
    for step in (1, 2, 3):
        run.log({"step": step, "loss": 9.0 - step, "lr": 0.1})
        run.log({"step": step, "dev/accuracy": (0.5, 0.7, 0.6)[step - 1], "train/accuracy": step / 4})
    assert best_value(run, "dev/accuracy", True) == (0.7, 2, 0.5)
    assert best_value(run, "train/accuracy", True) == (0.75, 3, None)  # there is none but itself
    run.log({"step": 3, "dev/accuracy": 0.7})
    assert best_value(run, "dev/accuracy", True).step == 2
    run.best = 3  # of equals the sweep tells of the checkpoint that is there
    assert best_value(run, "dev/accuracy", True) == (0.7, 3, 0.75)
    run.log({"step": 4, "dev/loss": 3.0})
    assert best_value(run, "dev/loss", False) == (3.0, 4, 7.0)  # the mean of the steps, where an evaluation has none


def test_the_same_command_goes_on_and_another_is_told_the_difference(regard_, monkeypatch):
    fake = Fake(monkeypatch, lambda recipe: recipe.train.lr)
    assert regard_("sweep", "lm", *TINY, "--grid", *GRID, "--out", "s")[0] == 0
    assert regard_("sweep", "lm", *TINY, "--grid", *GRID, "--out", "s")[0] == 0 and len(fake.trained) == 4
    code, _, err = regard_("sweep", "lm", *TINY, "--grid", "train.lr=1e-3,1e-1", GRID[1], "--out", "s")
    assert code == 2 and "train.lr=1e-3,1e-2" in err and "train.lr=1e-3,1e-1" in err and "regard sweep s" in err, err
    code, _, err = regard_("sweep", "s", "--seed", 3)
    assert code == 2 and "was started with" in err
    code, _, err = regard_("sweep", "s", "--trials", 9)
    assert code == 2 and "is a grid" in err
    Path("other").mkdir()
    code, _, err = regard_("sweep", "other", "--grid", *GRID)
    assert code == 2 and "no recipe 'other'" in err
    Run.create("r", {"task": "lm"})
    code, _, err = regard_("sweep", "lm", *TINY, "--grid", *GRID, "--out", "r")
    assert code == 2 and "holds results already" in err


@pytest.mark.parametrize("place", ["_write_config", "Study", "create", "set_user_attr", "enqueue_trial"])
def test_killed_while_it_begins_the_same_command_goes_on(place, monkeypatch):
    """Whatever was being made when it was killed: the folder, its config, the study, its settings, its trials."""
    import optuna

    owner = {"create": Study, "set_user_attr": optuna.Study, "enqueue_trial": optuna.Study}.get(place, sweeps)
    real = getattr(owner, place)
    calls = []

    def killed(*given, **named):
        calls.append(given)
        if len(calls) == (2 if place == "enqueue_trial" else 1):
            os._exit(9)
        return real(*given, **named)

    child = os.fork()
    if not child:
        setattr(owner, place, killed)
        Sweep.create("s", grid())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9 and Path("s").is_dir()
    fake = Fake(monkeypatch, lambda recipe: recipe.train.lr)
    began = time.monotonic()
    found = Sweep.create("s", grid()).run()
    assert found["counts"] == {"finished": 4} and len(fake.trained) == 4
    assert time.monotonic() - began < 20  # nobody else is waited for


def test_a_folder_that_an_earlier_version_left_when_killed_is_gone_on_with(monkeypatch):
    Fake(monkeypatch, lambda recipe: recipe.train.lr)
    Study("sqlite:///t.db", "s", Path("s"), None)
    Path("s").mkdir()
    Path("t.db").rename("s/trials.db")  # a study, and no sweep.toml
    assert Sweep.create("s", grid()).run()["counts"] == {"finished": 4}


def test_a_sweep_that_cannot_begin_leaves_no_folder():
    with pytest.raises(SweepError, match="--storage"):
        Sweep.create("sweeps/s", grid(), "nonsense")
    assert not Path("sweeps").exists()


def test_clocks_of_other_machines_do_not_matter(here, monkeypatch):
    """One whose clock is a day behind, or ahead, is alive as long as it writes anything new."""
    from regard.sweep import study

    url = f"sqlite:///{here / 'shared.db'}"
    first = Sweep.create("one/s", grid(), url)
    second = Sweep.create("two/s", grid(), url)
    now = [0.0]
    skew = [-86400.0]
    clocks = {"time": lambda: time.time() + skew[0], "monotonic": lambda: now[0]}
    monkeypatch.setattr(study, "time", SimpleNamespace(**vars(time) | clocks))
    for _ in range(2):  # also of one that was silent before
        with first.study.claim_trial(first.config.parameters, 0) as held:
            for _ in range(9):
                assert second.study.waiting() == 3, "a trial that is alive was taken for dead"
                now[0] += 0.9 * study.TIMEOUT
                first.study._give_sign(held.trial)
        assert second.study.waiting() == 3
        now[0] += 1.1 * study.TIMEOUT
        assert second.study.waiting() == 4, "a trial that was silent was not taken for dead"
        skew[0] = 86400.0


def test_a_recipe_that_was_edited_meanwhile_does_not_change_a_sweep(monkeypatch):
    Path("mine.toml").write_text("task = 'lm'\n[train]\nsteps = 3\n")
    sweep = Sweep.create("s", asked("mine.toml", ["data.text=a.txt"], grid=["train.lr=1e-3,1e-2"]))
    Path("mine.toml").write_text("task = 'lm'\n[train]\nsteps = 9\n")
    Fake(monkeypatch, lambda recipe: float(recipe.train.steps))
    assert {row["value"] for row in sweep.run()["trials"]} == {3.5}


def test_a_search_draws_by_the_seed_and_what_was_found_and_by_nothing_else(monkeypatch):
    """Stopped at any trial, it goes on to draw what it would have drawn; another seed draws otherwise."""
    Fake(monkeypatch, lambda recipe: abs(math.log10(recipe.train.lr) + 2) + recipe.model["dropout"])
    whole = Sweep.create("whole", search())
    whole.run()
    assert len({row["train.lr"] for row in settings(whole)}) == 12  # the last two after a look at the others
    assert {row["model.dropout"] for row in settings(whole)} <= {0.1, 0.2, 0.3}
    stopped = Sweep.create("stopped", search(trials=7))
    stopped.run()
    more = Sweep.create("stopped", search())  # the same with more trials goes further
    more.run()
    assert settings(more) == settings(whole)
    other = Sweep.create("other", search(trials=1, seed=1))
    other.run()
    assert settings(other) != settings(whole)[:1]


def test_a_search_finds_what_chance_does_not(monkeypatch):
    """The least is at 1e-2; half of what chance draws is more than 1.5 decades away."""
    Fake(monkeypatch, lambda recipe: abs(math.log10(recipe.train.lr) + 2))
    sweep = Sweep.create("s", search("train.lr=1e-6..1:log", trials=25))
    sweep.run()
    far = [abs(math.log10(row["train.lr"]) + 2) for row in settings(sweep)]
    assert sorted(far[-15:])[7] < 0.75


class Stops(Shown):
    """An experiment's eye on one trial, at whose step something happens."""

    def __init__(self, trial, watch):
        super().__init__(progress=lambda name: watch if name == f"trial-{trial:03d}" else Progress())


def test_ctrl_c_saves_and_going_on_ends_with_the_same_bits():
    whole = Sweep.create("whole", grid())
    whole.run()
    stopped = Sweep.create("s", grid())
    with pytest.raises(Interrupted, match="Go on with: regard sweep s"):
        stopped.run(shown=Stops(1, StopAt(3, signal.SIGINT)))
    found = Sweep.open("s").results()
    assert found["counts"] == {"finished": 1, "waiting": 3} and Path("s/report.html").is_file()
    before = {path: path.stat().st_mtime_ns for path in Path("s/trial-000").rglob("*")}
    began = Run("s/trial-001").metrics()
    assert began[-1]["step"] == 3
    Sweep.open("s").run()
    assert {path: path.stat().st_mtime_ns for path in Path("s/trial-000").rglob("*")} == before
    assert Run("s/trial-001").metrics()[: len(began)] == began  # it went on, and did not begin again
    for n in range(4):
        assert bits(Path(f"s/trial-00{n}")) == bits(Path(f"whole/trial-00{n}"))


def test_ctrl_c_on_the_command_line(regard_, monkeypatch):
    from regard.cli import sweep as command

    monkeypatch.setattr(command, "_RareLines", lambda name, write: StopAt(1, signal.SIGINT))
    code, _, err = regard_("sweep", "lm", *TINY, "--grid", *GRID, "--out", "s")
    assert code == 130 and err.endswith("stopped; what was done is saved. Go on with: regard sweep s\n")


def test_a_trial_whose_process_died_waits_again_and_goes_on_from_its_checkpoint():
    sweep = Sweep.create("s", grid())
    with pytest.raises(Crash):
        sweep.run(shown=Stops(1, StopAt(3)))
    assert [row["state"] for row in sweep.results()["trials"]] == ["finished", "running", "waiting", "waiting"]
    began = [row for row in Run("s/trial-001").metrics() if row["step"] < 3]
    found = Sweep.open("s").run()
    assert [row["state"] for row in found["trials"]] == ["finished"] * 4
    assert Run("s/trial-001").metrics()[: len(began)] == began


def test_a_trial_that_kills_its_process_each_time_fails_in_the_end():
    sweep = Sweep.create("s", asked("lm", [*TINY[:-1], "train.saving.every=0"], grid=["train.lr=1e-3,1e-2"]))
    for _ in range(MAX_DEATHS):
        with pytest.raises(Crash):
            Sweep.open("s").run(shown=Stops(0, StopAt(1)))
    rows = sweep.run(shown=Stops(0, StopAt(1)))["trials"]
    assert [row["state"] for row in rows] == ["failed", "finished"] and "enough memory" in rows[0]["error"]


def test_two_do_not_take_the_same_trial():
    sweep, other = Sweep.create("s", grid()), Sweep.open("s")
    parameters = sweep.config.parameters
    with sweep.study.claim_trial(parameters, 0) as first, other.study.claim_trial(parameters, 0) as second:
        assert (first.number, second.number) == (0, 1)
        assert other.study.waiting() == 2  # the first is not taken for dead
        with Sweep.open("s").study.claim_trial(parameters, 0) as third:
            assert third.number == 2
    assert other.study.waiting() == 4  # nothing was said of any of them: their holders have gone


def test_a_trial_that_is_locked_is_not_taken_although_it_waits():
    """SQLite reads before it writes: two may both find a trial waiting, and only one has the lock."""
    sweep, other = Sweep.create("s", grid()), Sweep.open("s")
    with other.study.lock("trial-000"), sweep.study.claim_trial(sweep.config.parameters, 0) as taken:
        assert taken.number == 1


def test_those_who_take_at_the_same_time_take_different_trials(monkeypatch):
    fake = Fake(monkeypatch, lambda recipe: recipe.train.lr)
    Sweep.create("s", grid("train.lr=1,2,3,4", "train.seed=1,2,3"))
    each = [threading.Thread(target=Sweep.open("s").work, args=("cpu",)) for _ in range(3)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()
    assert sorted(fake.trained) == [f"trial-{n:03d}" for n in range(12)]
    assert Sweep.open("s").results()["counts"] == {"finished": 12}


def test_a_lock_ends_with_its_process(here):
    """However it ends: a killed one cannot clean up."""
    code = (
        "import fcntl, sys; held = open('.locks/x', 'w'); fcntl.flock(held, fcntl.LOCK_EX)\n"
        "print(flush=True); sys.stdin.read()"
    )
    study = Study("sqlite:///t.db", "s", here, None)
    with study.lock("x") as ours:
        assert ours
        with study.lock("x") as also, study.lock("y") as another:
            assert not also and another
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline()
        with study.lock("x") as ours:
            assert not ours
        other.kill()
        other.wait()
    with study.lock("x") as ours:
        assert ours


def test_machines_that_share_a_storage_share_the_trials(here, monkeypatch):
    """Another folder, the same study: each trial is trained once, and one that is not heard of is taken over."""
    from regard.sweep import study

    fake = Fake(monkeypatch, lambda recipe: recipe.train.lr)
    monkeypatch.setattr(study, "HEARTBEAT", 0.2)
    url = f"sqlite:///{here / 'shared.db'}"
    first = Sweep.create("one/s", grid(), url)
    second = Sweep.create("two/s", grid(), url)
    with first.study.claim_trial(first.config.parameters, 0) as held:
        assert held.number == 0
        found = second.run()
        assert [row["state"] for row in found["trials"]] == ["running"] + ["finished"] * 3
    assert second.study.waiting() == 0  # the first may be at it still, as far as the second can know
    monkeypatch.setattr(study, "TIMEOUT", 0.2)
    assert [row["state"] for row in second.run()["trials"]] == ["finished"] * 4
    assert fake.trained == ["trial-001", "trial-002", "trial-003", "trial-000"]
    assert not list(Path("one/s").glob("trial-*"))
    assert first.run()["counts"] == {"finished": 4} and len(fake.trained) == 4
    with pytest.raises(SweepError, match=r"is another sweep: grid was .* and is now"):
        Sweep.create("three/s", grid("train.lr=1,2"), url)
    assert not Path("three/s/sweep.toml").exists()


@pytest.mark.parametrize("url", ["redis://localhost", "nonsense", "sqlite:////nowhere/t.db", "journal://x"])
def test_a_storage_that_cannot_be_is_refused(url, regard_):
    code, _, err = regard_("sweep", "lm", *TINY, "--grid", *GRID, "--out", "s", "--storage", url)
    assert code == 2 and "--storage" in err and not Path("s/sweep.toml").exists(), err


def test_a_password_is_not_printed(regard_):
    code, _, err = regard_("sweep", "lm", *TINY, "--grid", *GRID, "--storage", "postgresql://me:secret@nowhere/x")
    assert code == 2 and "nowhere/x" in err and "secret" not in err


def test_nothing_in_the_study_is_pickled(monkeypatch):
    Fake(monkeypatch, lambda recipe: recipe.train.lr)
    Sweep.create("s", search(trials=3)).run()
    with sqlite3.connect("s/trials.db") as opened:
        names = [name for (name,) in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        cells = [x for name in names for row in opened.execute(f"SELECT * FROM {name}") for x in row]
    opened.close()
    assert cells and not any(isinstance(x, bytes) for x in cells)


def started(*words):
    """The command in a process of its own group, as a terminal starts it: Ctrl-C reaches it."""

    def heed() -> None:
        # A shell's background jobs ignore Ctrl-C, and so would all that tests in one of them start.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    program = [sys.executable, "-m", "regard", "sweep", *words]
    return subprocess.Popen(program, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=heed)


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)


def ended(folder):
    return sorted(path.parent.parent.name for path in Path(folder).glob("trial-*/model/config.json"))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_any_moment_it_goes_on_and_ends_as_if_it_had_not_been(workers):
    """SIGKILL for the whole group, twice, at moments drawn by chance: finished trials stay as they are."""
    whole = Sweep.create("whole", grid())
    whole.run()
    draw = random.Random(workers)
    words = ["lm", *TINY, "--grid", *GRID, "--out", "s", "--workers", str(workers)]
    kept = {}
    for n in range(2):
        with started(*words) as process:
            wait_for(lambda wanted=n: len(ended("s")) > wanted)
            time.sleep(draw.uniform(0, 0.3))
            os.killpg(process.pid, signal.SIGKILL)
        wait_for(lambda: not Sweep.open("s").study.at and _alone("s"))
        done = [row["folder"] for row in Sweep.open("s").results()["trials"] if row["state"] == "finished"]
        now = {p: p.stat().st_mtime_ns for name in done for p in Path("s", name).rglob("*")}
        assert kept.items() <= now.items()
        kept = now
    with started(*words) as process:
        _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    found = Sweep.open("s").results()
    assert found["counts"] == {"finished": 4} and len(found["trials"]) == 4
    assert {p: p.stat().st_mtime_ns for p in kept} == kept
    assert [row["value"] for row in found["trials"]] == [row["value"] for row in whole.results()["trials"]]
    for n in range(4):
        assert bits(Path(f"s/trial-00{n}")) == bits(Path(f"whole/trial-00{n}"))


def _alone(folder):
    """Whether no process holds a trial of a sweep any more."""
    study = Sweep.open(folder).study
    free = []
    for n in range(4):
        with study.lock(f"trial-{n:03d}") as ours:
            free.append(ours)
    return all(free)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_workers_share_the_trials_and_stop_together():
    """Ctrl-C for the one that was started: its workers save, and exit; nothing is left behind."""
    words = ["lm", *TINY, "train.steps=4000", "--grid", *GRID, "--out", "s", "--workers", "2"]
    words.remove("train.steps=4")
    with started(*words) as process:
        wait_for(lambda: len(list(Path("s").glob("trial-*/checkpoints/step-*/manifest.json"))) > 1)
        wait_for(lambda: all(Path(f"s/trial-00{n}/metrics.jsonl").is_file() for n in (0, 1)))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.endswith(b"Go on with: regard sweep s\n"), err
    found = Sweep.open("s").results()
    assert found["counts"] == {"waiting": 4} and _alone("s")
    assert all(Run(f"s/trial-00{n}").metrics() for n in (0, 1)) and not Path("s/trial-002").exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_workers_train_each_trial_once():
    with started("lm", *TINY, "--grid", *GRID, "--out", "s", "--workers", "2") as process:
        _, err = process.communicate(timeout=100)
    assert process.returncode == 0 and err.count(b"dev/loss") == 4, err
    assert ended("s") == [f"trial-00{n}" for n in range(4)]
    for n in range(4):
        steps = [row["step"] for row in Run(f"s/trial-00{n}").metrics() if "lr" in row]
        assert steps == sorted(set(steps)) and steps[-1] == 4


def results(n=3, **changes):
    rows = [
        {"trial": k, "folder": f"trial-{k:03d}", "state": "finished", "value": 2.0 + k, "step": 9, "seconds": 1.0}
        | {"settings": {"train.lr": 10.0**-k, "model.mechanism": "<elu>"}, "error": None, "host": "a"}
        for k in range(n)
    ]
    made = {"recipe": "lm", "metric": "dev/loss", "maximize": False, "trials": rows, "importance": {}, "best": 0}
    made["parameters"] = [
        {"key": "train.lr", "values": [], "log": True},
        {"key": "model.mechanism", "values": ["softmax", "<elu>"], "log": False},
    ]
    made |= {"counts": {"finished": n}, "command": "regard train lm", "again": "regard sweep s"}
    return made | {"curves": {k: [(1, 3.0 + k), (9, 2.0 + k)] for k in range(n)}} | changes


def test_the_page_shows_what_there_is_and_escapes_it():
    page = sweep_page(results()).html()
    assert "<elu>" not in page and "&lt;elu&gt;" in page and "regard train lm" in page
    assert "Best by dev/loss (lower is better): <strong>trial-000</strong> with <strong>2</strong>" in page
    best_first = re.findall(r'<th scope="row"><span[^>]*>(trial-\d+)', page)
    assert best_first == ["trial-000", "trial-001", "trial-002"]
    turned = sweep_page(results(maximize=True, best=2)).html()
    assert (
        re.findall(r'<th scope="row"><span[^>]*>(trial-\d+)', turned) == best_first[::-1]
        and "higher is better" in turned
    )
    assert (
        "at least eight finished trials" in page
        and "PED-ANOVA" in sweep_page(results(importance={"train.lr": 1.0})).html()
    )


def test_trials_that_end_alike_have_no_best_and_one_mark(capsys):
    """An accuracy of 0 in all trials has no axis from -0.4 to 0.4."""
    alike = results(metric="dev/accuracy", maximize=True)
    for trial in alike["trials"]:
        trial |= {"value": 0.0, "train": 0.0}
    page = sweep_page(alike).html()
    assert "None is best by dev/accuracy: each has <strong>0</strong>" in page and ">-0." not in page
    assert 'class="best"' not in page and "The best trial<" not in page and "which all end alike" in page
    alike["curves"] = {n: [(1, 0.0), (9, 0.0)] for n in range(3)}
    page = sweep_page(alike).html()
    assert ">-0." not in page and "best trial" not in page and page.count("first trial") == 2
    _print_results(alike, Path("s"))
    assert "None is best by dev/accuracy; one of them: regard train lm" in capsys.readouterr().out
    alike["trials"][0]["value"] = -1.0
    _print_results(alike, Path("s"))
    assert "Best: regard train lm" in capsys.readouterr().out
    page = sweep_page(alike).html()
    assert "<strong>trial-001</strong> with <strong>0</strong>, as 1 other." in page
    assert page.count('class="best"') == 2 and "The best trial<" in page
    assert sweep_page(results()).html().count('class="best"') == 1


def test_the_pictures_have_a_line_a_trial_the_best_in_its_own_colour():
    settings = [Dimension("train.lr", log=True), Dimension("model.mechanism", ["softmax", "elu"])]
    tried = [TrialPoint([10.0**-n, "elu" if n % 2 else "softmax"], None if n == 3 else 10.0**n) for n in range(6)]
    svg = parallel_coordinates(settings, tried, "dev/loss", maximize=False)
    lines = re.findall(r'<path d="[^"]*C[^"]*"[^>]*style="([^"]*)"', svg)
    assert len(lines) == 6 and sum("stroke-dasharray" in line for line in lines) == 1
    assert sum("--series-1" in line for line in lines) == 1 and "The best has 1 with train.lr 1" in svg
    best = parallel_coordinates(settings, tried, "dev/loss", maximize=True)
    assert "The best has 1e+05 with" in best
    for picture in (
        slice_plots(settings, tried, "dev/loss", False),
        trial_curves([[(1, 9e3), (2, 1.0)]], [(1, 2.0)], [], "x", "n", False),
    ):
        assert "mathdefault" not in picture and "<svg" in picture


def test_lines_cross_each_axis_at_their_values():
    """The ends of a line's pieces stand where the marks of its values do."""
    settings = [Dimension("a", ["x", "y"]), Dimension("b", ["p", "q", "r"]), Dimension("c", log=True)]
    values = [("x", "p", 1.0), ("x", "p", 10.0), ("y", "r", 100.0), ("x", "q", 1.0)]
    tried = [TrialPoint(row, float(n)) for n, row in enumerate(values)]
    svg = parallel_coordinates(settings, tried, "loss", maximize=False)
    drawn = [re.findall(r"-?[\d.]+", d) for d in re.findall(r'<path d="([^"]*C[^"]*)"', svg)]
    lines = [[float(points[n]) for n in (1, 7, 13, 19)] for points in drawn][::-1]  # the best is drawn last
    marks = {text: float(y) for y, text in re.findall(r'<text[^>]* y="([\d.]+)"[^>]*>([xypqr])</text>', svg)}
    for line, row in zip(lines, values, strict=True):
        for height, value in zip(line, row[:2], strict=False):
            assert abs(height - marks[value]) < 5, (value, height, marks)  # text stands on its line, not in its middle
    assert lines[0][:2] == lines[1][:2] and lines[0][2] == lines[3][2] != lines[1][2]
    middle = AxisScale.for_dimension(Dimension("a", ["x", "y"]), [])
    assert [middle.height(x) for x in ("x", "y")] == [0.25, 0.75]
    falling = AxisScale.over_range([1.0, 3.0], log=False, falling=True)
    assert (falling.height(1.0), falling.height(2.0), falling.height(3.0)) == (1.0, 0.5, 0.0)
    assert AxisScale.over_range([1e-4, 1e-2], log=True).height(1e-3) == pytest.approx(0.5)


def test_the_page_of_a_sweep_without_a_good_end():
    failed = results(1)["trials"][0] | {"state": "failed", "value": None, "error": "loss is nan"}
    page = sweep_page(results(trials=[failed], counts={"failed": 1}, best=None, command=None)).html()
    assert "No trial has finished yet" in page and "loss is nan" in page
    nothing = sweep_page(results(0, counts={"waiting": 4}, best=None, command=None)).html()
    assert "Waiting: 4" in nothing


def test_importance_knows_which_setting_matters(monkeypatch):
    """Loss depends on the rate alone; a sweep that is too small says nothing."""
    Fake(monkeypatch, lambda recipe: recipe.train.lr)
    sweep = Sweep.create("s", grid("train.lr=1,2,3,4", "train.seed=1,2,3"))
    found = sweep.run()["importance"]
    assert (
        list(found) == ["train.lr", "train.seed"]
        and found["train.lr"] > 0.9
        and sum(found.values()) == pytest.approx(1)
    )
    small = Sweep.create("t", grid("train.lr=1,2", "train.seed=1,2"))
    assert small.run()["importance"] == {}


def test_errors_are_of_the_family():
    assert issubclass(SweepError, RegardError) and issubclass(OptionError, RegardError)
    with pytest.raises(SweepError, match="is no sweep"):
        Sweep.open("nowhere")
    Path("s").mkdir()
    Path("s/sweep.toml").write_text("[sweep]\nrecip = 'lm'\n[here]\n")
    with pytest.raises(SweepError, match=r"s/sweep\.toml cannot be read: no key 'recip'"):
        Sweep.open("s")
