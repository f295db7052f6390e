"""What all designs share: results that explain themselves, checks of inputs, and the least length of a query."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from regard.lab.design.certificates import Array, DesignError

Vectors = Float[Tensor, "S K"]


class DesignResult:
    """The base class of the results of designs: each returns its fields as JSON, with an explanation."""

    def explain(self) -> str:
        """Returns the result in plain words, with the numbers to check by hand."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """Returns plain lists, strings and numbers; what is infinite or unknown is None."""
        plain: dict[str, Any] = to_plain(self)
        return plain | {"explanation": self.explain()}


def to_plain(value: Any) -> Any:
    """Returns any part of a result as JSON has it."""
    if is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Tensor):
        return to_plain(value.tolist())
    if isinstance(value, tuple | list):
        return [to_plain(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def shortest_length(gaps: Array, members: int, precision: float, scale: float) -> float:
    """Returns the least β with Σ_j exp(−β·scale·gap_j) ≤ members·(1−precision)/precision, plus 1e-8 of it for rounding.

    `gaps` are the differences between the members' score and that of each other key at β·scale = 1.
    """
    if not len(gaps):
        return 0.0
    allowed = members * (1 - precision) / precision
    # As if all gaps were as small as the smallest: that long always suffices.
    high = max(math.log(len(gaps) / allowed), 0.0) / (scale * float(gaps.min()))
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        if np.exp(-middle * scale * gaps).sum() <= allowed:
            high = middle
        else:
            low = middle
    return high * (1 + 1e-8)


def check_vectors(keys: Vectors, what: str = "keys") -> Vectors:
    """Returns keys or queries [S,K] in float64 on the CPU, or raises an error that names what is wrong with them."""
    if keys.dim() != 2 or 0 in keys.shape or not keys.is_floating_point():
        raise DesignError(f"{what} {tuple(keys.shape)} of {keys.dtype}: expected [S,K] of floating point, none empty")
    if not keys.isfinite().all():
        i, k = divmod(int((~keys.isfinite()).flatten().int().argmax()), keys.shape[1])
        raise DesignError(f"{what}: row {i}, coordinate {k} is {float(keys[i, k])}; expected a finite number")
    return keys.detach().to("cpu", torch.float64)


def check_index(i: int, n: int) -> None:
    """Raises an error unless i is the number of one of n keys."""
    if not 0 <= i < n:
        raise DesignError(f"no key {i}; expected 0 to {n - 1}")


def check_precision(precision: float, scale: float, least: float = 0.5) -> None:
    """Raises an error unless `least` < `precision` < 1 and `scale` > 0; `least` is what proves a preference."""
    if not least < precision < 1:
        raise DesignError(f"precision {precision:g}: expected more than {least:.4g} and less than 1")
    if not (math.isfinite(scale) and scale > 0):
        raise DesignError(f"scale {scale:g}: expected a positive number, such as 1 or 1/√K")


def format_indices(members: Iterable[int]) -> str:
    """Formats numbers of keys: 0, 2, 5."""
    return ", ".join(map(str, members))
