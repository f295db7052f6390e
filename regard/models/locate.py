"""Finding the model of a run: the names of files in a run's folder, and which of its checkpoints to open."""

from __future__ import annotations

import re
import warnings
from pathlib import Path, PurePath

from regard.errors import DataError, RunError, quote
from regard.reading import check_path, read_json_object, read_text
from regard.storage import MANIFEST, find_damage, finish_replacing, read_manifest

# Files of a model folder; a checkpoint is a model folder, too.
MODEL_CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
# Further files of a checkpoint.
STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
# Files and folders in the folder of a run.
RUN_CONFIG = "config.toml"
BEST = "best"
MODEL = "model"
CHECKPOINTS = "checkpoints"
# A file in the folder of an experiment.
RESULTS = "results.json"

MAX_BEST_BYTES = 1 << 10
_STEP = re.compile(r"step-([0-9]{1,18})")


def model_folder(path: str | Path) -> Path:
    """Returns the folder of the model of a run or an experiment; any other path is returned unchanged.

    A finished run has a final model. Of an unfinished one the best checkpoint is taken, or the newest if none is best.
    """
    path = check_path(path, RunError)
    if path.is_dir():
        finish_replacing(path)  # of a save that was stopped after its commit
        finish_replacing(path / MODEL)
    if (path / MODEL_CONFIG).is_file() or not path.is_dir():
        return path
    run = run_folder(path)
    if run != path:
        return model_folder(run)
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


def run_folder(path: Path) -> Path:
    """Returns the folder of an experiment's run, which its results name; any other path is returned unchanged."""
    if (path / RESULTS).is_file():
        run = read_json_object(path / RESULTS, RunError).get("run")
        if isinstance(run, str):
            return _inner_folder(path, run)
    return path


def best_step(run: Path) -> int | None:
    """Returns the step of a run's best checkpoint, which the file `best` names; None without such a file."""
    path = run / BEST
    if not path.is_file():
        return None
    match = _STEP.fullmatch(read_text(path, RunError, MAX_BEST_BYTES).strip())
    if match is None:
        raise RunError(
            f"{path} is damaged: expected the name of a checkpoint, such as step-100. Remove it, and the newest is used"
        )
    return int(match[1])


def _inner_folder(path: Path, run: str) -> Path:
    """Returns the folder of the run that an experiment's results name; raises a RunError if it is not inside `path`."""
    named = PurePath(run)
    folder = check_path(path / named, RunError)
    inside = named.parts and not named.is_absolute() and ".." not in named.parts
    if not inside or not folder.is_dir():
        raise RunError(f"{path / RESULTS}: run = {quote(run)}; expected the name of a folder inside {path}")
    return folder


def checkpoint_steps(folder: Path) -> list[int]:
    """Returns the steps that have a checkpoint, complete or not, in order."""
    matches = (_STEP.fullmatch(path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in matches if match)


def newest_step(folder: Path) -> int | None:
    """Returns the newest step whose checkpoint is complete; a warning names the file at fault in any newer one."""
    for step in reversed(checkpoint_steps(folder)):
        fault = find_fault(folder / f"step-{step}")
        if fault is None:
            return step
        warnings.warn(f"checkpoint passed over: {fault}", stacklevel=2)
    return None


def find_fault(place: Path, from_disk: bool = False) -> str | None:
    """Returns in words what is wrong with a checkpoint, with the file's name; None if it is complete.

    `from_disk`: files are read from disk, not from the system's cache.
    """
    try:
        hashes = read_manifest(place / MANIFEST)
    except DataError as error:
        return str(error)
    if hashes is None:
        return f"{place / MANIFEST} is missing"
    absent = {MODEL_CONFIG, WEIGHTS, OPTIMIZER, STATE} - set(hashes)
    if absent:
        return f"{place / MANIFEST} does not list {min(absent)}"
    strange = next((name for name in hashes if Path(name).name != name), None)
    if strange is not None:
        return f"{place / MANIFEST} lists {quote(strange)}, which is no file of its folder"
    found = (find_damage(place / name, want, from_disk) for name, want in hashes.items())
    return next(filter(None, found), None)
