"""The command line of training, as a newcomer types it: what is printed, what is written, and the exit codes."""

import json
import signal
import sys
import warnings
from pathlib import Path

import pytest
import torch

import regard
from regard.cli import app, progress
from regard.cli import train as commands
from regard.cli.progress import Bar
from regard.cli.show import console
from regard.data import write_lines
from regard.lab import EXPERIMENTS
from regard.train.progress import Progress
from regard.train.recipe import recipe_names

RUNNABLE = (
    "approximate",
    "argmax",
    "heads",
    "knowledge",
    "recall",
    "scale",
    "sentiment",
    "summarize",
    "tour",
    "two-heads",
)
TEXT = "to be, or not to be: that is the question. " * 20
SMALL = ["model.width=16", "model.layers=1", "model.attention.heads=2"]
LM = ["train", "lm", "data.text=a.txt", "data.block=16", "train.steps=4", "train.batch=4", *SMALL]
WORLD = ["data.world.people=30", "data.world.biographies=1", "data.block=128", "train.batch=16"]
KNOWLEDGE = ["run", "knowledge", *WORLD, *SMALL, "train.epochs=2"]


@pytest.fixture
def regard_(tmp_path, monkeypatch, capsys):
    """Types a command in an empty folder with a text in it; its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    Path("a.txt").write_text(TEXT, encoding="utf-8")

    def typed(*words):
        monkeypatch.setattr(sys, "argv", ["regard", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            app.main()
        return left.value.code, *capsys.readouterr()

    return typed


class Stops(Progress):
    """Presses Ctrl-C at the first thing shown."""

    pressed = False

    def show(self, step, total, values):
        if not self.pressed:
            self.pressed = True
            signal.raise_signal(signal.SIGINT)


def test_without_a_name_recipes_and_experiments_are_listed(regard_):
    code, out, _ = regard_("train")
    assert code == 0 and all(name in out for name in recipe_names())
    assert "A language model of any text: data.text=FILE" in out
    code, out, _ = regard_("train", "--json")
    assert [row["recipe"] for row in json.loads(out)] == recipe_names() and all(row["about"] for row in json.loads(out))
    code, out, _ = regard_("run", "--json")
    assert code == 0 and tuple(row["experiment"] for row in json.loads(out)) == RUNNABLE
    assert set(EXPERIMENTS) == {*RUNNABLE, "bench", "convert"}


def test_a_lab_runs_reports_again_and_is_no_training(regard_):
    code, out, _ = regard_("run", "two-heads", "draws=50", "--seed", 3, "--out", "lab")
    assert code == 0 and str(Path("lab/report.html").resolve()) in out.replace("\n", "")
    results = json.loads(Path("lab/results.json").read_text())
    assert results["config"]["draws"] == 50 and results["config"]["seed"] == 3
    first = Path("lab/report.html").read_bytes()
    code, out, _ = regard_("report", "lab", "--out", "again.html")
    assert code == 0 and Path("again.html").read_bytes() == first
    code, out, _ = regard_("runs", ".", "--json")
    (row,) = json.loads(out)
    assert code == 0 and (row["kind"], row["recipe"], row["status"]) == ("measurement", "two-heads", "finished")
    for words, told in {
        ("run", "two-heads", "--out", "lab"): "holds results already",
        ("run", "two-heads", "drawss=1"): "Did you mean 'draws'",
        ("run", "two-heads", "draws=1", "--device", "cpu"): "takes KEY=VALUE",
        ("run", "scales"): "Did you mean 'scale'",
        ("run", "bench"): "bench has a command of its own: regard bench",
    }.items():
        code, _, err = regard_(*words)
        assert code == 2 and told in err.replace("\n", " "), err


def test_train_then_every_command_that_takes_a_run(regard_):
    code, out, err = regard_(*LM, "--out", "r", "--seed", 3)
    assert code == 0 and "finished: dev/loss" in out and "step 4 of 4" in err and "tokens/s" in err
    assert "seed = 3\n" in Path("r/config.toml").read_text()
    code, out, _ = regard_("generate", "r", "to be", "--max", 8)
    want = regard.generate(regard.load("r/model"), "to be", max_tokens=8).text
    assert (code, out) == (0, want + "\n")
    assert regard_("generate", "r/checkpoints/step-4", "to be", "--max", 8)[0] == 0
    code, out, _ = regard_("check", "r", "--only", "cache", "--json")
    assert code == 0 and [v["status"] for v in json.loads(out)] == ["holds"]
    (row,) = json.loads(regard_("runs", ".", "--json")[1])
    assert (row["name"], row["status"], row["steps"]) == ("r", "finished", 4)
    assert "finished" in regard_("runs", ".")[1]
    code, out, _ = regard_("train", "--resume", "r", "--json")
    assert code == 0 and json.loads(out)["metrics"] == row["metrics"]


def test_ctrl_c_saves_says_how_to_go_on_and_resuming_ends_the_same(regard_, monkeypatch):
    regard_(*LM, "--out", "whole")
    with monkeypatch.context() as patch:
        patch.setattr(commands, "training_progress", lambda name: Stops())
        code, _, err = regard_(*LM, "--out", "r")
    assert code == 130 and err == "stopped at step 1 of 4; all of it is saved. Go on with: regard train --resume r\n"
    assert regard_("generate", "r", "to be", "--max", 2)[0] == 0  # its checkpoint serves meanwhile
    assert regard_("train", "--resume", "r")[0] == 0
    want, got = (regard.load(f"{name}/model").state_dict() for name in ("whole", "r"))
    assert all(torch.equal(want[name], got[name]) for name in want)


def test_an_experiment_stops_and_goes_on_as_an_experiment(regard_, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(progress, "training_progress", lambda name: Stops())
        code, _, err = regard_(*KNOWLEDGE, "--out", "k")
    assert code == 130 and err.endswith("Go on with: regard run --resume k\n") and "train --resume" not in err
    code, out, err = regard_("run", "--resume", "k")
    assert code == 0 and "with pretraining" in out and Path("k/report.html").is_file()
    assert "pretraining: step" in err and "tokens/s" in err
    code, out, _ = regard_("evaluate", "k", "--data", "k/data/dev.tsv", "--predictions", "said.txt", "--json")
    questions = Path("k/data/dev.tsv").read_text().splitlines()
    assert code == 0 and json.loads(out)["n"] == len(questions) == len(Path("said.txt").read_text().splitlines())
    code, out, _ = regard_("predict", "k", "--input", "k/data/test_inputs.tsv", "--out", "answers.txt")
    assert code == 0 and len(Path("answers.txt").read_text().splitlines()) == len(
        Path("k/data/test_inputs.tsv").read_text().splitlines()
    )
    code, out, err = regard_("evaluate", "k", "--data", "k/data/test_inputs.tsv")
    assert code == 0 and "no answers to compare with" in err and out == Path("answers.txt").read_text()
    assert Path("k/predictions/with-pretraining.dev.txt").read_text() == Path("said.txt").read_text()
    assert regard_("generate", "k", "Where was A born?⁇", "--max", 3)[0] == 0
    Path("k/report.html").unlink()
    assert regard_("report", "k")[0] == 0 and Path("k/report.html").is_file()
    rows = json.loads(regard_("runs", "k", "--json")[1])
    assert [row["recipe"] for row in rows if row["kind"] == "experiment"] == ["knowledge"]
    names = [row["name"] for row in rows if row["kind"] == "run"]
    assert names == ["without-pretraining", "pretraining", "with-pretraining"]


MISTAKES = {
    ("train", "lmm"): "Did you mean 'lm'?",
    ("train", "lm", "data.text=none.txt"): "none.txt cannot be read",
    ("train", "lm", "data.txt=a.txt"): "Did you mean 'text'?",
    ("train", "lm", "trian.lr=1"): "Did you mean 'train.lr'?",
    ("train", "lm", "data.text"): "section.key=value",
    ("train", "lm", "data.text=a.txt", "train.lr=fast"): "train.lr = 'fast': expected a number",
    ("train", "lm", "data.text=a.txt", "--variant", "ful"): "Did you mean 'full'?",
    ("train", "lm", "data.text=a.txt", "--out", "/proc/r"): "cannot write into /proc/r",
    ("train", "lm", "data.text=a.txt", "--device", "cuda:77"): "cuda:77",
    ("train", "lm", "data.text=a.txt", "train.init=none"): "none is no folder",
    ("train", "mine.toml"): "mine.toml cannot be read",
    ("train", "--resume", "none"): "none is no run",
    ("train", "--resume", "none", "--seed", "0"): "leave out all others",
    ("run", "knowlege"): "Did you mean 'knowledge'?",
    ("run", "knowledge", "train.lrr=1"): "Did you mean 'lr'?",
    ("run", "--resume", "none"): "none is no experiment",
    ("evaluate", "none", "--data", "none.tsv"): "none.tsv cannot be read",
    ("predict", "none", "--input", "a.txt", "--out", "b.txt"): "none is no folder",
    ("runs", "none"): "none is no folder",
    ("report", "none"): "no runs in none",
    ("generate", "none", "a"): "none is no folder",
    ("check", "."): "no config.json",
    ("world", "--out", "a.txt"): "a.txt",
    ("data", "tokens", "none.txt", "--out", "t"): "none.txt cannot be read",
    ("data", "tokens", "a.txt", "--out", "a.txt"): "expected a folder",
    ("data", "show", "name"): "Did you mean 'names'?",
}


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_line_and_exit_code_2(words, regard_):
    code, out, err = regard_(*words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and MISTAKES[words] in err
    assert [p.name for p in Path().rglob("config.toml")] == []  # nothing that would be in the way of the next try


def test_asking_a_model_that_never_learned_to_answer(regard_):
    regard_(*LM, "--out", "r")
    write_lines("q.tsv", ["Where was A born?\tElm"])
    code, _, err = regard_("evaluate", "r", "--data", "q.tsv")
    assert code == 2 and "was not trained to answer" in err


@pytest.mark.filterwarnings("default")
def test_warnings_are_one_line_without_source(regard_, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(commands, "training_progress", lambda name: Stops())
        regard_(*LM, "--out", "r")
    Path("r/checkpoints/step-1/state.json").write_text("{")
    code, _, err = regard_("train", "--resume", "r")
    assert code == 0 and err.startswith(
        "warning: checkpoint passed over: r/checkpoints/step-1/state.json does not match"
    )
    assert ".py" not in err and "step 4 of 4" in err


def test_world_and_tokens_are_written_and_described(regard_):
    code, out, _ = regard_("world", "--out", "w", "--people", 30, "--json")
    lines = json.loads(out)["lines"]
    assert code == 0 and lines == {name: Path("w", name).read_text().count("\n") for name in lines}
    code, out, _ = regard_("data", "tokens", "a.txt", "--out", "t", "--json")
    assert code == 0 and json.loads(out)["train"] + json.loads(out)["dev"] == len(TEXT)
    code, out, _ = regard_("data", "show", "corruption", "--documents", "w/documents.txt", "--n", 2, "--json")
    assert code == 0 and len(json.loads(out)) == 2
    assert regard_("train", "lm", "data.tokens=t", *LM[3:], "--out", "r")[0] == 0


def test_the_bar_has_what_was_measured_below_it_in_a_narrow_terminal():
    where = console(stderr=True)
    where.width = 80
    bar = Bar("knowledge: with pretraining", where)
    bar.show(50, 2000, {"step": 50, "lr": 0.1, "loss": 2.0, "tokens_per_second": 12345.6, "mfu": None})
    bar.show(
        50,
        2000,
        {"step": 50, "train/loss": 1.2, "dev/loss": 1.9, "dev/perplexity": 6.7, "dev/bits_per_character": 2.74},
    )
    with where.capture() as printed:
        where.print(bar.bar.get_renderable())
    first, second = printed.get().rstrip("\n").split("\n")
    assert "50/2000" in first and "left" in first and len(first) <= 80
    assert second.startswith("loss 2  12,346 tokens/s  dev/loss 1.9") and "MFU" not in second
