"""From how many tokens on one mechanism takes less time than another: by the model, and by the clock.

By the model a time is the floor on a device, or the predicted one. By the clock the two run in turn on this machine,
with the kernels that regard would choose, at lengths that double until the order changes and then close in on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.cost.declared import of
from regard.cost.devices import Device, floor
from regard.cost.timing import Run, best
from regard.mechanisms import Cost, Face, Mechanism, fitted
from regard.shapes import Mask, Size

LONGEST = 1 << 24  # tokens beyond which nobody is asked
FIRST = 64  # where measuring starts
PATIENCE = 2.0  # seconds that one run may take


class Point(NamedTuple):
    """Seconds of both at a length."""

    tokens: int
    first: float
    second: float


@dataclass(frozen=True)
class Crossing:
    """`first` takes less time than `second` from `tokens` on; None: at no length that was looked at, up to `upto`."""

    first: str
    second: str
    tokens: int | None
    upto: int
    points: tuple[Point, ...] = ()


Named = Callable[[Size], Mechanism]


def named(name: str, **options: object) -> Named:
    """A mechanism that is built anew for each length."""
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
    """By floors on a device, or by what is `predicted` for it."""

    def faster(tokens: int) -> bool:
        at = _sized(size, tokens, face)
        with torch.device("meta"):
            built = first(at), second(at)
        a, b = (time(of(m, at, face, training=training), device, size.dtype) for m in built)
        return a < b

    high = 1
    while not faster(high):
        high *= 2
        if high > LONGEST:
            return Crossing(*_names(first, second, size), None, LONGEST)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if faster(middle) else (middle, high)
    return Crossing(*_names(first, second, size), high, LONGEST)


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
    """By the clock, to within a factor of `close`. Lengths end at `longest`, or where a run takes over two seconds."""
    points: list[Point] = []
    device = torch.device(size.device)

    def faster(tokens: int) -> bool:
        at = _sized(size, tokens, face)
        runs = [runner(m(at), at, face, training) for m in (first, second)]
        points.append(Point(tokens, *best(runs, device, seconds)))
        if progress is not None:
            progress(points[-1])
        return points[-1].first < points[-1].second

    low, high = 0, FIRST
    while not faster(high):
        if 2 * high > longest or max(points[-1][1:]) > PATIENCE:
            return Crossing(*_names(first, second, size), None, high, tuple(points))
        low, high = high, 2 * high
    while low and high > close * low:
        middle = round((low * high) ** 0.5)
        low, high = (low, middle) if faster(middle) else (middle, high)
    return Crossing(*_names(first, second, size), high, high, tuple(sorted(points)))


def runner(mechanism: Mechanism, size: Size, face: Face = "parallel", training: bool = False) -> Run:
    """One run of a face on random inputs. Recurrent: the last T of S tokens, after the others were written."""
    mechanism = mechanism.to(torch.device(size.device), size.dtype)
    mask = Mask(size.causal)
    if face == "parallel":
        return attending(lambda q, k, v: mechanism(q, k, v, mask), size, training, tuple(mechanism.parameters()))
    q, k, v = _inputs(size, False)
    if face == "weights":
        return torch.no_grad()(lambda: mechanism.weights(q, k, mask))
    return _stepper(mechanism, size, q, k, v)


def attending(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    size: Size,
    training: bool = False,
    parameters: Sequence[Tensor] = (),
) -> Run:
    """One run of a function of q, k, v on random inputs; `training`: with its gradients."""
    q, k, v = _inputs(size, training)
    if not training:
        return torch.no_grad()(lambda: attend(q, k, v))
    gradient = torch.randn(size.B, size.H, size.T, size.V, device=size.device).to(size.dtype)

    def both() -> None:
        for x in (q, k, v, *parameters):
            x.grad = None
        attend(q, k, v).backward(gradient)

    return both


def _inputs(size: Size, training: bool) -> list[Tensor]:
    draw = torch.Generator(size.device).manual_seed(0)
    shapes = ((size.H, size.T, size.K), (size.G, size.S, size.K), (size.G, size.S, size.V))
    made = [torch.randn(size.B, *s, generator=draw, device=size.device) * s[-1] ** -0.25 for s in shapes]
    return [x.to(size.dtype).requires_grad_(training) for x in made]


def _stepper(mechanism: Mechanism, size: Size, q: Tensor, k: Tensor, v: Tensor) -> Run:
    T, before = size.T, size.S - size.T
    with torch.no_grad():
        state = mechanism.empty(size)
        for at in range(0, before, 4096):
            part = slice(at, min(at + 4096, before))
            queries = q.new_zeros(size.B, size.H, part.stop - at, size.K)
            _, state = mechanism.extend(queries, k[:, :, part], v[:, :, part], state)
    new_k, new_v = k[:, :, before:].contiguous(), v[:, :, before:].contiguous()
    assert new_k.shape[2] == T
    return torch.no_grad()(lambda: mechanism.extend(q, new_k, new_v, state))


def _sized(size: Size, tokens: int, face: Face) -> Size:
    return replace(size, T=1 if face == "recurrent" else tokens, S=tokens)


def _names(first: Named, second: Named, size: Size) -> tuple[str, str]:
    small = replace(size, T=1, S=1)
    return first(small).name, second(small).name
