"""Where the model of a run is: the names in a run's folder, and which of its checkpoints is the one to open."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from pathlib import Path

from regard.errors import RunError

# In a model folder; a checkpoint is one, too.
MODEL_CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
# In a checkpoint beside the model.
MANIFEST = "manifest.json"
STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
# In the folder of a run.
RUN_CONFIG = "config.toml"
BEST = "best"
MODEL = "model"
CHECKPOINTS = "checkpoints"
# In the folder of an experiment.
RESULTS = "results.json"


def model_folder(path: str | Path) -> Path:
    """Returns the folder of the model of a run or an experiment; any other path as it is.

    A run that is over has a final model. One that is not has checkpoints, of which the best is taken, else the newest.
    """
    path = Path(path)
    if (path / MODEL_CONFIG).is_file() or not path.is_dir():
        return path
    if (path / RESULTS).is_file():
        run = json.loads((path / RESULTS).read_text(encoding="utf-8")).get("run")
        if isinstance(run, str):
            return model_folder(path / run)
    if (path / MODEL / MODEL_CONFIG).is_file():
        return path / MODEL
    step = best_step(path)
    if step is None:
        step = newest_step(path / CHECKPOINTS)
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


def checkpoint_steps(folder: Path) -> list[int]:
    """Returns the steps that have a checkpoint, complete or not, in order."""
    matches = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in matches if match)


def newest_step(folder: Path) -> int | None:
    """Returns the newest step whose checkpoint is complete; a warning names the file at fault in any newer one."""
    for step in reversed(checkpoint_steps(folder)):
        fault = find_fault(folder / f"step-{step}")
        if fault is None:
            return step
        warnings.warn(f"checkpoint passed over: {fault}", stacklevel=2)
    return None


def find_fault(place: Path) -> str | None:
    """Returns what is wrong with a checkpoint, naming the file; None if it is complete."""
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
