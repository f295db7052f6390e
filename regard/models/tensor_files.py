"""Reading untrusted safetensors files: the header is checked before any tensor takes memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from regard.errors import RegardError, quote
from regard.reading import check_file

MAX_TENSORS = 1 << 17  # a model of 1,024 layers has some 20,000
MAX_DIMENSIONS = 8
# A damaged file may raise any of these: torch has no such dtype, a shape overflows, a name is no text.
FAULTS = (SafetensorError, OSError, ValueError, RuntimeError, AttributeError, KeyError, TypeError, OverflowError)


class TensorFile:
    """An open safetensors file."""

    def __init__(self, path: Path, inner: Any, error: type[RegardError]) -> None:
        self.path = path
        self.inner = inner
        self.error = error

    @cached_property
    def metadata(self) -> dict[str, str]:
        """Returns the metadata of the header, texts by name."""
        return self.inner.metadata() or {}

    @cached_property
    def shapes(self) -> dict[str, list[int]]:
        """Returns the shape of each tensor by name, from the header."""
        names = list(self.inner.keys())
        if len(names) > MAX_TENSORS:
            raise self.error(f"{self.path} has {len(names):,} tensors; expected at most {MAX_TENSORS:,}")
        return {name: list(self.inner.get_slice(name).get_shape()) for name in names}

    def dtype(self, name: str) -> str:
        """Returns the dtype of a tensor, as the header names it."""
        return str(self.inner.get_slice(name).get_dtype())

    def get(self, name: str) -> torch.Tensor:
        """Returns one tensor, read from the file."""
        try:
            tensor: torch.Tensor = self.inner.get_tensor(name)
        except FAULTS as cause:
            raise self.error(
                f"{self.path} is damaged at {quote(name, marks=False)} ({quote(cause)}); "
                "copy, download or save it again"
            ) from None
        return tensor

    def read(self) -> dict[str, torch.Tensor]:
        """Returns all tensors by name, read from the file."""
        return {name: self.get(name) for name in self.shapes}


@contextmanager
def open_tensors(path: str | Path, error: type[RegardError]) -> Iterator[TensorFile]:
    """Opens a safetensors file; raises `error` for a pipe, a device, a damaged file, or one larger than the memory."""
    path = Path(path)
    check_file(path, error, _physical_memory())
    try:
        inner = safe_open(path, framework="pt")
    except FAULTS as cause:
        raise error(f"{path} is damaged or no safetensors file ({quote(cause)}); copy or save it again") from None
    with inner:
        file = TensorFile(path, inner, error)
        for name, shape in file.shapes.items():
            if len(shape) > MAX_DIMENSIONS:
                raise error(f"{path}: {quote(name, marks=False)} has {len(shape)} dimensions; expected at most 8")
        yield file


def _physical_memory() -> int | None:
    """Returns the bytes of memory of this machine, or None if the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
