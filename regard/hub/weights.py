"""The tensors of a Hugging Face folder, in one safetensors file, or in several with an index.

Only the headers of the files are read until `get` reads a tensor.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from regard.errors import HubError
from regard.hub.safety import INDEX, WEIGHTS, check_weights

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_LEGACY = {".gamma": ".weight", ".beta": ".bias"}  # the suffixes that old files have in the names of a norm's tensors


class Weights:
    """The tensors of a folder by name, as a context manager that keeps the files open.

    `prefix` is removed from the names that begin with it, and the old suffixes .gamma and .beta become .weight and
    .bias.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.folder = folder
        self.prefix = prefix
        self._open_files = ExitStack()
        # By name: the open file, the name in that file, the path of the file.
        self._tensors: dict[str, tuple[Any, str, Path]] = {}

    def __enter__(self) -> Weights:
        check_weights(self.folder)
        try:
            for path, listed in self._files().items():
                file = self._open(path)
                names = set(file.keys())
                for absent in sorted(listed - names)[:1]:
                    raise HubError(f"{self.folder / INDEX} says that {path.name} holds {absent}, but it does not")
                for name in sorted(names):
                    self._add(name, file, path)
        except BaseException:
            self._open_files.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._open_files.close()

    @property
    def names(self) -> set[str]:
        """The names of all tensors, without the prefix and with the new suffixes."""
        return set(self._tensors)

    def path_of(self, name: str) -> Path:
        """Returns the path of the file that a tensor is in."""
        return self._tensors[name][2]

    def shape(self, name: str) -> list[int]:
        """Returns the shape of a tensor, from the header of its file."""
        file, stored, _ = self._tensors[name]
        return list(file.get_slice(stored).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor, from the header of its file; refuses one that is not in `DTYPES`."""
        file, stored, path = self._tensors[name]
        kind = str(file.get_slice(stored).get_dtype())
        if kind not in DTYPES:
            raise HubError(
                f"{path}: {stored} is stored as {kind}; regard reads {', '.join(DTYPES)}, not quantised weights"
            )
        return DTYPES[kind]

    def get(self, name: str) -> Tensor:
        """Reads a tensor from its file."""
        file, stored, path = self._tensors[name]
        try:
            tensor: Tensor = file.get_tensor(stored)
        except (SafetensorError, OSError, ValueError) as error:
            raise HubError(f"{path} is damaged at {stored}: {error}; copy or download it again") from None
        return tensor

    def _files(self) -> dict[Path, set[str]]:
        """Maps each file to the tensor names that the index lists for it.

        If model.safetensors exists, it is the only file, the index is not read, and the set of names is empty.
        """
        if (self.folder / WEIGHTS).exists():
            return {self.folder / WEIGHTS: set()}
        path = self.folder / INDEX
        try:
            listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            pairs = [(str(name), str(file)) for name, file in listed.items()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise HubError(f"{path} is damaged or no index of weights: {error!r}; download it again") from None
        files: dict[Path, set[str]] = {}
        for name, file in pairs:
            if PurePath(file).name != file or not file.endswith(".safetensors"):
                raise HubError(f"{path}: {name} is said to be in {file!r}; expected a safetensors file of this folder")
            files.setdefault(self.folder / file, set()).add(name)
        return files

    def _open(self, path: Path) -> Any:
        """Opens a file, which is closed when the context ends."""
        try:
            return self._open_files.enter_context(safe_open(path, framework="pt"))
        except FileNotFoundError:
            raise HubError(f"{path} does not exist: the folder is incomplete; copy or download it again") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise HubError(
                f"{path} is damaged, cut short or no safetensors file ({error}); download it again"
            ) from None

    def _add(self, stored: str, file: Any, path: Path) -> None:
        """Adds a tensor under its name without prefix and with the new suffix.

        Raises an error if two stored names become the same name.
        """
        name = stored.removeprefix(self.prefix)
        for old, new in _LEGACY.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        if name in self._tensors:
            raise HubError(f"{path}: {stored} and {self._tensors[name][1]} are one tensor under two names")
        self._tensors[name] = (file, stored, path)
