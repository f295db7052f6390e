"""Checks of a Hugging Face folder before anything in it is used: no code, no pickle, no absurd sizes.

Certain fields of a model's JSON files make transformers run or download code. These checks refuse a folder that has
such a field, before transformers sees the folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from regard.config import SIZE_LIMITS
from regard.errors import ExtraMissingError, HubError, quote
from regard.reading import check_path, read_json, read_json_object
from regard.storage import find_damage, read_manifest

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
IMAGES = "preprocessor_config.json"
# The files that transformers reads settings from; `check_settings` adds config.*.json, configs for single versions of
# transformers. Vocabulary files are not checked: they hold tokens, no settings.
SETTINGS = (
    CONFIG,
    "tokenizer_config.json",
    "generation_config.json",
    "processor_config.json",
    IMAGES,
    "video_preprocessor_config.json",
    "audio_tokenizer_config.json",
    "special_tokens_map.json",
)
HASHES = "regard-hashes.json"  # beside what regard exports; transformers does not look at it
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
DOWNLOADED = ("*.json", "*.jinja", "*.model", "*.spm", "*.tiktoken", "*.txt", "model*.safetensors")

# For each size in regard's configs: the keys that transformers' configs have for it.
_SIZE_KEYS = {
    "width": "hidden_size d_model n_embd dim embedding_size",
    "layers": "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers",
    "length": "max_position_embeddings n_positions n_ctx max_seq_len",
    "vocabulary": "vocab_size decoder_vocab_size",
    "heads": "num_attention_heads num_heads n_head n_heads num_key_value_heads encoder_attention_heads",
    "key_width": "head_dim d_kv",
    "hidden": "intermediate_size d_ff n_inner ffn_dim encoder_ffn_dim decoder_ffn_dim",
}
# Fields that name code to run, or permit it. Values that are false, null, empty or a number do neither.
_CODE = ("auto_map", "custom_pipelines", "custom_generate", "kernel_config", "trust_remote_code", "use_kernels")
# Fields that name other files for transformers to read. Those files have not been checked, and can name a shared
# library to load.
_FILES = ("configuration_files", "checkpoint_path", "sudachi_config_path", "sudachi_resource_dir")
# Fields that choose an implementation, and the values that transformers and torch implement themselves. Any other value
# can make transformers get code from the hub. One is flash_attention_2: if `flash_attn` is not installed and `kernels`
# is, transformers gets a kernel from the hub instead.
_CHOICES = {
    "attn_implementation": ("eager", "sdpa", "flex_attention"),
    "experts_implementation": ("eager", "grouped_mm", "batched_mm"),
}
# Fields that name a model of timm. A name with a colon ("hf-hub:", "local-dir:") says where to fetch the model from.
_TIMM = ("architecture", "backbone")
# Fields that say how large an image is made, in pixels.
_EDGES = (
    "height",
    "width",
    "shortest_edge",
    "longest_edge",
    "max_height",
    "max_width",
    "size",
    "crop_size",
    "pad_size",
    "size_divisor",
    "size_divisibility",
    "ensure_multiple_of",
)
MAX_EDGE = 2048
_MAX_SIZES = {theirs: SIZE_LIMITS[ours] for ours, names in _SIZE_KEYS.items() for theirs in names.split()}


def find_folder(name: str | Path, download: bool = False) -> Path:
    """Returns the folder of a model: the path itself, or the folder that a model of the hub was downloaded to.

    `download` permits downloading the model now. Only configs, tokenizers and safetensors are downloaded.
    """
    if check_path(name, HubError).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ExtraMissingError('models by name need `huggingface_hub`: pip install "regard[hf]"') from None
    try:
        folder = snapshot_download(
            str(name), local_files_only=not download, allow_patterns=list(DOWNLOADED), ignore_patterns=["*/*"]
        )
    except Exception as error:  # invalid name, no network, no such model: these errors have no common base class
        if not download:
            raise HubError(
                f"{name} is no folder, and no model of that name was downloaded before; expected a folder with "
                f"{CONFIG} and {WEIGHTS}, or ask for a download (--download)"
            ) from error
        first = quote(str(error).strip().partition("\n")[0], marks=False)
        raise HubError(f"{name} cannot be downloaded: {first}") from error
    return Path(folder)


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of a folder's config.json.

    Refuses a config whose hidden size, vocabulary or other model size is above its limit, and a folder that
    `check_settings` refuses.
    """
    path = folder / CONFIG
    if not path.exists():
        raise HubError(f"{folder} has no {CONFIG}: expected a Hugging Face model")
    document = read_json_object(path, HubError)
    check_settings(folder)
    for key, value in _all_numbers(document):
        if key in _MAX_SIZES and value > _MAX_SIZES[key]:
            raise HubError(f"{path}: {key} = {quote(value)}: expected at most {_MAX_SIZES[key]}")
    return document


def check_settings(folder: Path) -> None:
    """Refuses a folder with a setting, at any depth, that makes transformers run, fetch or read something unchecked."""
    for name in (*SETTINGS, *sorted(path.name for path in folder.glob("config.*.json"))):
        path = folder / name
        for key, value in _all_fields(_read_json(path)):
            _check_field(path, key, value)


def check_image_sizes(folder: Path) -> None:
    """Refuses settings of an image processor that make an image so large that it fills the memory."""
    path = folder / IMAGES
    for key, value in _all_fields(_read_json(path)):
        sizes = value if isinstance(value, list) else [value]
        for size in sizes if key in _EDGES else ():
            if isinstance(size, int | float) and not 0 < size <= MAX_EDGE:
                raise HubError(f"{path}: {key} = {quote(size)}: expected pixels from 1 to {MAX_EDGE:,}")


def read_field(path: Path, key: str) -> Any:
    """Returns the value of a field in a JSON file; None if the file or the field is missing."""
    return _read_json(path).get(key)


def check_adapter(folder: Path) -> None:
    """Refuses a folder with an adapter (PEFT): it points to a base model to load, and to a library to import."""
    if (folder / ADAPTER).exists():
        raise HubError(f"{folder / ADAPTER}: an adapter to another model's weights; merge it into them and save those")


def check_weights(folder: Path) -> None:
    """Refuses a folder that holds an adapter, or that has no weights in safetensors files."""
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


def check_hashes(folder: Path) -> None:
    """Refuses a folder that regard exported, if one of its files was changed since; missing files are not checked."""
    for name, want in (read_manifest(folder / HASHES) or {}).items():
        path = folder / Path(name).name
        damage = find_damage(path, want)
        if damage is not None and os.path.exists(path):
            raise HubError(
                f"{damage}: it was changed since it was exported. Copy or export it again; if it was changed on "
                f"purpose, remove {HASHES}"
            )


def _check_field(path: Path, key: str, value: Any) -> None:
    """Refuses a field that makes transformers run, fetch or read something that has not been checked."""
    # A true flag permits code, and a non-empty string, list or object names code or files. Numbers do neither.
    takes_effect = bool(value) and (value is True or not isinstance(value, int | float))
    if key in _CODE and takes_effect:
        shown = value
        if isinstance(value, Mapping):
            shown = next(iter(value.values()), value)
        raise HubError(
            f"{path}: {key} names code to run ({shown!s:.80}), and regard runs no one's code. Use a model that "
            f"transformers itself has; if this one is the same without that code, take the key '{key}' out"
        )
    if key in _FILES and takes_effect:
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
    choices = [value]
    if isinstance(value, Mapping):  # one for each section of the config
        choices = list(value.values())
    for choice in choices:
        if choice is not None and choice not in known:
            raise HubError(
                f"{path}: {key} = {choice!r:.80} is code from elsewhere, and regard runs no one's code; expected "
                f"{', '.join(known)}. Take the key '{key}' out, and transformers chooses one of these"
            )


def _read_json(path: Path) -> Mapping[str, Any]:
    """Returns the object in a JSON file; {} if the file is missing, or holds no object."""
    if not path.exists():
        return {}
    document = read_json(path, HubError)
    if not isinstance(document, dict):
        return {}
    return document


def _all_numbers(document: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the key and value of every number in a config and its nested sections."""
    for key, value in document.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value
        elif isinstance(value, Mapping):
            yield from _all_numbers(value)


def _all_fields(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the key and value of every field in a document and in its nested sections and lists."""
    # A loop over a list, and no recursion: a file may be nested deeper than Python's stack.
    waiting: list[Any] = [document]
    while waiting:
        section = waiting.pop()
        if isinstance(section, Mapping):
            yield from section.items()
            waiting += section.values()
        elif isinstance(section, list):
            waiting += section
