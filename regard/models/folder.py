"""A model folder: config.json, model.safetensors, tokenizer.json if there is one, and manifest.json, their hashes.

Nothing in it is executed. All files are replaced at the same time (`regard.storage.replace_files`), so that a save that
is stopped at any time leaves one complete model. Config and weights both hold a number of their save, so that files of
two saves that somebody mixed are not taken for one model.
"""

from __future__ import annotations

import json
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from regard import plugins
from regard.config import ConfigError
from regard.data.tokenizers import Tokenizer, TokenizerFileError, load_tokenizer
from regard.devices import explain_memory, without_values
from regard.errors import DataError, RegardError, did_you_mean, quote
from regard.mechanisms import Mechanism
from regard.models.base import MODELS, Model
from regard.models.locate import MODEL_CONFIG as CONFIG
from regard.models.locate import TOKENIZER, WEIGHTS, model_folder
from regard.models.tensor_files import TensorFile, open_tensors
from regard.reading import check_path, read_json
from regard.storage import MANIFEST, Locate, find_damage, read_files, read_manifest, replace_files, write_tensors

FORMAT = 1


class ModelFolderError(RegardError, ValueError):
    """A model folder that is missing, incomplete, damaged, foreign, or of a newer format."""


class ModelSaveError(RegardError, OSError):
    """A model that cannot be written."""


def save(model: Model[Any], folder: str | Path) -> None:
    """Writes the model into a folder and replaces the model there; at any moment the folder has one complete model."""
    folder = check_path(folder, ModelSaveError)
    try:
        with replace_files(folder, owned=(TOKENIZER,)) as stage:
            model.write_files(stage)
    except ModelFolderError:
        raise
    except (OSError, DataError, SafetensorError, RuntimeError) as error:  # RuntimeError: shared memory
        raise ModelSaveError(
            f"{folder} cannot be written: {quote(error)}; choose another folder, or make room"
        ) from error


def write_files(model: Model[Any], folder: Path) -> None:
    """Writes the files of a model into an empty folder."""
    name = MODELS.name_of(type(model))
    if name is None or model.has_weights:
        raise ModelFolderError(f"a {type(model).__name__} has no folder format; expected {', '.join(_saved_classes())}")
    number = secrets.token_hex(8)  # the same in config and weights of one save
    document = {"format_version": FORMAT, "class": name, "save": number, "config": model.config.as_dict()}
    used = plugins.describe(m.name for m in model.modules() if isinstance(m, Mechanism))
    if used:
        document[plugins.KEY] = used
    try:
        config = json.dumps(document, indent=2, ensure_ascii=False)
    except TypeError as error:
        raise ModelFolderError(f"the config cannot be written as JSON: {error}") from None
    tensors = model.state_dict()
    _warn_if_not_finite("the model", tensors)
    write_tensors(folder / WEIGHTS, tensors, metadata={"format": "pt", "regard": number})
    if model.tokenizer is not None:
        model.tokenizer.save(folder / TOKENIZER)
    (folder / CONFIG).write_text(config + "\n", encoding="utf-8")


def load(folder: str | Path, device: torch.device | str = "cpu") -> Model[Any]:
    """Returns the model of a model folder, or of a run or an experiment, in evaluation mode, with its tokenizer."""
    folder = model_folder(folder)
    if not folder.is_dir():
        raise ModelFolderError(
            f"{folder} is no folder; expected a run, an experiment or a model folder, as model.save makes. A model of "
            "Hugging Face, by folder or name, is loaded by regard.hub.load"
        )
    with read_files(folder) as locate:
        document = _read_document(folder, locate(CONFIG))
        cls = MODELS[document["class"]]
        try:
            config = cls.Config().but(**document["config"])
        except ConfigError as error:
            raise ModelFolderError(f"{folder / CONFIG}: {error}") from None
        plugins.require(document.get(plugins.KEY), folder)
        hashes = read_manifest(locate(MANIFEST))
        tensors = _read_tensors(locate(WEIGHTS), document.get("save"), cls, config)
        tokenizer = None
        # A tokenizer that is not in the manifest is left over from an earlier save.
        if hashes is None or TOKENIZER in hashes:
            tokenizer = _read_tokenizer(locate(TOKENIZER))
        _check_hashes(hashes, locate)
    with explain_memory(f"loading {folder}", "Take a smaller model, or a machine with more memory"):
        model = cls(config)
    _warn_if_not_finite(str(folder / WEIGHTS), tensors)
    dtypes = {x.dtype for x in tensors.values() if x.is_floating_point()}
    if len(dtypes) == 1:  # with several dtypes, the model stays in float32
        model.to(dtypes.pop())
    model.load_state_dict(tensors)
    model.tokenizer = tokenizer
    return model.to(device).eval()


def _saved_classes() -> list[str]:
    """Returns the names of the classes that have a folder format; others are built from files of their own."""
    return [name for name in MODELS if not MODELS[name].has_weights]


def _read_document(folder: Path, path: Path) -> dict[str, Any]:
    """Returns the content of config.json, whose path is `path`, after checking its outer keys."""
    if not path.exists():
        raise ModelFolderError(f"{folder} has no {CONFIG}: no model folder, or its save was interrupted")
    document = read_json(path, ModelFolderError)
    if not isinstance(document, dict) or "format_version" not in document:
        if isinstance(document, dict) and "model_type" in document:
            raise ModelFolderError(
                f"{folder} holds a Hugging Face model; regard.hub.load({str(folder)!r}) loads it into one of regard's"
            )
        raise ModelFolderError(f"{path} has no format_version: the folder holds no model saved by regard")
    version = document["format_version"]
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ModelFolderError(f"{path}: format_version {quote(version)}, expected a whole number from 1 to {FORMAT}")
    if version > FORMAT:
        raise ModelFolderError(
            f"{path} has format_version {quote(version)}, newer than this regard knows ({FORMAT}): update regard"
        )
    name = document.get("class")
    if not isinstance(name, str) or name not in MODELS or MODELS[name].has_weights:
        raise ModelFolderError(f"{path}: no model class {quote(name)}.{did_you_mean(str(name), _saved_classes())}")
    if not isinstance(document.get("config"), dict):
        raise ModelFolderError(f"{path} has no section 'config'")
    return document


def _check_hashes(hashes: dict[str, str] | None, locate: Locate) -> None:
    """Raises a ModelFolderError that names the file if one has changed; folders of earlier versions have no hashes."""
    if hashes is None:
        return
    for name in (CONFIG, WEIGHTS, TOKENIZER):
        if name in hashes or name != TOKENIZER:
            damage = find_damage(locate(name), hashes.get(name))
            if damage is not None:
                raise ModelFolderError(
                    f"{damage}: it was changed since it was saved. Copy or save it again; if it was changed on "
                    f"purpose, remove {MANIFEST}"
                )


def _warn_if_not_finite(what: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Warns if weights are NaN or infinite, which are saved and loaded nevertheless; `what` names their place."""
    for name, x in tensors.items():
        if x.is_floating_point() and not x.isfinite().all():
            warnings.warn(f"{what}: {name} has weights that are not finite numbers", stacklevel=3)
            return


def _read_tokenizer(path: Path) -> Tokenizer | None:
    """Returns the tokenizer of a folder, or None where it has none."""
    if not path.exists():
        return None
    try:
        return load_tokenizer(path)
    except TokenizerFileError as error:
        raise ModelFolderError(str(error)) from None


def _read_tensors(path: Path, number: Any, cls: type[Model[Any]], config: Any) -> dict[str, torch.Tensor]:
    """Returns the weights by name; `number` is that of the save in the config, which must be in the file, too.

    The header of the file is first compared with the config, so that neither of them can take memory by absurd sizes.
    """
    if not path.exists():
        raise ModelFolderError(f"{path} does not exist: the folder is incomplete; copy or save it again")
    with open_tensors(path, ModelFolderError) as file:
        if number is not None and file.metadata.get("regard", number) != number:
            raise ModelFolderError(
                f"{path} and {CONFIG} come from two different saves: one was interrupted; save it again"
            )
        _check_count(path, config, file)
        with torch.random.fork_rng([]), without_values():
            want = cls(config).state_dict()
        _check_tensors(path, want, file)
        return file.read()


def _check_count(path: Path, config: Any, file: TensorFile) -> None:
    """Raises a ModelFolderError if the config has more layers than the file has tensors: building them takes long."""
    layers = getattr(config, "layers", 0)
    if layers > len(file.shapes):
        raise ModelFolderError(f"{path} does not fit {CONFIG}: {layers} layers, but {len(file.shapes)} tensors")


def _check_tensors(path: Path, want: dict[str, Any], file: TensorFile) -> None:
    """Raises a ModelFolderError unless names and shapes of the weights are those of the config."""
    got = file.shapes
    missing = sorted(set(want) - set(got))
    extra = sorted(set(got) - set(want))
    faults = []
    if missing:
        faults.append(f"lacks {_first_of(missing)}")
    if extra:
        faults.append(f"has an unknown {_first_of(extra)}")
    if faults:
        raise ModelFolderError(f"{path} does not fit {CONFIG}: it {', and '.join(faults)}")
    for name, tensor in want.items():
        if got[name] != list(tensor.shape):
            raise ModelFolderError(
                f"{path} does not fit {CONFIG}: {name} is {quote(got[name])}, expected {list(tensor.shape)}"
            )


def _first_of(names: list[str]) -> str:
    """Returns in words the first name and how many more there are."""
    first = quote(names[0], marks=False)
    if len(names) == 1:
        return first
    return f"{first} and {len(names) - 1} more"
