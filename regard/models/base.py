"""The base class of all models: a config, presets, a tokenizer, saving, and a summary."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from regard.config import ConfigError, Section
from regard.data.tokenizers import Tokenizer
from regard.errors import UnknownNameError, did_you_mean
from regard.registry import Registry

if TYPE_CHECKING:  # it knows all models, and so comes after them
    from regard.models.summary import Summary

C = TypeVar("C", bound=Section)
M = TypeVar("M", bound="Model[Any]")

# The classes that recipes and model folders name. Each registers itself when its module is imported, on the first
# look-up: so the Classifier can be listed here, below the hub.
MODELS: Registry[type[Model[Any]]] = Registry(
    "model class",
    {
        "GPT": "regard.models.gpt",
        "Encoder": "regard.models.encoder",
        "Seq2Seq": "regard.models.seq2seq",
        "Classifier": "regard.hub.classifier",
    },
    ConfigError,
)


class Model(nn.Module, Generic[C]):
    """A model with its config. Build one from a config, from changes to the default, or from a preset."""

    Config: ClassVar[type[Any]]
    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {}
    has_weights: ClassVar[bool] = False  # whether its constructor reads weights and tokenizer from files
    config: C
    tokenizer: Tokenizer | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if isinstance(getattr(cls, "Config", None), type):
            cls.__signature__ = _signature(cls.Config)  # type: ignore[attr-defined]  # help() and editors show it

    def __init__(self, config: C | None = None, **changes: Any) -> None:
        super().__init__()
        if config is None:
            config = self.Config()
        self.config = config.but(**changes)
        self.tokenizer = None

    @classmethod
    def preset(cls: type[M], name: str, **changes: Any) -> M:
        """Returns a new model of a known size, e.g. `GPT.preset("char", vocabulary=65, mechanism="elu")`."""
        if name not in cls.PRESETS:
            raise UnknownNameError(f"{cls.__name__} has no preset '{name}'.{did_you_mean(name, cls.PRESETS)}")
        return cls(cls.Config().but(**cls.PRESETS[name]).but(**changes))

    def save(self, folder: str | Path) -> None:
        """Writes config.json, model.safetensors, tokenizer.json (if it has one) and manifest.json, their hashes."""
        from regard.models.folder import save

        save(self, folder)

    def write_files(self, folder: Path) -> None:
        """Writes the files of the model into an empty folder; `save` then puts all of them in place at once."""
        from regard.models.folder import write_files

        write_files(self, folder)

    def restore(self, folder: str | Path) -> None:
        """Loads the weights of a model folder into this model; their shapes must be the same."""
        from regard.models.folder import load

        self.load_state_dict(load(folder).state_dict())

    def summary(self, T: int | None = None, S: int | None = None, B: int = 1) -> Summary:
        """Returns a table of parameters, FLOPs and state bytes, to be printed.

        `T`: the length of the B sequences, by default the model's; `S`: that of a source, by default T.
        """
        from regard.models.summary import summarize

        return summarize(self, T, S, B)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


def _signature(config: type[Any]) -> inspect.Signature:
    """Returns the signature of a model's constructor: a config, or its keys with their defaults."""
    defaults = config()
    first = inspect.Parameter("config", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    keys = [
        first.replace(name=f.name, kind=first.KEYWORD_ONLY, default=getattr(defaults, f.name), annotation=f.type)
        for f in fields(config)
    ]
    return inspect.Signature([first, *keys])
