"""Contexts that a training runs in: algorithms that give the same bits each time, and signals to stop."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Allows only algorithms that give the same bits each time, if enabled; restores the caller's setting on exit."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS raises
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


@contextlib.contextmanager
def catch_signals(distributed: bool) -> Iterator[list[int]]:
    """Yields a list to which each SIGINT (Ctrl-C) and SIGTERM is added; the loop looks at it after each step.

    A second signal raises KeyboardInterrupt at once, unless several processes train: each of these gets one signal
    twice, from the terminal and from torchrun.
    """
    caught: list[int] = []

    def note(number: int, frame: Any) -> None:
        if caught and not distributed:
            raise KeyboardInterrupt
        caught.append(number)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, which alone may handle signals
        before = {}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
