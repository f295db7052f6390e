"""Names of devices and dtypes, free memory, and errors that explain a lack of memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from regard.errors import OptionError, RegardError, ResourceError, did_you_mean, quote

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_MEMINFO = Path("/proc/meminfo")  # Linux only
_SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?\w+)")


def requested_memory(error: BaseException) -> str | None:
    """Returns in words how much memory an out-of-memory error says was asked for; None for other errors."""
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
        return None
    match = _ASKED.search(str(error))
    if match is None:
        return quote(error)
    return f"{match[1]} more were asked for"


def memory_error(error: BaseException, doing: str, lower: str) -> ResourceError | None:
    """Returns a ResourceError for an out-of-memory error: what was asked for, and what to lower; None for other
    errors."""
    asked = requested_memory(error)
    if asked is None or isinstance(error, RegardError):
        return None
    return ResourceError(f"out of memory while {doing}: {asked}. {lower}")


@contextmanager
def explain_memory(doing: str, lower: str) -> Iterator[None]:
    """Turns an out-of-memory error inside the block into a ResourceError: what was asked for, and what to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        explained = memory_error(error, doing, lower)
        if explained is None:
            raise
        raise explained from error


class _LeaveUnfilled(TorchFunctionMode):
    """Makes PyTorch skip the filling of tensors with normally distributed numbers.

    On the device "meta" this filling imports PyTorch's compiler, which takes as long as importing torch.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.nn.init.normal_, torch.Tensor.normal_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def without_values() -> Iterator[None]:
    """Makes tensors created in the block have the device "meta": they have a shape, but no numbers and no memory."""
    with ExitStack() as stack:
        stack.enter_context(torch.device("meta"))
        stack.enter_context(_LeaveUnfilled())
        yield


def resolve_device(name: str) -> str:
    """Returns the name if tensors can be made on this device; raises an OptionError with the devices that exist."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):
        here = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise OptionError(f"device {quote(name)} cannot be used here; there is {', '.join(here)}") from None
    return name


def resolve_dtype(name: str) -> str:
    """Returns the full name of a dtype, a key of `DTYPES`, from that name or its short form such as bf16."""
    full = _SHORT.get(name, name)
    if full not in DTYPES:
        raise OptionError(f"dtype {quote(name)} is not known.{did_you_mean(name, [*DTYPES, *_SHORT])}")
    return full


def autocast_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """Returns the dtype of autocast on a device, or None for float32 throughout.

    "auto" is bfloat16 on a GPU that has it, and float32 elsewhere.
    """
    if name == "auto":
        name = "float32"
        if device.type == "cuda" and torch.cuda.is_bf16_supported():
            name = "bfloat16"
    if name == "float32":
        return None
    return DTYPES[name]


def free_memory(device: torch.device) -> int:
    """Returns the bytes that can still be allocated; 4 GiB where the system does not say."""
    if device.type == "cuda":
        # What PyTorch's allocator has reserved but does not use is free, too.
        return (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    if _MEMINFO.exists():
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        if "MemAvailable" in lines:
            return int(lines["MemAvailable"].split()[0]) << 10
    return 4 << 30


def require_memory(needed: int, device: torch.device, doing: str, lower: str) -> None:
    """Raises a ResourceError if a device has fewer bytes free than `needed`: Linux may grant them and kill later."""
    free = free_memory(device)
    if needed > free:
        raise ResourceError(
            f"out of memory before {doing}: {needed / 1e9:,.1f} GB are needed, "
            f"and {device} has {free / 1e9:,.1f} GB free. {lower}"
        )
