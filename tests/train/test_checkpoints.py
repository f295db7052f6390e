"""Checkpoints and going on: bit by bit what an uninterrupted run gives, whatever stops it and whatever is damaged."""

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from training import CTRL_C, TINY, Crash, StopAt, Toy, answering, bits, gpt, pretraining, trainer

import regard
from regard.train import Interrupted, Run, RunError, checkpoint, stage
from regard.train.checkpoint import CheckpointError
from regard.train.optimizer import OPTIMIZERS

HARD = [  # all that is random or has a state of its own
    "model.dropout=0.1",
    "model.attention.dropout=0.1",
    "train.micro=4",
    "train.saving.every=3",
    "train.saving.keep=2",
    "train.evaluation.every=2",
]


def names(folder):
    return sorted((p.name for p in (folder / "checkpoints").iterdir()), key=lambda n: int(re.sub(r"\D", "", n)))


# Going on


@pytest.mark.parametrize("name", ["reading", "answering"])
@pytest.mark.parametrize("stop", [StopAt(7), StopAt(7, CTRL_C)], ids=["killed", "interrupted"])
def test_going_on_gives_the_same_bits(name, stop, tmp_path):
    more = ["train.evaluation.patience=4", "data.mix=0.5"]
    recipe = pretraining(*HARD) if name == "reading" else answering(*HARD, *more)
    whole = stage.train(recipe, tmp_path / "a")
    with pytest.raises((Crash, Interrupted)):
        stage.train(recipe, tmp_path / "b", progress=stop)
    assert not Run(tmp_path / "b").finished
    resumed = stage.resume(tmp_path / "b")
    assert bits(resumed) == bits(whole)
    assert len(bits(whole)) > 30 and len(whole.metrics()) >= 12


def test_one_at_a_time_goes_on(tmp_path):
    with pytest.raises(Crash):
        stage.train(pretraining(*HARD), tmp_path, progress=StopAt(7))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with Run.open(tmp_path).locked(), pytest.raises(RunError, match="another process is writing into"):
        stage.resume(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert stage.resume(tmp_path).finished


def test_a_file_system_without_locks_keeps_nobody_out(monkeypatch, tmp_path):
    def absent(file, how):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", absent)
    assert stage.train(pretraining("train.steps=2"), tmp_path).finished


@pytest.mark.parametrize("at", range(1, 7))
def test_going_on_from_any_step(at, tmp_path):
    measured = [{"m": x} for x in (1.0, 3.0, 2.0, 5.0)]

    def work(folder, progress=None, skip=0):
        task = Toy(measured=measured, metric="m")
        task.evaluations = skip
        settings = {"saving": {"every": 3, "keep": 1}, "evaluation": {"every": 2, "patience": 1}}
        return trainer(folder, task, gpt(dropout=0.2), progress, **settings)

    work(tmp_path / "a").fit()  # ends at 6, where 2 is not better than 3
    with pytest.raises(Crash):
        work(tmp_path / "b", StopAt(at)).fit()
    step = checkpoint.newest(tmp_path / "b/checkpoints") or 0
    again = work(tmp_path / "b", skip=step // 2)
    assert again.resume() == step
    again.fit()
    assert bits(tmp_path / "b") == bits(tmp_path / "a")


def test_a_line_of_metrics_that_a_stop_divides(tmp_path):
    settings = {"steps": 400, "saving": {"every": 35}, "evaluation": {"every": 0}}  # a line every second step
    trainer(tmp_path / "a", **settings).fit()
    with pytest.raises(Crash):
        trainer(tmp_path / "b", progress=StopAt(36), **settings).fit()
    again = trainer(tmp_path / "b", **settings)
    assert again.resume() == 35 and again.state.sums[0] > 0
    again.fit()
    assert bits(tmp_path / "b") == bits(tmp_path / "a")


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimiser_goes_on_with_its_state(name, tmp_path):
    options = {"momentum": 0.9, "nesterov": True} if name == "sgd" else {}
    chosen = {"optimizer": {"name": name, "options": options}, "saving": {"every": 4}}
    trainer(tmp_path / "a", model=gpt(0.1), **chosen).fit()
    with pytest.raises(Interrupted):
        trainer(tmp_path / "b", model=gpt(0.1), progress=StopAt(3, CTRL_C), **chosen).fit()
    again = trainer(tmp_path / "b", model=gpt(0.1), **chosen)
    assert again.resume() == 3
    again.fit()
    shutil.rmtree(tmp_path / "b/checkpoints/step-3", ignore_errors=True)  # only the interrupted one has it
    shutil.rmtree(tmp_path / "a/checkpoints/step-4", ignore_errors=True)
    shutil.rmtree(tmp_path / "b/checkpoints/step-4", ignore_errors=True)
    assert bits(tmp_path / "b") == bits(tmp_path / "a")


@pytest.mark.parametrize("place", ["write", "best", "prune"])
@pytest.mark.parametrize("at", [2, 4])
def test_a_crash_between_a_checkpoint_and_its_best_mark(place, at, tmp_path, monkeypatch):
    """The file `best` and the checkpoints are written one after the other: no crash in between loses the best."""
    measured = [{"m": x} for x in (1.0, 3.0, 2.0, 2.0)]

    def work(folder, skip=0):
        task = Toy(measured=measured, metric="m")
        task.evaluations = skip
        return trainer(folder, task, evaluation={"every": 2}, saving={"every": 1, "keep": 1})

    work(tmp_path / "a").fit()
    broken = work(tmp_path / "b")
    owner, name = {
        "write": (checkpoint, "write"),
        "best": (Run, "_write"),
        "prune": (checkpoint, "prune"),
    }[place]
    real = getattr(owner, name)

    def crash(*given):
        if broken.state.step == at and (place != "best" or given[1] == "best"):
            raise Crash
        return real(*given)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(owner, name, crash)
        broken.fit()
    step = checkpoint.newest(tmp_path / "b/checkpoints")
    again = work(tmp_path / "b", skip=step // 2)
    again.resume()
    assert again.run.best is None or (again.run.checkpoints / f"step-{again.run.best}").is_dir()
    again.fit()
    assert bits(tmp_path / "b") == bits(tmp_path / "a")
    assert Run(tmp_path / "b").best == 4


def test_killed_before_the_first_checkpoint(tmp_path):
    recipe = pretraining(*HARD)
    whole = stage.train(recipe, tmp_path / "a")
    with pytest.raises(Crash):
        stage.train(recipe, tmp_path / "b", progress=StopAt(1))
    assert not (tmp_path / "b/checkpoints").exists() and Run(tmp_path / "b").metrics()
    assert bits(stage.resume(tmp_path / "b")) == bits(whole)


def test_killed_before_the_model_was_written(tmp_path):
    whole = bits(stage.train(pretraining(*HARD), tmp_path / "a"))
    shutil.rmtree(tmp_path / "a/model")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "a/checkpoints").rglob("*")}
    assert bits(stage.resume(tmp_path / "a")) == whole
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "a/checkpoints").rglob("*")}


def test_a_finished_run_is_left_as_it_is(tmp_path):
    run = stage.train(pretraining(), tmp_path / "a")
    before = {p: p.stat().st_mtime_ns for p in run.path.rglob("*")}
    assert stage.resume(run.path).path == run.path
    assert before == {p: p.stat().st_mtime_ns for p in run.path.rglob("*")}


def test_going_on_from_another_folder_with_own_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("docs.txt").write_text("abc def\nghi jkl mno\n" * 5)
    recipe = pretraining("data.documents=docs.txt", *HARD)
    whole = stage.train(recipe, "a")
    with pytest.raises(Crash):
        stage.train(recipe, "b", progress=StopAt(5))
    monkeypatch.chdir("/")
    assert bits(stage.resume(tmp_path / "b")) == bits(tmp_path / whole.path)


def test_a_line_cut_off_in_the_metrics(tmp_path):
    whole = stage.train(pretraining(*HARD), tmp_path / "a")
    with pytest.raises(Crash):
        stage.train(pretraining(*HARD), tmp_path / "b", progress=StopAt(7))
    with (tmp_path / "b/metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    assert bits(stage.resume(tmp_path / "b")) == bits(whole)
    with (tmp_path / "b/metrics.jsonl").open("a") as file:
        file.write("broken\n")
    with pytest.raises(RunError, match=r"metrics.jsonl, line \d+"):
        Run(tmp_path / "b").metrics()


def test_no_run_to_go_on_with(tmp_path):
    with pytest.raises(RunError, match=r"is no run: expected a folder with config\.toml"):
        stage.resume(tmp_path)
    (tmp_path / "config.toml").write_text("[broken")
    with pytest.raises(RunError, match=r"config\.toml is damaged or no TOML"):
        stage.resume(tmp_path)


# Real processes

REPEATEDLY = """
import os, random, signal, sys, time, warnings
import torch
torch.set_num_threads(1)
from pathlib import Path
from regard.train import stage
folder, dice, seen, kills = Path(sys.argv[1]), random.Random(0), 0, 0
while True:
    child = os.fork()
    if not child:
        warnings.simplefilter("error")
        stage.resume(folder)
        os._exit(0)
    wanted = dice.choice(["writing", "any"])
    began, wait = time.monotonic(), dice.uniform(0.02, 0.25)
    while not os.waitpid(child, os.WNOHANG)[0]:
        writing = any(folder.glob("checkpoints/.step-*"))
        if kills < 12 and (writing if wanted == "writing" else time.monotonic() - began > wait):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            kills, seen = kills + 1, seen + any(folder.glob("checkpoints/.step-*"))
            break
    else:
        break
print(kills, seen)
"""


def test_killed_again_and_again_also_while_writing(tmp_path):
    recipe = answering(*HARD, "train.saving.every=1", "train.steps=20", "train.evaluation.patience=9")
    whole = stage.train(recipe, tmp_path / "a")
    with pytest.raises(Crash):
        stage.train(recipe, tmp_path / "b", progress=StopAt(1))
    done = subprocess.run(
        [sys.executable, "-c", REPEATEDLY, tmp_path / "b"], capture_output=True, text=True, env=_env(), timeout=100
    )
    assert done.returncode == 0, done.stderr
    kills, while_writing = map(int, done.stdout.split())
    assert kills >= 5 and while_writing >= 2, done.stdout
    assert bits(tmp_path / "b") == bits(whole)
    assert not list(tmp_path.glob("b/checkpoints/.*"))


def _env():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _command(*arguments):
    return [sys.executable, "-m", "regard", *map(str, arguments)]


def test_control_c_on_the_command_line(tmp_path):
    changes = [*TINY, *HARD, "train.steps=150", "train.saving.every=20", "train.evaluation.every=50"]
    whole = stage.train(pretraining(*changes), tmp_path / "a")
    started = subprocess.Popen(
        _command("train", "knowledge/pretrain", *changes, "--out", tmp_path / "b"),
        stderr=subprocess.PIPE,
        text=True,
        env=_env(),
    )
    metrics = tmp_path / "b/metrics.jsonl"
    while started.poll() is None and not (metrics.is_file() and metrics.stat().st_size > 500):
        time.sleep(0.01)
    with pytest.raises(RunError, match="another process is writing into"):
        stage.resume(tmp_path / "b")
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 130, said
    found = re.search(r"stopped at step (\d+) of 150.*regard train --resume (\S+)", said)
    assert found and found[2] == str(tmp_path / "b")
    step = int(found[1])
    assert checkpoint.newest(tmp_path / "b/checkpoints") == step and step < 150
    stage.resume(found[2])
    assert bits(tmp_path / "b") == bits(whole)


# Damage


def _three(folder):
    """A run with the checkpoints of steps 4 and 6, stopped at 7."""
    with pytest.raises(Crash):
        trainer(folder, progress=StopAt(7), saving={"every": 2, "keep": 2}).fit()
    assert names(folder) == ["step-4", "step-6"]
    return folder / "checkpoints"


def truncated(place):
    path = place / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    return path


def without_manifest(place):
    (place / "manifest.json").unlink()
    return place / "manifest.json"


def flipped(place):
    path = place / "optimizer.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    return path


def emptied(place):
    shutil.rmtree(place)
    place.mkdir()
    return place / "manifest.json"


def without_state(place):
    (place / "state.json").unlink()
    return place / "state.json"


def hollow(place):
    (place / "manifest.json").write_text("{}")
    return place / "manifest.json"


def broken_manifest(place):
    (place / "manifest.json").write_text("[1")
    return place / "manifest.json"


DAMAGES = [truncated, without_manifest, flipped, emptied, without_state, hollow, broken_manifest]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_a_damaged_checkpoint_is_passed_over(damage, tmp_path):
    trainer(tmp_path / "a", saving={"every": 2, "keep": 2}).fit()
    folder = _three(tmp_path / "b")
    path = damage(folder / "step-6")
    again = trainer(tmp_path / "b", saving={"every": 2, "keep": 2})
    with pytest.warns(UserWarning, match=f"checkpoint passed over: .*{re.escape(str(path))}"):
        assert again.resume() == 4
    assert [row["step"] for row in again.run.metrics()] == [1, 2, 3, 4]
    again.fit()
    assert bits(tmp_path / "b") == bits(tmp_path / "a")


def test_all_damaged_begins_anew(tmp_path):
    trainer(tmp_path / "a", saving={"every": 2, "keep": 2}).fit()
    folder = _three(tmp_path / "b")
    flipped(folder / "step-6")
    emptied(folder / "step-4")
    (tmp_path / "b/best").write_text("step-4\n")
    again = trainer(tmp_path / "b", saving={"every": 2, "keep": 2})
    with pytest.warns(UserWarning, match="passed over") as told:
        assert again.resume() == 0
    assert len(told) == 2 and again.run.best is None
    again.fit()
    assert bits(tmp_path / "b") == bits(tmp_path / "a")


def test_leftovers_do_no_harm_and_go(tmp_path):
    trainer(tmp_path / "a", saving={"every": 2, "keep": 2}).fit()
    folder = _three(tmp_path / "b")
    shutil.copytree(folder / "step-6", folder / ".step-8.0123abcd")
    (folder / ".step-7.feed0000").mkdir()
    (folder / "step-x").mkdir()
    again = trainer(tmp_path / "b", saving={"every": 2, "keep": 2})
    assert again.resume() == 6
    again.fit()
    (folder / "step-x").rmdir()
    assert names(tmp_path / "b") == ["step-6", "step-8"]
    assert bits(tmp_path / "b") == bits(tmp_path / "a")


def test_a_damaged_best_is_told(tmp_path):
    task = Toy(measured=[{"m": x} for x in (2.0, 1.0)], metric="m")
    work = trainer(tmp_path, task, steps=4, evaluation={"every": 2}, saving={"every": 2})
    real = task.evaluate

    def spoil(model):
        if task.evaluations:
            flipped(tmp_path / "checkpoints/step-2")
        return real(model)

    task.evaluate = spoil
    with pytest.warns(UserWarning, match=r"best checkpoint is damaged.*step-2/optimizer.safetensors"):
        work.fit()
    assert work.run.best == 4 and work.run.finished


def test_with_none_to_keep_one_stays_until_the_end_and_then_the_model_alone(tmp_path):
    trainer(tmp_path / "kept", saving={"every": 2, "keep": 1}).fit()
    with pytest.raises(Crash):
        trainer(tmp_path / "a", progress=StopAt(7), saving={"every": 2, "keep": 0}).fit()
    assert names(tmp_path / "a") == ["step-6"]
    again = trainer(tmp_path / "a", saving={"every": 2, "keep": 0})
    assert again.resume() == 6
    again.fit()
    assert not (tmp_path / "a/checkpoints").exists() and Run(tmp_path / "a").best == 8
    first, second = (regard.load(tmp_path / name).state_dict() for name in ("a", "kept"))
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_and_the_best_are_kept(keep, tmp_path):
    measured = [{"m": x} for x in (1.0, 9.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)]
    trainer(
        tmp_path,
        Toy(measured=measured, metric="m"),
        evaluation={"every": 1},
        saving={"every": 1, "keep": keep},
    ).fit()
    assert names(tmp_path) == ["step-2", *(f"step-{n}" for n in range(9 - keep, 9))]


def test_only_complete_checkpoints_count(tmp_path):
    """With one to keep and the newest damaged, a stop that saves an earlier step keeps what it saved."""
    trainer(tmp_path / "a", saving={"every": 2, "keep": 1}).fit()
    folder = _three(tmp_path / "b")
    flipped(folder / "step-6")
    again = trainer(tmp_path / "b", progress=StopAt(5, CTRL_C), saving={"every": 2, "keep": 1})
    with pytest.warns(UserWarning, match="passed over"):
        assert again.resume() == 4
    with pytest.raises(Interrupted, match="stopped at step 5 of 8; all of it is saved"):
        again.fit()
    assert checkpoint.fault(folder / "step-5") is None and names(tmp_path / "b") == ["step-5", "step-6"]
    again = trainer(tmp_path / "b", saving={"every": 2, "keep": 1})
    with pytest.warns(UserWarning, match="passed over"):
        assert again.resume() == 5
    again.fit()
    assert bits(tmp_path / "b") == bits(tmp_path / "a")


def test_nothing_is_removed_before_the_new_one_was_read_back(tmp_path, monkeypatch):
    folder = _three(tmp_path)
    again = trainer(tmp_path, saving={"every": 2, "keep": 1})
    again.resume()
    real = checkpoint.write

    def write_badly(*given):
        path = real(*given)
        flipped(path)
        return path

    monkeypatch.setattr(checkpoint, "write", write_badly)
    with pytest.raises(
        CheckpointError, match=r"not written as it should be: .*step-8/optimizer.*Earlier ones are kept"
    ):
        again.fit()
    assert names(tmp_path) == ["step-4", "step-6", "step-8"] and checkpoint.fault(folder / "step-6") is None


def test_what_is_read_back_is_read_from_disk(tmp_path, monkeypatch):
    dropped = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: dropped.append(given[-1]))
    checkpoint.write(tmp_path, 1, gpt(), {"a": torch.zeros(1)}, {})
    assert not dropped
    checkpoint.prune(tmp_path, 1, None, written=1)
    assert dropped == [os.POSIX_FADV_DONTNEED] * 5


# A full disk


def full(*given, **named):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "place, what",
    [
        ("regard.train.checkpoint.write_tensors", "step-8"),
        ("regard.models.folder.write_tensors", "step-8"),
        ("regard.storage.os.fsync", "metrics.jsonl"),
        ("regard.storage._sync_files", "step-8"),
    ],
)
def test_a_full_disk_leaves_earlier_checkpoints(place, what, tmp_path, monkeypatch):
    folder = _three(tmp_path)
    before = bits(tmp_path)
    again = trainer(tmp_path, saving={"every": 2, "keep": 2})
    again.resume()
    told = rf"cannot write .*{what}.*No space left.*as they were"
    with monkeypatch.context() as patch, pytest.raises((CheckpointError, RunError), match=told):
        patch.setattr(place, full)
        again.fit()
    assert names(tmp_path) == ["step-4", "step-6"] and all(checkpoint.fault(p) is None for p in folder.iterdir())
    assert Run(tmp_path).metrics()[-1]["step"] == 8
    assert before["metrics"] == bits(tmp_path)["metrics"][:7]
    again = trainer(tmp_path, saving={"every": 2, "keep": 2})
    assert again.resume() == 6
    again.fit()
    assert again.run.finished


def test_a_full_disk_at_the_end(tmp_path, monkeypatch):
    work = trainer(tmp_path, saving={"every": 4})
    work.fit()
    shutil.rmtree(tmp_path / "model")
    again = trainer(tmp_path, saving={"every": 4})
    again.resume()
    with monkeypatch.context() as patch, pytest.raises(RunError, match=r"model: .*No space left.*as they were"):
        patch.setattr("regard.models.folder.write_tensors", full)
        again.fit()
    assert not again.run.finished
    again.fit()
    assert again.run.finished


def test_metrics_that_cannot_be_written(tmp_path):
    work = trainer(tmp_path)
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunError, match=r"cannot write .*metrics.jsonl"):
        work.fit()


# What is in a run


def test_what_killed_processes_left_goes_at_the_next_start(tmp_path):
    with pytest.raises(Crash):
        stage.train(pretraining(*HARD), tmp_path, progress=StopAt(7))
    (tmp_path / ".metrics.jsonl.01234567.staged").write_text("half")
    (tmp_path / "checkpoints/.step-9.01234567.staged").mkdir()
    run = stage.resume(tmp_path)
    assert not [path for path in run.path.rglob("*.staged")]


def test_all_files_have_the_same_permissions(tmp_path):
    before = os.umask(0o027)
    try:
        run = stage.train(answering(*HARD), tmp_path / "run")
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in run.path.rglob("*") if path.is_file()} == {"0o640"}
    assert {oct(path.stat().st_mode & 0o777) for path in run.path.rglob("*") if path.is_dir()} == {"0o750"}


def test_a_checkpoint_says_its_version_and_a_newer_one_is_told(tmp_path):
    place = checkpoint.write(tmp_path, 3, gpt(), {"a": torch.zeros(1)}, {})
    assert json.loads((place / "state.json").read_text()) == {"format_version": 2}
    (place / "state.json").write_text('{"format_version": 3}')
    with pytest.raises(CheckpointError, match=r"state.json has format_version 3; this regard reads 1 to 2: update"):
        checkpoint.read(place)


def test_nothing_in_a_run_is_a_pickle(tmp_path):
    run = stage.train(answering(*HARD), tmp_path / "a")
    kinds = {".safetensors", ".json", ".jsonl", ".toml", ".txt", ".tsv"}
    for path in run.path.rglob("*"):
        if path.is_dir():
            continue
        assert path.suffix in kinds or path.name in ("best", ".lock"), path
        if path.suffix == ".safetensors":
            length = int.from_bytes(path.read_bytes()[:8], "little")
            json.loads(path.read_bytes()[8 : 8 + length])
        else:
            path.read_text(encoding="utf-8")
    for path in run.path.rglob("*.json"):
        json.loads(path.read_text(), parse_constant=pytest.fail)  # NaN and Infinity are no JSON


def test_a_checkpoint_is_a_model_folder(tmp_path):
    trainer(tmp_path, saving={"every": 4}).fit()
    model = regard.load(tmp_path / "checkpoints/step-4")
    assert model.tokenizer is not None
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        assert model(torch.tensor([[1, 2, 3]])).shape == (1, 3, 10)


def test_a_state_of_random_numbers_is_kept_exactly(tmp_path):
    dice = random.Random(0)
    state = {"numbers": [dice.random() * 10**e for e in range(-300, 300, 25)]}
    place = checkpoint.write(tmp_path, 3, gpt(), {"a": torch.rand(3)}, state)
    assert checkpoint.read(place).state == state and checkpoint.fault(place) is None
    assert checkpoint.write(tmp_path, 3, gpt(), {}, {}) == place and checkpoint.read(place).state == state
