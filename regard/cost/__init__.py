"""Declared costs as numbers and formulas, the peak rates of devices, and the least time that follows from both.

`regard.cost(mechanism, size, face)` is short for `regard.cost.of`.
"""

from __future__ import annotations

from regard.cost.declared import decode, of
from regard.cost.devices import DEVICES, Device, device, floor, measured_device, peak, predicted
from regard.mechanisms import Cost
from regard.packages import make_callable

__all__ = ["DEVICES", "Cost", "Device", "decode", "device", "floor", "measured_device", "of", "peak", "predicted"]


make_callable(__name__, of)
