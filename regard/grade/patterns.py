"""What a wrong output has in common with the right one, if no slip explains it.

Axes may be exchanged or reversed, all numbers may be multiplied by one factor, or the output may be right in some
places, or for each sequence alone. Each of these is tested on the outputs; the cause is not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.grade.cases import copy_arguments
from regard.grade.comparing import compare, plain_output

NEARLY = 2e-2  # of the largest entry: the most that a small epsilon, half precision or rounding changes an output
CLEARLY = 30.0  # times the tolerance: how far off a place must be to be clearly wrong
MOST_AXES = 4  # the most axes of an output that are tried in every order
LEAST_FACTOR = 1e-6  # a smaller factor is none: such an output is nearly zero
SHARED = (
    "Each sequence alone gives the right output, and in a batch it does not: something is taken from another sequence, "
    "or summed over the batch"
)
NEAR = "It is nearly right: is an ε too large, or is there rounding or half precision?"


@dataclass(frozen=True)
class WrongCall:
    """A call with a wrong output: the function, its arguments, its output, and the expected one.

    `reference(*arguments)` returns the expected output for other arguments.
    """

    function: Callable[..., Any]
    reference: Callable[..., Any]
    arguments: tuple[Any, ...]
    output: Any
    want: Any


class Pattern(NamedTuple):
    """What wrong outputs have in common with the right ones, in words, and whether nothing else is wrong with them."""

    words: str = ""
    is_whole: bool = False


def describe_pattern(wrong: Sequence[WrongCall], tolerance: float) -> Pattern:
    """Returns what all wrong outputs have in common with the right ones, without words if that is nothing.

    If an output has several tensors, the first wrong one is described.
    """
    pairs = [_first_difference(call, tolerance) for call in wrong]
    if any(pair is None for pair in pairs):
        return Pattern()
    known: list[tuple[Tensor, Tensor, str]] = [pair for pair in pairs if pair is not None]
    if len({name for _, _, name in known}) != 1:
        return Pattern()
    what = known[0][2]
    for describe in (_exchanged_axes, _reversed_axis):
        words = {describe(got, want, tolerance) for got, want, _ in known}
        if len(words) == 1 and words != {""}:
            return Pattern(words.pop(), is_whole=True)
    factors = [_factor(got, want, tolerance) for got, want, _ in known]
    if None not in factors:
        said = _describe_factors([factor for factor in factors if factor is not None], tolerance)
        return Pattern(said, is_whole=True)
    if _is_right_alone(wrong, tolerance):
        return Pattern(SHARED, is_whole=True)
    if all(_is_close(got, want, NEARLY) for got, want, _ in known):
        return Pattern(NEAR)
    places = {_right_places(got, want, tolerance) for got, want, _ in known}
    if len(places) != 1:
        return Pattern()
    return Pattern(places.pop().format(what=what))


def _first_difference(call: WrongCall, tolerance: float) -> tuple[Tensor, Tensor, str] | None:
    """Returns the first wrong tensor of an output, the expected one, and its name in words.

    Returns None if the output has no tensors that can be compared.
    """
    got, want = call.output, call.want
    if isinstance(want, Tensor):
        return _as_pair(got, want, "output")
    if not isinstance(want, tuple) or not isinstance(got, list | tuple) or len(got) != len(want):
        return None
    for n, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        if compare(ours, theirs, tolerance) is not None:
            return _as_pair(ours, theirs, f"output[{n}]")
    return None


def _as_pair(got: Any, want: Any, name: str) -> tuple[Tensor, Tensor, str] | None:
    ours = plain_output(got, torch.float64)
    if not isinstance(ours, Tensor) or not isinstance(want, Tensor) or not want.is_floating_point():
        return None
    ours, theirs = ours.detach().cpu().double(), want.detach().double()
    if not ours.numel() or not bool(ours.isfinite().all()) or not bool(theirs.isfinite().all()):
        return None
    return ours, theirs, name


def _is_close(got: Tensor, want: Tensor, tolerance: float) -> bool:
    if got.shape != want.shape:
        return False
    return float((got - want).abs().max()) <= tolerance * max(1.0, float(want.abs().max()))


def _exchanged_axes(got: Tensor, want: Tensor, tolerance: float) -> str:
    """Returns in words that the axes of the right output are exchanged; "" if they are not."""
    if not 1 < want.dim() == got.dim() <= MOST_AXES or sorted(got.shape) != sorted(want.shape):
        return ""
    for order in permutations(range(want.dim())):
        moved = [axis for axis, place in enumerate(order) if axis != place]
        if not moved or not _is_close(got.permute(order), want, tolerance):
            continue
        if len(moved) == 2:
            return f"The numbers are right, and two axes are exchanged: transpose({moved[0]}, {moved[1]}) mends it"
        axes = ", ".join(map(str, order))
        return f"The numbers are right, and the axes are in another order: permute({axes}) mends it"
    return ""


def _factor(got: Tensor, want: Tensor, tolerance: float) -> float | None:
    """Returns the factor by which all numbers of the right output are multiplied; None if there is none."""
    if got.shape != want.shape or want.numel() < 2:
        return None
    factor = float((got * want).sum() / want.square().sum().clamp(min=1e-300))
    if abs(factor) < LEAST_FACTOR or not _is_close(got / factor, want, tolerance):
        return None
    return factor


def _describe_factors(factors: list[float], tolerance: float) -> str:
    """Returns in words that all numbers are off by a factor, and by which if it is the same in each call."""
    spread = max(factors) - min(factors)
    first = factors[0]
    if abs(first + 1) <= tolerance >= spread:
        return "All numbers have the wrong sign, and are right otherwise"
    named = "one factor, which differs from call to call"
    if spread <= 10 * tolerance * abs(first):
        named = f"{first:.3g}"
    return f"All numbers are the right ones times {named}: there is a multiplication or division too many or too few"


def _reversed_axis(got: Tensor, want: Tensor, tolerance: float) -> str:
    """Returns in words that the right output is reversed along an axis; "" if it is not."""
    for axis in range(want.dim()):
        if want.shape[axis] > 1 and _is_close(got, want.flip(axis), tolerance):
            return f"The numbers are right, and stand in reverse along axis {axis}"
    return ""


def _is_right_alone(wrong: Sequence[WrongCall], tolerance: float) -> bool:
    """Returns whether each sequence of a batch, called alone, gives the right output."""
    batches = [call for call in wrong if _batch_of(call) > 1]
    return bool(batches) and all(_gives_each_alone(call, tolerance) for call in batches)


def _batch_of(call: WrongCall) -> int:
    """Returns the number of sequences in a call, by the first axis of its first tensor; 0 if there is none."""
    first = next((x for x in call.arguments if isinstance(x, Tensor)), None)
    if first is None or first.dim() < 2:
        return 0
    return int(first.shape[0])


def _gives_each_alone(call: WrongCall, tolerance: float) -> bool:
    """Returns whether a function gives the right output for each sequence of a call when it is alone in its batch."""
    count = _batch_of(call)
    for n in range(count):
        alone = tuple(_row(x, n, count) for x in call.arguments)
        try:
            want = call.reference(*copy_arguments(alone))
            whole = _row_of_output(call.want, n)
            got = call.function(*copy_arguments(alone))
        except (Exception, SystemExit):  # weights whose first axis is as long as the batch, or a batch that is needed
            return False
        is_a_row = compare(want, whole, tolerance) is None  # else the axis that was cut is not one of sequences
        if not is_a_row or compare(got, want, tolerance) is not None:
            return False
    return True


def _row(value: Any, n: int, count: int) -> Any:
    """Returns sequence n of a tensor that has one for each, else the value as it is."""
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == count:
        return value[n : n + 1]
    return value


def _row_of_output(value: Any, n: int) -> Any:
    if isinstance(value, Tensor):
        return value[n : n + 1]
    return tuple(entry[n : n + 1] for entry in value)


def _right_places(got: Tensor, want: Tensor, tolerance: float) -> str:
    """Returns in words where along an axis the output is right or wrong, if that is one slice; else "".

    Of several axes it is the one along which the largest share is right.
    """
    if got.shape != want.shape:
        return ""
    gap = (got - want).abs()
    bound = tolerance * max(1.0, float(want.abs().max()))
    found = [_right_along(axis, gap, bound) for axis in range(want.dim())]
    return max(found, key=lambda one: one[0], default=(0.0, ""))[1]


def _right_along(axis: int, gap: Tensor, bound: float) -> tuple[float, str]:
    """Returns the share of places along an axis that are right, and where they are in words; 0 and "" if unclear."""
    worst = gap.transpose(0, axis).flatten(1).amax(1)
    along = (worst <= bound).tolist()
    is_clear = bool((worst > CLEARLY * bound)[worst > bound].all())  # else some are right by chance
    if not any(along) or not is_clear:
        return 0.0, ""
    good = _as_slice(along)
    bad = _as_slice([not is_right for is_right in along])
    colons = ":, " * axis
    share = along.count(True) / len(along)
    if bad and (not good or along.count(False) == 1):
        return share, f"{{what}}[{colons}{bad}] is wrong, and all else along that axis is right"
    if good:
        return share, f"{{what}}[{colons}{good}] is right, and nothing else along that axis"
    return 0.0, ""


def _as_slice(chosen: list[bool]) -> str:
    """Returns the chosen places as an index of Python: one, the first few, the last few, or every other; else ""."""
    places = [n for n, is_chosen in enumerate(chosen) if is_chosen]
    count = len(chosen)
    if len(places) == 1:
        if places[0] == count - 1:
            return "-1"
        return str(places[0])
    if places == list(range(len(places))):
        return f":{len(places)}"
    if places == list(range(count - len(places), count)):
        return f"{places[0]}:"
    for first in (0, 1):
        if places == list(range(first, count, 2)):
            return f"{first or ''}::2"
    return ""
