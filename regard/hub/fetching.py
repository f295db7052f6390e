"""Hugging Face models as transformers has them, from a folder or by their id on the hub.

Only safetensors are read, no code of the model's own is run, and nothing is downloaded unasked.
"""

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
from regard.hub.gate import build_model, load_config, load_model, load_tokenizer, model_class, quiet
from regard.hub.safety import find_folder, read_config
from regard.hub.weights import Weights

_TOKENIZER_FILES = ("tokenizer*.json", "vocab.*", "merges.txt", "*.model", "*.spm", "*.tiktoken")


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, its tokenizer or None, the name to show, and whether its weights are trained."""

    model: Any
    tokenizer: Any
    name: str
    trained: bool


def is_hub_folder(folder: str | Path) -> bool:
    """Tells whether a folder holds a Hugging Face model, by its config.json."""
    try:
        document = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and "format_version" not in document  # which every config of regard's has


def display_name(name: str | Path) -> str:
    """Returns what to call a model: the name of its folder, with the folder above if its own says nothing."""
    path = Path(name)
    if not path.exists():
        return str(name)
    path = path.resolve()
    if path.name in ("model", "best") or path.name.startswith(("step-", "checkpoint-")):
        return f"{path.parent.name}/{path.name}"
    return path.name


def fetch(
    name: str | Path, device: torch.device | str = "cpu", download: bool = False, classes: Sequence[str] = ()
) -> LoadedModel:
    """Returns the model of a folder, or of an id on the hub that was downloaded before; `download` fetches it if not.

    With `classes` it is a classifier of texts with classes of these names, whose head is random if the file has none.
    """
    folder = find_folder(name, download)
    read_config(folder)  # its errors come before those of the weights
    with Weights(folder):  # opening them reports damage by the name of the file
        pass
    with _explain_errors(folder):
        config = load_config(folder)
        if classes:
            cls = _classifier_class(config, classes)
        else:
            cls = model_class(config)
        model, info = load_model(cls, folder, config)
    for key, got, want in sorted(info["mismatched_keys"]):
        if not classes or key.startswith(model.base_model_prefix):
            raise HubError(f"{folder}: {key} is {list(got)} in the file, but config.json asks for {list(want)}")
    # Many models are saved without a pooler, and a new head has no weights yet: no reason to warn.
    missing = sorted(n for n in info["missing_keys"] if "pooler" not in n)
    if classes:
        missing = [n for n in missing if n.startswith(model.base_model_prefix)]
    if missing:
        warnings.warn(
            f"{name}: {missing[0]} and {len(missing) - 1} more are not in the file, so they are random", stacklevel=2
        )
    return LoadedModel(model.to(device).eval(), _find_tokenizer(folder), display_name(name), trained=True)


def untrained(
    name: str | Path, seed: int = 0, device: torch.device | str = "cpu", download: bool = False
) -> LoadedModel:
    """Returns a model with random weights, built as the config of a model, or of a type such as 'gpt2', says."""
    config, folder = _find_config(name, download)
    tokenizer = None if folder is None else _find_tokenizer(folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build_model(model_class(config), config)
    return LoadedModel(model.to(device).eval(), tokenizer, f"random:{display_name(name)}", trained=False)


def model_on_meta(name: str | Path, download: bool = False) -> Any:
    """Returns a model on the device "meta", without memory for its weights: its config, or its type, is enough."""
    with torch.device("meta"):
        config, _ = _find_config(name, download)
        return build_model(model_class(config), config).eval()


def save_pretrained(model: Any, tokenizer: Any, folder: str | Path) -> None:
    """Writes a folder that transformers' AutoModel and AutoTokenizer load: one file of safetensors, and no code."""
    with quiet(import_transformers()):
        # No model reaches this size, so the weights stay in one file.
        model.save_pretrained(folder, max_shard_size=1 << 60)
        tokenizer.save_pretrained(folder)


def _find_config(name: str | Path, download: bool) -> tuple[Any, Path | None]:
    """Returns the default config of a model type such as 'gpt2', or the config of a model with its folder."""
    types = import_transformers().CONFIG_MAPPING
    if not Path(name).is_dir() and str(name) in types:
        return types[str(name)](), None
    folder = find_folder(name, download)
    with _explain_errors(folder):
        return load_config(folder), folder


def _classifier_class(config: Any, classes: Sequence[str]) -> Any:
    """Returns the class that classifies texts, and writes the names of the classes into the config."""
    mapping = import_transformers().MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if type(config) not in mapping:
        raise HubError(f"transformers has no classifier for a {type(config).__name__}; expected an encoder, e.g. BERT")
    config.id2label = dict(enumerate(classes))
    config.label2id = {name: n for n, name in enumerate(classes)}
    config.problem_type = None
    return mapping[type(config)]


def _find_tokenizer(folder: Path) -> Any:
    """Returns the tokenizer of a folder; None if it has none, as a model may read token ids, or images."""
    if not any(path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)):
        return None
    try:
        return load_tokenizer(folder)
    except RegardError:
        raise
    except Exception as error:  # a damaged file or a missing library: each library has errors of its own
        raise HubError(
            f"the tokenizer of {folder} cannot be read: {type(error).__name__}: {_first_line(error)}"
        ) from error


@contextmanager
def _explain_errors(folder: Path) -> Iterator[None]:
    """Raises the errors of libraries as a HubError that names the folder."""
    try:
        yield
    except RegardError:
        raise
    except Exception as error:  # those of transformers, safetensors and huggingface_hub have no class in common
        raise HubError(f"{folder} cannot be loaded as a Hugging Face model: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """Returns the first line of an error's message, or its class if it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
