"""A race of mechanisms on this machine: time, memory, FLOP/s and bytes/s over the number of tokens, beside the floor.

At each size all entrants run in turn, so that whatever slows the machine slows all alike; medians and quartiles are
kept. An entrant that breaks a law does not start. A size that would take too much memory or time, extrapolated from the
sizes before it, is left out, and the reason is kept.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from regard import cost
from regard.checking import check
from regard.cost.crossing import Crossing, Point, interpolated
from regard.cost.timing import Run, time_interleaved
from regard.devices import free_memory, resolve_dtype
from regard.errors import RegardError
from regard.lab.base import EXPERIMENTS, Experiment, Say, quartiles, versions
from regard.lab.bench.config import PASSES, Race
from regard.lab.bench.entrants import SPARE, Entrant, entrants, format_gib
from regard.lab.bench.memory import peak
from regard.lab.bench.page import bench_page
from regard.lab.bench.results import Absence, RaceDevice, RaceResults, RaceRow, RowWork
from regard.laws import Subject
from regard.mechanisms import Cost
from regard.shapes import Size

__all__ = ["PASSES", "Race", "crossings", "race"]

EXPERIMENTS.put("bench", Experiment("bench", "A race of mechanisms.", bench_page, command="regard bench"))


class ReadyRun(NamedTuple):
    """A run that has been made and tried at one size: its memory in bytes, and the cost that was declared."""

    entrant: Entrant
    run: Run
    peak: int | None
    work: Cost | None


def race(
    config: Race,
    names: Sequence[str] = (),
    plugins: Sequence[Subject] = (),
    peers: Sequence[str] = (),
    say: Say = lambda text: None,
    keep: Callable[[RaceResults], object] = lambda results: None,
) -> RaceResults:
    """Races mechanisms by name, plugins and peers, and returns all that was measured.

    Interrupted, it returns what was measured until then, and `interrupted` is True. `keep` gets the same after each
    size, for a race that is killed.
    """
    began = time.monotonic()
    rows: list[RaceRow] = []
    absent: list[Absence] = []
    machine = cost.device(config.device)

    def results(interrupted: bool) -> RaceResults:
        """Returns what was measured so far."""
        return RaceResults(
            config=config.as_dict(),
            device=_describe_device(machine, config),
            threads=torch.get_num_threads(),
            seconds=round(time.monotonic() - began, 1),
            versions=versions(),
            date=time.strftime("%Y-%m-%d"),
            interrupted=interrupted,
            rows=list(rows),
            absent=list(absent),
        )

    try:
        racing = _keep_lawful(entrants(names, config, plugins, peers), plugins, config, absent, say)
        for passing in config.passes:
            still = [entrant for entrant in racing if passing in entrant.passes]
            for N in config.tokens:
                _race_size(config, passing, N, still, machine, rows, absent, say)
                keep(results(True))
    except KeyboardInterrupt:
        return results(True)
    return results(False)


def crossings(results: RaceResults, passing: str, against: str = "softmax") -> list[Crossing]:
    """Returns at which lengths each entrant takes less time than `against`, as far as both were timed."""
    medians: dict[str, dict[int, float]] = {name: {} for name in results.entrants}
    for row in results.of_pass(passing):
        medians[row.what][row.N] = row.median
    other = medians.pop(against, {})
    found = []
    for name, own in medians.items():
        points = [Point(N, own[N], other[N]) for N in own if N in other]
        if points:
            found.append(interpolated(name, against, points))
    return found


def _describe_device(machine: cost.Device, config: Race) -> RaceDevice:
    """Returns the device with its peak at the dtype of the race."""
    return RaceDevice(machine.name, machine.flops.get(config.torch_dtype), machine.bandwidth, machine.measured)


def _keep_lawful(
    racing: Sequence[Entrant], plugins: Sequence[Subject], config: Race, absent: list[Absence], say: Say
) -> list[Entrant]:
    """Returns the entrants that break no law; one that does is added to `absent`. Peers are not checked."""
    strangers = {subject.label: subject for subject in plugins}
    lawful = []
    for entrant in racing:
        say(f"laws of {entrant.name}")
        asked = config.draws and (not entrant.peer or entrant.name in strangers)
        broken = _broken_laws(entrant, strangers, config) if asked else ()
        if broken:
            names = ", ".join(f"'{law}'" for law in broken)
            absent.append(Absence(entrant.name, f"breaks {names}: `regard check` shows how"))
        else:
            lawful.append(entrant)
    return lawful


def _broken_laws(entrant: Entrant, subjects: Mapping[str, Subject], config: Race) -> Sequence[str]:
    """Returns the laws that one of ours or a plugin breaks, each once."""
    verdict = check(
        subjects.get(entrant.name, entrant.name),
        dtype=resolve_dtype(config.dtype),
        device=config.device,
        draws=config.draws,
        seed=config.seed,
    )
    if verdict.ok:
        return ()
    return list(dict.fromkeys(violation.law for violation in verdict.broken))


def _race_size(
    config: Race,
    passing: str,
    N: int,
    still: list[Entrant],
    machine: cost.Device,
    rows: list[RaceRow],
    absent: list[Absence],
    say: Say,
) -> None:
    """Races one size: adds a row for each entrant that can run, and moves all others from `still` to `absent`."""
    size = config.size(N, passing)
    device = torch.device(config.device)
    ready: list[ReadyRun] = []
    for entrant in list(still):
        say(f"{passing}, {N:,} tokens: {entrant.name}")
        before = [row for row in rows if row.what == entrant.name and row.passing == passing]
        gc.collect()  # what the one before left behind is free, too
        prepared = _prepare(config, entrant, before, size, passing, device)
        if isinstance(prepared, ReadyRun):
            ready.append(prepared)
            continue
        still.remove(entrant)
        absent.append(Absence(entrant.name, prepared, passing, N))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if not ready:
        return
    say(f"{passing}, {N:,} tokens: all in turn")
    # All in turn rather than one after the other: what slows the machine slows all alike.
    times = time_interleaved([one.run for one in ready], device, config.seconds * len(ready), rounds=3)
    for one, seconds in zip(ready, times, strict=True):
        first, median, third = quartiles(seconds)
        rows.append(
            RaceRow(
                what=one.entrant.name,
                like=one.entrant.like,
                peer=one.entrant.peer,
                passing=passing,
                N=N,
                B=size.B,
                seconds=(first, median, third),
                repeats=len(seconds),
                peak=one.peak,
                work=_row_work(one.work, machine, size),
            )
        )


def _prepare(
    config: Race, entrant: Entrant, before: Sequence[RaceRow], size: Size, passing: str, device: torch.device
) -> ReadyRun | str:
    """Returns the run of an entrant after trying it once, or why there is none."""
    work = entrant.cost(size, passing)
    reason = _too_much(config, before, size, work, device)
    if reason is not None:
        return reason
    try:
        run = entrant.make(size, passing)
        run()  # compiles, tunes and fills caches, none of which is to be timed
        most = None
        if entrant.counted or device.type == "cuda":
            most = peak(run, device)
        return ReadyRun(entrant, run, most, work)
    except Exception as error:  # whatever a stranger's code raises: one that cannot run should not end the race
        return _first_line(error)


def _row_work(work: Cost | None, machine: cost.Device, size: Size) -> RowWork | None:
    """Returns the declared FLOPs and bytes of a row, with the least time that this machine needs for them."""
    if work is None:
        return None
    floor = None
    if size.dtype in machine.flops:
        floor = cost.floor(work, machine, size.dtype)
    return RowWork(work.useful, work.bytes, work.state, floor)


def _too_much(
    config: Race, before: Sequence[RaceRow], size: Size, work: Cost | None, device: torch.device
) -> str | None:
    """Returns why a size is not run: it would take too much memory or time, extrapolated from smaller sizes; else None.

    Time and memory are taken to grow as those of one sequence did between the last two sizes. If there was only one,
    time grows like the declared FLOPs, or N² if none are declared, and memory like N², or like N if there was less of
    it than a matrix of weights takes.
    """
    spare = SPARE * free_memory(device)
    if not before:
        moved = 0.0
        if work is not None:
            moved = work.bytes
        if moved < spare:
            return None
        return f"its inputs and outputs are {format_gib(moved)}; {format_gib(spare)} can be spared"
    last = before[-1]
    ratio = size.S / last.N
    time_growth = ratio**2
    if work is not None and last.work is not None:
        time_growth = max(work.useful / size.B / (last.work.flops / last.B), ratio)
    memory_growth = ratio
    # As much memory as a matrix of weights has: it grows like the square of the length.
    dense = (last.peak or 0) >= last.B * size.H * last.N * last.N * size.e
    if dense:
        memory_growth = ratio**2
    memory = _extrapolate(before, size, lambda row: row.peak or 0, memory_growth)
    if memory > spare:
        return f"it should take {format_gib(memory)}; {format_gib(spare)} can be spared"
    seconds = _extrapolate(before, size, lambda row: row.median, time_growth)
    if seconds > config.patience:
        return f"a run should take {seconds:.1f} s, longer than patience = {config.patience:g} s"
    return None


def _extrapolate(before: Sequence[RaceRow], size: Size, measured: Callable[[RaceRow], float], growth: float) -> float:
    """Returns what a size is expected to take, from the rows before it; `growth` is used if there is only one."""
    last = before[-1]
    now = measured(last) / last.B
    if len(before) > 1:
        past = before[-2]
        earlier = measured(past) / past.B
        if earlier and now:
            # One sequence grows by a power of the length: at least linearly, at most like its square.
            power = math.log(now / earlier) / math.log(last.N / past.N)
            growth = (size.S / last.N) ** min(max(power, 1.0), 2.0)
    return size.B * now * growth


def _first_line(error: Exception) -> str:
    """Returns the first line of an error's message that is not empty, at most 160 characters of it."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, RegardError):
        return first[:160]
    return f"{type(error).__name__}: {first[:140]}"
