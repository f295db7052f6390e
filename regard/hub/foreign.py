"""Hugging Face models from a folder or by name: safetensors only, no code of theirs, and no download unasked."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regard.hub.attention import HubError, transformers


@dataclass(frozen=True)
class Foreign:
    """A Hugging Face model with its tokenizer, where it has one."""

    model: Any
    tokenizer: Any
    name: str
    trained: bool


def is_foreign(folder: str | Path) -> bool:
    """Whether a folder holds a Hugging Face model."""
    try:
        document = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and "format_version" not in document


def titled(name: str | Path) -> str:
    """What to call the model of a folder: by the folder above it where its own name says nothing."""
    path = Path(name)
    if not path.exists():
        return str(name)
    path = path.resolve()
    dull = path.name in ("model", "best") or path.name.startswith(("step-", "checkpoint-"))
    return f"{path.parent.name}/{path.name}" if dull else path.name


def fetch(name: str | Path, device: torch.device | str = "cpu", download: bool = False) -> Foreign:
    """The model of a folder, or of a name on the hub that was downloaded before; `download` fetches it if need be."""
    library = transformers()
    with _quiet(library), _explained(name, download):
        where = {"local_files_only": not download, "trust_remote_code": False}
        config = library.AutoConfig.from_pretrained(name, **where)
        cls = _class(library, config)
        model, info = cls.from_pretrained(
            name, config=config, use_safetensors=True, output_loading_info=True, local_files_only=not download
        )
    missing = sorted(n for n in info["missing_keys"] if "pooler" not in n)
    if missing:
        warnings.warn(
            f"{name}: {missing[0]} and {len(missing) - 1} more are not in the file, so they are random", stacklevel=2
        )
    return Foreign(model.to(device).eval(), _tokenizer(library, name, download), titled(name), True)


def untrained(name: str | Path, seed: int = 0, device: torch.device | str = "cpu", download: bool = False) -> Foreign:
    """A twin that has learned nothing: the config of a model, or of a kind such as 'gpt2', and random weights."""
    library = transformers()
    tokenizer = None
    with _quiet(library):
        if not Path(name).is_dir() and str(name) in library.CONFIG_MAPPING:
            config = library.CONFIG_MAPPING[str(name)]()
        else:
            with _explained(name, download):
                config = library.AutoConfig.from_pretrained(
                    name, local_files_only=not download, trust_remote_code=False
                )
            tokenizer = _tokenizer(library, name, download)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = _class(library, config)(config)
    return Foreign(model.to(device).eval(), tokenizer, f"random:{titled(name)}", False)


def _class(library: Any, config: Any) -> Any:
    """The class that the config names, else the one that writes text, else the bare one."""
    for named in getattr(config, "architectures", None) or ():
        found = getattr(library, named, None)
        if found is not None:
            return found
    for mapping in (library.MODEL_FOR_CAUSAL_LM_MAPPING, library.MODEL_FOR_MASKED_LM_MAPPING, library.MODEL_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise HubError(f"transformers has no model for a {type(config).__name__}")


def _tokenizer(library: Any, name: str | Path, download: bool) -> Any:
    try:
        return library.AutoTokenizer.from_pretrained(name, local_files_only=not download, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError):
        return None  # a model without one is given token ids, or an image


@contextmanager
def _explained(name: str | Path, download: bool) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        if not download and not Path(name).exists():
            raise HubError(
                f"{name} is no folder, and no model of that name was downloaded before; expected a folder with "
                "config.json and model.safetensors, or ask for a download (--download)"
            ) from error
        first = str(error).strip().partition("\n")[0]
        raise HubError(f"{name} cannot be loaded as a Hugging Face model: {first}") from error


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Without the library's notes and bars for a while."""
    log = library.utils.logging
    before, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(before)
        if bars:
            log.enable_progress_bar()
