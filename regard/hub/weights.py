"""The tensors of a Hugging Face folder, in one safetensors file, or in several with an index.

Only the headers of the files are read until `get` reads a tensor.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path, PurePath

import torch
from torch import Tensor

from regard.errors import HubError, quote
from regard.hub.safety import INDEX, WEIGHTS, check_weights
from regard.models.tensor_files import TensorFile, open_tensors
from regard.reading import check_path, read_json_object

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
        self._tensors: dict[str, tuple[TensorFile, str, Path]] = {}

    def __enter__(self) -> Weights:
        check_weights(self.folder)
        try:
            for path, listed in self._files().items():
                file = self._open(path)
                names = set(file.shapes)
                for absent in sorted(listed - names)[:1]:
                    raise HubError(
                        f"{self.folder / INDEX} says that {path.name} holds {quote(absent)}, but it does not"
                    )
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
        return file.shapes[stored]

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor, from the header of its file; refuses one that is not in `DTYPES`."""
        file, stored, path = self._tensors[name]
        kind = file.dtype(stored)
        if kind not in DTYPES:
            raise HubError(
                f"{path}: {stored} is stored as {kind}; regard reads {', '.join(DTYPES)}, not quantised weights"
            )
        return DTYPES[kind]

    def get(self, name: str) -> Tensor:
        """Reads a tensor from its file."""
        file, stored, _ = self._tensors[name]
        return file.get(stored)

    def _files(self) -> dict[Path, set[str]]:
        """Maps each file to the tensor names that the index lists for it.

        If model.safetensors exists, it is the only file, the index is not read, and the set of names is empty.
        """
        if (self.folder / WEIGHTS).exists():
            return {self.folder / WEIGHTS: set()}
        path = self.folder / INDEX
        listed = read_json_object(path, HubError).get("weight_map")
        if not isinstance(listed, dict):
            raise HubError(f"{path} is damaged or no index of weights: it has no weight_map; download it again")
        pairs = [(str(name), str(file)) for name, file in listed.items()]
        files: dict[Path, set[str]] = {}
        for name, file in pairs:
            if PurePath(file).name != file or not file.endswith(".safetensors"):
                raise HubError(
                    f"{path}: {name:.200} is said to be in {quote(file)}; expected a safetensors file of this folder"
                )
            files.setdefault(self.folder / file, set()).add(name)
        return files

    def _open(self, path: Path) -> TensorFile:
        """Opens a file, which is closed when the context ends."""
        if not check_path(path, HubError).exists():
            raise HubError(f"{path} does not exist: the folder is incomplete; copy or download it again")
        return self._open_files.enter_context(open_tensors(path, HubError))

    def _add(self, stored: str, file: TensorFile, path: Path) -> None:
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
