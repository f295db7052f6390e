"""Timing short runs, interleaved, so that a slower machine slows all of them alike."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from time import perf_counter

import torch

LONG = 0.2  # seconds of a run compared with which a garbage collection is short
AHEAD = 8_000_000  # cycles, about four milliseconds, for which a GPU waits while Python launches its work
Run = Callable[[], object]
Clock = Callable[[], float]


def time_run(run: Run, device: torch.device, clock: Clock = perf_counter) -> float:
    """Returns the seconds of one run; on a GPU by its events, with the work launched ahead of it as in a model."""
    if device.type == "cuda":
        return _time_on_gpu(run, device)
    start = clock()
    run()
    seconds = clock() - start
    if seconds > LONG:  # else tensors in cycles of references could stay for several runs
        gc.collect()
    return seconds


def _time_on_gpu(run: Run, device: torch.device) -> float:
    first = torch.cuda.Event(enable_timing=True)
    last = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(AHEAD)
    first.record()
    run()
    last.record()
    torch.cuda.synchronize(device)
    return float(first.elapsed_time(last)) / 1e3


def time_interleaved(
    runs: Sequence[Run], device: torch.device, seconds: float = 0.3, rounds: int = 5, clock: Clock = perf_counter
) -> list[list[float]]:
    """Returns the times of each run, from at least `rounds` rounds that take at least `seconds`; each runs all once.

    A first round is not counted: it compiles, allocates and fills caches.
    """
    for run in runs:
        time_run(run, device)
    times: list[list[float]] = [[] for _ in runs]
    until = perf_counter() + seconds
    while len(times[0]) < rounds or perf_counter() < until:
        for own_times, run in zip(times, runs, strict=True):
            own_times.append(time_run(run, device, clock))
    return times


def shortest_times(
    runs: Sequence[Run], device: torch.device, seconds: float = 0.3, rounds: int = 5, clock: Clock = perf_counter
) -> list[float]:
    """Returns the shortest time of each run, interleaved: other work on the machine can only make it longer."""
    return [min(times) for times in time_interleaved(runs, device, seconds, rounds, clock)]
