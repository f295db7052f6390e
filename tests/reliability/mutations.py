"""Damages every kind of file and request that regard reads, and asks that each is read or refused by a RegardError.

    python tests/reliability/mutations.py --count 10000 [--kind recipe] [--seed 1] [--jobs 2]

A failure is any other exception, a message that quotes much, more than `SECONDS`, or more than `BYTES` of memory. The
readers are called in batches, many in one process. A batch has a process of its own, which a failure in a library
written in another language may end.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

os.environ["RUST_BACKTRACE"] = "0"  # of a panic: it is caught, and writing it down takes longer than all else

import mutated_hub_kinds  # noqa: F401 (they register kinds)
import mutated_other_kinds  # noqa: F401
from mutated_kinds import KINDS, make_corpus

SECONDS = 20  # of a processor, so that others who use the machine do no harm
BYTES = 3 << 30
LONGEST_MESSAGE = 2500  # several quotes of 200 characters, paths, and the names that are known
BATCH = 2500  # mutations in one process
STUCK = 300  # seconds on a file: the process waits, or is in a library that no alarm interrupts
BEAT = ".beat"  # of a corpus: touched before each mutation


class SlowError(BaseException):
    """Reading took longer than `SECONDS`."""


@dataclass
class Outcome:
    """What became of the mutations of one kind; `seconds` are those of a processor, `slowest` those of one mutation."""

    name: str
    tried: int = 0
    refused: int = 0
    read: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, other: Outcome) -> None:
        """Adds what became of another batch of the same kind."""
        for name in ("tried", "refused", "read", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.slowest = max(self.slowest, other.slowest)
        self.failures = other.failures | self.failures

    def __str__(self) -> str:
        return (
            f"{self.name:24} {self.tried:7,} mutations  {self.refused:7,} refused  {self.read:7,} read  "
            f"{len(self.failures):3} kinds of failure  {self.seconds:7.1f} s  {self.slowest:5.2f} s the slowest"
        )


def try_kind(name: str, numbers: range, seed: int, corpus: Path) -> Outcome:
    """Reads damaged files of a kind, one for each number; `corpus` is as it was afterwards."""
    chosen = KINDS[name]
    path = corpus / chosen.file
    good = path.read_bytes()
    saved = {part: shutil.copytree(corpus / part, corpus / f".{part}") for part in chosen.reset}
    outcome = Outcome(name)
    began = time.process_time()
    chosen.read(corpus)  # the good file is read, or nothing would be tried
    changed = True
    for number in numbers:
        if changed:
            _restore(corpus, saved)
        draw = random.Random(f"{name} {seed} {number}")
        random.seed(number)
        damaged = chosen.mutate(good, draw)
        path.write_bytes(damaged)
        (corpus / BEAT).touch()
        read_before = outcome.read
        before = time.process_time()
        fault = _try(chosen.read, corpus, outcome)
        outcome.slowest = max(outcome.slowest, time.process_time() - before)
        changed = bool(fault) or outcome.read > read_before  # what is refused stays as it was
        if fault is not None:
            kept = f"{name} {seed} {number}: {fault}\n    {damaged[:300]!r}"
            outcome.failures.setdefault(fault.partition("\n")[0], kept)
    _restore(corpus, saved)
    for copy in saved.values():
        shutil.rmtree(copy)
    path.write_bytes(good)
    outcome.tried = len(numbers)
    outcome.seconds = time.process_time() - began
    return outcome


def _restore(corpus: Path, saved: dict[str, Path]) -> None:
    """Puts back the folders that reading changes."""
    for part, copy in saved.items():
        shutil.rmtree(corpus / part)
        shutil.copytree(copy, corpus / part)


def _try(read: Callable[[Path], Any], corpus: Path, outcome: Outcome) -> str | None:
    """Reads one file, counts what became of it, and returns what is wrong, or None."""
    from regard.errors import RegardError, ResourceError

    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(corpus)
        outcome.read += 1
    except ResourceError as error:
        return f"out of memory: {error}"
    except RegardError as error:
        outcome.refused += 1
        if len(str(error)) > LONGEST_MESSAGE:
            return f"a message of {len(str(error))} characters: {str(error)[:200]}…"
    except SlowError:
        return "slow\n" + "".join(traceback.format_exc().splitlines(True)[-12:])
    except BaseException as error:  # panics of Rust are no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/regard/" in f.filename]
        place = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-3:]))
        return f"{type(error).__name__} at {place}\n    {str(error)[:300]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def _slow(*given: Any) -> None:
    raise SlowError


def prepare_process() -> None:
    """Sets the limits of memory and time in this process, and lets it write without waiting for the disk."""
    import torch

    torch.set_num_threads(1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
    signal.signal(signal.SIGPROF, _slow)
    os.fsync = lambda handle: None  # type: ignore[assignment]


def _work(name: str, numbers: range, seed: int, corpus: Path, result: Any) -> None:
    prepare_process()
    result.send(try_kind(name, numbers, seed, corpus))


@dataclass
class Worker:
    """A process that reads one batch in a copy of the corpus of its own."""

    name: str
    numbers: range
    corpus: Path
    process: Any
    result: Any

    def finish(self) -> Outcome:
        """Returns what the process found, or, where it ended without a word, a failure that names what it read."""
        try:
            outcome: Outcome = self.result.recv()
        except EOFError:
            self.process.join()
            kept = Path(tempfile.gettempdir()) / f"mutation-{self.name.replace(' ', '-')}"
            shutil.copy(self.corpus / KINDS[self.name].file, kept)
            said = f"the process ended with {self.process.exitcode}"
            outcome = Outcome(self.name, failures={said: f"{self.name} {self.numbers}: {said}; see {kept}"})
            shutil.rmtree(self.corpus)
            make_corpus(self.corpus)
        self.process.join()
        return outcome

    def end_if_stuck(self) -> None:
        """Ends the process where it has been reading one file for too long."""
        beat = self.corpus / BEAT
        if beat.exists() and time.time() - beat.stat().st_mtime > STUCK:
            self.process.kill()


def run_campaign(names: list[str], count: int, seed: int, jobs: int) -> list[Outcome]:
    """Tries every kind in batches, `jobs` at a time, prints a line for each kind, and returns what became of them."""
    batches = [(name, range(n, min(count, n + BATCH))) for name in names for n in range(0, count, BATCH)]
    left = {name: sum(other == name for other, _ in batches) for name in names}
    outcomes = {name: Outcome(name) for name in names}
    with tempfile.TemporaryDirectory() as root:
        free = [Path(root) / str(job) for job in range(jobs)]
        for corpus in free:
            make_corpus(corpus)
        working: list[Worker] = []
        while batches or working:
            while batches and free:
                working.append(_start(*batches.pop(0), seed, free.pop()))
            ready = wait([worker.result for worker in working], timeout=SECONDS)
            for worker in list(working):
                if worker.result not in ready:
                    worker.end_if_stuck()
                    continue
                outcomes[worker.name].add(worker.finish())
                working.remove(worker)
                free.append(worker.corpus)
                left[worker.name] -= 1
                if not left[worker.name]:
                    _print(outcomes[worker.name])
    return list(outcomes.values())


def _start(name: str, numbers: range, seed: int, corpus: Path) -> Worker:
    """Starts the process of one batch."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(name, numbers, seed, corpus, sender))
    process.start()
    sender.close()  # so that its end is noticed here
    return Worker(name, numbers, corpus, process, receiver)


def _print(outcome: Outcome) -> None:
    print(outcome, flush=True)
    for failure in outcome.failures.values():
        print("  ✗", failure, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=10_000, help="mutations of each kind")
    parser.add_argument("--kind", action="append", choices=sorted(KINDS), help="only this kind; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    given = parser.parse_args()
    began = time.monotonic()
    outcomes = run_campaign(given.kind or list(KINDS), given.count, given.seed, given.jobs)
    tried = sum(outcome.tried for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    failures = sum(len(outcome.failures) for outcome in outcomes)
    print(f"{tried:,} mutations, {seconds:.0f} s of processors in {time.monotonic() - began:.0f} s", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1), encoding="utf-8")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
