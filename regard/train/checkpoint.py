"""Checkpoints: a model folder with the optimiser's state and a manifest of hashes, in place whole or not at all.

A checkpoint is staged in the folder where it will stand, forced to disk, and renamed. The manifest is written last: a
folder without one, or with a file that does not match, was never finished or was damaged since, and is passed over.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.data.files import sync
from regard.errors import RegardError
from regard.models import Model
from regard.models.folder import CONFIG, WEIGHTS

MANIFEST, STATE, OPTIMIZER = "manifest.json", "state.json", "optimizer.safetensors"


class CheckpointError(RegardError, OSError):
    """A checkpoint that cannot be written or read."""


class Saved(NamedTuple):
    """What a checkpoint holds besides the model: the optimiser's tensors, and plain numbers."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


def write(folder: Path, step: int, model: Model[Any], tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Writes step-N; one that is already there and complete is kept."""
    place = folder / f"step-{step}"
    if place.is_dir() and fault(place) is None:
        return place
    staged = folder / f".step-{step}.{secrets.token_hex(4)}"
    try:
        staged.mkdir(parents=True)
        model.save(staged)
        save_file({n: x.detach().contiguous() for n, x in tensors.items()}, staged / OPTIMIZER)
        (staged / STATE).write_text(json.dumps(state, indent=2), encoding="utf-8")
        hashes = {path.name: _hash(path) for path in sorted(staged.iterdir())}
        (staged / MANIFEST).write_text(json.dumps(hashes, indent=2), encoding="utf-8")
        for path in (*staged.iterdir(), staged):
            sync(path)
        if place.exists():
            shutil.rmtree(place)
        staged.rename(place)
        sync(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the checkpoint {place}: {error}. Earlier checkpoints are as they were."
        ) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return place


def read(place: Path) -> Saved:
    """The optimiser's tensors and the plain state of a checkpoint that was found complete."""
    return Saved(load_file(place / OPTIMIZER), json.loads((place / STATE).read_text(encoding="utf-8")))


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, complete or not, in order."""
    found = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in found if match)


def newest(folder: Path) -> int | None:
    """The newest step whose checkpoint is complete; damaged ones are passed over with a warning that names the file."""
    for step in reversed(steps(folder)):
        wrong = fault(folder / f"step-{step}")
        if wrong is None:
            return step
        warnings.warn(f"checkpoint passed over: {wrong}", stacklevel=2)
    return None


def fault(place: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file, or None."""
    try:
        hashes = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        absent = {CONFIG, WEIGHTS, OPTIMIZER, STATE} - set(hashes)
        if absent:
            return f"{place / MANIFEST} does not list {min(absent)}"
        for name, want in hashes.items():
            if _hash(place / name) != want:
                return f"{place / name} does not match its hash in {MANIFEST}"
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{place / MANIFEST} cannot be read: {error}"
    return None


def prune(folder: Path, keep: int, also: int | None) -> None:
    """Removes all but the `keep` newest checkpoints and that of one more step, and what killed writers left."""
    old = [folder / f"step-{step}" for step in steps(folder)[: -max(1, keep)] if step != also]
    for place in (*old, *folder.glob(".step-*")):
        try:
            shutil.rmtree(place)
        except OSError as error:
            raise CheckpointError(f"cannot remove the old checkpoint {place}: {error}") from error


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
