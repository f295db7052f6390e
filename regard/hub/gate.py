"""The only file that calls transformers' loaders: none of them gets an unchecked folder, and nothing in a file runs.

`safety` refuses the fields of a file that name code. Against a field that it does not know there is a second barrier,
`closed`: while a loader works, it cannot ask at the terminal whether to run code, and it gets no kernel from the hub.
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
from regard.hub.safety import CONFIG, check_adapter, check_settings, read_config, read_field

_LOCAL = {"local_files_only": True, "trust_remote_code": False}
_LOCK = threading.RLock()  # `closed` changes transformers for every thread


def load_config(folder: Path) -> Any:
    """Returns the config of a folder, as transformers reads it."""
    read_config(folder)
    with closed() as library:
        return library.AutoConfig.from_pretrained(folder, **_LOCAL)


def load_model(cls: Any, folder: Path, config: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a model of a class with the weights of a folder, and which tensors were missing or of another shape."""
    read_config(folder)
    check_adapter(folder)
    with closed():
        model, info = cls.from_pretrained(
            folder,
            config=config,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # a head for other classes may differ; the caller reports the rest
            **_LOCAL,
        )
    return model, info


def load_tokenizer(folder: Path) -> Any:
    """Returns the tokenizer of a folder."""
    check_settings(folder)
    with closed() as library:
        _check_tokenizer_class(library, folder)
        return library.AutoTokenizer.from_pretrained(folder, **_LOCAL)


def build_model(cls: Any, config: Any) -> Any:
    """Returns a model of a class with random weights."""
    with closed():
        return cls(config)


def load_gguf(path: Path, trained: bool) -> tuple[Any, Any]:
    """Returns the language model of a GGUF file in float32, with its own weights or random ones, and its tokenizer."""
    folder = path.parent  # transformers also reads the settings that lie beside the file
    check_settings(folder)
    check_adapter(folder)
    options: dict[str, Any] = {"gguf_file": path.name, **_LOCAL}
    with closed() as library:
        _check_tokenizer_class(library, folder)
        tokenizer = library.AutoTokenizer.from_pretrained(folder, **options)
        if trained:
            model = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
        else:
            config = library.AutoConfig.from_pretrained(folder, **options)
            model = library.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return model, tokenizer


def model_class(config: Any) -> Any:
    """Returns the class that a config names; else its class for causal, or masked, language modelling; else any."""
    library = import_transformers()
    # A class by name only where it is a model of transformers: a name could stand for anything else in the library.
    for name in getattr(config, "architectures", None) or ():
        cls = _find_class(library, name, Path(config.name_or_path) / CONFIG)
        if cls is not None:
            return cls
    for mapping in (library.MODEL_FOR_CAUSAL_LM_MAPPING, library.MODEL_FOR_MASKED_LM_MAPPING, library.MODEL_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise HubError(f"transformers has no model for a {type(config).__name__}")


@contextmanager
def closed() -> Iterator[Any]:
    """Yields transformers, silenced, and unable to ask whether to run code or to get a kernel from the hub."""
    library = import_transformers()
    from transformers import dynamic_module_utils
    from transformers.integrations import hub_kernels

    with (
        _LOCK,
        quiet(library),
        _patch(dynamic_module_utils, "TIME_OUT_REMOTE_CODE", 0),  # 0 s to answer: an error and no question
        _patch(hub_kernels, "get_kernel", _no_kernel),
    ):
        yield library


@contextmanager
def quiet(library: Any) -> Iterator[None]:
    """Silences the library's messages and progress bars while the context lasts."""
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
    """Raises what transformers expects where the hub has no kernel, so that it takes its own code where it can."""
    raise FileNotFoundError(f"{name} is a kernel on the hub, and regard loads no one's code")


def _find_class(library: Any, name: Any, path: Path) -> Any:
    """Returns the model class of transformers with that name; None where transformers has nothing of that name."""
    cls = name
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
    """Refuses a tokenizer_class that is no tokenizer: whatever transformers has by that name would load the folder."""
    for path in (folder / "tokenizer_config.json", folder / CONFIG):
        name = read_field(path, "tokenizer_class")
        while isinstance(name, str) and name:
            for tried in (name, f"{name}Fast"):  # transformers tries the name with and without that ending
                cls = getattr(library, tried, None)
                absent = cls is None or getattr(cls, "is_dummy", False)  # a dummy stands for a missing library
                if not absent and not _is_subclass(cls, library.PreTrainedTokenizerBase):
                    raise HubError(
                        f"{path}: tokenizer_class names {tried:.80}, which is no tokenizer; expected the class of one, "
                        "or take the key 'tokenizer_class' out"
                    )
            if not name.endswith("Fast"):
                break
            name = name.removesuffix("Fast")  # transformers goes on without the ending, which may come twice


def _is_subclass(thing: Any, base: type) -> bool:
    """Tells whether something is a class, and one that builds on `base`."""
    return isinstance(thing, type) and issubclass(thing, base)
