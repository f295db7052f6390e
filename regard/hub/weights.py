"""The tensors of a Hugging Face folder: one safetensors file, or several with an index. Only what is used is read."""

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
_LEGACY = {".gamma": ".weight", ".beta": ".bias"}  # what norms were called once


class Weights:
    """The tensors by name, as a context manager; `prefix` before a name is left off."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.folder, self.prefix = folder, prefix
        self._open = ExitStack()
        self._found: dict[str, tuple[Any, str, Path]] = {}

    def __enter__(self) -> Weights:
        check_weights(self.folder)
        try:
            for path, listed in self._files().items():
                file = self._opened(path)
                names = set(file.keys())
                for absent in sorted(listed - names)[:1]:
                    raise HubError(f"{self.folder / INDEX} says that {path.name} holds {absent}, but it does not")
                for name in sorted(names):
                    self._add(name, file, path)
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    @property
    def names(self) -> set[str]:
        return set(self._found)

    def place(self, name: str) -> Path:
        """The file that a tensor is in."""
        return self._found[name][2]

    def shape(self, name: str) -> list[int]:
        file, stored, _ = self._found[name]
        return list(file.get_slice(stored).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor; quantised ones are refused."""
        file, stored, path = self._found[name]
        kind = str(file.get_slice(stored).get_dtype())
        if kind not in DTYPES:
            raise HubError(
                f"{path}: {stored} is stored as {kind}; regard reads {', '.join(DTYPES)}, not quantised weights"
            )
        return DTYPES[kind]

    def get(self, name: str) -> Tensor:
        file, stored, path = self._found[name]
        try:
            tensor: Tensor = file.get_tensor(stored)
        except (SafetensorError, OSError, ValueError) as error:
            raise HubError(f"{path} is damaged at {stored}: {error}; copy or download it again") from None
        return tensor

    def _files(self) -> dict[Path, set[str]]:
        """Each file with the tensors that the index says are in it."""
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

    def _opened(self, path: Path) -> Any:
        try:
            return self._open.enter_context(safe_open(path, framework="pt"))
        except FileNotFoundError:
            raise HubError(f"{path} does not exist: the folder is incomplete; copy or download it again") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise HubError(
                f"{path} is damaged, cut short or no safetensors file ({error}); download it again"
            ) from None

    def _add(self, stored: str, file: Any, path: Path) -> None:
        name = stored.removeprefix(self.prefix)
        for old, new in _LEGACY.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        if name in self._found:
            raise HubError(f"{path}: {stored} and {self._found[name][1]} are one tensor under two names")
        self._found[name] = (file, stored, path)
