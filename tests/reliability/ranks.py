"""Kills random processes of trainings that torchrun started, and compares their curves with those of a quiet training.

    python tests/reliability/ranks.py --kills 10

A kill is a SIGKILL to a random rank at a random moment between the start of the processes and the end of the training.
Then one of three things happens, in turn: torchrun starts all processes again (`--max-restarts`), the training is
resumed by a second torchrun (`--resume`), or two torchruns, as on two machines, start their processes again. In each
the others must have ended within a minute of the kill, no process may show a traceback, and the run must end with the
same metrics and the same weights, to the bit, as the training that nobody killed. Both DDP and FSDP2 are tried, over
gloo on this machine's CPU. Exits with 1 where a kill ended otherwise. Needs Linux (/proc).
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file

from regard.train import Run

TIMES = ("seconds", "tokens_per_second", "mfu")
RECIPE = ["knowledge/scratch", "model.width=16", "model.layers=1", "model.attention.heads=2", "model.position=learned"]
RECIPE += ["data.block=96", "data.world.people=12", "data.world.asked=8", "data.world.held_out=2"]
RECIPE += ["data.world.places=40", "model.dropout=0.1", "train.batch=5"]
KINDS = {"DDP": "train.shard=false", "FSDP2": "train.shard=true"}
WAYS = ("restart", "resume", "two nodes")
OTHERS_END_S = 60  # seconds within which the other processes must have ended
LIMIT_S = 300  # seconds after which a training counts as hanging


@dataclass
class Job:
    """The torchruns of one training, `nodes` of them with `processes` each, and what they print."""

    words: Sequence[str]
    log: Path
    nodes: int = 1
    processes: int = 2
    restarts: int = 0
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        options = ["--nproc-per-node", str(self.processes), "--max-restarts", str(self.restarts)]
        options += ["--nnodes", str(self.nodes), "--rdzv-backend", "c10d", "--rdzv-id", self.id]
        options += ["--rdzv-endpoint", f"localhost:{_free_port()}"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "regard", "train"]
        with self.log.open("wb") as log:
            for _ in range(self.nodes):
                agent = subprocess.Popen([*torchrun, *self.words], stdout=log, stderr=log, start_new_session=True)
                self.agents.append(agent)

    def ranks(self) -> dict[int, int]:
        """Returns the process id of each rank that lives now."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            variables = _environment(folder)
            if variables.get("TORCHELASTIC_RUN_ID") == self.id:
                found[int(variables["RANK"])] = int(folder.name)
        return found

    def wait_for_ranks(self) -> dict[int, int]:
        """Waits until all ranks have been started, and returns their process ids."""
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            found = self.ranks()
            if len(found) == self.nodes * self.processes:
                return found
            time.sleep(0.05)
        raise SystemExit(f"no processes after {LIMIT_S} s:\n{self.log.read_text()}")

    def wait(self) -> bool:
        """Waits until all torchruns have ended, and returns whether all did so well."""
        return all([agent.wait(LIMIT_S) == 0 for agent in self.agents])

    def end(self) -> None:
        """Ends what is left of it."""
        for agent in self.agents:
            if agent.poll() is None:
                agent.kill()
        for pid in self.ranks().values():
            os.kill(pid, signal.SIGKILL)


def _environment(process: Path) -> dict[str, str]:
    """Returns the environment of a worker of torchrun, by its folder in /proc; {} of others."""
    try:
        text = (process / "environ").read_bytes().decode(errors="replace")
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # ended meanwhile, or somebody else's
        return {}
    variables = dict(line.partition("=")[::2] for line in text.split("\0"))
    if "RANK" not in variables or state == "Z":
        return {}
    return variables


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def started(job: Job) -> Iterator[Job]:
    """Starts a job, and ends what is left of it when the context is left."""
    job.start()
    try:
        yield job
    finally:
        job.end()


def outcome(folder: Path) -> tuple[list[dict[str, object]], dict[str, bytes]]:
    """Returns the metrics of a finished run, without times, and the bytes of its weights."""
    run = Run.open(folder)
    rows = [{key: value for key, value in row.items() if key not in TIMES} for row in run.metrics()]
    weights = load_file(folder / "model" / "model.safetensors")
    return rows, {name: x.numpy().tobytes() for name, x in weights.items()}


class Campaign:
    """Trainings of one kind (DDP or FSDP2): one that nobody kills, then as many as asked for that somebody does."""

    def __init__(self, folder: Path, kind: str, steps: int, random_source: random.Random) -> None:
        self.folder = folder
        self.random = random_source
        self.recipe = [*RECIPE, KINDS[kind], f"train.steps={steps}"]
        self.recipe += [f"train.saving.every={steps // 20}", f"train.evaluation.every={steps // 5}"]
        job = Job([*self.recipe, "--out", str(folder / "quiet")], folder / "quiet.log")
        with started(job):
            job.wait_for_ranks()
            begun = time.monotonic()
            if not job.wait():
                raise SystemExit(f"the training that nobody kills failed:\n{job.log.read_text()}")
            self.seconds = time.monotonic() - begun
        self.expected = outcome(folder / "quiet")
        self.start_seconds = self.seconds - max(row.get("seconds", 0) for row in Run(folder / "quiet").metrics())

    def kill(self, number: int, way: str) -> str:
        """Trains, kills one process, lets the training go on, and returns what was wrong: "" where nothing was."""
        nodes = 2 if way == "two nodes" else 1
        restarts = 0 if way == "resume" else 1
        run = self.folder / f"run-{number}"
        job = Job([*self.recipe, "--out", str(run)], self.folder / f"run-{number}.log", nodes, 2 // nodes, restarts)
        with started(job):
            others = job.wait_for_ranks()
            self._wait_for_moment(run)
            rank = self.random.randrange(2)
            killed = others.pop(rank)
            print(f"  {way}: rank {rank} is killed {_progress(run)}", flush=True)
            fault = _kill(killed, others)
            ended_well = job.wait()
        fault = fault or _traceback(job.log)
        if way == "resume" and not Run(run).finished:
            words = ["--resume", str(run)]
            if not (run / "config.toml").exists():  # killed before there was a run
                words = [*self.recipe, "--out", str(run)]
            again = Job(words, self.folder / f"run-{number}-resumed.log")
            with started(again):
                ended_well = again.wait()
            fault = fault or _traceback(again.log)
        if not fault and not ended_well:
            fault = "ended with an error"
        if not fault and outcome(run) != self.expected:
            fault = "ended with other metrics or weights"
        return fault

    def _wait_for_moment(self, run: Path) -> None:
        """Waits for the moment of a kill: for one of ten while the processes start, for the others at some step."""
        if self.random.random() < 0.1:
            time.sleep(self.random.random() * self.start_seconds)
            return
        line = self.random.randrange(len(self.expected[0]) - 2)  # the last two come with the end
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until and not _has_lines(run, line):
            time.sleep(0.01)


def _has_lines(run: Path, count: int) -> bool:
    """Returns whether a run has written so many lines of metrics, and at least one."""
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n") >= max(1, count)
    except FileNotFoundError:
        return False


def _kill(pid: int, others: dict[int, int]) -> str:
    """Kills a process and waits for the end of the others; returns what was wrong, "" where nothing was."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return "had ended before it was killed: this was no kill"
    until = time.monotonic() + OTHERS_END_S
    while time.monotonic() < until:
        if not any(_environment(Path("/proc") / str(other)) for other in others.values()):
            return ""
        time.sleep(0.1)
    return f"another process still ran {OTHERS_END_S} s after the kill"


def _progress(run: Path) -> str:
    """Returns how far a training has come, for the line that tells of a kill."""
    if not (run / "config.toml").exists():
        return "before there was a run"
    if Run(run).finished:
        return "after its end"
    rows = Run(run).metrics()
    return f"at step {rows[-1]['step']}" if rows else "before the first step"


def _traceback(log: Path) -> str:
    """Returns that a process showed a traceback, "" where none did; torchrun's own report of a failure is none."""
    text = log.read_text(errors="replace")
    shown = [part for part in text.split("Traceback (most recent call last)")[1:] if "regard/" in part[:2000]]
    return "a process showed a traceback" if shown else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10, help="of each kind (DDP and FSDP2)")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=None, help="of the moments and the ranks; drawn unless given")
    parser.add_argument("--keep", type=Path, help="keep runs and logs in this folder")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    faults = 0
    with tempfile.TemporaryDirectory() as temporary:
        for kind in options.kinds:
            folder = (options.keep or Path(temporary)) / kind
            folder.mkdir(parents=True)
            campaign = Campaign(folder, kind, options.steps, random.Random(f"{seed} {kind}"))
            print(f"{kind}: {options.kills} kills in trainings of {campaign.seconds:.0f} s", flush=True)
            for number, way in zip(range(options.kills), itertools.cycle(options.ways), strict=False):
                fault = campaign.kill(number, way)
                faults += bool(fault)
                print(f"  {number + 1}: {fault or 'the same curve and weights'}", flush=True)
                if fault:
                    log = (folder / f"run-{number}.log").read_text(errors="replace")
                    print("\n".join(log.splitlines()[-60:]))
    print(f"{faults} of {options.kills * len(options.kinds)} kills ended otherwise")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
