"""One layer of a model: attention, perhaps attention to another sequence, and an MLP, each added to its input.

before:  x + f(norm(x))        after:  norm(x + f(x))
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from regard.kernels.dropout import dropout
from regard.mechanisms import State
from regard.nn.attention import Attention, Seen, Tokens
from regard.nn.norms import NORMS
from regard.nn.positions import Rotation
from regard.nn.projection import Projection
from regard.registry import Registry

MLPS: Registry[Callable[..., nn.Module]] = Registry("MLP")


class MLP(nn.Module):
    """f(x A + a) B + b, `hidden` wide in between (four times D unless said)."""

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


class Gated(nn.Module):
    """SwiGLU: (silu(x A) ∘ x C) B. As many parameters as a plain MLP unless `hidden` is said: 8/3 of D, in eights."""

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
MLPS.add("swiglu")(Gated)


class BlockState(NamedTuple):
    """What a block keeps: of its own tokens, and of the other sequence."""

    own: State
    other: State = None


class Block(nn.Module):
    """A layer around ready-made parts; `cross` attends to another sequence between the two others."""

    def __init__(
        self,
        attention: Attention,
        mlp: nn.Module,
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
        self.before, self.dropout = before, dropout
        self.attention, self.attention_norm = attention, NORMS.build(norm, offered)
        self.cross, self.cross_norm = cross, None if cross is None else NORMS.build(norm, offered)
        self.mlp, self.mlp_norm = mlp, NORMS.build(norm, offered)

    def forward(
        self,
        x: Tokens,
        visible: Seen = None,
        *,
        source: Float[Tensor, "B S E"] | None = None,
        source_visible: Bool[Tensor, "B S"] | None = None,
        rotation: Rotation | None = None,
    ) -> Tokens:
        """A whole sequence."""
        out = self.attention(self._into(x, self.attention_norm), visible, rotation=rotation)
        x = self._onto(x, out, self.attention_norm)
        if self.cross is not None:
            seen = {"source": source, "source_visible": source_visible}
            x = self._onto(x, self.cross(self._into(x, self.cross_norm), visible, **seen), self.cross_norm)
        return self._onto(x, self._mlp(self._into(x, self.mlp_norm)), self.mlp_norm)

    def extend(
        self, x: Tokens, state: BlockState, visible: Seen = None, *, rotation: Rotation | None = None
    ) -> tuple[Tokens, BlockState]:
        """Causal continuation by T tokens. The state handed in is used up."""
        h = self._into(x, self.attention_norm)
        out, own = self.attention.extend(h, state.own, visible, rotation=rotation)
        x = self._onto(x, out, self.attention_norm)
        if self.cross is not None:
            out = self.cross.read(self._into(x, self.cross_norm), state.other, visible)
            x = self._onto(x, out, self.cross_norm)
        x = self._onto(x, self._mlp(self._into(x, self.mlp_norm)), self.mlp_norm)
        return x, BlockState(own, state.other)

    def _into(self, x: Tensor, norm: Any) -> Tensor:
        """What a part is given."""
        return norm(x) if self.before else x

    def _onto(self, x: Tensor, out: Tensor, norm: Any) -> Tensor:
        """Its output added to the stream."""
        return x + out if self.before else norm(x + out)

    def _mlp(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(x)
        return dropout(out, self.dropout) if self.training and self.dropout else out
