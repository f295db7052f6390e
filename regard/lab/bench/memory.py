"""How much memory a run takes at its peak."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak(run: Callable[[], object], device: torch.device) -> int:
    """Returns the bytes at the peak of a run, above what was allocated before.

    On a GPU PyTorch's allocator counts them. On a CPU every tensor that an operation returns is counted until it is
    freed; memory that an operation allocates and frees itself is not counted.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    counter = _AllocationCounter()
    with counter:
        run()
    return counter.peak


class _AllocationCounter(TorchDispatchMode):
    """Adds up the storages of tensors that operations return, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocated = 0
        self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor):
                self._is_new(x.untyped_storage())  # what was there before costs nothing
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and self._is_new(storage := x.untyped_storage()):
                size = storage.nbytes()
                self.allocated += size
                self.peak = max(self.peak, self.allocated)
                weakref.finalize(storage, self._subtract, size)
        return out

    def _is_new(self, storage: torch.UntypedStorage) -> bool:
        """Returns whether a storage is seen for the first time, and remembers it until it is freed."""
        key = storage._cdata
        if key in self.seen:
            return False
        self.seen.add(key)
        weakref.finalize(storage, self.seen.discard, key)
        return True

    def _subtract(self, size: int) -> None:
        """Takes off a storage that was freed."""
        self.allocated -= size
