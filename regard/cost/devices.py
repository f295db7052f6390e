"""Rates of devices, peak FLOP/s by dtype and bytes a second, as their makers state them or as measured here.

floor      max(bytes / bandwidth, useful FLOPs / peak)                            all at once, the roofline predicted
bytes / bandwidth + useful FLOPs / peak + element-wise FLOPs / rate    one after the other
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from regard.cost.timing import Run, shortest_times
from regard.errors import OptionError, UnknownNameError, did_you_mean
from regard.mechanisms import Cost

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Device:
    """The highest rates of a device."""

    name: str
    flops: Mapping[torch.dtype, float]  # peak FLOP/s of dense matrix products
    bandwidth: float  # bytes a second
    elements: float  # element-wise operations a second, of which some are exponentials
    measured: bool = False  # whether they were measured here, and not taken from a table

    def peak(self, dtype: torch.dtype) -> float:
        """Returns the peak FLOP/s of a dtype; raises an OptionError with the known dtypes if it is not known."""
        if dtype not in self.flops:
            known = ", ".join(str(t).removeprefix("torch.") for t in self.flops)
            raise OptionError(f"{self.name}: no peak is known for {dtype}; known: {known}")
        return self.flops[dtype]

    def ridge(self, dtype: torch.dtype) -> float:
        """Returns the FLOPs a byte above which products, not memory, bound the time."""
        return self.peak(dtype) / self.bandwidth


def _stated_device(name: str, half: float, single: float, bandwidth: float, bfloat16: bool = True) -> Device:
    """Returns a device with the rates that its maker states.

    They are tera-FLOP/s of dense products in half and in single precision (without TF32), and terabytes a second.
    """
    rates = {torch.float16: half * 1e12, torch.float32: single * 1e12}
    if bfloat16:
        rates = {torch.bfloat16: half * 1e12} | rates
    # Of five operations one is an exponential, which takes as long as eight sums, and no multiply-adds are fused: a
    # fifth.
    return Device(name, rates, bandwidth * 1e12, single * 1e12 / 5)


# As the makers state them. Names are searched in this order, so longer ones come before their beginnings.
DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        _stated_device("H200", 989.0, 67.0, 4.8),
        _stated_device("H100 PCIe", 756.0, 51.0, 2.0),
        _stated_device("H100", 989.0, 67.0, 3.35),
        _stated_device("B200", 2250.0, 75.0, 8.0),
        _stated_device("A100 80GB", 312.0, 19.5, 1.935),
        _stated_device("A100 SXM4 80GB", 312.0, 19.5, 2.039),
        _stated_device("A100", 312.0, 19.5, 1.555),
        _stated_device("L40S", 362.0, 91.6, 0.864),
        _stated_device("L4", 121.0, 30.3, 0.3),
        _stated_device("A10", 125.0, 31.2, 0.6),
        _stated_device("V100", 125.0, 15.7, 0.9, bfloat16=False),
        _stated_device("T4", 65.0, 8.1, 0.32, bfloat16=False),
        _stated_device("RTX 4090", 165.0, 82.6, 1.008),
        _stated_device("RTX 3090", 71.0, 35.6, 0.936),
    )
}


def find_stated(name: str) -> Device | None:
    """Returns the first device of the table whose name is part of the given one, or None."""
    words = f" {name} ".replace("-", " ").lower()
    return next((device for known, device in DEVICES.items() if f" {known.lower()} " in words), None)


def peak(device: str, dtype: torch.dtype) -> float | None:
    """Returns the peak FLOP/s of a device by its name, None where it is not in the table."""
    stated = find_stated(device)
    if stated is None:
        return None
    return stated.flops.get(dtype)


def device(which: str | torch.device = "cpu") -> Device:
    """Returns the rates of a device: those of the table for a name such as "H200", else those measured here."""
    stated = find_stated(str(which))
    if stated is not None:
        return stated
    try:
        here = torch.device(which)
    except RuntimeError:
        known = [*DEVICES, "cpu", "cuda"]
        raise UnknownNameError(f"no device is called '{which}'.{did_you_mean(str(which), known)}") from None
    if here.type == "cuda" and torch.cuda.is_available():
        stated = find_stated(torch.cuda.get_device_name(here))
    return stated or measured_device(here)


def floor(cost: Cost, device: Device, dtype: torch.dtype) -> float:
    """Returns the least seconds that a cost takes on a device: max(bytes / bandwidth, useful FLOPs / peak)."""
    return max(cost.bytes / device.bandwidth, cost.useful / device.peak(dtype))


def predicted(cost: Cost, device: Device, dtype: torch.dtype) -> float:
    """Returns the seconds that a cost takes if memory, products and element-wise work wait for each other."""
    return cost.bytes / device.bandwidth + cost.useful / device.peak(dtype) + cost.elementwise / device.elements


def measured_device(which: str | torch.device = "cpu", dtypes: tuple[torch.dtype, ...] = _DTYPES) -> Device:
    """Measures a device for about a second and returns its rates.

    Timed are products of large matrices, large copies, and element-wise work in the cache; the best of each counts. The
    result is kept; on a CPU it is that of PyTorch's number of threads.
    """
    which = torch.device(which)
    if which.type not in ("cpu", "cuda") or (which.type == "cuda" and not torch.cuda.is_available()):
        raise OptionError(f"device '{which}' cannot be measured here; expected cpu, or cuda where there is a GPU")
    if which.type == "cpu":
        return _measure(which, torch.get_num_threads(), dtypes, _CPU_PROBES)
    return _measure(which, 0, dtypes, _GPU_PROBES)


class _Probes(NamedTuple):
    """Sizes at which a device reaches its rates: the side of a product, numbers to copy, and numbers to work on."""

    side: int
    copied: int
    worked: int


_CPU_PROBES = _Probes(1024, 1 << 24, 1 << 16)
_GPU_PROBES = _Probes(8192, 1 << 28, 1 << 22)


@lru_cache(16)
def _measure(which: torch.device, threads: int, dtypes: tuple[torch.dtype, ...], probes: _Probes) -> Device:
    """Returns a measured device. `threads` are those of a CPU, 0 for a GPU: they are part of the cache's key."""
    rates = {dtype: _product_rate(which, dtype, probes.side) for dtype in dtypes}
    source = torch.ones(probes.copied, device=which)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / _shortest_time(lambda: target.copy_(source), which)
    small = torch.randn(probes.worked, device=which)
    elements = 5 * small.numel() / _shortest_time(elementwise(small), which, 0.05)
    return Device(_measured_name(which, threads), rates, bandwidth, elements, measured=True)


def _measured_name(which: torch.device, threads: int) -> str:
    if which.type == "cuda":
        return torch.cuda.get_device_name(which)
    if threads == 1:
        return "cpu, 1 thread"
    return f"cpu, {threads} threads"


def elementwise(x: Tensor) -> Run:
    """Returns a run of five operations on each element, one of them an exponential, as for each weight of a softmax."""
    out = torch.empty_like(x)

    def run() -> None:
        torch.sub(x, 1.0, out=out)
        torch.exp(out, out=out)
        out.mul_(0.5).add_(1.0).mul_(2.0)

    return run


def _product_rate(which: torch.device, dtype: torch.dtype, n: int) -> float:
    """Returns the FLOP/s of an n×n product, or of a smaller one if the device is slow with the dtype."""
    probe = torch.ones(128, 128, device=which, dtype=dtype)
    probed_rate = 2 * 128**3 / _shortest_time(lambda: probe @ probe, which, 0.01)
    if probed_rate < (2 * n**3) / 0.1:  # it would take over a tenth of a second
        n = n // 4
    a, b = (torch.randn(n, n, device=which).to(dtype) for _ in range(2))
    return 2 * n**3 / _shortest_time(lambda: a @ b, which)


def _shortest_time(run: Run, which: torch.device, seconds: float = 0.15) -> float:
    """Returns the shortest time of a run, repeated for this many seconds."""
    return shortest_times([run], which, seconds, rounds=3)[0]
