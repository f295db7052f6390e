"""Configs are nested sections: frozen dataclasses whose values are checked, alike in Python, JSON and TOML."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from regard.errors import RegardError, did_you_mean, list_known, quote
from regard.reading import fits

S = TypeVar("S", bound="Section")


class ConfigError(RegardError, ValueError):
    """A config has an unknown key or an impossible value."""


# The largest value of each size, so that a mistake in a config file cannot exhaust the memory.
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


# Names of settings in nanoGPT, transformers, x-transformers and Lightning, each with the keys that it may stand for
# here: the first of them that a section, or a section inside it, has.
ALSO_CALLED: dict[str, tuple[str, ...]] = {
    "accumulate_grad_batches": ("micro",),
    "activation": ("mlp",),
    "arch": ("preset",),
    "attention": ("mechanism",),
    "attn_implementation": ("mechanism",),
    "batch_size": ("batch",),
    "block_size": ("data.block", "length"),
    "context_length": ("data.block", "length"),
    "corpus": ("text",),
    "d_ff": ("hidden",),
    "d_model": ("width",),
    "data": ("text",),
    "dataset": ("text",),
    "depth": ("layers",),
    "dim": ("width",),
    "dim_feedforward": ("hidden",),
    "do_sample": ("temperature",),
    "dtype": ("precision",),
    "embed_dim": ("width",),
    "eval_interval": ("evaluation.every",),
    "eval_steps": ("evaluation.every",),
    "file": ("text",),
    "grad_clip": ("clip",),
    "gradient_accumulation_steps": ("micro",),
    "gradient_clip_val": ("clip",),
    "hidden_dim": ("width",),
    "hidden_dropout_prob": ("dropout",),
    "hidden_size": ("width",),
    "intermediate_size": ("hidden",),
    "kv_heads": ("groups",),
    "learning_rate": ("lr",),
    "logger": ("saving.log",),
    "lr_scheduler_type": ("schedule.name",),
    "max_epochs": ("epochs",),
    "max_grad_norm": ("clip",),
    "max_iters": ("steps",),
    "max_length": ("max_tokens", "data.block", "length"),
    "max_new_tokens": ("max_tokens",),
    "max_position_embeddings": ("data.block", "length"),
    "max_seq_len": ("data.block", "length"),
    "max_steps": ("steps",),
    "min_lr": ("floor",),
    "mixed_precision": ("precision",),
    "model": ("preset",),
    "n_embd": ("width",),
    "n_embed": ("width",),
    "n_head": ("heads",),
    "n_heads": ("heads",),
    "n_kv_head": ("groups",),
    "n_kv_heads": ("groups",),
    "n_layer": ("layers",),
    "n_layers": ("layers",),
    "n_positions": ("data.block", "length"),
    "nhead": ("heads",),
    "norm_eps": ("eps",),
    "num_attention_heads": ("heads",),
    "num_beams": ("beams",),
    "num_epochs": ("epochs",),
    "num_heads": ("heads",),
    "num_hidden_layers": ("layers",),
    "num_key_value_heads": ("groups",),
    "num_kv_heads": ("groups",),
    "num_layers": ("layers",),
    "num_return_sequences": ("n",),
    "num_samples": ("n",),
    "num_train_epochs": ("epochs",),
    "optim": ("optimizer.name",),
    "path": ("text",),
    "per_device_train_batch_size": ("batch",),
    "pos_emb": ("position",),
    "report_to": ("saving.log",),
    "rms_norm_eps": ("eps",),
    "scheduler": ("schedule.name",),
    "seq_len": ("data.block", "length"),
    "seq_length": ("data.block", "length"),
    "sequence_length": ("data.block", "length"),
    "sliding_window": ("attention.window",),
    "tie_word_embeddings": ("tied",),
    "train_file": ("train", "text"),
    "vocab_size": ("vocabulary",),
    "wandb": ("saving.log",),
    "warmup_iters": ("warmup",),
    "warmup_steps": ("warmup",),
    "weight_decay": ("optimizer.decay",),
    "window_size": ("attention.window",),
}


def find_by_end(wrong: str, keys: Iterable[str]) -> list[str]:
    """Returns the keys that a wrong name may stand for, the least nested first: keys that end in this name, else the
    least nested keys that end in what other libraries call by this name (`ALSO_CALLED`)."""
    keys = sorted(keys, key=lambda key: (key.count("."), key))
    name = wrong.replace("-", "_")
    last = name.rpartition(".")[2]
    for own in (name, last):
        found = [key for key in keys if f".{key}".endswith(f".{own}")]
        if found:
            return found
        for end in ALSO_CALLED.get(own, ()):
            found = [key for key in keys if f".{key}".endswith(f".{end}")]
            if found:
                return [key for key in found if key.count(".") == found[0].count(".")]
    return []


@functools.cache
def _type_hints(kind: Any) -> dict[str, Any]:
    """Returns the types of a class's fields; cached, as finding them takes longer than checking all values."""
    return get_type_hints(kind)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a config. Unknown keys, wrong types and impossible sizes are errors that say what was expected."""

    # The dotted path of a section in the whole config, for error messages.
    place: ClassVar[str] = "model"
    # The smallest allowed value of each size for which it is not 1.
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
                if name == "name" and isinstance(value, str):
                    raise ConfigError(self._describe_unnamed(value))
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

    def key_names(self, place: str) -> Iterator[str]:
        """Yields the dotted keys of this section, which begin with `place`, then those of the sections inside it."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        sections = {name: value for name, value in values.items() if isinstance(value, Section)}
        yield from (f"{place}.{name}" for name in values if name not in sections)
        for name, section in sections.items():
            yield from section.key_names(f"{place}.{name}")

    def _suggest(self, name: str) -> str:
        """Returns the end of the error for an unknown key: the key probably meant, here or in a section inside."""
        own = [f.name for f in fields(self)]
        found = find_by_end(name, self.key_names(self.place))
        if not found:
            return did_you_mean(name, own)
        bare = found[0].removeprefix(f"{self.place}.")
        return f" Did you mean '{bare if bare in own else found[0]}'?{list_known(own)}"

    def _describe_unnamed(self, value: str) -> str:
        """Returns the error for a text given as a section without a key `name`, as in `model.attention=elu`."""
        parent, _, own = self.place.rpartition(".")
        hint = "".join(f" Did you mean '{parent}.{other}'?" for other in ALSO_CALLED.get(own, ()))
        known = list_known(f.name for f in fields(self))
        return f"{self.place} = {quote(value)}: that is a section, whose keys are set one by one.{hint}{known}"

    def as_dict(self) -> dict[str, Any]:
        """Returns the section as plain dicts, lists, strings and numbers, for JSON and TOML."""
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
