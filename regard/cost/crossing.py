"""The lengths at which one mechanism takes less time than another, by a model of costs or as measured.

The model's time is the floor on a device, or the predicted one. To measure, the two run in turn on this machine, with
the kernels that regard would choose. They are compared at lengths that grow by up to a factor of two; between two
lengths with a different order, a bisection finds the change. Two changes between the same two lengths are missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from regard.cost.declared import of
from regard.cost.devices import Device, floor
from regard.cost.timing import Run, shortest_times
from regard.devices import without_values
from regard.mechanisms import Cost, Face, Mechanism, Recurrence, fitted
from regard.shapes import Mask, Size

LONGEST = 1 << 24  # tokens up to which the model is evaluated
FIRST = 64  # tokens where measuring starts
PATIENCE = 2.0  # seconds that one run may take
PREFILL = 4096  # tokens that are written into a state at a time, before a step is timed


class Point(NamedTuple):
    """The seconds of both mechanisms at a length."""

    tokens: int
    first: float
    second: float


class LengthRange(NamedTuple):
    """Lengths from `start` to `end`, both included."""

    start: int
    end: int


@dataclass(frozen=True)
class Crossing:
    """The lengths at which `first` takes less time than `second`."""

    first: str
    second: str
    since: int  # the shortest length that was compared
    upto: int  # the longest length that was compared
    ranges: tuple[LengthRange, ...]  # in rising order
    points: tuple[Point, ...] = ()  # what was measured

    @property
    def tokens(self) -> int | None:
        """Returns the length from which on `first` is faster, up to the longest compared one; None: there is none."""
        if not self.ranges or self.ranges[-1].end < self.upto:
            return None
        return self.ranges[-1].start

    def describe(self) -> str:
        """Returns the lengths in words: "from N = 325 on", "up to N = 8"."""
        if not self.ranges:
            return f"never, up to N = {self.upto:,}"
        return " and ".join(map(self._describe_range, self.ranges))

    def _describe_range(self, lengths: LengthRange) -> str:
        if lengths == (self.since, self.upto):
            return f"always, from N = {self.since:,} to {self.upto:,}"
        if lengths.end == self.upto:
            return f"from N = {lengths.start:,} on"
        if lengths.start == self.since:
            return f"up to N = {lengths.end:,}"
        return f"from N = {lengths.start:,} to {lengths.end:,}"


Named = Callable[[Size], Mechanism]


def named(name: str, **options: object) -> Named:
    """Returns a function that builds the mechanism anew for each length."""
    return lambda size: fitted(name, size, **options)


def modelled(
    first: Named,
    second: Named,
    size: Size,
    device: Device,
    face: Face = "parallel",
    training: bool = False,
    time: Callable[[Cost, Device, torch.dtype], float] = floor,
) -> Crossing:
    """Returns the crossing by floors on a device, or by what is `predicted` for it."""

    def seconds(build: Named, at: Size) -> float:
        with without_values():
            mechanism = build(at)
        return time(of(mechanism, at, face, training=training), device, size.dtype)

    def is_faster(tokens: int) -> bool:
        at = _with_length(size, tokens, face)
        return seconds(first, at) < seconds(second, at)

    # 1, 2, 3, 4, 6, 8, 12, …
    powers = [1 << n for n in range(LONGEST.bit_length())]
    lengths = sorted({*powers, *(n + n // 2 for n in powers[:-1])})
    ranges = _find_ranges({n: is_faster(n) for n in lengths}, is_faster)
    return Crossing(*_names(first, second, size), 1, LONGEST, ranges)


def measured(
    first: Named,
    second: Named,
    size: Size,
    face: Face = "parallel",
    training: bool = False,
    longest: int = 1 << 15,
    close: float = 1.1,
    seconds: float = 0.3,
    progress: Callable[[Point], None] | None = None,
) -> Crossing:
    """Returns the measured crossing, with each change of the order located to within a factor of `close`.

    Lengths double from 64 on, and end at `longest`, or where a run takes over two seconds.
    """
    points: list[Point] = []
    device = torch.device(size.device)

    def is_faster(tokens: int) -> bool:
        at = _with_length(size, tokens, face)
        runs = [face_runner(build(at), at, face, training) for build in (first, second)]
        points.append(Point(tokens, *shortest_times(runs, device, seconds)))
        if progress is not None:
            progress(points[-1])
        return points[-1].first < points[-1].second

    order = {FIRST: is_faster(FIRST)}
    while 2 * max(order) <= longest and max(points[-1][1:]) <= PATIENCE:
        longer = 2 * max(order)
        order[longer] = is_faster(longer)
    ranges = _find_ranges(order, is_faster, close)
    return Crossing(*_names(first, second, size), FIRST, max(order), ranges, tuple(sorted(points)))


def interpolated(first: str, second: str, points: Sequence[Point]) -> Crossing:
    """Returns the crossing of two mechanisms that were timed at some lengths, by interpolating logarithms."""
    ordered = sorted(points)
    lengths = [math.log(point.tokens) for point in ordered]
    ratios = [math.log(point.first / point.second) for point in ordered]

    def is_faster(tokens: int) -> bool:
        return bool(np.interp(math.log(tokens), lengths, ratios) < 0)

    order = {point.tokens: is_faster(point.tokens) for point in ordered}
    ranges = _find_ranges(order, is_faster)
    return Crossing(first, second, ordered[0].tokens, ordered[-1].tokens, ranges, tuple(ordered))


def _find_ranges(
    order: dict[int, bool], is_faster: Callable[[int], bool], close: float = 1.0
) -> tuple[LengthRange, ...]:
    """Returns the ranges of lengths at which `is_faster` holds; `order` has its values at some lengths, in rising
    order.

    Between two lengths that differ it bisects until they are next to each other, or within a factor of `close`.
    """
    lengths = list(order)
    ranges = []
    start = lengths[0]
    for low, high in pairwise(lengths):
        if order[low] == order[high]:
            continue
        after = high
        while after - low > max(1, (close - 1) * low):
            middle = (low + after) // 2
            if is_faster(middle) == order[high]:
                after = middle
            else:
                low = middle
        if order[high]:
            start = after
        else:
            ranges.append(LengthRange(start, low))
    if order[lengths[-1]]:
        ranges.append(LengthRange(start, lengths[-1]))
    return tuple(ranges)


def face_runner(mechanism: Mechanism, size: Size, face: Face = "parallel", training: bool = False) -> Run:
    """Returns a run of one face on random inputs; "recurrent": of the last T of S tokens, the others written before."""
    mechanism = mechanism.to(torch.device(size.device), size.dtype)
    mask = Mask(size.causal, window=size.window)
    gates = _random_gates(mechanism, size, training)
    unit = isinstance(mechanism, Recurrence)
    if face == "parallel":
        learned = (*mechanism.parameters(), *gates.values())
        return attention_runner(lambda q, k, v: mechanism(q, k, v, mask, **gates), size, training, learned, unit)
    q, k, v = _random_inputs(size, False, unit)
    if face == "weights":
        return torch.no_grad()(lambda: mechanism.weights(q, k, mask, **gates))
    return _step_runner(mechanism, size, q, k, v, gates)


def attention_runner(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    size: Size,
    training: bool = False,
    parameters: Sequence[Tensor] = (),
    unit: bool = False,
) -> Run:
    """Returns a run of a function of q, k, v on random inputs; `training`: with its gradients; `unit`: ‖k‖ = 1."""
    q, k, v = _random_inputs(size, training, unit)
    if not training:
        return torch.no_grad()(lambda: attend(q, k, v))
    gradient = torch.randn(size.B, size.H, size.T, size.V, device=size.device).to(size.dtype)

    def forward_and_backward() -> None:
        for x in (q, k, v, *parameters):
            x.grad = None
        attend(q, k, v).backward(gradient)

    return forward_and_backward


def _random_gates(mechanism: Mechanism, size: Size, training: bool) -> dict[str, Tensor]:
    """Returns random decays a and write strengths b, by name, that a gated or delta mechanism takes; {} for others."""
    if not isinstance(mechanism, Recurrence):
        return {}
    draw = torch.Generator(size.device).manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {"a": (size.B, size.G, size.S), "b": (size.B, size.G, size.S)}
    if mechanism.channels:
        shapes["a"] = (*shapes["a"], size.K)
    made = {n: torch.randn(s, generator=draw, device=size.device) for n, s in shapes.items() if n in mechanism.needs}
    for name, x in made.items():
        if name == "a":
            made[name] = functional.logsigmoid(x) / 16
        else:
            made[name] = mechanism.range * x.sigmoid()
    return {name: x.to(size.dtype).requires_grad_(training) for name, x in made.items()}


def _random_inputs(size: Size, training: bool, unit: bool = False) -> list[Tensor]:
    """Returns q, k and v from a fixed seed, small enough for random features to follow; `unit`: keys of length 1."""
    draw = torch.Generator(size.device).manual_seed(0)
    shapes = ((size.H, size.T, size.K), (size.G, size.S, size.K), (size.G, size.S, size.V))
    inputs = [torch.randn(size.B, *shape, generator=draw, device=size.device) * shape[-1] ** -0.25 for shape in shapes]
    if unit:
        inputs[1] = functional.normalize(inputs[1], dim=-1)
    return [x.to(size.dtype).requires_grad_(training) for x in inputs]


def _step_runner(mechanism: Mechanism, size: Size, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> Run:
    """Returns a run of the last T tokens over a state in which the S − T before them are written."""
    before = size.S - size.T
    with torch.no_grad():
        state = mechanism.empty(size, Mask(window=size.window))
        for start in range(0, before, PREFILL):
            part = slice(start, min(start + PREFILL, before))
            queries = q.new_zeros(size.B, size.H, part.stop - start, size.K)
            made = {name: x[:, :, part] for name, x in gates.items()}
            _, state = mechanism.extend(queries, k[:, :, part], v[:, :, part], state, **made)
    new_k = k[:, :, before:].contiguous()
    new_v = v[:, :, before:].contiguous()
    new_gates = {name: x[:, :, before:].contiguous() for name, x in gates.items()}
    return torch.no_grad()(lambda: mechanism.extend(q, new_k, new_v, state, **new_gates))


def _with_length(size: Size, tokens: int, face: Face) -> Size:
    """Returns the size with this many tokens: a whole sequence, or, for the recurrent face, a step over as many."""
    if face == "recurrent":
        return replace(size, T=1, S=tokens)
    return replace(size, T=tokens, S=tokens)


def _names(first: Named, second: Named, size: Size) -> tuple[str, str]:
    small = replace(size, T=1, S=1)
    return first(small).name, second(small).name
