"""What a family of Hugging Face models is: a translation of its config and of its tensors' names, both ways.

A family reads a config.json into a config of ours, and writes one. A part says which of their tensors make up one of
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
    """One tensor of ours, which is their tensors one after the other along the first axis.

    `sizes` are their lengths along it, or () for a single one. `transposed`: theirs is stored [in, out]. `skip`: rows
    of theirs before the first of ours. `zeros`: ours may be missing, and theirs is zero then.
    """

    ours: str
    theirs: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    transposed: bool = False
    skip: int = 0
    zeros: bool = False


class Family(ABC):
    """Models that are built alike, all of one `model_type` of transformers and of one class of ours.

    `prefix` stands before the names of all tensors but those of the head. `heads` gives the head of ours for each class
    of transformers, `default` what transformers takes for a key that a config lacks. `spare` are the endings of names
    of tensors that the model does without, such as buffers.
    """

    model_type: ClassVar[str]
    model: ClassVar[type[Model[Any]]]
    prefix: ClassVar[str]
    heads: ClassVar[Mapping[str, str]]
    default: ClassVar[Mapping[str, Any]]
    spare: ClassVar[tuple[str, ...]] = ()
    zero_bias: ClassVar[bool] = False  # theirs always has biases: where ours has none, they are zero

    @abstractmethod
    def read(self, keys: Keys, head: str) -> Any:
        """Returns our config, with no field left to its default."""

    @abstractmethod
    def write(self, config: Any) -> dict[str, Any]:
        """Returns their config."""

    @abstractmethod
    def parts(self, config: Any, document: Mapping[str, Any]) -> Iterator[Part]:
        """Yields each tensor of ours, with those of theirs that it is made of."""

    def copies(self, config: Any) -> dict[str, str]:
        """Returns the tensors that a file may hold a second time, each with the one that it repeats."""
        return {}

    def head(self, names: Collection[str]) -> str:
        """Returns the head of a model whose config does not say its class, by the names of its tensors."""
        return next(iter(self.heads.values()))

    def architecture(self, head: str) -> str:
        """Returns the class of transformers that has a head of ours."""
        return next(name for name, mine in self.heads.items() if mine == head)


def head_of(config: Any) -> str:
    """Returns the head of a config of ours; a GPT has only one, which predicts words."""
    return str(getattr(config, "head", "words"))


def projections(ours: str, theirs: str, *kinds: str, **options: Any) -> Iterator[Part]:
    """Yields the weight or the bias of a linear layer or a norm, or both."""
    for kind in kinds:
        yield Part(f"{ours}.{kind}", (f"{theirs}.{kind}",), zeros=kind == "bias", **options)


def projection_widths(config: StackConfig) -> tuple[int, int, int]:
    """Returns the widths of the queries, the keys and the values of all heads together."""
    a = config.attention
    assert a.groups is not None and a.key_width is not None and a.value_width is not None
    return a.heads * a.key_width, a.groups * a.key_width, a.groups * a.value_width


def attention_section(heads: int, groups: int, head_width: int, bias: bool, out_bias: bool) -> dict[str, Any]:
    """Returns the section `attention` of a config of ours, as far as all families have it."""
    return {
        "heads": heads,
        "groups": groups,
        "key_width": head_width,
        "value_width": head_width,
        "bias": bias,
        "out_bias": out_bias,
    }


def weight_and_bias(bias: bool | None) -> tuple[str, ...]:
    """Returns the names of the tensors of a layer, with a bias or without."""
    return ("weight", "bias") if bias else ("weight",)
