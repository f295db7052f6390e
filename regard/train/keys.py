"""The keys of a recipe: the meaning and the default of each, and the key that a wrong name stands for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from regard.config import Section, find_by_end
from regard.train import recipe as recipes
from regard.train.meanings import MEANINGS, OF_MODEL

MOST_FOUND = 3


class Key(NamedTuple):
    """A key of a recipe as the user types it, its default there, and its meaning."""

    name: str
    default: Any
    meaning: str


def list_keys(recipe: recipes.Recipe) -> list[Key]:
    """Returns every key of a recipe, in the order of its sections."""
    cls, config = recipes.resolve_model(recipe.model)
    model = [
        Key("model.class", cls.__name__, OF_MODEL["class"]),
        Key("model.preset", recipe.model.get("preset"), OF_MODEL["preset"]),
    ]
    return [*_keys_of(recipe.data, "data"), *model, *_keys_of(config, "model"), *_keys_of(recipe.train, "train")]


def _keys_of(section: Section, place: str) -> Iterator[Key]:
    """Yields the keys of a section, then those of the sections in it."""
    meanings = _meanings(type(section))
    inner = []
    for field in fields(section):
        value = getattr(section, field.name)
        if isinstance(value, Section):
            inner.append((value, f"{place}.{field.name}"))
        else:
            yield Key(f"{place}.{field.name}", value, meanings.get(field.name, ""))
    for value, name in inner:
        yield from _keys_of(value, name)


def _meanings(cls: type) -> dict[str, str]:
    """Returns what the fields of a section mean, those that it inherits too."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        found |= MEANINGS.get(base.__name__, {})
    return found


def find_keys(wrong: str, given: Sequence[str] = ()) -> list[str]:
    """Returns the keys that a name such as lr or attention.heads may stand for, those with the fewest parts first.

    `given` are the words of the command. If one names a recipe, only its keys are searched, else those of all recipes.
    """
    known = recipes.recipe_names()
    asked = [name for word in given for name in known if name == word or name.startswith(f"{word}/")]
    keys = {key.name for name in asked or known for key in list_keys(recipes.load(name))}
    return find_by_end(wrong, keys)[:MOST_FOUND]
