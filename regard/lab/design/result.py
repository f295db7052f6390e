"""What every design shares: a result that explains itself, what is checked, and how long a query must be."""

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


class Result:
    """What all results share: their fields as JSON has them, with the explanation."""

    def explain(self) -> str:
        """In plain words, with the numbers to check by hand."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, strings and numbers; what is infinite or unknown is None."""
        found: dict[str, Any] = plain(self)
        return found | {"explanation": self.explain()}


def plain(value: Any) -> Any:
    """Any result as JSON has it."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, tuple | list):
        return [plain(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def least_length(gaps: Array, members: int, precision: float, scale: float) -> float:
    """The least β with Σ_j exp(−β·scale·gap_j) ≤ members·(1−precision)/precision, and 1e-8 of it for rounding."""
    allowed = members * (1 - precision) / precision
    high = max(math.log(len(gaps) / allowed), 0.0) / (scale * float(gaps.min())) if len(gaps) else 0.0
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if np.exp(-middle * scale * gaps).sum() <= allowed else (middle, high)
    return high * (1 + 1e-8)


def checked(keys: Vectors, what: str = "keys") -> Vectors:
    """Keys or queries in float64, or an error that names what is the matter with them."""
    if keys.dim() != 2 or 0 in keys.shape or not keys.is_floating_point():
        raise DesignError(f"{what} {tuple(keys.shape)} of {keys.dtype}: expected [S,K] of floating point, none empty")
    if not keys.isfinite().all():
        i, k = divmod(int((~keys.isfinite()).flatten().int().argmax()), keys.shape[1])
        raise DesignError(f"{what}: row {i}, coordinate {k} is {float(keys[i, k])}; expected a finite number")
    return keys.detach().to("cpu", torch.float64)


def checked_index(i: int, n: int) -> None:
    if not 0 <= i < n:
        raise DesignError(f"no key {i}; expected 0 to {n - 1}")


def checked_numbers(precision: float, scale: float, least: float = 0.5) -> None:
    """`precision` between the least that proves a preference and one, `scale` positive."""
    if not least < precision < 1:
        raise DesignError(f"precision {precision:g}: expected more than {least:.4g} and less than 1")
    if not (math.isfinite(scale) and scale > 0):
        raise DesignError(f"scale {scale:g}: expected a positive number, such as 1 or 1/√K")


def listed(members: Iterable[int]) -> str:
    return ", ".join(map(str, members))
