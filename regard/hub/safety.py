"""What is looked at before anything of a Hugging Face folder is used: no code, no pickle, no absurd sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from regard.config import MOST
from regard.errors import ExtraMissingError, HubError

CONFIG, WEIGHTS, INDEX, ADAPTER = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
)
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
WANTED = ("*.json", "*.jinja", "*.model", "*.spm", "*.tiktoken", "*.txt", "model*.safetensors")

# Sizes as the models of transformers call them.
_SIZES = {
    "width": "hidden_size d_model n_embd dim embedding_size",
    "layers": "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers",
    "length": "max_position_embeddings n_positions n_ctx max_seq_len",
    "vocabulary": "vocab_size decoder_vocab_size",
    "heads": "num_attention_heads num_heads n_head n_heads num_key_value_heads encoder_attention_heads",
    "key_width": "head_dim d_kv",
    "hidden": "intermediate_size d_ff n_inner ffn_dim encoder_ffn_dim decoder_ffn_dim",
}
MOST_OF = {theirs: MOST[ours] for ours, names in _SIZES.items() for theirs in names.split()}


def located(name: str | Path, download: bool = False) -> Path:
    """The folder of a model: a path, or a name on the hub that was downloaded before or, if asked for, is now.

    Only configs, tokenizers and safetensors are downloaded.
    """
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ExtraMissingError('models by name need `huggingface_hub`: pip install "regard[hf]"') from None
    try:
        found = snapshot_download(
            str(name), local_files_only=not download, allow_patterns=list(WANTED), ignore_patterns=["*/*"]
        )
    except Exception as error:  # names that cannot be, no network, no such model: each has a class of its own
        if not download:
            raise HubError(
                f"{name} is no folder, and no model of that name was downloaded before; expected a folder with "
                f"{CONFIG} and {WEIGHTS}, or ask for a download (--download)"
            ) from error
        first = str(error).strip().partition("\n")[0]
        raise HubError(f"{name} cannot be downloaded: {first}") from error
    return Path(found)


def config_of(folder: Path) -> dict[str, Any]:
    """config.json of a folder, which names no code to run and no absurd size."""
    path = folder / CONFIG
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HubError(f"{folder} has no {CONFIG}: expected a Hugging Face model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise HubError(f"{path} is damaged or no JSON: {error}") from None
    if not isinstance(document, dict):
        raise HubError(f"{path}: expected an object with the keys of a config")
    for file in (path, folder / "tokenizer_config.json"):
        _check_code(file, document if file == path else _json(file))
    for key, value in _numbers(document):
        if key in MOST_OF and value > MOST_OF[key]:
            raise HubError(f"{path}: {key} = {value}: expected at most {MOST_OF[key]}")
    return document


def check_weights(folder: Path) -> None:
    """An error where a folder's weights are not in safetensors, or are only what an adapter changes."""
    if (folder / ADAPTER).exists():
        raise HubError(f"{folder / ADAPTER}: an adapter to another model's weights; merge it into them and save those")
    if (folder / WEIGHTS).exists() or (folder / INDEX).exists():
        return
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled:
        raise HubError(
            f"{folder / pickled[0]} is a pickle, and reading one can run any code; expected {WEIGHTS}. Take a revision "
            "of the model that has safetensors, or convert it where you trust the file "
            "(model.save_pretrained(folder) writes safetensors)"
        )
    raise HubError(f"{folder} has no {WEIGHTS}: it is incomplete, or holds no weights; copy or download it again")


def _check_code(path: Path, document: Mapping[str, Any]) -> None:
    """Code that a config names is never run, and a model may be something else without it."""
    named = document.get("auto_map")
    if named:
        shown = next(iter(named.values()), named) if isinstance(named, Mapping) else named
        raise HubError(
            f"{path}: auto_map names code to run ({shown!s:.80}), and regard runs no one's code. Use a model that "
            "transformers itself has; if this one is the same without that code, take the key 'auto_map' out"
        )


def _json(path: Path) -> Mapping[str, Any]:
    """A file that need not be there."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise HubError(f"{path} is damaged or no JSON: {error}") from None
    return document if isinstance(document, dict) else {}


def _numbers(document: Any) -> Iterator[tuple[str, float]]:
    """Every number of a config with its key, those of sections too."""
    for key, value in document.items() if isinstance(document, Mapping) else ():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value
        elif isinstance(value, Mapping):
            yield from _numbers(value)
