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
# The files of a folder that transformers reads settings from; those of a vocabulary hold tokens, which name nothing.
SETTINGS = (
    CONFIG,
    "tokenizer_config.json",
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "audio_tokenizer_config.json",
    "special_tokens_map.json",
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
# Fields whose value names code, or permits it; with false, nothing or a number they name none.
_CODE = ("auto_map", "custom_pipelines", "custom_generate", "kernel_config", "trust_remote_code", "use_kernels")
# Fields whose value is another file to read, which nobody has looked at: a library of programs may be in it.
_FILES = ("configuration_files", "checkpoint_path", "sudachi_config_path", "sudachi_resource_dir")
# Fields that choose among implementations, and those that transformers and torch have themselves. Any other comes from
# the hub, as flash_attention_2 does where `kernels` is installed and `flash_attn` is not.
_CHOICES = {
    "attn_implementation": ("eager", "sdpa", "flex_attention"),
    "experts_implementation": ("eager", "grouped_mm", "batched_mm"),
}
# Fields with the name of a model of timm: one with a colon ("hf-hub:", "local-dir:") is a place to fetch it from.
_TIMM = ("architecture", "backbone")
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
    check_settings(folder)
    for key, value in _numbers(document):
        if key in MOST_OF and value > MOST_OF[key]:
            raise HubError(f"{path}: {key} = {value}: expected at most {MOST_OF[key]}")
    return document


def check_settings(folder: Path) -> None:
    """Refuses a folder whose settings name code to run, or something to fetch, in any of their sections."""
    for name in (*SETTINGS, *sorted(path.name for path in folder.glob("config.*.json"))):
        path = folder / name
        for key, value in _fields(_json(path)):
            _check_field(path, key, value)


def field_of(path: Path, key: str) -> Any:
    """The value of a field in a file that need not be there; None where it is not."""
    return _json(path).get(key)


def check_adapter(folder: Path) -> None:
    """Refuses a folder with an adapter, which names another model, and a library to import."""
    if (folder / ADAPTER).exists():
        raise HubError(f"{folder / ADAPTER}: an adapter to another model's weights; merge it into them and save those")


def check_weights(folder: Path) -> None:
    """An error where a folder's weights are not in safetensors, or are only what an adapter changes."""
    check_adapter(folder)
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


def _check_field(path: Path, key: str, value: Any) -> None:
    """Refuses a field by which transformers would run or fetch what is not its own."""
    named = bool(value) and (value is True or not isinstance(value, int | float))
    if key in _CODE and named:
        shown = next(iter(value.values()), value) if isinstance(value, Mapping) else value
        raise HubError(
            f"{path}: {key} names code to run ({shown!s:.80}), and regard runs no one's code. Use a model that "
            f"transformers itself has; if this one is the same without that code, take the key '{key}' out"
        )
    if key in _FILES and named:
        raise HubError(
            f"{path}: {key} names other files to read ({value!s:.80}), and regard reads only those it has checked; "
            f"take the key '{key}' out"
        )
    if key in _TIMM and isinstance(value, str) and ":" in value:
        raise HubError(
            f"{path}: {key} names a place to fetch a model from ({value:.80}); expected the name of a model of timm, "
            "such as 'resnet50'"
        )
    known = _CHOICES.get(key.lstrip("_").removesuffix("_internal"))
    if known is None:
        return
    for choice in value.values() if isinstance(value, Mapping) else (value,):  # one for each section, or one
        if choice is not None and choice not in known:
            raise HubError(
                f"{path}: {key} = {choice!r:.80} is code from elsewhere, and regard runs no one's code; expected "
                f"{', '.join(known)}. Take the key '{key}' out, and transformers chooses one of these"
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


def _fields(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every field of a document with its value, those of its sections and lists too."""
    waiting: list[Any] = [document]
    while waiting:
        section = waiting.pop()
        if isinstance(section, Mapping):
            yield from section.items()
            waiting += section.values()
        elif isinstance(section, list):
            waiting += section
