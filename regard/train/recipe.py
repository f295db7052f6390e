"""Recipes: TOML files with the sections data, model and train, changed by `key=value`, into frozen dataclasses.

A recipe names its task, which knows what its section `data` may hold. `[variant.NAME.…]` are changes that `--variant
NAME` applies, such as the full size of an experiment whose default fits a laptop. `[mechanism.NAME.…]` are settings
that hold if the model's mechanism is NAME; `key=value` overrides them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from regard.config import ConfigError, Section
from regard.errors import did_you_mean, list_known, quote
from regard.mechanisms import lookup
from regard.models import Model
from regard.models.base import MODELS
from regard.reading import check_path, parse_toml, read_toml
from regard.train.settings import TrainConfig
from regard.train.tasks.base import TASKS

SECTIONS = ("data", "model", "train")
COMPARE = "compare"  # what an experiment varies; a single training has no use for it
_BARE_POINT = re.compile(r"[+-]?(\d+\.|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)  # .1 and 1.
_BARE_NAMES = re.compile(r"\[ *[a-z][\w-]*( *, *[a-z][\w-]*)* *\]", re.IGNORECASE)  # [adamw,sgd]
MECHANISM = "mechanism"  # the section with settings that hold for one mechanism only


@dataclass(frozen=True)
class Recipe:
    """A resolved recipe. `model` holds changes to a preset; `asked` are the changes that the user made."""

    name: str
    task: str
    data: Section
    model: Mapping[str, Any]
    train: TrainConfig
    asked: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Returns plain tables, as config.toml has them."""
        return {
            "recipe": self.name,
            "task": self.task,
            "data": self.data.as_dict(),
            "model": dict(self.model),
            "train": self.train.as_dict(),
        }


def recipe_names() -> list[str]:
    """Returns the names of the recipes that come with regard."""
    root = Path(str(resources.files("regard") / "recipes"))
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.toml"))


def load(name: str, overrides: Sequence[str] = (), variant: str | None = None) -> Recipe:
    """Returns a recipe by its name or file, with changes applied."""
    asked = parse(overrides, recipe=name)
    made = resolve(name, apply_variant(read_tables(name), variant, name), asked)
    refuse_unused(made.task, asked)
    return made


def refuse_unused(task: str, asked: Mapping[str, Any]) -> None:
    """Raises ConfigError if the user sets both a file and a key of the generated data that it replaces."""
    known = TASKS[task]
    given = asked.get("data", {})
    unused = [key for key in known.generated if key in given]
    if unused and given.get(known.files[0]):
        raise ConfigError(
            f"data.{unused[0]}: nothing is generated where data.{known.files[0]} is given; leave one of them out"
        )


def read_tables(name: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the tables of a recipe's file, merged over those of the recipe that it `extends`.

    `above` are the names of the recipes that extend this one, by which a circle is found.
    """
    if name in above:
        raise ConfigError(f"the recipe {name} extends itself: {' → '.join((*above, name))}")
    if name.endswith(".toml"):
        path = Path(name)
    else:
        if name not in recipe_names():
            raise ConfigError(f"no recipe {quote(name)}.{_suggest_recipe(name)} A file of your own ends in .toml.")
        path = Path(str(resources.files("regard") / "recipes" / f"{name}.toml"))
    if not check_path(path, ConfigError).is_file():
        raise ConfigError(f"the recipe {path} cannot be read: expected a TOML file")
    tables = read_toml(path, ConfigError)
    extends = tables.pop("extends", None)
    if extends is None:
        return tables
    return merge_tables(read_tables(str(extends), (*above, name)), tables)


def _suggest_recipe(name: str) -> str:
    """Returns a hint for a name that is no recipe's: it is an experiment, a preset or a file, or is like a recipe's."""
    if any(known.startswith(f"{name}/") for known in recipe_names()):
        return f" It is an experiment of several trainings: `regard run {name}`.{list_known(recipe_names())}"
    if name in MODELS["GPT"].PRESETS:
        return f" It is a preset of GPT: lm model.preset={name}.{list_known(recipe_names())}"
    if check_path(name, ConfigError).is_file():
        return f" Is it a text to learn from? lm data.text={name}.{list_known(recipe_names())}"
    return did_you_mean(name, recipe_names())


def resolve(name: str, tables: Mapping[str, Any], asked: Mapping[str, Any] | None = None) -> Recipe:
    """Returns the recipe of tables and the user's changes; raises ConfigError for any key that does not exist."""
    asked = asked or {}
    for key in asked:
        if key not in SECTIONS:
            raise ConfigError(f"no section {quote(key)} in the recipe {name}.{_suggest(key, asked[key], name)}")
    for key in SECTIONS:
        for table in (tables.get(key, {}), asked.get(key, {})):
            if not isinstance(table, Mapping):
                raise ConfigError(f"{name}: {key} = {quote(table)}: expected a section of keys and values")
    tables = apply_mechanism(tables, asked, name)
    unknown = set(tables) - {"task", "recipe", "versions", COMPARE, *SECTIONS}
    if unknown:
        raise ConfigError(f"{name} has an unknown section {quote(min(unknown))}.{did_you_mean(min(unknown), SECTIONS)}")
    task = tables.get("task")
    if not isinstance(task, str) or task not in TASKS:
        raise ConfigError(f"{name}: task = {quote(task)}.{did_you_mean(str(task), TASKS)}")
    data = TASKS[task].Config().but(**tables.get("data", {})).but(**asked.get("data", {}))
    train = TrainConfig().but(**tables.get("train", {})).but(**_train_changes(asked.get("train", {})))
    model = merge_tables(tables.get("model", {}), asked.get("model", {}))
    resolve_model(model)  # an error in a model's keys comes here, not when it is built
    return Recipe(name, task, data, model, train, asked)


def resolve_model(changes: Mapping[str, Any], **given: Any) -> tuple[type[Model[Any]], Any]:
    """Returns the class and the config of a model: its preset, then what the data decide (`given`), then changes."""
    if not isinstance(changes, Mapping):
        raise ConfigError(f"model = {quote(changes)}: expected a section of keys and values")
    rest = dict(changes)
    name = rest.pop("class", "GPT")
    preset = rest.pop("preset", None)
    if not isinstance(name, str) or name not in MODELS:
        raise ConfigError(f"model.class = {quote(name)}.{did_you_mean(str(name), MODELS)}")
    cls = MODELS[name]
    config = cls.Config()
    if preset is not None:
        if not isinstance(preset, str) or preset not in cls.PRESETS:
            hint = did_you_mean(str(preset), cls.PRESETS)
            raise ConfigError(f"model.preset = {quote(preset)}: {name} has no such preset.{hint}")
        config = config.but(**cls.PRESETS[preset])
    return cls, config.but(**given).but(**rest)


def apply_variant(tables: Mapping[str, Any], variant: str | None, name: str) -> dict[str, Any]:
    """Returns a recipe's tables with one of its variants applied; `name` is what errors call the recipe."""
    plain = {key: value for key, value in tables.items() if key != "variant"}
    variants = tables.get("variant", {})
    if variant is None:
        return plain
    if variant not in variants:
        raise ConfigError(f"{name} has no variant {quote(variant)}.{did_you_mean(variant, variants)}")
    return merge_tables(plain, variants[variant])


def apply_mechanism(tables: Mapping[str, Any], asked: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns a recipe's tables merged with its settings for the model's mechanism; errors call the recipe `name`."""
    plain = {key: value for key, value in tables.items() if key != MECHANISM}
    by_mechanism = tables.get(MECHANISM, {})
    if not isinstance(by_mechanism, Mapping):
        raise ConfigError(f"{name}: {MECHANISM} = {quote(by_mechanism)}: expected sections [{MECHANISM}.NAME.…]")
    for known in by_mechanism:
        lookup(known)  # raises for a name that is no mechanism's
    used = merge_tables(tables.get("model", {}), asked.get("model", {})).get(MECHANISM)
    if not isinstance(used, str) or used not in by_mechanism:
        return plain
    return merge_tables(plain, by_mechanism[used])


def merge_tables(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of both nested tables; where both have a key, those of `over`.

    A string merged with a table stands for its key `name`: `optimizer = "sgd"` over `optimizer = {name = "adamw", …}`.
    """
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) != isinstance(value, Mapping):
            below = _as_named_table(below)
            value = _as_named_table(value)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = merge_tables(below, value)
        merged[key] = value
    return merged


def _as_named_table(value: Any) -> Any:
    if isinstance(value, str):
        return {"name": value}
    return value


def flatten(table: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Returns nested tables as pairs of `section.key` and value."""
    if not isinstance(table, Mapping):
        return [(prefix, table)]
    pairs = []
    for key, value in table.items():
        path = f"{prefix}.{key}" if prefix else key
        pairs += flatten(value, path)
    return pairs


def _train_changes(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the user's changes to `train`, with steps = 0 if they set epochs and no steps.

    Steps win over epochs, so epochs alone would have no effect on a recipe that sets steps.
    """
    changes = dict(asked)
    if changes.get("epochs") and "steps" not in changes:
        changes["steps"] = 0
    return changes


def parse(overrides: Sequence[str], sections: bool = True, recipe: str = "") -> dict[str, Any]:
    """Returns `train.lr=6e-3 data.documents=wiki.txt` as nested tables; a value is TOML where it can be, else text.

    `sections`: whether a key must begin with a section. `recipe`: the recipe or experiment whose keys an error
    suggests; by default those of all recipes.
    """
    tables: dict[str, Any] = {}
    for text in overrides:
        key, sign, value = text.partition("=")
        parts = key.strip().split(".")
        if not sign or not all(parts) or len(parts) < 1 + sections:
            expected = "key=value, e.g. seed=1"
            if sections:
                expected = f"section.key=value, e.g. {example_override(text, recipe)}"
            raise ConfigError(f"{quote(text)}: expected {expected}")
        nested: Any = _parse_value(value.strip())
        for part in reversed(parts):
            nested = {part: nested}
        tables = merge_tables(tables, nested)
    return tables


def example_override(text: str, recipe: str) -> str:
    """Returns an example of an override for an error: what this text, without a section, may mean, or else any."""
    from regard.train.keys import find_keys  # it reads recipes, with this module

    key, sign, value = text.partition("=")
    if not sign and Path(text).is_file():
        key, value = "file", text  # a text to learn from, where there is a key for one
    found = find_keys(key.strip(), [recipe])
    if not found:
        return "train.lr=3e-4"
    return " or ".join(f"{name}={value or '…'}" for name in found)


def _suggest(section: str, asked: Any, recipe: str) -> str:
    """Returns a hint for an unknown section: a key that ends with this name, or else the most similar section."""
    from regard.train.keys import find_keys

    found = find_keys(flatten(asked, section)[0][0], [recipe])
    if found:
        return f" Did you mean '{found[0]}'?{list_known(SECTIONS)}"
    return did_you_mean(section, SECTIONS)


def _parse_value(text: str) -> Any:
    try:
        return parse_toml(f"value = {text}", "the value", ConfigError)["value"]
    except ConfigError:
        pass
    # Booleans and numbers as Python writes them and TOML does not.
    if text in ("True", "False"):
        return text == "True"
    if _BARE_POINT.fullmatch(text):
        return float(text)
    # A list of names whose quotation marks the shell has taken away.
    if _BARE_NAMES.fullmatch(text):
        return [name.strip() for name in text[1:-1].split(",")]
    return text
