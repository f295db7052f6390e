"""What a model is made of: small nested sections, frozen, checked, and the same in Python, JSON and TOML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from regard.errors import RegardError, did_you_mean

S = TypeVar("S", bound="Section")


class ConfigError(RegardError, ValueError):
    """A config has an unknown key or a value that cannot be."""


# The most that a size may be: a config is read from files, and a typing error should not exhaust the memory.
_MOST = {
    "width": 1 << 16,
    "layers": 1 << 10,
    "length": 1 << 24,
    "vocabulary": 1 << 24,
    "target_vocabulary": 1 << 24,
    "heads": 1 << 12,
    "groups": 1 << 12,
    "key_width": 1 << 14,
    "value_width": 1 << 14,
    "hidden": 1 << 18,
    "window": 1 << 24,
    "classes": 1 << 20,
}


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a config. Unknown keys, wrong types and impossible sizes are errors that say what was expected."""

    # Where a section stands in its model's config, for error messages.
    place: ClassVar[str] = "model"

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for f in fields(self):
            value = getattr(self, f.name)
            if not _fits(value, hints[f.name]):
                raise ConfigError(f"{self.place}.{f.name} = {value!r}: expected {_shown(hints[f.name])}")
            most = _MOST.get(f.name)
            if most is not None and value is not None and not 1 <= value <= most:
                raise ConfigError(f"{self.place}.{f.name} = {value}: expected 1 to {most}")
            if "dropout" in f.name and not 0 <= value < 1:
                raise ConfigError(f"{self.place}.{f.name} = {value}: expected at least 0 and less than 1")

    def but(self: S, **changes: Any) -> S:
        """The same with some fields changed; a section inside takes a dict of its own changes."""
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        made: dict[str, Any] = {}
        for name, value in changes.items():
            if name not in known:
                raise ConfigError(f"no key '{name}' in {self.place}.{did_you_mean(name, known)}")
            if isinstance(known[name], Section) and isinstance(value, Mapping):
                value = known[name].but(**value)
            made[name] = tuple(value) if isinstance(value, list) else value
        return replace(self, **made)

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, as JSON and TOML have them."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Section):
    """The attention layer. `groups`: key/value heads, None for as many as `heads`; widths None: width / heads."""

    place = "model.attention"

    heads: int = 12
    groups: int | None = None
    key_width: int | None = None
    value_width: int | None = None
    merge: str = "concatenate"
    merge_options: dict[str, Any] = field(default_factory=dict)
    window: int | None = None
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class BlockConfig(Section):
    """Norms and MLP. `final_norm` None: where norms come before. `hidden` None: the MLP's own rule."""

    place = "model.block"

    norm: str = "layer"
    before: bool = True
    eps: float = 1e-5
    final_norm: bool | None = None
    embedding_norm: bool = False
    mlp: str = "gelu_tanh"
    hidden: int | None = None
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class StackConfig(Section):
    """A stack of blocks. `mechanism` is a name, or one for each layer; each layer takes those `options` that it has."""

    width: int = 768
    layers: int = 12
    length: int = 1024
    mechanism: str | tuple[str, ...] = "softmax"
    options: dict[str, Any] = field(default_factory=dict)
    position: str = "learned"
    position_options: dict[str, Any] = field(default_factory=dict)
    dropout: float = 0.0
    checkpoint: bool = False
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    block: BlockConfig = field(default_factory=BlockConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.mechanism, str) and len(self.mechanism) != self.layers:
            raise ConfigError(
                f"{self.place}.mechanism names {len(self.mechanism)} mechanisms for {self.layers} layers; "
                "give one name, or one for each layer"
            )

    @property
    def per_layer(self) -> tuple[str, ...]:
        """The mechanism of each layer."""
        return (self.mechanism,) * self.layers if isinstance(self.mechanism, str) else self.mechanism


@dataclass(frozen=True, kw_only=True)
class GPTConfig(StackConfig):
    """A decoder-only language model. `tied`: the output layer is the embedding."""

    vocabulary: int = 50257
    tied: bool = True


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(StackConfig):
    """A bidirectional encoder. `head`: "none" (vectors), "masked" (a word at each place) or "classes" (one a text)."""

    vocabulary: int = 30522
    tied: bool = True
    token_types: int = 0
    head: str = "masked"
    classes: int = 2


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig(Section):
    """An encoder and a decoder, which may differ in everything. `target_vocabulary` None: one for both.

    `cross` is the mechanism by which the decoder attends to the encoder; `shared`: one embedding for both sides;
    `start` is the token that every target begins with.
    """

    vocabulary: int = 32000
    target_vocabulary: int | None = None
    shared: bool = False
    tied: bool = True
    start: int = 0
    cross: str = "softmax"
    cross_options: dict[str, Any] = field(default_factory=dict)
    encoder: StackConfig = field(default_factory=StackConfig)
    decoder: StackConfig = field(default_factory=StackConfig)


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, h) for h in get_args(hint))
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(x, get_args(hint)[0]) for x in value)
    if origin is dict:
        return isinstance(value, Mapping) and all(isinstance(n, str) for n in value)
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _shown(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a name", NoneType: "nothing"}
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_shown(h) for h in get_args(hint))
    if get_origin(hint) is tuple:
        return "a list, each " + _shown(get_args(hint)[0])
    return names.get(hint, "a section of keys and values")


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.as_dict()
    if isinstance(value, Mapping):
        return {n: _plain(x) for n, x in value.items()}
    return [_plain(x) for x in value] if isinstance(value, tuple | list) else value
