"""Checkpoints: a model folder with the optimiser's state and a manifest of hashes, in place whole or not at all.

A checkpoint is staged in the folder where it will stand, forced to disk, and renamed. The manifest is written last: a
folder without one, or with a file that does not match, was never finished or was damaged since, and is passed over.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.data.files import sync
from regard.errors import RegardError
from regard.models import Model
from regard.models.locate import MANIFEST, OPTIMIZER, STATE, hash_file
from regard.models.locate import checkpoint_steps as steps
from regard.models.locate import find_fault as fault
from regard.models.locate import newest_step as newest

__all__ = ["CheckpointError", "SavedState", "fault", "newest", "prune", "read", "steps", "write"]


class CheckpointError(RegardError, OSError):
    """A checkpoint that cannot be written or read."""


class SavedState(NamedTuple):
    """What a checkpoint holds besides the model: the optimiser's tensors, and plain numbers."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


def write(folder: Path, step: int, model: Model[Any], tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Writes step-N into a folder and returns its path; one that is already there and complete is kept."""
    path = folder / f"step-{step}"
    if path.is_dir() and fault(path) is None:
        return path
    staged = folder / f".step-{step}.{secrets.token_hex(4)}"
    try:
        staged.mkdir(parents=True)
        model.save(staged)
        save_file({name: x.detach().contiguous() for name, x in tensors.items()}, staged / OPTIMIZER)
        (staged / STATE).write_text(json.dumps(state, indent=2), encoding="utf-8")
        hashes = {file.name: hash_file(file) for file in sorted(staged.iterdir())}
        (staged / MANIFEST).write_text(json.dumps(hashes, indent=2), encoding="utf-8")
        for file in (*staged.iterdir(), staged):
            sync(file)
        if path.exists():
            shutil.rmtree(path)
        staged.rename(path)
        sync(folder)  # the new name is on disk only when its folder is
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the checkpoint {path}: {error}. Earlier checkpoints are as they were."
        ) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return path


def read(path: Path) -> SavedState:
    """Reads the optimiser's tensors and the plain state of a checkpoint that was found complete."""
    return SavedState(load_file(path / OPTIMIZER), json.loads((path / STATE).read_text(encoding="utf-8")))


def prune(folder: Path, keep: int, also: int | None) -> None:
    """Removes all but the `keep` newest checkpoints and that of one more step, and what killed writers left."""
    old = [folder / f"step-{step}" for step in steps(folder)[: -max(1, keep)] if step != also]
    for path in (*old, *folder.glob(".step-*")):
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise CheckpointError(f"cannot remove the old checkpoint {path}: {error}") from error
