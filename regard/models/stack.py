"""A stack of blocks, with what stands before and after them: positions, norms, and the state of all layers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.errors import LengthError
from regard.kernels.dropout import dropout
from regard.mechanisms import Cache, fork, lookup
from regard.models.config import StackConfig
from regard.nn import MLPS, NORMS, POSITIONS, Attention, Block, BlockState, Rotation
from regard.registry import accepted_options, accepts
from regard.shapes import Mask

Vectors = Float[Tensor, "B T D"]
Seen = Bool[Tensor, "B T"] | None


class StackState(NamedTuple):
    """What all layers keep. The next token of a row stands at position `tokens`; no row has more than `used`."""

    layers: tuple[BlockState, ...]
    tokens: Int[Tensor, " B"]
    used: int
    even: bool  # every row has exactly `used`


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
        D, own, block = config.width, config.attention, config.block
        self.config = config
        norm: dict[str, Any] = {"D": D, "eps": block.eps, "bias": block.bias}

        def attention(mechanism: str, options: dict[str, Any], **more: Any) -> Attention:
            return Attention(
                D,
                own.heads,
                G=own.groups,
                K=own.key_width,
                V=own.value_width,
                mechanism=mechanism,
                length=config.length,
                merge=own.merge,
                merge_options=own.merge_options,
                bias=block.bias if own.bias is None else own.bias,
                out_bias=block.bias if own.out_bias is None else own.out_bias,
                qk_norm=block.norm if own.qk_norm else None,
                eps=block.eps,
                dropout=own.dropout,
                residual_dropout=config.dropout,
                **more,
                **options,
            )

        def layer(name: str) -> Block:
            mine = _taken(name, config)
            rules = Mask(window=own.window)
            other = None if source is None else attention(cross, cross_options or {}, source=source)
            mlp = MLPS.build(block.mlp, {"D": D, "hidden": block.hidden, "bias": block.bias})
            return Block(
                attention(name, mine, causal=causal, rules=rules),
                mlp,
                other,
                norm=block.norm,
                before=block.before,
                eps=block.eps,
                bias=block.bias,
                dropout=config.dropout,
            )

        self.blocks = nn.ModuleList(layer(name) for name in config.per_layer)
        K = self.blocks[0].attention.size.K  # type: ignore[union-attr]
        offered = {"D": D, "K": K, "H": own.heads, "length": config.length}
        self.positions = POSITIONS.build(config.position, offered, **config.position_options)
        for made in self.layers:
            made.attention.use_positions(self.positions)
        final = block.before if block.final_norm is None else block.final_norm
        self.embedding_norm = NORMS.build(block.norm, norm) if block.embedding_norm else None
        self.final_norm = NORMS.build(block.norm, norm) if final else None
        lengths = [self.positions.length, *(getattr(b.attention.mechanism, "length", None) for b in self.layers)]
        self.limit = min((n for n in lengths if n is not None), default=None)
        initialise(self, residuals=len(self.blocks) * (2 if source is None else 3))

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
    ) -> Vectors:
        """A whole sequence of embeddings."""
        T = x.shape[1]
        self.check_length(T if visible is None or (self.limit or T) >= T else int(visible.sum(1).max()))
        x, rotation = self._placed(x, Mask(visible=visible).positions(T, x.device), T)
        run = partial(checkpoint, use_reentrant=False) if self._saves_memory else None
        for block in self.layers:
            layer = partial(block, source=source, source_visible=source_visible, rotation=rotation)
            x = layer(x, visible) if run is None else run(layer, x, visible)
        return x if self.final_norm is None else self.final_norm(x)

    def empty(self, B: int, capacity: int) -> StackState:
        """A state that has seen nothing, with room for `capacity` tokens before it has to grow."""
        layers = tuple(BlockState(block.attention.empty(B, capacity)) for block in self.layers)
        device = self.layers[0].attention.out.weight.device
        return StackState(layers, torch.zeros(B, dtype=torch.long, device=device), 0, True)

    def write(
        self, state: StackState, source: Float[Tensor, "B S E"], visible: Bool[Tensor, "B S"] | None = None
    ) -> StackState:
        """The other sequence, written once into every layer."""
        layers = []
        for block, kept in zip(self.layers, state.layers, strict=True):
            assert block.cross is not None
            room = block.cross.empty(source.shape[0], source.shape[1])
            layers.append(kept._replace(other=block.cross.write(room, source, visible)))
        return state._replace(layers=tuple(layers))

    def extend(self, x: Vectors, state: StackState, visible: Seen = None) -> tuple[Vectors, StackState]:
        """Causal continuation by T tokens. The state handed in is used up."""
        T, even = x.shape[1], state.even and visible is None
        seen = None if visible is None else visible.long()
        tokens = state.tokens + (T if seen is None else seen.sum(1))
        reach = state.used + T
        if self.limit is not None and reach > self.limit:
            self.check_length(reach if even else int(tokens.max()))
        if even:
            positions = torch.arange(state.used, reach, device=x.device)[None]
        elif T == 1:
            positions = state.tokens[:, None]
        else:
            seen = torch.ones_like(x[..., 0], dtype=torch.long) if seen is None else seen
            positions = state.tokens[:, None] + seen.cumsum(1) - seen
        x, rotation = self._placed(x, positions, reach)
        layers = []
        for block, kept in zip(self.layers, state.layers, strict=True):
            x, kept = block.extend(x, kept, visible, rotation=rotation)
            layers.append(kept)
        x = x if self.final_norm is None else self.final_norm(x)
        return x, StackState(tuple(layers), tokens, reach, even)

    @property
    def _saves_memory(self) -> bool:
        """Whether activations are computed again on the way back rather than kept."""
        return self.config.checkpoint and self.training and torch.is_grad_enabled()

    def check_length(self, tokens: int) -> None:
        """An error where a sequence is longer than positions or a mechanism go."""
        if self.limit is not None and tokens > self.limit:
            raise LengthError(
                f"{tokens} visible tokens, but this model was built for length = {self.limit}. Shorten the input, or "
                f"build it with length ≥ {tokens}, or with position 'sinusoidal', 'rotary', 'alibi' or 'none' and a "
                "mechanism that has no length of its own."
            )

    def _placed(self, x: Tensor, positions: Tensor, reach: int) -> tuple[Tensor, Rotation | None]:
        added = self.positions.added(positions, reach, x.dtype)
        x = x if added is None else x + added
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        if self.training and self.config.dropout:
            x = dropout(x, self.config.dropout)
        return x, self.positions.rotation(positions, reach, x.dtype)


def fork_stack(state: StackState, rows: Int[Tensor, " N"] | None = None, same_source: bool = False) -> StackState:
    """A copy of a whole state, or of some rows of it in any order.

    `same_source`: rows only change places within one source, so what cross-attention reads stays as it is.
    """
    tokens = state.tokens.clone() if rows is None else state.tokens.index_select(0, rows)
    used, even = state.used, state.even
    if not even and not same_source:  # rows may have left: perhaps the longest ones
        used, even = int(tokens.max()), bool((tokens == tokens[0]).all())

    def copy(kept: BlockState) -> BlockState:
        own = fork(kept.own, rows)
        own = own._replace(used=used, even=even) if isinstance(own, Cache) else own
        return BlockState(own, kept.other if kept.other is None or same_source else fork(kept.other, rows))

    return StackState(tuple(copy(kept) for kept in state.layers), tokens, used, even)


def initialise(module: nn.Module, residuals: int) -> None:
    """GPT-2's: N(0, 0.02²) throughout, and 0.02/√residuals where a layer adds to the stream; biases zero."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
    for block in module.modules():
        if isinstance(block, Block):
            for adds in (block.attention, block.cross, block.mlp):
                if adds is not None:
                    nn.init.normal_(adds.out.weight, std=0.02 / math.sqrt(residuals))  # type: ignore[arg-type, union-attr]


def _taken(name: str, config: StackConfig) -> dict[str, Any]:
    """The options that this layer's mechanism has; one that no layer has is passed on, to be refused."""
    known = accepted_options(lookup(name), config.options)
    unknown = {n for n in config.options if not any(accepts(lookup(other), n) for other in config.per_layer)}
    return {n: x for n, x in config.options.items() if n in known or n in unknown}
