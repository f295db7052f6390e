"""What a family of Hugging Face models is: its config and its tensors, both ways.

A family reads a config.json into a config of ours and writes one; a part says which of their tensors make up one of
ours. Loading and exporting use the same two tables, so what the one reads the other writes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from regard.hub.keys import Keys
from regard.models import Model, StackConfig

GELU = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}


@dataclass(frozen=True)
class Part:
    """One tensor of ours: theirs one after the other along the first axis, `sizes` long each.

    `turned`: theirs lies on its side. `skip`: rows of theirs before the first of ours. `zeros`: it may be missing in
    ours, and is zero then.
    """

    ours: str
    theirs: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    turned: bool = False
    skip: int = 0
    zeros: bool = False


class Family(ABC):
    """Models that are built alike. `prefix` stands before the names of the tensors of all but the head; `heads` gives
    the head of each class of transformers; `spare` are tensors that carry nothing, by the end of their name."""

    model_type: ClassVar[str]
    model: ClassVar[type[Model[Any]]]
    prefix: ClassVar[str]
    heads: ClassVar[Mapping[str, str]]
    default: ClassVar[Mapping[str, Any]]
    spare: ClassVar[tuple[str, ...]] = ()
    zero_bias: ClassVar[bool] = False  # theirs always has biases: where ours has none, they are zero

    @abstractmethod
    def read(self, keys: Keys, head: str) -> Any:
        """Our config, every field of it said."""

    @abstractmethod
    def write(self, config: Any) -> dict[str, Any]:
        """Their config."""

    @abstractmethod
    def parts(self, config: Any, document: Mapping[str, Any]) -> Iterator[Part]:
        """Where each tensor of ours comes from."""

    def copies(self, config: Any) -> dict[str, str]:
        """Tensors that a file may hold a second time, and what they repeat. Without tying they are never used."""
        return {}

    def head(self, names: Collection[str]) -> str:
        """The head of a model whose config does not say its class."""
        return next(iter(self.heads.values()))

    def architecture(self, head: str) -> str:
        return next(name for name, mine in self.heads.items() if mine == head)


def projections(ours: str, theirs: str, *kinds: str, **how: Any) -> Iterator[Part]:
    """The weight or the bias of a layer, or both."""
    for kind in kinds:
        yield Part(f"{ours}.{kind}", (f"{theirs}.{kind}",), zeros=kind == "bias", **how)


def widths(config: StackConfig) -> tuple[int, int, int]:
    """Of the queries, the keys and the values of all heads."""
    a = config.attention
    assert a.groups is not None and a.key_width is not None and a.value_width is not None
    return a.heads * a.key_width, a.groups * a.key_width, a.groups * a.value_width


def attention_of(heads: int, groups: int, width: int, bias: bool, out_bias: bool) -> dict[str, Any]:
    """The section `attention` of a config of ours, as far as all families say it; `width`: of a head."""
    own = {"heads": heads, "groups": groups, "key_width": width, "value_width": width}
    return own | {"bias": bias, "out_bias": out_bias}


def kinds(bias: bool | None) -> tuple[str, ...]:
    """What a layer has."""
    return ("weight", "bias") if bias else ("weight",)
