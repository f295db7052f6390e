"""The configs of models and of their parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from regard.config import ConfigError, Section
from regard.errors import did_you_mean, quote


@dataclass(frozen=True, kw_only=True)
class ConvolutionConfig(Section):
    """A short causal convolution over queries, keys and values. `width`: in tokens, 0 for none."""

    place = "model.attention.convolution"
    smallest: ClassVar[Mapping[str, int]] = {"width": 0}

    width: int = 0
    activation: str = "silu"
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class OutputConfig(Section):
    """The norm, the gate and the skip that follow each head's output.

    `norm`: true for the block's norm, or a name. `gate`: the activation of a gate that is computed from the layer's
    input ("sigmoid", "silu", "linear"), or "none". `joint`: the gate comes first, and the norm is one over all heads.
    `skip`: a head's values are added to its output, times a learned number.
    """

    place = "model.attention.output"

    norm: bool | str = False
    gate: str = "none"
    joint: bool = False
    skip: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Section):
    """The attention layer. `groups`: key/value heads, None for as many as `heads`; widths None: width / heads.

    `key_heads`: heads of queries and keys, None for as many as `heads` and `groups`; they may be fewer if a mechanism
    has a memory for each value head, so that several share a key. `bias`: of queries, keys and values; `out_bias`: of
    the output; None: the block's. `qk_norm`: a norm over each head's queries and keys, true for the block's, or a name,
    such as "l2" for length 1. `positions`: whether rotary positions and ALiBi apply to the layer. `decay`: how decays
    are computed ("softplus", "logsigmoid", "constant", "step") for a mechanism that takes them, with its
    `decay_options`. `by_mechanism`: changes to this section for the layers with a mechanism, by the name of the
    mechanism.
    """

    place = "model.attention"

    heads: int = 12
    groups: int | None = None
    key_heads: int | None = None
    key_width: int | None = None
    value_width: int | None = None
    merge: str = "concatenate"
    merge_options: dict[str, Any] = field(default_factory=dict)
    window: int | None = None
    bias: bool | None = None
    out_bias: bool | None = None
    qk_norm: bool | str = False
    positions: bool = True
    decay: str = "softplus"
    decay_options: dict[str, Any] = field(default_factory=dict)
    convolution: ConvolutionConfig = field(default_factory=ConvolutionConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    dropout: float = 0.0
    by_mechanism: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, changes in self.by_mechanism.items():
            if not isinstance(changes, Mapping):
                raise ConfigError(
                    f"{self.place}.by_mechanism.{name} = {quote(changes)}: expected a section of keys and values"
                )
            self.for_mechanism(name)  # an error in its keys is raised here, not when the model is built

    def for_mechanism(self, name: str) -> AttentionConfig:
        """Returns this section with its changes for the layers with a mechanism."""
        return self.but(by_mechanism={}).but(**self.by_mechanism.get(name, {}))


@dataclass(frozen=True, kw_only=True)
class BlockConfig(Section):
    """Norms and the MLP of a block; `mlp` may be "none", and `before` puts norms before attention and MLP.

    `final_norm`: a norm after the last block; None: if norms come before. `hidden`: the width of the MLP; None: 4 D, or
    8/3 D if it is gated.
    """

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
    """A stack of blocks. `mechanism` is a name, one for each layer, or a pattern of names that is repeated.

    Each layer takes those `options` that its mechanism has. `checkpoint`: activations are recomputed in the backward
    pass instead of kept.
    """

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
        if not isinstance(self.mechanism, str) and (not self.mechanism or self.layers % len(self.mechanism)):
            raise ConfigError(
                f"{self.place}.mechanism names {len(self.mechanism)} mechanisms for {self.layers} layers; "
                "give one name, one for each layer, or a pattern whose length divides the number of layers"
            )
        unknown = set(self.attention.by_mechanism) - set(self.per_layer)
        if unknown:
            name = min(unknown)
            hint = did_you_mean(name, sorted(set(self.per_layer)))
            raise ConfigError(f"{self.place}.attention.by_mechanism: no layer has the mechanism {quote(name)}.{hint}")

    @property
    def per_layer(self) -> tuple[str, ...]:
        """Returns the name of the mechanism of each layer."""
        if isinstance(self.mechanism, str):
            return (self.mechanism,) * self.layers
        return self.mechanism * (self.layers // len(self.mechanism))


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
    """An encoder and a decoder, whose sections are independent. `target_vocabulary` None: as large as `vocabulary`.

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

    @property
    def mechanism(self) -> str:
        """Returns the mechanisms of encoder, decoder and cross-attention in words: one name if all are the same."""
        parts = {"encoder": self.encoder.per_layer, "decoder": self.decoder.per_layer, "cross": (self.cross,)}
        by_part = {part: "/".join(dict.fromkeys(names)) for part, names in parts.items()}
        if len(set(by_part.values())) == 1:
            return by_part["cross"]
        return ", ".join(f"{part} {name}" for part, name in by_part.items())
