"""A stack of blocks with positions before and norms around them, and the state of all its layers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.config import ConfigError
from regard.errors import LengthError, OptionError, quote
from regard.kernels.dropout import dropout
from regard.mechanisms import Cache, fork, lookup
from regard.models.config import AttentionConfig, StackConfig
from regard.nn import (
    MLPS,
    NORMS,
    POSITIONS,
    Attention,
    Block,
    BlockState,
    Rotation,
    mechanism_state,
    with_mechanism_state,
)
from regard.registry import accepted_options, accepts
from regard.shapes import Mask, check_visible

Vectors = Float[Tensor, "B T D"]
Seen = Bool[Tensor, "B T"] | None


class StackState(NamedTuple):
    """The state of all layers while a sequence is read in steps.

    The next token of a row has the position `tokens`. `used` is an upper bound of `tokens` in all rows, which the host
    knows without waiting for the GPU.
    """

    layers: tuple[BlockState, ...]
    tokens: Int[Tensor, " B"]
    used: int
    even: bool  # whether every row has exactly `used` tokens


class Stack(nn.Module):
    """Blocks of one width. `source`: the width of another sequence that each block attends to as well."""

    def __init__(
        self,
        config: StackConfig,
        causal: bool = True,
        source: int | None = None,
        cross: str = "softmax",
        cross_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        block = config.block
        blocks = []
        for name in config.per_layer:
            # Cross-attention is built first; the order must stay, as it decides which weights a seed draws.
            cross_attention = None
            if source is not None:
                cross_attention = _build_cross_attention(config, cross, cross_options or {}, source)
            blocks.append(_build_block(config, name, causal, cross_attention))
        self.blocks = nn.ModuleList(blocks)
        offered = {"D": config.width, "K": _turned_width(self.layers), "H": config.attention.heads}
        offered["length"] = config.length
        self.positions = POSITIONS.build(config.position, offered, **config.position_options)
        for layer in self.layers:
            layer.attention.use_positions(self.positions)
        norm: dict[str, Any] = {"D": config.width, "eps": block.eps, "bias": block.bias}
        self.embedding_norm = None
        if block.embedding_norm:
            self.embedding_norm = NORMS.build(block.norm, norm)
        self.final_norm = None
        # If norms come before each part, the last sum has not been normalized.
        if block.final_norm or (block.final_norm is None and block.before):
            self.final_norm = NORMS.build(block.norm, norm)
        # Learned positions, and mechanisms with weights for each position, have a largest length.
        lengths = [self.positions.length, *(getattr(b.attention.mechanism, "length", None) for b in self.layers)]
        self.limit = min((n for n in lengths if n is not None), default=None)
        # Attention, MLP and cross-attention add to the residual stream.
        per_block = 1 + (self.layers[0].mlp is not None) + (source is not None)
        init_weights(self, residuals=len(self.blocks) * per_block)

    @property
    def layers(self) -> list[Block]:
        return list(self.blocks)  # type: ignore[arg-type]

    def forward(
        self,
        x: Vectors,
        visible: Seen = None,
        *,
        source: Float[Tensor, "B S E"] | None = None,
        source_visible: Bool[Tensor, "B S"] | None = None,
        documents: Int[Tensor, "B T"] | None = None,
    ) -> Vectors:
        """Returns the vectors [B,T,D] of a whole sequence of embeddings.

        `documents` numbers the documents packed into a row; each is read as it would be alone.
        """
        T = x.shape[1]
        check_visible(visible)
        positions = Mask(visible=visible, documents=documents).positions(T, x.device)
        longest = T
        if self.limit is not None and self.limit < T and (visible is not None or documents is not None):
            longest = _longest(positions, visible)  # waits for the GPU, so only if it matters
        self.check_length(longest)
        x, rotation = self._add_positions(x, positions, T)
        given = {"source": source, "source_visible": source_visible, "rotation": rotation, "documents": documents}
        for block in self.layers:
            layer = partial(block, **given)
            x = checkpoint(layer, x, visible, use_reentrant=False) if self._recomputes else layer(x, visible)
        return self._norm_output(x)

    def empty(self, B: int, capacity: int) -> StackState:
        """Returns a state without tokens, with room for `capacity` tokens before it has to grow."""
        layers = tuple(BlockState(block.attention.empty(B, capacity)) for block in self.layers)
        device = self.layers[0].attention.out.weight.device
        return StackState(layers, torch.zeros(B, dtype=torch.long, device=device), 0, True)

    def write(
        self, state: StackState, source: Float[Tensor, "B S E"], visible: Bool[Tensor, "B S"] | None = None
    ) -> StackState:
        """Returns the state with the other sequence [B,S,E] written into every layer's cross-attention."""
        layers = []
        for block, layer in zip(self.layers, state.layers, strict=True):
            assert block.cross is not None
            empty = block.cross.empty(source.shape[0], source.shape[1])
            layers.append(layer._replace(other=block.cross.write(empty, source, visible)))
        return state._replace(layers=tuple(layers))

    def extend(self, x: Vectors, state: StackState, visible: Seen = None) -> tuple[Vectors, StackState]:
        """Returns the vectors [B,T,D] of T more tokens, and the next state; the given one must not be used again."""
        T = x.shape[1]
        even = state.even and visible is None
        reach = state.used + T
        tokens = state.tokens + T
        if visible is not None:
            tokens = state.tokens + visible.long().sum(1)
        if self.limit is not None and reach > self.limit:
            # `reach` counts padding too; the exact count waits for the GPU, so it is taken only if it matters.
            self.check_length(reach if even else int(tokens.max()))
        x, rotation = self._add_positions(x, self._next_positions(x, state, visible), reach)
        layers = []
        for block, layer in zip(self.layers, state.layers, strict=True):
            x, layer = block.extend(x, layer, visible, rotation=rotation)
            layers.append(layer)
        return self._norm_output(x), StackState(tuple(layers), tokens, reach, even)

    @property
    def _recomputes(self) -> bool:
        """Returns whether activations are recomputed in the backward pass rather than kept."""
        return self.config.checkpoint and self.training and torch.is_grad_enabled()

    def check_length(self, tokens: int) -> None:
        """Raises a LengthError if a sequence is longer than positions or a mechanism allow."""
        if self.limit is not None and tokens > self.limit:
            raise LengthError(
                f"{tokens} visible tokens, but this model was built for length = {self.limit}. Shorten the input, or "
                f"build it with length ≥ {tokens}, or with position 'sinusoidal', 'rotary', 'alibi' or 'none' and a "
                "mechanism that has no length of its own."
            )

    def _next_positions(self, x: Vectors, state: StackState, visible: Seen) -> Int[Tensor, "B T"]:
        """Returns the positions of T more tokens, [B,T], or [1,T] if they are the same in all rows.

        A position counts the visible tokens before it.
        """
        T = x.shape[1]
        if state.even and visible is None:
            return torch.arange(state.used, state.used + T, device=x.device)[None]
        if T == 1:
            return state.tokens[:, None]
        seen = torch.ones_like(x[..., 0], dtype=torch.long) if visible is None else visible.long()
        return state.tokens[:, None] + seen.cumsum(1) - seen

    def _add_positions(self, x: Vectors, positions: Int[Tensor, "B T"], reach: int) -> tuple[Vectors, Rotation | None]:
        """Returns the input of the first block, and the rotation of queries and keys in every block."""
        added = self.positions.added(positions, reach, x.dtype)
        if added is not None:
            x = x + added
        if torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is torch.bfloat16 and x.is_cuda:
            # The residual stream takes the dtype of what is added to it, which halves the memory traffic of norms and
            # sums.
            x = x.to(torch.bfloat16)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if self.training and self.config.dropout:
            x = dropout(x, self.config.dropout)
        return x, self.positions.rotation(positions, reach, x.dtype)

    def _norm_output(self, x: Vectors) -> Vectors:
        """Returns the output of the last block, normalized if the stack has a final norm."""
        if self.final_norm is None:
            return x
        out: Tensor = self.final_norm(x)
        return out


def _longest(positions: Int[Tensor, "#B T"], visible: Seen) -> int:
    """Returns the largest number of visible tokens in a row, or in a packed document."""
    after = positions + 1
    if visible is not None:
        after = after.masked_fill(~visible, 0)
    return int(after.max())


def fork_stack(state: StackState, rows: Int[Tensor, " N"] | None = None, same_source: bool = False) -> StackState:
    """Returns a copy of a whole state, or of some of its rows in any order.

    `same_source`: each row takes the place of one with the same source, so the state of cross-attention stays.
    """
    tokens = state.tokens.clone() if rows is None else state.tokens.index_select(0, rows)
    used = state.used
    even = state.even
    if not even and not same_source:  # the longest rows may not be among `rows`
        used = int(tokens.max())
        even = bool((tokens == tokens[0]).all())

    def fork_layer(layer: BlockState) -> BlockState:
        own = fork(layer.own, rows)
        cache = mechanism_state(own)
        if isinstance(cache, Cache):
            own = with_mechanism_state(own, cache._replace(used=used, even=even))
        other = layer.other
        # The state of cross-attention is the same for all rows of one source and need not be copied.
        if other is not None and not same_source:
            other = fork(other, rows)
        return BlockState(own, other)

    return StackState(tuple(map(fork_layer, state.layers)), tokens, used, even)


def init_weights(module: nn.Module, residuals: int) -> None:
    """Draws weights as GPT-2 does: N(0, 0.02²), and 0.02/√residuals where a layer adds to the residual stream.

    Biases are zero.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
    for block in module.modules():
        if isinstance(block, Block):
            for branch in (block.attention, block.cross, block.mlp):
                if branch is not None:
                    nn.init.normal_(branch.out.weight, std=0.02 / math.sqrt(residuals))  # type: ignore[arg-type, union-attr]


def _turned_width(layers: list[Block]) -> int:
    """Returns the width of heads in the layers with `positions`, where rotary positions need one width."""
    widths = {layer.attention.size.K for layer in layers if layer.attention.positions}
    if len(widths) > 1:
        raise ConfigError(
            f"model.attention.by_mechanism: heads are {', '.join(map(str, sorted(widths)))} wide, and rotary "
            "positions need one width: set positions = false in the layers without them"
        )
    return widths.pop() if widths else layers[0].attention.size.K


def _build_attention(
    config: StackConfig, attention: AttentionConfig, mechanism: str, options: dict[str, Any], **more: Any
) -> Attention:
    """Returns one attention layer of the stack; `more` are further arguments of `Attention`."""
    block = config.block
    own = next((name for name in options if name == "self" or accepts(Attention, name)), None)
    if own is not None:
        raise OptionError(f"mechanism '{mechanism}': {quote(own)} is set by the model, not among its options")
    return Attention(
        config.width,
        attention.heads,
        G=attention.groups,
        K=attention.key_width,
        V=attention.value_width,
        mechanism=mechanism,
        length=config.length,
        merge=attention.merge,
        merge_options=attention.merge_options,
        bias=block.bias if attention.bias is None else attention.bias,
        out_bias=block.bias if attention.out_bias is None else attention.out_bias,
        qk_norm=_norm_name(attention.qk_norm, block.norm),
        out_norm=_norm_name(attention.output.norm, block.norm),
        gate=None if attention.output.gate == "none" else attention.output.gate,
        joint=attention.output.joint,
        eps=block.eps,
        dropout=attention.dropout,
        residual_dropout=config.dropout,
        **more,
        **options,
    )


def _norm_name(said: bool | str, usual: str) -> str | None:
    """Returns the name of a norm that a config asks for: `usual` for True, None for False."""
    if isinstance(said, str):
        return said
    return usual if said else None


def _build_cross_attention(config: StackConfig, mechanism: str, options: dict[str, Any], source: int) -> Attention:
    """Returns one layer's attention to another sequence, without a convolution."""
    return _build_attention(config, config.attention, mechanism, options, source=source)


def _build_block(config: StackConfig, mechanism: str, causal: bool, cross: Attention | None) -> Block:
    """Returns one block of the stack."""
    block = config.block
    mlp = MLPS.build(block.mlp, {"D": config.width, "hidden": block.hidden, "bias": block.bias})
    options = _mechanism_options(mechanism, config)
    attention = config.attention.for_mechanism(mechanism)
    convolution = attention.convolution
    return Block(
        _build_attention(
            config,
            attention,
            mechanism,
            options,
            causal=causal,
            rules=Mask(window=attention.window),
            positions=attention.positions,
            key_heads=attention.key_heads,
            skip=attention.output.skip,
            decay=attention.decay,
            decay_options=attention.decay_options,
            convolution=convolution.width,
            convolution_options={"activation": convolution.activation, "bias": convolution.bias},
        ),
        mlp,
        cross,
        norm=block.norm,
        before=block.before,
        eps=block.eps,
        bias=block.bias,
        dropout=config.dropout,
    )


def _mechanism_options(name: str, config: StackConfig) -> dict[str, Any]:
    """Returns the options that this layer's mechanism has, and those that no layer has, so that they raise an error."""
    known = accepted_options(lookup(name), config.options)
    unknown = {n for n in config.options if not any(accepts(lookup(other), n) for other in config.per_layer)}
    return {n: x for n, x in config.options.items() if n in known or n in unknown}
