"""Configs as small nested sections, frozen, checked, and the same in Python, JSON and TOML."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from regard.errors import RegardError, did_you_mean, list_known, quote
from regard.reading import fits

S = TypeVar("S", bound="Section")


class ConfigError(RegardError, ValueError):
    """A config has an unknown key or a value that cannot be."""


# The most that a size may be: a config is read from files, and a typing error should not exhaust the memory.
SIZE_LIMITS = {
    "width": 1 << 16,
    "layers": 1 << 10,
    "length": 1 << 24,
    "vocabulary": 1 << 24,
    "target_vocabulary": 1 << 24,
    "heads": 1 << 12,
    "groups": 1 << 12,
    "key_heads": 1 << 12,
    "key_width": 1 << 14,
    "value_width": 1 << 14,
    "hidden": 1 << 18,
    "window": 1 << 24,
    "classes": 1 << 20,
}


@functools.cache
def _type_hints(kind: Any) -> dict[str, Any]:
    """Returns the types of a class's fields; to find them out takes longer than all checks of their values."""
    return get_type_hints(kind)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a config. Unknown keys, wrong types and impossible sizes are errors that say what was expected."""

    # Where a section stands in its model's config, for error messages.
    place: ClassVar[str] = "model"
    # The least that a size may be, where that is not 1.
    smallest: ClassVar[Mapping[str, int]] = {}

    def __post_init__(self) -> None:
        hints = _type_hints(type(self))  # type: ignore[arg-type]  # of a class, whose metaclass hashes it
        for f in fields(self):
            value = getattr(self, f.name)
            if not fits(value, hints[f.name]):
                raise ConfigError(f"{self.place}.{f.name} = {quote(value)}: expected {_describe_type(hints[f.name])}")
            most = SIZE_LIMITS.get(f.name)
            least = self.smallest.get(f.name, 1)
            if most is not None and value is not None and not least <= value <= most:
                raise ConfigError(f"{self.place}.{f.name} = {quote(value)}: expected {least} to {most}")
            if "dropout" in f.name and not 0 <= value < 1:
                raise ConfigError(f"{self.place}.{f.name} = {quote(value)}: expected at least 0 and less than 1")

    def but(self: S, /, **changes: Any) -> S:
        """Returns this section with some fields changed.

        A section inside takes a dict of its own changes, or a string, which is then its `name`.
        """
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {}
        for name, value in changes.items():
            if name not in known:
                raise ConfigError(f"no key {quote(name)} in {self.place}.{self._suggest(name)}")
            current = known[name]
            if isinstance(current, Section) and isinstance(value, str):
                value = {"name": value}
            if isinstance(current, Section) and isinstance(value, Mapping):
                value = current.but(**value)
            if isinstance(value, list):  # JSON and TOML have no tuples
                value = tuple(value)
            changed[name] = value
        return replace(self, **changed)

    def _suggest(self, name: str) -> str:
        """Returns what to say beside an unknown key: the key of that name in a section inside, else the nearest."""
        inner = {f.name: getattr(self, f.name) for f in fields(self)}
        for section, value in inner.items():
            if isinstance(value, Section) and name in {f.name for f in fields(value)}:
                return f" Did you mean '{self.place}.{section}.{name}'?{list_known(inner)}"
        return did_you_mean(name, inner)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, strings and numbers, as JSON and TOML have them."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def _describe_type(hint: Any) -> str:
    """Returns an annotated type in the words of an error message."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a name", NoneType: "nothing"}
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_describe_type(h) for h in get_args(hint))
    if get_origin(hint) is tuple:
        return "a list, each " + _describe_type(get_args(hint)[0])
    return names.get(hint, "a section of keys and values")


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.as_dict()
    if isinstance(value, Mapping):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(x) for x in value]
    return value
