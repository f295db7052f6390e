"""Declared costs as numbers and formulas, what devices can do, and the least time that follows.

`regard.cost(mechanism, size, face)` is short for `regard.cost.of`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from regard.cost.declared import decode, of
from regard.cost.devices import DEVICES, Device, device, floor, measured_device, peak, predicted
from regard.mechanisms import Cost

__all__ = ["DEVICES", "Cost", "Device", "decode", "device", "floor", "measured_device", "of", "peak", "predicted"]


class _Callable(ModuleType):
    """`regard.cost` is this module; called, it is `of`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Cost:
        return of(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
