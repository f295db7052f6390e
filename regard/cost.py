"""Declared costs: of a mechanism's face, and of one decoding step of a whole attention layer."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

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


# Peak FLOP/s of dense matrix products as the makers state them, by device and dtype; float32 without TF32.
PEAKS: dict[str, dict[str, float]] = {
    "H200": {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
    "H100 PCIe": {"bfloat16": 756e12, "float16": 756e12, "float32": 51e12},
    "H100": {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
    "B200": {"bfloat16": 2250e12, "float16": 2250e12, "float32": 75e12},
    "A100": {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
    "L40S": {"bfloat16": 362e12, "float16": 362e12, "float32": 91.6e12},
    "L4": {"bfloat16": 121e12, "float16": 121e12, "float32": 30.3e12},
    "A10": {"bfloat16": 125e12, "float16": 125e12, "float32": 31.2e12},
    "V100": {"float16": 125e12, "float32": 15.7e12},
    "T4": {"float16": 65e12, "float32": 8.1e12},
    "RTX 4090": {"bfloat16": 165e12, "float16": 165e12, "float32": 82.6e12},
    "RTX 3090": {"bfloat16": 71e12, "float16": 71e12, "float32": 35.6e12},
}


def peak(device: str, dtype: torch.dtype) -> float | None:
    """The peak FLOP/s of a device by its name, None where it is not in the table."""
    words = f" {device} ".replace("-", " ")
    found = next((rates for name, rates in PEAKS.items() if f" {name} " in words), {})
    return found.get(str(dtype).removeprefix("torch."))


class _Callable(ModuleType):
    """`regard.cost` is this module; called, it is `of`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Cost:
        return of(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
