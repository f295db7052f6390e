"""The only file that calls transformers' loaders: they get only checked folders, and run no code from them.

`safety` refuses the fields of a file that name code. `no_remote_code` is a second barrier, against fields that `safety`
does not know: in its context transformers can neither ask at the terminal whether to run code, nor get a kernel from
the hub.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from regard.errors import HubError
from regard.hub.attention import import_transformers
from regard.hub.safety import CONFIG, IMAGES, check_adapter, check_image_sizes, check_settings, read_config, read_field

_LOCAL = {"local_files_only": True, "trust_remote_code": False}
_LOCK = threading.RLock()  # `no_remote_code` patches transformers for every thread


def load_config(folder: Path) -> Any:
    """Returns the config of a folder, as transformers reads it."""
    read_config(folder)
    with no_remote_code() as library:
        return library.AutoConfig.from_pretrained(folder, **_LOCAL)


def load_model(cls: Any, folder: Path, config: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a model of class `cls` with a folder's weights, and transformers' loading info (missing keys, …)."""
    read_config(folder)
    check_adapter(folder)
    with no_remote_code():
        model, info = cls.from_pretrained(
            folder,
            config=config,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the caller reports them, except in a new classification head
            **_LOCAL,
        )
    return model, info


def load_tokenizer(folder: Path) -> Any:
    """Returns the tokenizer of a folder."""
    check_settings(folder)
    with no_remote_code() as library:
        _check_tokenizer_class(library, folder)
        return library.AutoTokenizer.from_pretrained(folder, **_LOCAL)


def load_image_processor(folder: Path) -> Any:
    """Returns the image processor of a folder: what makes pixel values of an image."""
    check_settings(folder)
    check_image_sizes(folder)
    with no_remote_code() as library:
        _check_image_processor_class(library, folder)
        return library.AutoImageProcessor.from_pretrained(folder, **_LOCAL)


def build_model(cls: Any, config: Any) -> Any:
    """Builds a model of class `cls` with random weights."""
    with no_remote_code():
        return cls(config)


def load_gguf(path: Path, trained: bool) -> tuple[Any, Any]:
    """Returns the language model of a GGUF file in float32, with trained or random weights, and its tokenizer."""
    folder = path.parent  # transformers also reads the settings that lie beside the file
    check_settings(folder)
    check_adapter(folder)
    options: dict[str, Any] = {"gguf_file": path.name, **_LOCAL}
    with no_remote_code() as library:
        _check_tokenizer_class(library, folder)
        tokenizer = library.AutoTokenizer.from_pretrained(folder, **options)
        if trained:
            model = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
        else:
            config = library.AutoConfig.from_pretrained(folder, **options)
            model = library.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return model, tokenizer


def model_class(config: Any) -> Any:
    """Returns the class that the config's `architectures` names, if transformers has it.

    Else returns the first of these that transformers has for the config: the sequence-to-sequence class (text, then
    speech) of an encoder-decoder, or the masked-LM class of a config that is not marked `is_decoder`; then the
    causal-LM class; then the base class.
    """
    library = import_transformers()
    # `_find_class` checks that a name is that of a model: it could name anything else in the library.
    for name in getattr(config, "architectures", None) or ():
        cls = _find_class(library, name, Path(config.name_or_path) / CONFIG)
        if cls is not None:
            return cls
    mappings = [library.MODEL_FOR_CAUSAL_LM_MAPPING, library.MODEL_MAPPING]
    if getattr(config, "is_encoder_decoder", False):
        mappings[:0] = [library.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, library.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING]
    elif not getattr(config, "is_decoder", False):
        mappings[:0] = [library.MODEL_FOR_MASKED_LM_MAPPING]  # GPT-like models get here, too, but have no entry in it
    for mapping in mappings:
        if type(config) in mapping:
            return mapping[type(config)]
    raise HubError(f"transformers has no model for a {type(config).__name__}")


@contextmanager
def no_remote_code() -> Iterator[Any]:
    """Yields the module `transformers`, which is silenced while the context lasts.

    Meanwhile it can neither ask at the terminal whether to run code, nor get a kernel from the hub.
    """
    library = import_transformers()
    from transformers import dynamic_module_utils
    from transformers.integrations import hub_kernels

    with (
        _LOCK,
        quiet(library),
        # With no time to answer, transformers raises an error instead of asking.
        _patch(dynamic_module_utils, "TIME_OUT_REMOTE_CODE", 0),
        _patch(hub_kernels, "get_kernel", _no_kernel),
    ):
        yield library


@contextmanager
def quiet(library: Any) -> Iterator[None]:
    """Silences the library's messages, except errors, and its progress bars while the context lasts."""
    log = library.utils.logging
    verbosity = log.get_verbosity()
    bars = log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


@contextmanager
def _patch(module: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of a module while the context lasts."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _no_kernel(name: str, *_: Any, **__: Any) -> NoReturn:
    """Raises the error of a kernel that does not exist, so that transformers uses its own code where it can."""
    raise FileNotFoundError(f"{name} is a kernel on the hub, and regard loads no one's code")


def _find_class(library: Any, name: Any, path: Path) -> Any:
    """Returns transformers' model class of a name, or None if the name does not exist; refuses anything but a model."""
    cls = name  # an entry of `architectures` that is neither a string nor null is refused below
    if isinstance(name, str):
        cls = getattr(library, name, None)
    if cls is None:
        return None
    if _is_subclass(cls, library.PreTrainedModel) and cls.__module__.startswith("transformers.models."):
        return cls
    raise HubError(
        f"{path}: architectures names {name!s:.80}, which is no model of transformers; expected the name of one, "
        "such as 'GPT2LMHeadModel'. Take the key 'architectures' out, and the class follows from model_type"
    )


def _check_tokenizer_class(library: Any, folder: Path) -> None:
    """Refuses a tokenizer_class that is no tokenizer: transformers would call any class of that name."""
    for path in (folder / "tokenizer_config.json", folder / CONFIG):
        name = read_field(path, "tokenizer_class")
        while isinstance(name, str) and name:
            for tried in (name, f"{name}Fast"):  # transformers tries the name with and without the suffix
                cls = getattr(library, tried, None)
                # `is_dummy` marks what transformers puts in the place of a class whose library is missing.
                absent = cls is None or getattr(cls, "is_dummy", False)
                if not absent and not _is_subclass(cls, library.PreTrainedTokenizerBase):
                    raise HubError(
                        f"{path}: tokenizer_class names {tried:.80}, which is no tokenizer; expected the class of one, "
                        "or take the key 'tokenizer_class' out"
                    )
            if not name.endswith("Fast"):
                break
            name = name.removesuffix("Fast")  # transformers removes the suffix and tries again; it may occur twice


def _check_image_processor_class(library: Any, folder: Path) -> None:
    """Refuses the name of an image processor that transformers does not list: it would call any class of that name."""
    listed = library.models.auto.image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES
    known = {name for backends in listed.values() for name in backends.values()}
    for path in (folder / IMAGES, folder / CONFIG):
        for key in ("image_processor_type", "feature_extractor_type"):
            name = read_field(path, key)
            if name is None:
                continue
            asked = str(name).replace("FeatureExtractor", "ImageProcessor")
            if not isinstance(name, str) or not {asked, asked.removesuffix("Fast")} & known:
                raise HubError(
                    f"{path}: {key} names {name!s:.80}, which is no image processor of transformers; expected one such "
                    f"as 'ViTImageProcessor', or take the key '{key}' out"
                )


def _is_subclass(thing: Any, base: type) -> bool:
    """Tells whether `thing` is a class that inherits from `base`."""
    return isinstance(thing, type) and issubclass(thing, base)
