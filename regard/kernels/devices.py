"""What a device can do, asked once: a decoding step has no time to ask it again."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def can_start_early(x: Tensor) -> bool:
    """Returns whether a program on x's device may start while the one before it still runs: on Hopper and later.

    CUDA calls it programmatic dependent launch.
    """
    return x.is_cuda and bool(_properties(x.device).major >= 9)


def count_processors(device: torch.device) -> int:
    """Returns how many programs run on a device at the same time; 4 stand for it in Triton's interpreter."""
    if device.type != "cuda":
        return 4
    processors: int = _properties(device).multi_processor_count
    return processors


def shared_memory(device: torch.device) -> int:
    """Returns the bytes of shared memory that one program may have; 96 KiB stand for it in Triton's interpreter."""
    if device.type != "cuda":
        return 96 << 10
    size: int = _properties(device).shared_memory_per_block_optin
    return size


@lru_cache
def _properties(device: torch.device) -> Any:
    """Returns what CUDA says of a GPU."""
    return torch.cuda.get_device_properties(device)


def power_of_2(n: int) -> int:
    """Returns the power of two at or above n. Triton's own function takes microseconds."""
    return 1 << (n - 1).bit_length()
