"""Hugging Face models from a folder or by name: safetensors only, no code of theirs, and no download unasked."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regard.errors import RegardError
from regard.hub.attention import HubError, import_transformers
from regard.hub.gate import built, config_from, model_class, model_from, quiet, tokenizer_from
from regard.hub.safety import config_of, located
from regard.hub.weights import Weights

_TOKENIZERS = ("tokenizer*.json", "vocab.*", "merges.txt", "*.model", "*.spm", "*.tiktoken")


@dataclass(frozen=True)
class LoadedModel:
    """A Hugging Face model with its tokenizer, where it has one."""

    model: Any
    tokenizer: Any
    name: str
    trained: bool


def is_hub_folder(folder: str | Path) -> bool:
    """Whether a folder holds a Hugging Face model."""
    try:
        document = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and "format_version" not in document


def display_name(name: str | Path) -> str:
    """What to call the model of a folder: by the folder above it where its own name says nothing."""
    path = Path(name)
    if not path.exists():
        return str(name)
    path = path.resolve()
    dull = path.name in ("model", "best") or path.name.startswith(("step-", "checkpoint-"))
    return f"{path.parent.name}/{path.name}" if dull else path.name


def fetch(
    name: str | Path, device: torch.device | str = "cpu", download: bool = False, classes: Sequence[str] = ()
) -> LoadedModel:
    """The model of a folder, or of a name on the hub that was downloaded before; `download` fetches it if need be.

    `classes`: as a classifier of whole texts with classes of these names, whose head is random where the file has none.
    """
    library = import_transformers()
    folder = located(name, download)
    config_of(folder)  # what it refuses comes before what is wrong with the weights
    with Weights(folder):  # opening them tells of damage by the name of the file
        pass
    with _explained(folder):
        config = config_from(folder)
        cls = _classifier(library, config, classes) if classes else model_class(config)
        model, info = model_from(cls, folder, config)
    for key, got, want in sorted(info["mismatched_keys"]):
        if not classes or key.startswith(model.base_model_prefix):
            raise HubError(f"{folder}: {key} is {list(got)} in the file, but config.json asks for {list(want)}")
    missing = sorted(n for n in info["missing_keys"] if "pooler" not in n)
    if classes:
        missing = [n for n in missing if n.startswith(model.base_model_prefix)]
    if missing:
        warnings.warn(
            f"{name}: {missing[0]} and {len(missing) - 1} more are not in the file, so they are random", stacklevel=2
        )
    return LoadedModel(model.to(device).eval(), _tokenizer(folder), display_name(name), True)


def store(model: Any, tokenizer: Any, folder: str | Path) -> None:
    """Writes a folder that transformers' AutoModel and AutoTokenizer load: one file of safetensors, and no code."""
    with quiet(import_transformers()):
        model.save_pretrained(folder, max_shard_size=1 << 60)
        tokenizer.save_pretrained(folder)


def untrained(
    name: str | Path, seed: int = 0, device: torch.device | str = "cpu", download: bool = False
) -> LoadedModel:
    """A twin that has learned nothing: the config of a model, or of a kind such as 'gpt2', and random weights."""
    config, folder = _config(name, download)
    tokenizer = None if folder is None else _tokenizer(folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = built(model_class(config), config)
    return LoadedModel(model.to(device).eval(), tokenizer, f"random:{display_name(name)}", False)


def model_on_meta(name: str | Path, download: bool = False) -> Any:
    """A model without its numbers, on the device "meta": of any size, from its config or its kind alone."""
    with torch.device("meta"):
        config, _ = _config(name, download)
        return built(model_class(config), config).eval()


def _config(name: str | Path, download: bool) -> tuple[Any, Path | None]:
    """The config of a kind such as 'gpt2', or of a model, with its folder."""
    kinds = import_transformers().CONFIG_MAPPING
    if not Path(name).is_dir() and str(name) in kinds:
        return kinds[str(name)](), None
    folder = located(name, download)
    with _explained(folder):
        return config_from(folder), folder


def _classifier(library: Any, config: Any, classes: Sequence[str]) -> Any:
    """The class that judges whole texts, with the config told what its classes are."""
    mapping = library.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if type(config) not in mapping:
        raise HubError(f"transformers has no classifier for a {type(config).__name__}; expected an encoder, e.g. BERT")
    config.id2label = dict(enumerate(classes))
    config.label2id = {name: n for n, name in enumerate(classes)}
    config.problem_type = None
    return mapping[type(config)]


def _tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder; None where it has no files of one, as the model is given token ids, or an image."""
    if not any(path for pattern in _TOKENIZERS for path in folder.glob(pattern)):
        return None
    try:
        return tokenizer_from(folder)
    except RegardError:
        raise
    except Exception as error:  # a damaged file, a library that is not there: each has a class of its own
        raise HubError(
            f"the tokenizer of {folder} cannot be read: {type(error).__name__}: {_first_line(error)}"
        ) from error


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except RegardError:
        raise
    except Exception as error:  # of transformers, safetensors and huggingface_hub: they share no class
        raise HubError(f"{folder} cannot be loaded as a Hugging Face model: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
