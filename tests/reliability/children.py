"""Forked children that work, and are killed."""

from __future__ import annotations

import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from regard.errors import RegardError

KILLED = -signal.SIGKILL
REFUSED = 3  # the exit code of a child that regard told an error
FAILED = 4


def start(work: Callable[[], Any], log: Path | None = None) -> int:
    """Starts a child that does some work and exits with 0, REFUSED or FAILED, and returns its number."""
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        os.setpgid(0, 0)  # so that it can be killed with all that it starts
        work()
    except RegardError as error:
        _note(log, f"{type(error).__name__}: {error}")
        os._exit(REFUSED)
    except BaseException:
        _note(log, traceback.format_exc())
        os._exit(FAILED)
    os._exit(0)


def _note(log: Path | None, text: str) -> None:
    if log is not None:
        log.write_text(text, encoding="utf-8")


def end(child: int, kill_after: float | None = None) -> int:
    """Waits for a child, kills it after so many seconds if it is still there, and returns its exit code or KILLED."""
    began = time.monotonic()
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if kill_after is not None and time.monotonic() - began >= kill_after:
            _kill(child)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.002)


def _kill(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:  # it has not made its group yet
        os.kill(child, signal.SIGKILL)
