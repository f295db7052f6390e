"""Converting a trained model to fewer key/value heads or another mechanism, with the original as teacher.

Surgery first, then distillation of each converted layer (`distil.py`), then uptraining of the whole with the ordinary
loss, that of the model's own task or of a plain text; beside them a control that spends the steps of both on the
ordinary loss alone. One folder holds surgery/ (a model), distillation/, uptraining/ and control/ (runs), results.json,
report.html and lens.html.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from regard import hub
from regard.convert.page import convert_page
from regard.convert.results import TrainedConversion, measure_conversion
from regard.convert.settings import (
    ConvertConfig,
    SourceTraining,
    find_source_training,
    parse_overrides,
    uptraining_steps,
)
from regard.convert.stages import ORIGINAL, SURGERY, tokenize_once, trained_stages
from regard.convert.surgery import converted
from regard.devices import resolve_device
from regard.errors import RunError
from regard.lab.base import EXPERIMENTS, Experiment, Shown, write_results
from regard.lab.experiment import Session
from regard.models import Model, load
from regard.models.locate import MODEL, RESULTS, model_folder
from regard.reading import check_fields, check_path, read_json
from regard.storage import write_text
from regard.train.claim import claimed, locked
from regard.train.run import find_runs

REQUEST = "convert.json"  # the settings of the conversion, with all that later stages need
QUIET = Shown()
EXPERIMENTS.put("convert", Experiment("convert", "Fewer heads.", convert_page, command="regard convert MODEL"))


def convert(
    model: Model[Any],
    source: str | Path,
    out: str | Path,
    config: ConvertConfig,
    overrides: Sequence[str] = (),
    device: str = "cpu",
    shown: Shown = QUIET,
) -> Mapping[str, Any]:
    """Converts a model into a new folder and returns the results.

    `source` is the path or name of the model; if it is a run, its data and settings are used. `overrides` change data
    and training (`data.block=64 train.lr=1e-4`); under `distil.`, `uptrain.` or `control.`, the training of that stage.
    """
    path = Path(out)
    with _claimed(path):
        _start(model, source, path, config, overrides, device)
        return _finish(path, device, shown)


def _claimed(path: Path) -> AbstractContextManager[None]:
    """Returns the lock of a new folder, which is removed again if convert.json could not be written."""
    return claimed(path, (REQUEST, RESULTS), (path / REQUEST).exists, f", or continue it with --resume {path}")


def start_conversion(
    model: Model[Any],
    source: str | Path,
    out: str | Path,
    config: ConvertConfig,
    overrides: Sequence[str] = (),
    device: str = "cpu",
) -> Path:
    """Builds the new model in a new folder, writes convert.json for the later stages, and returns the folder."""
    path = Path(out)
    with _claimed(path):
        _start(model, source, path, config, overrides, device)
    return path


def _start(
    model: Model[Any], source: str | Path, path: Path, config: ConvertConfig, overrides: Sequence[str], device: str
) -> None:
    """Builds the new model in a locked folder, and writes convert.json for the later stages."""
    tables = parse_overrides(overrides)
    student = converted(
        model,
        kv_heads=config.kv_heads,
        mechanism=config.mechanism,
        layers=config.only,
        options=config.options,
    )
    training = find_source_training(student, source, config, tables)
    config = config.but(uptrain=float(uptraining_steps(student, config, training)))
    if config.text:
        config = config.but(text=str(Path(config.text).resolve()))
    if find_runs(path):
        raise RunError(f"{path} holds runs already: choose another --out")
    original = model_folder(source)
    if not original.is_dir() or hub.is_hub_folder(original):
        # A model that is not in a folder of regard's own is saved, so that a resumed conversion finds its teacher.
        original = path / ORIGINAL
        model.save(original)
    student.save(path / SURGERY)
    document = {
        "source": str(source),
        "original": str(original.resolve()),
        "class": type(model).__name__,
        "device": resolve_device(device),
        "convert": config.as_dict(),
        "reading": vars(training),
        "asked": tables,
    }
    write_text(path / REQUEST, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


# The types of the fields of convert.json, and of its field "reading".
_REQUEST: dict[str, Any] = {
    "original": str,
    "class": str,
    "source": str,
    "device": str,
    "convert": dict,
    "reading": dict,
    "asked": dict,
}
_READING: dict[str, Any] = {"task": str, "data": dict, "train": dict, "steps": int}


def train_stages(path: Path, device: str | None = None, shown: Shown = QUIET) -> TrainedConversion:
    """Trains the stages of a started conversion that are left; finished stages are kept."""
    if not (path / REQUEST).is_file():
        raise _no_conversion(path)
    document = check_fields(read_json(path / REQUEST, RunError), _REQUEST, str(path / REQUEST), RunError)
    reading = check_fields(document["reading"], _READING, f"{path / REQUEST}, reading", RunError)
    config = ConvertConfig().but(**document["convert"])
    source = SourceTraining(**{key: reading[key] for key in _READING})
    where = resolve_device(device or document["device"])
    session = Session("convert", path, {}, None, where, shown)
    models = {ORIGINAL: load(document["original"], where), SURGERY: load(path / SURGERY, where)}
    data = tokenize_once(source, path, models[ORIGINAL])
    stages = trained_stages(config, source, document, path, data)
    # All recipes are resolved before the first training, so that wrong settings of later stages raise errors at once.
    recipes = {stage.name: stage.recipe(source, config.seed, document["asked"]) for stage in stages}
    for name, recipe in recipes.items():
        run = session.train(recipe, name, name)
        models[name] = load(run.path / MODEL, where)
    return TrainedConversion(document, config, source, data, models)


def _no_conversion(path: Path) -> RunError:
    return RunError(f"{path} is no conversion: expected a folder with {REQUEST}, as `regard convert` makes")


def resume(path: str | Path, device: str | None = None, shown: Shown = QUIET) -> Mapping[str, Any]:
    """Continues a started conversion, writes its results and report, and returns the results."""
    path = check_path(path, RunError)
    if not path.is_dir():
        raise _no_conversion(path)
    with locked(path):
        return _finish(path, device, shown)


def _finish(path: Path, device: str | None, shown: Shown) -> Mapping[str, Any]:
    """Trains the stages that are left and measures all, in a locked folder, and returns the results."""
    began = time.perf_counter()
    conversion = train_stages(path, device, shown)
    shown.say("Measuring …")
    results = measure_conversion(path, conversion)
    # Finished stages count as well, so their sum may be more than the time of this call.
    results["seconds"] = round(max(time.perf_counter() - began, results["seconds"]), 1)
    write_results(path, results)
    convert_page(results).write(path / "report.html")
    return results
