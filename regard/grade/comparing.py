"""Comparing an output with the expected one, and describing the difference in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import quote


@dataclass(frozen=True)
class Mismatch:
    """How an output differs from the expected one, in words. `form`: in type, number of entries or shape."""

    words: str
    form: bool = False


def compare(got: Any, want: Any, tolerance: float, what: str = "the output") -> Mismatch | None:
    """Returns how `got` differs from `want`, or None if they agree.

    Tensors agree if no entry is off by more than `tolerance` times the largest expected entry (at least 1). A NumPy
    array or a list of numbers counts as a tensor.
    """
    if isinstance(want, Tensor):
        return _compare_tensors(got, want, tolerance, what)
    if isinstance(want, list | tuple):
        return _compare_sequences(got, want, tolerance, what)
    if isinstance(want, Mapping):
        if not isinstance(got, Mapping) or set(got) != set(want):
            return Mismatch(
                f"{what} is {_describe(got)}, expected a dictionary with the keys {sorted(want)}", form=True
            )
        return _first(compare(got[key], want[key], tolerance, f"{what}[{key!r}]") for key in want)
    if isinstance(want, float):
        return _compare_tensors(got, torch.tensor(want, dtype=torch.float64), tolerance, what)
    if type(got) is not type(want) and not _is_number(got, want):
        return Mismatch(f"{what} is {_describe(got)}, expected {_describe(want)}", form=True)
    if got != want:
        return Mismatch(f"{what} is {quote(got)}, expected {quote(want)}")
    return None


def compare_form(got: Any, want: Any, what: str = "the output") -> Mismatch | None:
    """Returns how the types, numbers of entries and shapes of `got` differ from those of `want`; None: they agree."""
    found = compare(got, want, float("inf"), what)
    if found is not None and found.form:
        return found
    return None


def _first(found: Any) -> Mismatch | None:
    return next((mismatch for mismatch in found if mismatch is not None), None)


def _compare_sequences(got: Any, want: list[Any] | tuple[Any, ...], tolerance: float, what: str) -> Mismatch | None:
    if isinstance(got, Tensor | np.ndarray) and not any(isinstance(entry, Tensor) for entry in want):
        got = got.tolist()
    if not isinstance(got, list | tuple):
        return Mismatch(f"{what} is {_describe(got)}, expected {len(want)} values in a tuple or list", form=True)
    if _are_tokens(got) and _are_tokens(want) and list(got) != list(want):
        return Mismatch(f"{what} is {quote(list(got))}, expected {list(want)}", form=len(got) != len(want))
    if len(got) != len(want):
        return Mismatch(f"{what} has {len(got)} entries, expected {len(want)}", form=True)
    names = [f"entry {n} of {what}" for n in range(1, len(want) + 1)]
    return _first(compare(g, w, tolerance, name) for g, w, name in zip(got, want, names, strict=True))


def _are_tokens(values: Any) -> bool:
    """Returns whether these are at most 12 whole numbers, such as tokens, which can be shown in full."""
    return len(values) <= 12 and all(type(value) is int for value in values)


def _compare_tensors(got: Any, want: Tensor, tolerance: float, what: str) -> Mismatch | None:
    tensor = _as_tensor(got)
    if tensor is None:
        return Mismatch(f"{what} is {_describe(got)}, expected a tensor {list(want.shape)}", form=True)
    if tensor.shape != want.shape:
        return Mismatch(f"{what} has the shape {list(tensor.shape)}, expected {list(want.shape)}", form=True)
    if want.is_floating_point() != tensor.is_floating_point() and tensor.dtype != torch.bool:
        kind = "whole numbers"
        if want.is_floating_point():
            kind = "floating-point numbers"
        return Mismatch(f"{what} is of {tensor.dtype}, expected {kind}", form=True)
    if not want.numel():
        return None
    ours = tensor.detach().to("cpu", torch.float64)
    theirs = want.detach().to(torch.float64)
    if not bool(torch.isfinite(ours)[torch.isfinite(theirs)].all()):
        return Mismatch(f"{what} has entries that are NaN or infinite")
    is_same = (ours == theirs) | (ours.isnan() & theirs.isnan())  # slips may have NaN, too
    gap = torch.where(is_same, 0.0, (ours - theirs).abs())
    worst = float(gap.max())
    largest = float(theirs[torch.isfinite(theirs)].abs().clamp(min=1.0).amax()) if theirs.isfinite().any() else 1.0
    if worst <= tolerance * largest:
        return None
    place = tuple(int(i) for i in np.unravel_index(int(gap.argmax()), gap.shape))
    values = f"it is {ours[place]:.4g}, expected {theirs[place]:.4g}"
    if place:
        values = f"at {list(place)} {values}"
    return Mismatch(f"{what} is off by up to {worst:.2g}: {values}")


def _as_tensor(value: Any) -> Tensor | None:
    """Returns a tensor, an array, a number or a list of numbers as a tensor; None for any other value."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, np.ndarray | np.generic | list | tuple | float | int):
        return None
    try:
        return torch.as_tensor(np.asarray(value))
    except (ValueError, TypeError, RuntimeError):  # rows of several lengths, or entries that are no numbers
        return None


def plain_output(value: Any, dtype: torch.dtype) -> Any:
    """Returns an output with arrays and nested lists of numbers as tensors, and floating-point tensors in `dtype`.

    Tensors without axes that hold whole numbers become ints, as tokens in a list are. Other values stay unchanged.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        value = torch.as_tensor(value)
    if isinstance(value, Tensor):
        return _plain_tensor(value, dtype)
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(plain_output(entry, dtype) for entry in value)
    if not isinstance(value, list):
        return value
    if value and all(isinstance(entry, list) for entry in value):
        table = _as_tensor(value)
        if table is not None and table.is_floating_point():
            return table.to(dtype)
    return [plain_output(entry, dtype) for entry in value]


def _plain_tensor(value: Tensor, dtype: torch.dtype) -> Any:
    if value.is_floating_point():
        return value.to(dtype)
    if value.dim() == 0:
        return value.item()
    return value


def _is_number(got: Any, want: Any) -> bool:
    """Returns whether `got` is a number, or a tensor of one entry, that may be compared with a number `want`."""
    if isinstance(got, Tensor):
        return got.numel() == 1 and isinstance(want, int)
    return isinstance(got, int | float | np.generic) and isinstance(want, int | float)


def _describe(value: Any) -> str:
    """Returns in words what a value is, for a message."""
    if value is None:
        return "None (is a `return` missing?)"
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{type(value).__name__} {quote(value)}"
