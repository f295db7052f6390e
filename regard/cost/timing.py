"""Times of short runs, one after the other in turn, so that whatever slows the machine slows all of them alike."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from time import perf_counter

import torch

LONG = 0.2  # seconds beside which looking for garbage is short
AHEAD = 8_000_000  # cycles, about four milliseconds, that a GPU is kept waiting while Python launches what it is to do
Run = Callable[[], object]
Clock = Callable[[], float]


def timed(run: Run, device: torch.device, clock: Clock = perf_counter) -> float:
    """Seconds of one run; on a GPU between two marks on its own clock, with the launches ahead of it as in a model."""
    if device.type == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        torch.cuda._sleep(AHEAD)
        first.record()
        run()
        last.record()
        torch.cuda.synchronize(device)
        return float(first.elapsed_time(last)) / 1e3
    start = clock()
    run()
    took = clock() - start
    if took > LONG:  # tensors in a cycle of references would stay until Python happens to look, several runs' worth
        gc.collect()
    return took


def in_turn(
    runs: Sequence[Run], device: torch.device, seconds: float = 0.3, rounds: int = 5, clock: Clock = perf_counter
) -> list[list[float]]:
    """Times of each, run in turn for at least so many rounds, and so many seconds; a first round is not counted."""
    for run in runs:
        timed(run, device)
    times: list[list[float]] = [[] for _ in runs]
    until = perf_counter() + seconds
    while len(times[0]) < rounds or perf_counter() < until:
        for one, run in zip(times, runs, strict=True):
            one.append(timed(run, device, clock))
    return times


def best(
    runs: Sequence[Run], device: torch.device, seconds: float = 0.3, rounds: int = 5, clock: Clock = perf_counter
) -> list[float]:
    """The shortest time of each, run in turn: what else runs on a machine only ever makes it longer."""
    return [min(one) for one in in_turn(runs, device, seconds, rounds, clock)]
