"""Declared costs: of a mechanism's face, and of one decoding step of a whole attention layer."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from regard.mechanisms import Cost, Face, Mechanism, fitted
from regard.shapes import Size


def of(mechanism: str | Mechanism, size: Size, face: Face = "parallel", **options: Any) -> Cost:
    """Cost of one face of a mechanism, by name or built."""
    built = mechanism if isinstance(mechanism, Mechanism) else fitted(mechanism, size, **options)
    return built.cost(size, face)


@dataclass(frozen=True)
class Step:
    """One decoding step: FLOPs, bytes moved, and FLOPs a byte."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes


def decode(b: int, n: int, D: int, H: int, G: int, K: int, V: int, e: int = 2) -> Step:
    """One token for each of b sequences with n cached, through a softmax layer of width D; e bytes an element.

    FLOPs = 2bD(HK+GK+GV+HV) + 2bH(n+1)(K+V): the same for multi-head and multi-query. Bytes differ: the cache counts
    G, not H, so multi-query (G = 1) moves 1/H of it.
    """
    widths = H * K + G * K + G * V + H * V
    flops = 2 * b * D * widths + 2 * b * H * (n + 1) * (K + V)
    return Step(flops, e * (D * widths + b * G * (n + 1) * (K + V) + b * (2 * D + widths)))


class _Callable(ModuleType):
    """`regard.cost` is this module; called, it is `of`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Cost:
        return of(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
