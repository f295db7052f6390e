"""A race of mechanisms on this machine: time, memory, FLOP/s and bytes/s over the number of tokens, beside the floor.

At each size all that take part run in turn, so that whatever slows the machine slows all alike; a median and quartiles
are kept. Who breaks a law does not start. A size that would take too much memory or time, by what the sizes before it
took, is left out, and the reason is kept.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from regard import cost
from regard.checking import check
from regard.config import ConfigError, Section
from regard.cost.crossing import attending, runner
from regard.cost.timing import Run, in_turn
from regard.devices import resolve_device, resolve_dtype
from regard.errors import RegardError, did_you_mean
from regard.lab.base import Results, Say, quartiles, versions
from regard.lab.bench.memory import free, peak
from regard.lab.bench.peers import PEERS
from regard.laws import Subject
from regard.laws.subjects import FunctionSubject, MechanismSubject
from regard.mechanisms import Cost, Mechanism, fitted, lookup, mechanisms, on_meta
from regard.registry import accepted_options
from regard.shapes import Size

Pass = Literal["forward", "training", "decode"]
PASSES: tuple[Pass, ...] = ("forward", "training", "decode")
SPARE = 0.8  # of the free memory that a run may be expected to take


@dataclass(frozen=True, kw_only=True)
class Race(Section):
    """Sizes and patience. `batch` sequences, or as many as make `total` tokens; `seconds` are spent on each point of
    each, and no run is begun that should take longer than `patience`; `draws` of cases are put to each
    law, none where the laws are not asked."""

    place: ClassVar[str] = "bench"

    tokens: tuple[int, ...] = (256, 1024, 4096, 16384)
    passes: tuple[str, ...] = PASSES
    batch: int = 1
    total: int = 0
    heads: int = 8
    groups: int = 8
    width: int = 64
    features: int = 256
    causal: bool = True
    dtype: str = "float32"
    device: str = "cpu"
    seconds: float = 0.3
    patience: float = 2.0
    draws: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tokens or list(self.tokens) != sorted(set(self.tokens)) or self.tokens[0] < 1:
            raise ConfigError(f"bench.tokens = {list(self.tokens)}: expected positive numbers in rising order")
        for name in self.passes:
            if name not in PASSES:
                raise ConfigError(f"bench.passes: no '{name}'.{did_you_mean(name, PASSES)}")
        if self.draws < 0:
            raise ConfigError(f"bench.draws = {self.draws}: expected 0 or more")
        for field in ("batch", "features", "seconds", "patience"):
            if getattr(self, field) <= 0:
                raise ConfigError(f"bench.{field} = {getattr(self, field)}: expected more than zero")
        if self.heads % self.groups:
            raise ConfigError(f"bench.groups = {self.groups}: expected a divisor of {self.heads} heads")
        resolve_dtype(self.dtype)
        resolve_device(self.device)

    def size(self, N: int, passing: str) -> Size:
        """The sizes of one point; in decoding N tokens were written and one more comes."""
        B, K = max(self.batch, self.total // N), self.width
        T, S = (1, N + 1) if passing == "decode" else (N, N)
        dtype = getattr(torch, resolve_dtype(self.dtype))
        return Size(B, T, S, self.heads, self.groups, K, K, self.causal, dtype, torch.device(self.device))


class Entrant(NamedTuple):
    """Who takes part: `make` gives a run for a size and a pass, or raises why there is none."""

    name: str
    like: str | None  # the mechanism whose work it does; None: nobody knows
    peer: bool
    make: Callable[[Size, str], Run]
    cost: Callable[[Size, str], Cost | None]
    passes: Sequence[str] = PASSES
    counted: bool = True  # whether the memory of its tensors can be counted on a CPU


def entrants(
    names: Sequence[str], config: Race, plugins: Sequence[Subject] = (), peers: Sequence[str] = ()
) -> list[Entrant]:
    """Ours by name, all where none is named; then strangers', then peers that do what one of ours does."""
    own = [lookup(name).name for name in names] or ([] if plugins else list(mechanisms()))
    found = [_ours(name, config) for name in own if name != "linear"]  # whose features would have to be given
    found += [_stranger(one, config) for one in plugins]
    likes = {one.like for one in found}
    return found + [_peer(n, config) for n, one in enumerate(PEERS) if one.name in peers and one.like in likes]


def _options(name: str, config: Race) -> dict[str, Any]:
    return accepted_options(lookup(name), {"features": config.features})


def _ours(name: str, config: Race) -> Entrant:
    def built(size: Size) -> Mechanism:
        options, there = _options(name, config), SPARE * free(torch.device(size.device))
        learned = sum(x.numel() * x.element_size() for x in on_meta(name, size, **options).parameters())
        if learned > there:
            raise RegardError(f"what it learns is {_gib(learned)}; {_gib(there)} can be spared")
        with torch.random.fork_rng(), torch.device(size.device):
            torch.manual_seed(config.seed)
            return fitted(name, size, **options)

    def make(size: Size, passing: str) -> Run:
        face: Any = "recurrent" if passing == "decode" else "parallel"
        run = runner(built(size), size, face, training=passing == "training")
        return _Graph(run) if passing == "decode" and torch.device(size.device).type == "cuda" else run

    return Entrant(name, name, False, make, partial(_cost, name, config))


def _stranger(thing: Subject, config: Race) -> Entrant:
    if isinstance(thing, MechanismSubject):
        return _ours(thing.label, config)._replace(peer=True)
    if not isinstance(thing, FunctionSubject):
        raise RegardError(f"{thing.label} takes tokens x [B,T,D]; a race is of functions f(q, k, v, causal=True)")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        named = {thing.causal_name: config.causal} if thing.causal_name else {}
        out: Tensor = thing.f(q, k, v, **named)
        return out

    def make(size: Size, passing: str) -> Run:
        return attending(attend, size, passing == "training")

    return Entrant(thing.label, None, True, make, lambda size, passing: None, PASSES[:2])


def _peer(n: int, config: Race) -> Entrant:
    peer = PEERS[n]

    def make(size: Size, passing: str) -> Run:
        return attending(peer.make(size, config.features), size, passing == "training")

    made = partial(_cost, peer.like, config)
    return Entrant(peer.name, peer.like, True, make, made, PASSES[:2], counted=not peer.compiled)


def _cost(name: str, config: Race, size: Size, passing: str) -> Cost:
    face: Any = "recurrent" if passing == "decode" else "parallel"
    return cost.of(name, size, face, training=passing == "training", **_options(name, config))


class _Graph:
    """The same work as a CUDA graph, as generating uses it: without the time of Python. It keeps the run, whose tensors
    the graph reads."""

    def __init__(self, run: Run) -> None:
        self.run, self.graph = run, torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self.graph):
            run()

    def __call__(self) -> None:
        self.graph.replay()


def lawful(one: Entrant, subjects: Mapping[str, Subject], config: Race) -> str | None:
    """The laws that one of ours or a stranger breaks, or None."""
    found = check(
        subjects.get(one.name, one.name), dtype=resolve_dtype(config.dtype), device=config.device, draws=config.draws,
        seed=config.seed,
    )  # fmt: skip
    if found.ok:
        return None
    return "breaks " + ", ".join(dict.fromkeys(f"'{v.law}'" for v in found.broken))


def race(
    config: Race,
    names: Sequence[str] = (),
    plugins: Sequence[Subject] = (),
    peers: Sequence[str] = (),
    say: Say = lambda text: None,
    keep: Callable[[Results], object] = lambda found: None,
) -> Results:
    """Everything measured, as JSON has it. Interrupted, what was measured until then, and `interrupted` is true; `keep`
    gets the same after each size, for a race that is killed."""
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    absent: list[dict[str, Any]] = []
    strangers = {one.label: one for one in plugins}
    machine = cost.device(config.device)

    def found(interrupted: bool) -> Results:
        return {
            "config": config.as_dict(),
            "device": _described(machine, config),
            "threads": torch.get_num_threads(),
            "seconds": round(time.monotonic() - began, 1),
            "versions": versions(),
            "date": time.strftime("%Y-%m-%d"),
            "interrupted": interrupted,
            "rows": rows,
            "absent": absent,
        }

    try:
        racing = []
        for one in entrants(names, config, plugins, peers):
            say(f"laws of {one.name}")
            ours = not one.peer or one.name in strangers
            broken = lawful(one, strangers, config) if ours and config.draws else None
            if broken:
                absent.append({"what": one.name, "why": f"{broken}: `regard check` shows how"})
            else:
                racing.append(one)
        for passing in config.passes:
            still = [one for one in racing if passing in one.passes]
            for N in config.tokens:
                _heat(config, passing, N, still, machine, rows, absent, say)
                keep(found(True))
    except KeyboardInterrupt:
        return found(True)
    return found(False)


def _described(machine: cost.Device, config: Race) -> dict[str, Any]:
    dtype = getattr(torch, resolve_dtype(config.dtype))
    return {
        "name": machine.name,
        "flops": machine.flops.get(dtype),
        "bandwidth": machine.bandwidth,
        "measured": machine.measured,
    }


def _heat(
    config: Race,
    passing: str,
    N: int,
    still: list[Entrant],
    machine: cost.Device,
    rows: list[dict[str, Any]],
    absent: list[dict[str, Any]],
    say: Say,
) -> None:
    """One size: who can, runs in turn; who cannot leaves `still`, with the reason."""
    size, device = config.size(N, passing), torch.device(config.device)
    ready: list[tuple[Entrant, Run, int | None, Cost | None]] = []
    for one in list(still):
        say(f"{passing}, {N:,} tokens: {one.name}")
        work = one.cost(size, passing)
        before = [r for r in rows if r["what"] == one.name and r["pass"] == passing]
        gc.collect()  # what the one before left behind is free, too
        why = _too_much(config, before, size, work, device)
        if why is None:
            try:
                run = one.make(size, passing)
                run()
                most = peak(run, device) if one.counted or device.type == "cuda" else None
                ready.append((one, run, most, work))
                continue
            except Exception as error:  # whatever a stranger's code raises: one that cannot run should not end the race
                why = _said(error)
        still.remove(one)
        absent.append({"what": one.name, "pass": passing, "N": N, "why": why})
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if not ready:
        return
    say(f"{passing}, {N:,} tokens: all in turn")
    times = in_turn([run for _, run, _, _ in ready], device, config.seconds * len(ready), rounds=3)
    for (one, _, most, work), seconds in zip(ready, times, strict=True):
        row: dict[str, Any] = {
            "what": one.name,
            "like": one.like,
            "peer": one.peer,
            "pass": passing,
            "N": N,
            "B": size.B,
        }
        row |= {"seconds": quartiles(seconds), "repeats": len(seconds), "peak": most}
        if work is not None:
            row |= {"flops": work.useful, "bytes": work.bytes, "state": work.state}
            row["floor"] = cost.floor(work, machine, size.dtype) if size.dtype in machine.flops else None
        rows.append(row)


def _too_much(
    config: Race, before: Sequence[Mapping[str, Any]], size: Size, work: Cost | None, device: torch.device
) -> str | None:
    """Why a size is not begun: what it should take, by the growth of one sequence between the last two sizes. Where
    there was only one, time grows like the declared FLOPs, or N² where none are declared, and memory like N², or N
    where there was less of it than a matrix of weights takes."""
    there = SPARE * free(device)
    if not before:
        moved = 0 if work is None else work.bytes
        return None if moved < there else f"its inputs and outputs are {_gib(moved)}; {_gib(there)} can be spared"
    last, past = before[-1], before[-2] if len(before) > 1 else None
    N, more = last["N"], size.S / last["N"]

    def grown(of: Callable[[Mapping[str, Any]], float], guess: float) -> float:
        now, earlier = (of(row) / row["B"] if row else 0.0 for row in (last, past))
        if earlier and past is not None:
            guess = more ** min(max(math.log(now / earlier) / math.log(N / past["N"]), 1.0), 2.0)
        return size.B * now * guess

    dense = (last["peak"] or 0) >= last["B"] * size.H * N * N * size.e
    slower = more**2 if work is None else max(work.useful / size.B / (last["flops"] / last["B"]), more)
    seconds = grown(lambda row: row["seconds"][1], slower)
    memory = grown(lambda row: row["peak"] or 0, more**2 if dense else more)
    if memory > there:
        return f"it should take {_gib(memory)}; {_gib(there)} can be spared"
    if seconds > config.patience:
        return f"a run should take {seconds:.1f} s, longer than patience = {config.patience:g} s"
    return None


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def _said(error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return first[:160] if isinstance(error, RegardError) else f"{type(error).__name__}: {first[:140]}"
