"""Where the model of a run stands: the names in a run's folder, and which of its checkpoints is the one to open."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from pathlib import Path

from regard.errors import RunError

# A model folder, which a checkpoint is too.
MODEL_CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
# What a checkpoint has beside the model.
MANIFEST, STATE, OPTIMIZER = "manifest.json", "state.json", "optimizer.safetensors"
# A run's folder; an experiment's has results.
RUN_CONFIG, BEST, MODEL, CHECKPOINTS, RESULTS = "config.toml", "best", "model", "checkpoints", "results.json"


def model_folder(path: str | Path) -> Path:
    """Returns the folder of the model of a run or an experiment, its best checkpoint; any other path as it is."""
    path = Path(path)
    if (path / MODEL_CONFIG).is_file() or not path.is_dir():
        return path
    if (path / RESULTS).is_file():
        named = json.loads((path / RESULTS).read_text(encoding="utf-8")).get("run")
        if isinstance(named, str):
            return model_folder(path / named)
    if (path / MODEL / MODEL_CONFIG).is_file():
        return path / MODEL
    best = best_step(path)
    step = newest(path / CHECKPOINTS) if best is None else best
    if step is not None:
        return path / CHECKPOINTS / f"step-{step}"
    if (path / RUN_CONFIG).is_file():
        raise RunError(f"{path} has no checkpoint yet; continue it with `regard train --resume {path}`")
    return path


def best_step(run: Path) -> int | None:
    """Returns the step of a run's best checkpoint, which the file `best` names, or None where there is no such file."""
    path = run / BEST
    if not path.is_file():
        return None
    number = path.read_text(encoding="utf-8").strip().removeprefix("step-")
    return int(number) if number.isdigit() else None


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
        absent = {MODEL_CONFIG, WEIGHTS, OPTIMIZER, STATE} - set(hashes)
        if absent:
            return f"{place / MANIFEST} does not list {min(absent)}"
        for name, want in hashes.items():
            if hash_file(place / name) != want:
                return f"{place / name} does not match its hash in {MANIFEST}"
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{place / MANIFEST} cannot be read: {error}"
    return None


def hash_file(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
