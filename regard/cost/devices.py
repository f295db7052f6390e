"""What devices can do: peak FLOP/s by dtype and bytes a second, as their makers state them or as measured here.

floor      max(bytes / bandwidth, useful FLOPs / peak)                            everything at once, the roofline
predicted  bytes / bandwidth + useful FLOPs / peak + element-wise FLOPs / rate    one after the other
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from regard.cost.timing import Run, in_turn
from regard.errors import OptionError, UnknownNameError, did_you_mean
from regard.mechanisms import Cost

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Device:
    """Peak FLOP/s of dense matrix products by dtype, bytes a second, and element-wise operations a second, of which
    some are exponentials. `measured`: here, and not from a table."""

    name: str
    flops: Mapping[torch.dtype, float]
    bandwidth: float
    elements: float
    measured: bool = False

    def peak(self, dtype: torch.dtype) -> float:
        """Peak FLOP/s at a dtype, or an error that names those that are known."""
        if dtype not in self.flops:
            known = ", ".join(str(t).removeprefix("torch.") for t in self.flops)
            raise OptionError(f"{self.name}: no peak is known for {dtype}; known: {known}")
        return self.flops[dtype]

    def ridge(self, dtype: torch.dtype) -> float:
        """FLOPs a byte above which products, not memory, set the time."""
        return self.peak(dtype) / self.bandwidth


def _stated(name: str, half: float, single: float, bandwidth: float, bfloat16: bool = True) -> Device:
    """Tera-FLOP/s of dense products in half and in single precision (without TF32), and terabytes a second."""
    halves = (torch.bfloat16, torch.float16) if bfloat16 else (torch.float16,)
    rates = {dtype: half * 1e12 for dtype in halves} | {torch.float32: single * 1e12}
    # An exponential takes eight sums; with four more beside it, and none fused, a fifth of the FLOP/s is left.
    return Device(name, rates, bandwidth * 1e12, single * 1e12 / 5)


# As the makers state them. A name is looked for in the order of this table, so the longer ones come first.
DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        _stated("H200", 989.0, 67.0, 4.8),
        _stated("H100 PCIe", 756.0, 51.0, 2.0),
        _stated("H100", 989.0, 67.0, 3.35),
        _stated("B200", 2250.0, 75.0, 8.0),
        _stated("A100 80GB", 312.0, 19.5, 1.935),
        _stated("A100 SXM4 80GB", 312.0, 19.5, 2.039),
        _stated("A100", 312.0, 19.5, 1.555),
        _stated("L40S", 362.0, 91.6, 0.864),
        _stated("L4", 121.0, 30.3, 0.3),
        _stated("A10", 125.0, 31.2, 0.6),
        _stated("V100", 125.0, 15.7, 0.9, bfloat16=False),
        _stated("T4", 65.0, 8.1, 0.32, bfloat16=False),
        _stated("RTX 4090", 165.0, 82.6, 1.008),
        _stated("RTX 3090", 71.0, 35.6, 0.936),
    )
}


def _listed(name: str) -> Device | None:
    words = f" {name} ".replace("-", " ").lower()
    return next((d for known, d in DEVICES.items() if f" {known.lower()} " in words), None)


def peak(device: str, dtype: torch.dtype) -> float | None:
    """The peak FLOP/s of a device by its name, None where it is not in the table."""
    found = _listed(device)
    return None if found is None else found.flops.get(dtype)


def device(which: str | torch.device = "cpu") -> Device:
    """What a device can do: by its maker's name ("H200") from the table; "cpu" and GPUs not in it are measured."""
    found = _listed(which) if isinstance(which, str) else None
    if found is not None:
        return found
    try:
        here = torch.device(which)
    except RuntimeError:
        known = [*DEVICES, "cpu", "cuda"]
        raise UnknownNameError(f"no device is called '{which}'.{did_you_mean(str(which), known)}") from None
    if here.type == "cuda" and torch.cuda.is_available():
        found = _listed(torch.cuda.get_device_name(here))
    return measured_device(here) if found is None else found


def floor(cost: Cost, device: Device, dtype: torch.dtype) -> float:
    """The least seconds that a cost takes on a device: max(bytes / bandwidth, useful FLOPs / peak)."""
    return max(cost.bytes / device.bandwidth, cost.useful / device.peak(dtype))


def predicted(cost: Cost, device: Device, dtype: torch.dtype) -> float:
    """The seconds that a cost takes where memory, products and the rest wait for each other."""
    return cost.bytes / device.bandwidth + cost.useful / device.peak(dtype) + cost.elementwise / device.elements


def measured_device(which: str | torch.device = "cpu", dtypes: tuple[torch.dtype, ...] = _DTYPES) -> Device:
    """Measures a device for about a second: the best of some products of large matrices, of some large copies, and of
    some element-wise work in the cache. The result is kept; on a CPU it is that of PyTorch's number of threads."""
    which = torch.device(which)
    if which.type not in ("cpu", "cuda") or (which.type == "cuda" and not torch.cuda.is_available()):
        raise OptionError(f"device '{which}' cannot be measured here; expected cpu, or cuda where there is a GPU")
    threads = torch.get_num_threads() if which.type == "cpu" else 0
    return _measured(which, threads, dtypes)


@lru_cache(16)
def _measured(which: torch.device, threads: int, dtypes: tuple[torch.dtype, ...]) -> Device:
    on_cpu = which.type == "cpu"
    rates = {dtype: _product_rate(which, dtype, 1024 if on_cpu else 8192) for dtype in dtypes}
    numbers = (1 << 24) if on_cpu else (1 << 28)
    source = torch.ones(numbers, device=which)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / _best(lambda: target.copy_(source), which)
    small = torch.randn(1 << (16 if on_cpu else 22), device=which)
    elements = 5 * small.numel() / _best(elementwise(small), which, 0.05)
    name = f"cpu, {threads} thread{'s' * (threads != 1)}" if on_cpu else torch.cuda.get_device_name(which)
    return Device(name, rates, bandwidth, elements, measured=True)


def elementwise(x: Tensor) -> Run:
    """Five operations on each element, of which one is an exponential, as behind a weight of a softmax."""
    out = torch.empty_like(x)

    def run() -> None:
        torch.sub(x, 1.0, out=out)
        torch.exp(out, out=out)
        out.mul_(0.5).add_(1.0).mul_(2.0)

    return run


def _product_rate(which: torch.device, dtype: torch.dtype, n: int) -> float:
    """FLOP/s of an n×n product; of a smaller one where the device is slow at the dtype."""
    probe = torch.ones(128, 128, device=which, dtype=dtype)
    slow = 2 * 128**3 / _best(lambda: probe @ probe, which, 0.01) < (2 * n**3) / 0.1
    n = n // 4 if slow else n
    a, b = (torch.randn(n, n, device=which).to(dtype) for _ in range(2))
    return 2 * n**3 / _best(lambda: a @ b, which)


def _best(run: Run, which: torch.device, seconds: float = 0.15) -> float:
    """The shortest of the runs that fit into some seconds."""
    return min(in_turn([run], which, seconds, rounds=3)[0])
