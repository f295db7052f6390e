"""What a family of Hugging Face models is: a translation of its config and of its tensors' names, both ways.

"Ours" is regard's, and "theirs" is transformers'. A family reads a config.json into a config of ours, and writes a
config.json from ours. Its tensor maps say which of their tensors make up each tensor of ours. Loading and exporting use
the same tensor maps, so what is exported can be loaded again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.hub.keys import Keys
from regard.models import Model, StackConfig

# Transformers' names of activations to ours, and back.
ACTIVATION_FROM_HF = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
ACTIVATION_TO_HF = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}


@dataclass(frozen=True)
class RowSpans:
    """The rows of a tensor of theirs that one tensor of ours holds; its other rows belong to other tensors of ours.

    `total` is the number of rows of their tensor. `spans` are (first row, row after the last), in the order of ours.
    """

    total: int
    spans: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """The number of rows in all spans."""
        return sum(stop - start for start, stop in self.spans)

    def take(self, theirs: Tensor) -> Tensor:
        """Returns these rows of their tensor, in the order of ours."""
        return torch.cat([theirs[start:stop] for start, stop in self.spans])

    def put(self, ours: Tensor, theirs: Tensor) -> None:
        """Writes our rows to their places in a tensor of theirs."""
        sizes = [stop - start for start, stop in self.spans]
        for (start, stop), piece in zip(self.spans, ours.split(sizes), strict=True):
            theirs[start:stop] = piece


@dataclass(frozen=True)
class TensorMap:
    """Names the tensors of theirs that make up one tensor of ours.

    Ours is the concatenation of theirs along dim 0, after transposing (`transposed`) and dropping rows (`skip`).
    `sizes` are the numbers of rows that ours takes from each of theirs, or () for a single tensor. `rows` says which
    rows of each tensor of theirs these are; None, or (), for all. `transposed`: their tensors are stored [in, out].
    `filters`: they are the filters of a convolution by channel, stored [channels, 1, width]. `skip`: the number of
    leading rows of their tensor that ours omits. `zeros`: if our model does not have the tensor, zeros are exported.
    """

    ours: str
    theirs: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    rows: tuple[RowSpans | None, ...] = ()
    transposed: bool = False
    filters: bool = False
    skip: int = 0
    zeros: bool = False

    def pieces(self, length: int) -> Iterator[tuple[str, int, RowSpans | None]]:
        """Yields each tensor of theirs: its name, how many rows ours takes from it, and which of its rows these are.

        `length` is that of ours.
        """
        sizes = self.sizes or (length,)
        yield from zip(self.theirs, sizes, self.rows or (None,) * len(self.theirs), strict=True)


class Family(ABC):
    """One architecture: a `model_type` of transformers, and `model`, our class that holds its weights.

    The names of their tensors begin with `prefix`, except those of the layers that transformers adds for an output head
    (lm_head, cls, classifier). In files of a base class such as BertModel the names may lack the prefix. `output_heads`
    maps the classes of transformers to our output heads: "lm", "masked" (MLM), "classes" (classification) or "none". A
    base class such as GPT2Model has no head, but it maps to "lm", because our GPT always has that head. `default` holds
    transformers' defaults for missing keys. `ignored_suffixes` are suffixes of the names of tensors to ignore, such as
    buffers. `zero_bias`: their layers always have biases; where ours have none, zeros are exported.
    """

    model_type: ClassVar[str]
    model: ClassVar[type[Model[Any]]]
    prefix: ClassVar[str]
    output_heads: ClassVar[Mapping[str, str]]
    default: ClassVar[Mapping[str, Any]]
    ignored_suffixes: ClassVar[tuple[str, ...]] = ()
    zero_bias: ClassVar[bool] = False

    @abstractmethod
    def read(self, keys: Keys, head: str) -> Any:
        """Returns our config for their config.json and an output head."""

    @abstractmethod
    def write(self, config: Any) -> dict[str, Any]:
        """Returns the keys of their config.json for a config of ours."""

    @abstractmethod
    def tensor_maps(self, config: Any, hf_config: Mapping[str, Any]) -> Iterator[TensorMap]:
        """Yields the map of each tensor of our state dict."""

    def copies(self, config: Any) -> dict[str, str]:
        """Returns {copy: original}: the names of tensors of theirs that a file may hold although no map needs them.

        With a tied embedding, `copy` is the same parameter as `original`, so in a file both must be equal. With an
        untied embedding, transformers has `copy` but does not use it, so in a file it may have any value.
        """
        return {}

    def guess_output_head(self, names: Collection[str]) -> str:
        """Returns the output head of a model whose config does not name a class.

        `names` are the names of its tensors. A family with several output heads overrides this method to judge by them.
        """
        return next(iter(self.output_heads.values()))

    def architecture(self, head: str) -> str:
        """Returns the name of transformers' class with the given output head of ours."""
        return next(name for name, ours in self.output_heads.items() if ours == head)


def output_head_of(config: Any) -> str:
    """Returns the output head of a config of ours; a GPT has only the language-modelling head, "lm"."""
    return str(getattr(config, "head", "lm"))


def layer_maps(ours: str, theirs: str, *kinds: str, **options: Any) -> Iterator[TensorMap]:
    """Yields a map for each of `kinds` ("weight", "bias") of a linear layer or a norm.

    A bias that our layer does not have is exported as zeros.
    """
    for kind in kinds:
        yield TensorMap(f"{ours}.{kind}", (f"{theirs}.{kind}",), zeros=kind == "bias", **options)


def projection_widths(config: StackConfig) -> tuple[int, int, int]:
    """Returns the output widths of the query, key and value projections, over all heads."""
    a = config.attention
    assert a.groups is not None and a.key_width is not None and a.value_width is not None
    return a.heads * a.key_width, a.groups * a.key_width, a.groups * a.value_width


def attention_section(heads: int, groups: int, head_width: int, bias: bool, out_bias: bool) -> dict[str, Any]:
    """Returns the options of the section `attention` of our config that all families set."""
    return {
        "heads": heads,
        "groups": groups,
        "key_width": head_width,
        "value_width": head_width,
        "bias": bias,
        "out_bias": out_bias,
    }


def weight_and_bias(bias: bool | None) -> tuple[str, ...]:
    """Returns the names of the tensors of a linear layer: "weight", and "bias" if it has one."""
    return ("weight", "bias") if bias else ("weight",)
