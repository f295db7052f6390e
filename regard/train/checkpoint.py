"""Checkpoints: model folders with the optimiser's state and a manifest of hashes, written atomically.

A checkpoint is staged in the folder where it will stand, forced to disk, and renamed. The manifest is written last: a
folder without one, or with a file that does not match, was never finished or was damaged since, and is passed over.

state.json has a format version. Checkpoints of version 1, which had no number, are read as well.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor

from regard.errors import RegardError, quote
from regard.models import Model
from regard.models.locate import OPTIMIZER, STATE
from regard.models.locate import checkpoint_steps as steps
from regard.models.locate import find_fault as fault
from regard.models.locate import newest_step as newest
from regard.models.tensor_files import open_tensors
from regard.reading import check_fields, fits, read_json_object
from regard.storage import STAGED, remove_leftovers, staged_folder, write_manifest, write_tensors

__all__ = [
    "CheckpointError",
    "SavedState",
    "check_progress",
    "explain_misfit",
    "fault",
    "newest",
    "prune",
    "read",
    "remove_all",
    "steps",
    "write",
]

FORMAT = 2
VERSION = "format_version"


class CheckpointError(RegardError, OSError):
    """A checkpoint that cannot be written or read."""


# What state.json holds, and what it holds of the progress of a training.
_DOCUMENT: dict[str, Any] = {"state": dict, "optimizer": dict, "scaler": dict}
_PROGRESS: dict[str, Any] = {
    "step": int,
    "tokens": int,
    "seconds": float,
    "best": float | None,
    "best_loss": float | None,  # earlier versions did not keep it
    "best_step": int | None,
    "stale": int,
    "sums": list,
}
LARGEST_COUNT = 1 << 62


class SavedState(NamedTuple):
    """What a checkpoint holds besides the model: the optimiser's tensors, and plain numbers."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


def write(folder: Path, step: int, model: Model[Any], tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Writes step-N into a folder and returns its path; one that is already there and complete is kept."""
    path = folder / f"step-{step}"
    if path.is_dir() and fault(path) is None:
        return path
    try:
        with staged_folder(path) as stage:
            model.write_files(stage)
            write_tensors(stage / OPTIMIZER, tensors)
            (stage / STATE).write_text(json.dumps({VERSION: FORMAT, **state}, indent=2), encoding="utf-8")
            write_manifest(stage)
            if path.exists():  # damaged, or it would have been kept
                shutil.rmtree(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the checkpoint {path}: {error}. Earlier checkpoints are as they were."
        ) from error
    return path


def read(path: Path) -> SavedState:
    """Reads the optimiser's tensors and the plain state of a checkpoint that was found complete."""
    document = read_json_object(path / STATE, CheckpointError)
    version = document.pop(VERSION, 1)
    if version not in range(1, FORMAT + 1):
        raise CheckpointError(
            f"{path / STATE} has {VERSION} {quote(version)}; this regard reads 1 to {FORMAT}: update it, or go on with "
            "the version that wrote it"
        )
    with open_tensors(path / OPTIMIZER, CheckpointError) as file:
        tensors = file.read()
    return SavedState(tensors, document)


def check_progress(path: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the progress of a training that state.json holds, after all of the document is checked."""
    source = str(path / STATE)
    check_fields(document, _DOCUMENT, source, CheckpointError)
    state = check_fields(document["state"], _PROGRESS, f"{source}, state", CheckpointError)
    sums = state["sums"]
    if len(sums) != 3 or not all(fits(x, float) for x in sums):
        raise CheckpointError(f"{source} is damaged: state.sums = {quote(sums)}, expected three numbers")
    for name in ("step", "tokens", "seconds", "stale"):
        if not 0 <= state[name] <= LARGEST_COUNT:
            raise CheckpointError(f"{source} is damaged: state.{name} = {quote(state[name])}, expected 0 or more")
    # A key that this version does not know is left out.
    return {name: state[name] for name in _PROGRESS if name in state}


@contextmanager
def explain_misfit(path: Path) -> Iterator[None]:
    """Raises CheckpointError where a complete checkpoint does not fit the run."""
    try:
        yield
    except CheckpointError:
        raise
    except (RegardError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} does not fit its run: {quote(error)}. Remove it, and the one before it is used"
        ) from error


def prune(folder: Path, keep: int, also: int | None, written: int) -> None:
    """Removes all checkpoints but the `keep` newest complete ones and that of the step `also`.

    First the one of the step `written` is read back from disk; if it is damaged, CheckpointError is raised and nothing
    is removed. Unfinished files of killed processes are removed too.
    """
    damage = fault(folder / f"step-{written}", from_disk=True)
    if damage is not None:
        raise CheckpointError(f"the checkpoint was not written as it should be: {damage}. Earlier ones are kept")
    complete = 0
    for step in reversed(steps(folder)):
        path = folder / f"step-{step}"
        if complete >= max(1, keep):
            if step != also:
                _remove(path)
        elif step == written or fault(path) is None:
            complete += 1
    remove_leftovers(folder)
    for path in folder.glob(".step-*"):
        if not STAGED.fullmatch(path.name):  # as earlier versions named what they staged
            _remove(path)


def remove_all(folder: Path) -> None:
    """Removes all checkpoints of a training that has ended."""
    if folder.is_dir():
        _remove(folder)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise CheckpointError(f"cannot remove the old checkpoint {path}: {error}") from error
