"""How much memory a run takes at its peak, and how much there is."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak(run: Callable[[], object], device: torch.device) -> int:
    """Bytes at the peak of a run, above what was held before.

    On a GPU the allocator knows. On a CPU every tensor that an operation gives is counted while it lives; what an
    operation allocates inside and frees again is not seen.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    counted = _Counted()
    with counted:
        run()
    return counted.most


def free(device: torch.device) -> int:
    """Bytes that can still be had."""
    if device.type == "cuda":
        return (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines()) if _LINUX else {}
    return int(lines["MemAvailable"].split()[0]) << 10 if "MemAvailable" in lines else 4 << 30


_LINUX = Path("/proc/meminfo").exists()


class _Counted(TorchDispatchMode):
    """Adds up the storages of tensors that operations give, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor):
                self._known(x.untyped_storage())  # what was there before costs nothing
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and self._known(storage := x.untyped_storage()):
                size = storage.nbytes()
                self.held += size
                self.most = max(self.most, self.held)
                weakref.finalize(storage, self._freed, size)
        return out

    def _known(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is seen for the first time."""
        key = storage._cdata
        if key in self.seen:
            return False
        self.seen.add(key)
        weakref.finalize(storage, self.seen.discard, key)
        return True

    def _freed(self, size: int) -> None:
        self.held -= size
