"""Several processes: they learn what one does, stop together, and go on in the same bits."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from one_process import assert_close, process_group, trained_weights
from safetensors.torch import load_file
from small_models import tiny
from torch import nn
from training import MODEL, SENTENCES, SUMMARIES, WORLD, Toy, bits, gpt, timeless, trainer

from regard.config import ConfigError
from regard.data.batch import Batch
from regard.train import Run, checkpoint
from regard.train.distributed import Process, _uses_all_parameters
from regard.train.graph import resolve_compile

for extra in ("matplotlib", "rouge_score", "tokenizers", "transformers"):
    pytest.importorskip(extra)

# Answers of unequal length, so that the processes have unequal shares of the targets; and no dropout.
SMALL = [*MODEL, *WORLD, "model.dropout=0", "model.attention.dropout=0", "train.optimizer=sgd", "train.lr=0.5"]
SMALL += ["train.steps=12", "train.saving.every=2", "train.evaluation.every=4"]
ALONE = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}

# Trains, or goes on with, a run; the second process gets a signal after a step, the first none.
PROGRAM = """
import os, signal, sys
from pathlib import Path
from regard.train import Interrupted, Trainer, recipe, resume, train

folder, number, at, *changes = sys.argv[1:]
step = Trainer._step

def signalled(self):
    step(self)
    if self.process.rank == 1 and self.state.step == int(at):
        signal.raise_signal(int(number))

Trainer._step = signalled
try:
    if Path(folder, "config.toml").exists():
        resume(folder)
    else:
        train(recipe.load("knowledge/scratch", changes), folder)
except Interrupted:
    os._exit(130)
os._exit(0)  # as `regard train` ends
"""


def torchrun(*command, processes=2, fails=False):
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
        *command,
    ]
    done = subprocess.run(words, capture_output=True, text=True, env=ALONE | {"OMP_NUM_THREADS": "1"}, timeout=300)
    assert fails == bool(done.returncode), done.stderr
    return done


@pytest.fixture
def program(tmp_path):
    """Runs PROGRAM in two processes, or in one."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)

    def run(folder, *changes, number=0, at=-1, processes=2):
        words = [str(path), str(folder), str(int(number)), str(at), *changes]
        if processes > 1:
            torchrun(*words, processes=processes, fails=at > 0)
        else:
            subprocess.run([sys.executable, *words], env=ALONE, check=True)
        return Run(folder)

    return run


def weights(run):
    return load_file(run.path / "model" / "model.safetensors")


def close(run, to, by):
    """Whether all weights are, relative to the largest of each; the gradient of a key's bias is rounding alone."""
    got = weights(run)
    return all((got[n] - x).abs().max() <= by * x.abs().max().clamp(min=0.01) for n, x in weights(to).items())


CHANGES = {
    "replicated": ["train.batch=5", "train.average=0.5"],
    "sharded": ["train.batch=6", "train.micro=1", "train.shard=true", "train.average=0.5"],
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_two_processes_learn_what_one_does(tmp_path, changes):
    regard = [sys.executable, "-m", "regard"]
    words = ["train", "knowledge/scratch", *SMALL, *changes]
    subprocess.run([*regard, *words, "--out", str(tmp_path / "one")], env=ALONE, check=True, capture_output=True)
    done = torchrun("-m", "regard", *words, "--out", str(tmp_path / "two"), "--json")
    assert json.loads(done.stdout)["status"] == "finished"  # one of them speaks
    assert "arning" not in done.stderr, done.stderr
    one, two = Run(tmp_path / "one"), Run(tmp_path / "two")
    assert close(two, one, 1e-6)
    assert len(one.metrics()) == 15
    for want, got in zip(one.metrics(), two.metrics(), strict=True):
        assert timeless(got) == pytest.approx(timeless(want), rel=1e-5), want["step"]


def test_the_folder_is_that_of_the_first(tmp_path, monkeypatch):
    """Without --out each names one by the time."""
    words = ["train", "knowledge/scratch", *SMALL, "train.steps=1", "train.batch=4", "--out", "runs/RANK"]
    script = tmp_path / "ranked.py"
    script.write_text(
        "import os, sys\nfrom regard.cli import main\n"
        "sys.argv = [a.replace('RANK', 'x' * (1 + int(os.environ['RANK']))) for a in sys.argv]\nmain()\n"
    )
    monkeypatch.chdir(tmp_path)
    torchrun(str(script), *words)
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["x"]


def test_an_error_of_the_first_is_a_line_of_each(tmp_path):
    """The others wait for it in vain, and say so."""
    words = ["train", "lm", f"data.text={tmp_path / 'none.txt'}", "--out", str(tmp_path / "run")]
    said = torchrun("-m", "regard", *words, fails=True).stderr
    assert "none.txt cannot be read" in said
    assert "[rank1]" not in said, said
    assert not Path(tmp_path / "run" / "config.toml").exists()


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["false", "true"])
def test_a_run_goes_on_in_the_same_bits(tmp_path, program, shard):
    """Stopped by a signal that one of them got, killed, or never."""
    changes = [*SMALL, "train.batch=5", f"train.shard={shard}", "model.dropout=0.1", "train.optimizer=adamw"]
    changes.append("train.average=0.9")
    whole = program(tmp_path / "whole", *changes)
    for number in (signal.SIGINT, signal.SIGKILL):
        part = program(tmp_path / number.name, *changes, number=number, at=7)
        assert not part.finished
        assert checkpoint.newest(part.checkpoints) == (7 if number == signal.SIGINT else 6)
        program(part.path)
        assert bits(part) == bits(whole)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["false", "true"])
def test_a_run_goes_on_in_another_number_of_processes(tmp_path, program, shard):
    changes = [*SMALL, "train.batch=6", f"train.shard={shard}", "train.optimizer=adamw", "train.lr=0.001"]
    whole = program(tmp_path / "whole", *changes)
    part = program(tmp_path / "part", *changes, number=signal.SIGTERM, at=7)
    for processes in (1, 3):
        shutil.copytree(part.path, tmp_path / str(processes))
        run = program(tmp_path / str(processes), processes=processes)
        assert run.finished
        assert close(run, whole, 1e-5)


MANY = """
import json, os, sys
from regard.train import recipe, train

for name, changes, folder in json.load(open(sys.argv[1])):
    train(recipe.load(name, changes), folder)
os._exit(0)
"""


@pytest.mark.slow
def test_every_kind_of_model_learns_the_same(tmp_path):
    """An encoder-decoder, a Hugging Face encoder, random features, and attention that is learned as a table."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(300)))
    roberta = tiny(tmp_path / "roberta", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    short = ["train.steps=4", "train.optimizer=sgd", "train.lr=0.1", "train.batch=6"]
    lm = [f"data.text={text}", "model.layers=2", "model.width=16", "model.attention.heads=2", "model.dropout=0"]
    lm += ["model.attention.dropout=0", *short]
    kinds = list(
        enumerate(
            [
                ("summarize", [*SUMMARIES, *short]),
                ("sentiment", [f"model.name={roberta}", *SENTENCES, *short]),
                ("lm", [*lm, "model.mechanism=performer"]),
                ("lm", [*lm, "model.mechanism=synthesizer-random", "model.position=learned"]),
            ]
        )
    )
    (tmp_path / "many.py").write_text(MANY)
    ways = {"one": "false", "replicated": "false", "sharded": "true"}
    jobs = {
        way: [(name, [*changes, f"train.shard={shard}"], str(tmp_path / way / str(n))) for n, (name, changes) in kinds]
        for way, shard in ways.items()
    }
    (tmp_path / "one.json").write_text(json.dumps(jobs["one"]))
    (tmp_path / "two.json").write_text(json.dumps(jobs["replicated"] + jobs["sharded"]))
    subprocess.run([sys.executable, str(tmp_path / "many.py"), str(tmp_path / "one.json")], env=ALONE, check=True)
    torchrun(str(tmp_path / "many.py"), str(tmp_path / "two.json"))
    for n, (name, changes) in kinds:
        one, *two = (Run(tmp_path / way / str(n)) for way in ways)
        assert [close(run, one, 1e-5) for run in two] == [True, True], (name, changes[-1])


def test_other_commands_are_for_one_process():
    words = [sys.executable, "-m", "regard", "mechanisms"]
    done = subprocess.run(words, env=ALONE | {"RANK": "1", "WORLD_SIZE": "2"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "process 1: `regard mechanisms` runs in one process, but torchrun started 2" in done.stderr


@pytest.mark.parametrize("count", [1, 2, 3])
def test_rows_are_dealt_out_in_turn(count):
    batch = Batch(torch.arange(14).view(7, 2), torch.arange(14).view(7, 2))
    parts = [Process(rank, count).shard(batch) for rank in range(count)]
    assert sorted(torch.cat([p.x for p in parts])[:, 0].tolist()) == batch.x[:, 0].tolist()
    assert {len(p.x) for p in parts} <= {7 // count, -(-7 // count)}
    assert parts[0].visible is None
    with pytest.raises(ConfigError, match=r"7 rows for 8 processes: raise train.batch"):
        Process(0, 8).shard(batch)


def test_what_no_loss_depends_on_is_found():
    """DDP must be told, or it waits for its gradient."""
    model, task = gpt(dropout=0.5), Toy()
    before = torch.get_rng_state()
    row = task.batch(0, 1)
    assert _uses_all_parameters(model, lambda batch: task.loss(model, batch), row)
    model.spare = nn.Parameter(torch.ones(1))
    assert not _uses_all_parameters(model, lambda batch: task.loss(model, batch), row)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())


SPARE = """
import os, sys, torch
from training import SHORT, Toy, gpt
from regard.train import Run, TrainConfig, Trainer
from regard.train.distributed import Process
from regard.train.progress import Progress

process = Process.from_environment()
process.init_group(torch.device("cpu"))
for shard in (False, True):
    model = gpt()
    model.spare = torch.nn.Parameter(torch.ones(4, 4))
    trainer = Trainer(model, Toy(), TrainConfig().but(**SHORT, shard=shard), Run(sys.argv[1]), Progress(), process)
    for _ in range(3):
        trainer._step()
    with trainer.parallel.full_model() as whole:
        assert torch.equal(whole.spare, torch.ones(4, 4)), whole.spare
        assert not torch.equal(whole.state_dict()["embedding.weight"], gpt().state_dict()["embedding.weight"])
os._exit(0)
"""


@pytest.mark.slow
def test_what_no_loss_depends_on_stays_as_it_is(tmp_path, monkeypatch):
    """As in one process: it does not even decay."""
    monkeypatch.setitem(ALONE, "PYTHONPATH", str(Path(__file__).parents[1] / "helpers"))
    (tmp_path / "spare.py").write_text(SPARE)
    torchrun(str(tmp_path / "spare.py"), str(tmp_path / "run"))


def test_one_process_that_shards_learns_the_same(tmp_path):
    """FSDP2 without anybody to share with; tests/gpu does this over nccl."""
    with process_group("gloo"):
        sharded = trained_weights(tmp_path / "sharded", shard=True)
    plain = trained_weights(tmp_path / "plain", shard=False)
    start = gpt().state_dict()
    assert any(not torch.equal(x, start[name]) for name, x in plain.items())
    assert_close(sharded, plain, 1e-5)


def test_what_several_processes_cannot_do(tmp_path):
    assert resolve_compile("auto", torch.device("cuda"), processes=2) == "off"
    with pytest.raises(ConfigError, match=r"train.compile = 'graph' needs a single process"):
        resolve_compile("graph", torch.device("cuda"), processes=2)
    with pytest.raises(ConfigError, match=r"train.shard and train.precision = 'float16'"):
        trainer(Path(tmp_path), shard=True, precision="float16")


def test_each_has_its_own_gpu():
    assert Process(5, 8, 1).device("cuda") == "cuda:1"
    assert Process(5, 8, 1).device("cpu") == "cpu"
    assert Process().device("cuda") == "cuda"
