"""Trainings of an experiment side by side on a CPU, each in a process of its own with one thread.

The operations of a small model are so short that several threads wait for each other longer than they compute, and on
a machine with other work very much longer. So each training has one thread, and as many train at once as there are.

`regard.lab.worker` is what runs in those processes. One is told the number of a training on its standard input, and
says on its standard output, in lines of JSON, how far it is and when it has ended. The end of its input stops it,
whatever ended the process that wrote there; a training that is stopped saves what it has.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from regard.errors import RunError
from regard.reading import parse_json
from regard.train.progress import Lines, Progress

GRACE = 15.0  # seconds for a training to save what it has
PART = 1 << 16  # bytes that are read at once


class Worker:
    """A process that trains. `training` is the title of what it does, None where it waits; a context ends it."""

    def __init__(self, folder: Path, plugins: Sequence[str]) -> None:
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "regard.lab.worker", str(folder), *plugins],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the one that started it, which then ends it
        )
        self.training: str | None = None
        self.progress = Progress()
        self.unread = b""

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *raised: Any) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def start(self, number: int, title: str, say: Callable[[str], Any]) -> None:
        """Has the worker do the training of this number."""
        assert self.process.stdin is not None
        self.training = title
        self.progress = Lines(title, say)
        with contextlib.suppress(BrokenPipeError):  # its end is seen where it is read
            self.process.stdin.write(f"{number}\n".encode())
            self.process.stdin.flush()

    def follow(self) -> None:
        """Shows what the worker says, and notes when its training has ended; a training that failed is an error."""
        assert self.process.stdout is not None and self.training is not None
        data = os.read(self.process.stdout.fileno(), PART)
        if not data:
            code = self.process.wait()
            raise RunError(f"{self.training}: the process that trained it has ended with exit code {code}")
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            said = parse_json(line, "the report of a training", RunError)
            if "error" in said:
                raise RunError(f"{self.training}: {said['error']}")
            if "note" in said:
                self.progress.note(said["note"])
            elif "step" in said:
                self.progress.show(said["step"], said["total"], said["values"])
            else:
                self.training = None


def train_side_by_side(
    folder: Path, titles: Mapping[int, str], workers: int, say: Callable[[str], Any], plugins: Sequence[str] = ()
) -> None:
    """Does the trainings of an experiment's folder that have these numbers in its plan, at most so many at a time.

    `plugins` are files with mechanisms of the user's.
    """
    waiting = list(titles.items())[::-1]
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for _ in range(min(workers, len(waiting))):
            worker = stack.enter_context(Worker(folder, plugins))
            assert worker.process.stdout is not None
            selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
            worker.start(*waiting.pop(), say)
        busy = len(selector.get_map())
        while busy:
            for key, _ in selector.select():
                worker = key.data
                worker.follow()
                if worker.training is not None:
                    continue
                if waiting:
                    worker.start(*waiting.pop(), say)
                else:
                    selector.unregister(key.fileobj)
                    busy -= 1


@contextlib.contextmanager
def one_thread() -> Iterator[int]:
    """Leaves PyTorch one thread, and yields how many it had."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)
