"""The one door to transformers' loaders: no file reaches them unchecked, and nothing in a file runs.

`safety` refuses the fields of a file that name code. For a field that it does not know this holds: while a loader
works, it cannot ask at the terminal whether to run code, and it gets no kernel from the hub.
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
from regard.hub.safety import CONFIG, check_adapter, check_settings, config_of, field_of

_LOCAL = {"local_files_only": True, "trust_remote_code": False}
_ALONE = threading.RLock()  # what is changed in transformers for a while is changed for every thread


def config_from(folder: Path) -> Any:
    """The config of a folder, as transformers reads it."""
    config_of(folder)
    with closed() as library:
        return library.AutoConfig.from_pretrained(folder, **_LOCAL)


def model_from(cls: Any, folder: Path, config: Any) -> tuple[Any, dict[str, Any]]:
    """The model of a class with the weights of a folder, and what was missing or of another shape."""
    config_of(folder)
    check_adapter(folder)
    with closed():
        model, info = cls.from_pretrained(
            folder,
            config=config,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # a head for other classes may differ; the caller tells of the rest
            **_LOCAL,
        )
    return model, info


def tokenizer_from(folder: Path) -> Any:
    """The tokenizer of a folder."""
    check_settings(folder)
    with closed() as library:
        _check_tokenizer_class(library, folder)
        return library.AutoTokenizer.from_pretrained(folder, **_LOCAL)


def built(cls: Any, config: Any) -> Any:
    """A model of a class with random weights."""
    with closed():
        return cls(config)


def model_from_gguf(path: Path, trained: bool) -> tuple[Any, Any]:
    """The language model of a GGUF file in float32, with its own weights or random ones, and its tokenizer."""
    folder = path.parent  # transformers reads the settings that lie beside the file, too
    check_settings(folder)
    check_adapter(folder)
    given: dict[str, Any] = {"gguf_file": path.name, **_LOCAL}
    with closed() as library:
        _check_tokenizer_class(library, folder)
        tokenizer = library.AutoTokenizer.from_pretrained(folder, **given)
        if trained:
            model = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **given)
        else:
            config = library.AutoConfig.from_pretrained(folder, **given)
            model = library.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return model, tokenizer


def model_class(config: Any) -> Any:
    """The class that a config names, else the one that writes text, else the bare one."""
    library = import_transformers()
    for named in getattr(config, "architectures", None) or ():
        found = _model_named(library, named, Path(config.name_or_path) / CONFIG)
        if found is not None:
            return found
    for mapping in (library.MODEL_FOR_CAUSAL_LM_MAPPING, library.MODEL_FOR_MASKED_LM_MAPPING, library.MODEL_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise HubError(f"transformers has no model for a {type(config).__name__}")


@contextmanager
def closed() -> Iterator[Any]:
    """Inside, transformers is quiet, asks nobody whether to run code, and finds no kernel on the hub."""
    library = import_transformers()
    from transformers import dynamic_module_utils
    from transformers.integrations import hub_kernels

    with (
        _ALONE,
        quiet(library),
        _replaced(dynamic_module_utils, "TIME_OUT_REMOTE_CODE", 0),  # 0 s to answer: an error and no question
        _replaced(hub_kernels, "get_kernel", _no_kernel),
    ):
        yield library


@contextmanager
def quiet(library: Any) -> Iterator[None]:
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


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _no_kernel(name: str, *_: Any, **__: Any) -> NoReturn:
    """Raises what transformers expects where the hub has no kernel, so that it takes its own code where it can."""
    raise FileNotFoundError(f"{name} is a kernel on the hub, and regard loads no one's code")


def _model_named(library: Any, name: Any, place: Path) -> Any:
    """A model of transformers by the name of its class; None where transformers has nothing of that name."""
    found = getattr(library, name, None) if isinstance(name, str) else name
    if found is None:
        return None
    if _is_class(found, library.PreTrainedModel) and found.__module__.startswith("transformers.models."):
        return found
    raise HubError(
        f"{place}: architectures names {name!s:.80}, which is no model of transformers; expected the name of one, "
        "such as 'GPT2LMHeadModel'. Take the key 'architectures' out, and the class follows from model_type"
    )


def _check_tokenizer_class(library: Any, folder: Path) -> None:
    """Refuses a tokenizer_class that is anything else of transformers, which would be asked to load the folder."""
    for path in (folder / "tokenizer_config.json", folder / CONFIG):
        name = field_of(path, "tokenizer_class")
        while isinstance(name, str) and name:
            for tried in (name, f"{name}Fast"):  # transformers tries the name with and without that ending
                found = getattr(library, tried, None)
                absent = found is None or getattr(found, "is_dummy", False)  # it, or a library that it needs
                if not absent and not _is_class(found, library.PreTrainedTokenizerBase):
                    raise HubError(
                        f"{path}: tokenizer_class names {tried:.80}, which is no tokenizer; expected the class of one, "
                        "or take the key 'tokenizer_class' out"
                    )
            name = name[:-4] if name.endswith("Fast") else None


def _is_class(thing: Any, of: type) -> bool:
    return isinstance(thing, type) and issubclass(thing, of)
