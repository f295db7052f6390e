"""One layer of a model: attention, perhaps attention to another sequence, and an MLP, each added to its input.

before:  x + f(norm(x))        after:  norm(x + f(x))
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from regard.kernels.dropout import dropout
from regard.mechanisms import State
from regard.nn.attention import Attention, Seen, Tokens
from regard.nn.norms import NORMS
from regard.nn.positions import Rotation
from regard.nn.projection import Projection
from regard.registry import Registry

MLPS: Registry[Callable[..., nn.Module | None]] = Registry("MLP")


class MLP(nn.Module):
    """The usual MLP, f(x A + a) B + b, `hidden` wide in between (by default 4 D)."""

    def __init__(
        self, D: int, activation: Callable[[Tensor], Tensor], hidden: int | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        hidden = hidden or 4 * D
        self.activation = activation
        self.into = Projection(D, hidden, bias=bias)
        self.out = Projection(hidden, D, bias=bias)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        out: Tensor = self.out(self.activation(self.into(x)))
        return out


class GatedMLP(nn.Module):
    """SwiGLU: (silu(x A) ∘ x C) B.

    `hidden` is by default 8/3 of D, rounded up to a multiple of 8: about as many parameters as a plain MLP has.
    """

    def __init__(self, D: int, hidden: int | None = None, bias: bool = True) -> None:
        super().__init__()
        hidden = hidden or -(-D // 3) * 8
        self.into = Projection(D, 2 * hidden, bias=bias)
        self.out = Projection(hidden, D, bias=bias)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        gate, value = self.into(x).chunk(2, -1)
        out: Tensor = self.out(functional.silu(gate) * value)
        return out


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": torch.relu,
}
MLPS.update({name: partial(MLP, activation=f) for name, f in _ACTIVATIONS.items()})
MLPS.add("swiglu")(GatedMLP)


@MLPS.add("none")
def no_mlp() -> None:
    """Returns None: the block has attention alone."""


class BlockState(NamedTuple):
    """The state of a block: that of its self-attention, and that of its cross-attention."""

    own: State
    other: State = None


class Block(nn.Module):
    """A layer of given parts: attention, perhaps cross-attention to another sequence, and perhaps an MLP."""

    def __init__(
        self,
        attention: Attention,
        mlp: nn.Module | None,
        cross: Attention | None = None,
        *,
        norm: str = "layer",
        before: bool = True,
        eps: float = 1e-5,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        offered: dict[str, Any] = {"D": attention.width, "eps": eps, "bias": bias}
        self.before = before
        self.dropout = dropout
        self.attention = attention
        self.attention_norm = NORMS.build(norm, offered)
        self.cross = cross
        self.cross_norm = None
        if cross is not None:
            self.cross_norm = NORMS.build(norm, offered)
        self.mlp = mlp
        self.mlp_norm = None
        if mlp is not None:
            self.mlp_norm = NORMS.build(norm, offered)

    def forward(
        self,
        x: Tokens,
        visible: Seen = None,
        *,
        source: Float[Tensor, "B S E"] | None = None,
        source_visible: Bool[Tensor, "B S"] | None = None,
        rotation: Rotation | None = None,
        documents: Int[Tensor, "B T"] | None = None,
    ) -> Tokens:
        """Returns the outputs of a whole sequence, [B,T,D]."""
        h = self._into(x, self.attention_norm)
        out = self.attention(h, visible, rotation=rotation, documents=documents)
        x = self._onto(x, out, self.attention_norm)
        if self.cross is not None:
            seen = {"source": source, "source_visible": source_visible}
            x = self._onto(x, self.cross(self._into(x, self.cross_norm), visible, **seen), self.cross_norm)
        return self._add_mlp(x)

    def extend(
        self, x: Tokens, state: BlockState, visible: Seen = None, *, rotation: Rotation | None = None
    ) -> tuple[Tokens, BlockState]:
        """Returns the outputs [B,T,D] of the T tokens that come next, and the state after them.

        The given state must not be used again, as its memory may be overwritten.
        """
        h = self._into(x, self.attention_norm)
        out, own = self.attention.extend(h, state.own, visible, rotation=rotation)
        x = self._onto(x, out, self.attention_norm)
        if self.cross is not None:
            out = self.cross.read(self._into(x, self.cross_norm), state.other, visible)
            x = self._onto(x, out, self.cross_norm)
        return self._add_mlp(x), BlockState(own, state.other)

    def _into(self, x: Tensor, norm: Any) -> Tensor:
        """Returns the input of a part: the residual stream, normalized if norms come before parts."""
        if self.before:
            x = norm(x)
        return x

    def _onto(self, x: Tensor, out: Tensor, norm: Any) -> Tensor:
        """Returns the residual stream with a part's output added, normalized if norms come after parts."""
        x = x + out
        if not self.before:
            x = norm(x)
        return x

    def _add_mlp(self, x: Tensor) -> Tensor:
        """Returns the residual stream with the output of the MLP added, if there is an MLP."""
        if self.mlp is None:
            return x
        out: Tensor = self.mlp(self._into(x, self.mlp_norm))
        if self.training and self.dropout:
            out = dropout(out, self.dropout)
        return self._onto(x, out, self.mlp_norm)
