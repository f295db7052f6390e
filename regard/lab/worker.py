"""What runs in a process that trains for an experiment: `python -m regard.lab.worker FOLDER PLUGIN…`.

`regard.lab.side_by_side` starts it, and says what it reads and writes.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from regard import plugins
from regard.errors import Interrupted, RegardError
from regard.lab.base import Shown
from regard.lab.experiment import TrainingExperiment, open_session, plan_trainings
from regard.train.progress import Progress


class _Told(Progress):
    """Writes what it is told as lines of JSON."""

    def note(self, text: str) -> None:
        _say({"note": text})

    def show(self, step: int, total: int, values: Mapping[str, Any]) -> None:
        _say({"step": step, "total": total, "values": dict(values)})


def _say(message: Mapping[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _read_numbers(numbers: queue.SimpleQueue[int]) -> None:
    """Passes the numbers on that come in; at their end asks the training to save and to stop."""
    for line in sys.stdin:
        numbers.put(int(line))
    os.kill(os.getpid(), signal.SIGTERM)


def work(folder: Path, files: Sequence[str]) -> None:
    """Does the trainings of an experiment's folder whose numbers come in, until it is stopped."""
    torch.set_num_threads(1)
    numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Thread(target=_read_numbers, args=(numbers,), daemon=True).start()
    try:
        for file in files:
            plugins.import_file(file)
        known, session = open_session(folder, "cpu", Shown(progress=lambda name: _Told()))
        assert isinstance(known, TrainingExperiment)
        trainings = plan_trainings(known, session).trainings
        while True:
            one = trainings[numbers.get()]
            session.train(one.recipe, one.folder, one.title)
            _say({"ended": one.title})
    except Interrupted:
        return
    except RegardError as error:
        _say({"error": str(error)})
    except Exception as error:
        traceback.print_exc()
        _say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2:])
