"""A short causal convolution of queries, keys and values, one filter a channel, over the visible tokens of each row.

    out_t = f(Σ_{j<W} w_{W−1−j} ∘ x_{t−j} + bias)

x_{t−j} is the visible token j places before t in the same document, and zero where there is none: padding is no token,
so that it changes nothing wherever it stands. With it, one layer can compare a token with the one before, for which
attention alone needs two. Decoding keeps the last W − 1 inputs of each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from regard.errors import OptionError
from regard.mechanisms import State
from regard.registry import Registry

WIDEST = 64  # tokens; to combine tokens farther apart is left to attention

# The activations of convolutions and of output gates.
ACTIVATIONS: Registry[Callable[[Tensor], Tensor]] = Registry("activation")
ACTIVATIONS.update({"linear": lambda x: x, "silu": functional.silu, "sigmoid": torch.sigmoid})


class ConvolvedState(NamedTuple):
    """The state of a layer with a short convolution: its mechanism's state, and the last inputs of the convolution."""

    own: State
    before: Float[Tensor, "B W1 C"]


def mechanism_state(state: State) -> State:
    """Returns the state of a layer's mechanism, which without a convolution is the whole state of the layer."""
    if isinstance(state, ConvolvedState):
        return state.own
    return state


def with_mechanism_state(state: State, own: State) -> State:
    """Returns a layer's state with that of its mechanism replaced."""
    if isinstance(state, ConvolvedState):
        return state._replace(own=own)
    return own


class ShortConvolution(nn.Module):
    """The convolution of C channels by filters of W taps."""

    def __init__(self, channels: int, width: int, activation: str = "silu", bias: bool = False) -> None:
        super().__init__()
        if not 2 <= width <= WIDEST:
            raise OptionError(f"a short convolution of width {width}: expected 2 to {WIDEST} tokens, or 0 for none")
        self.width = width
        self.activation = ACTIVATIONS.find(activation)
        spread = 1 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(channels, width).uniform_(-spread, spread))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(channels))

    def forward(
        self,
        x: Float[Tensor, "B T C"],
        visible: Bool[Tensor, "B T"] | None = None,
        documents: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T C"]:
        """Returns the outputs of a whole sequence; those at invisible tokens are meaningless."""
        order = None
        if visible is not None:
            order = _visible_first(visible)
            x = _take(x, order)
            if documents is not None:
                documents = documents.gather(1, order)
        out = self._filter(functional.pad(x, (0, 0, self.width - 1, 0)), documents)
        if order is not None:
            out = _take(out, order.argsort(1))
        return out

    def empty(self, B: int, dtype: torch.dtype, device: torch.device | str) -> Float[Tensor, "B W1 C"]:
        """Returns the inputs before the first token: zeros."""
        return torch.zeros(B, self.width - 1, self.weight.shape[0], dtype=dtype, device=device)

    def extend(
        self, x: Float[Tensor, "B T C"], before: Float[Tensor, "B W1 C"], visible: Bool[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T C"], Float[Tensor, "B W1 C"]]:
        """Returns the outputs of T more tokens, and the last inputs after them."""
        T = x.shape[1]
        if visible is None:
            inputs = torch.cat([before.to(x.dtype), x], 1)
            # A copy, as a view would keep the inputs of all tokens in memory.
            return self._filter(inputs), inputs[:, T:].to(before.dtype, copy=True)
        order = _visible_first(visible)
        inputs = torch.cat([before.to(x.dtype), _take(x, order)], 1)
        last = visible.sum(1, keepdim=True) + torch.arange(self.width - 1, device=x.device)
        return _take(self._filter(inputs), order.argsort(1)), _take(inputs, last).to(before.dtype)

    def flops(self, tokens: int) -> int:
        """Returns the element-wise FLOPs of `tokens` tokens: for each channel, two a tap and 8 for the activation."""
        return tokens * self.weight.shape[0] * (2 * self.width + 8)

    def extra_repr(self) -> str:
        return f"channels={self.weight.shape[0]}, width={self.width}, bias={self.bias is not None}"

    def _filter(
        self, inputs: Float[Tensor, "B TW1 C"], documents: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T C"]:
        """Returns the outputs of T tokens, given W − 1 inputs before them; no tap reaches into another document."""
        W = self.width
        T = inputs.shape[1] - W + 1
        weight = self.weight.to(inputs.dtype)
        out = inputs[:, W - 1 :] * weight[:, W - 1]
        for back in range(1, W):
            tap = inputs[:, W - 1 - back : W - 1 - back + T]
            if documents is not None:
                tap = tap * _same_document(documents, back).to(inputs.dtype)[..., None]
            out = torch.addcmul(out, tap, weight[:, W - 1 - back])
        if self.bias is not None:
            out = out + self.bias.to(inputs.dtype)
        return self.activation(out)


def _visible_first(visible: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Returns the tokens of each row with the visible ones before the others, each kind in its order."""
    return torch.argsort((~visible).to(torch.uint8), dim=1, stable=True)


def _take(x: Float[Tensor, "B T C"], places: Int[Tensor, "B N"]) -> Float[Tensor, "B N C"]:
    """Returns the tokens of each row at these places."""
    return x.gather(1, places[..., None].expand(*places.shape, x.shape[2]))


def _same_document(documents: Int[Tensor, "B T"], back: int) -> Bool[Tensor, "B T"]:
    """Returns for each token whether the one `back` places before it is of the same document."""
    same = torch.zeros_like(documents, dtype=torch.bool)
    same[:, back:] = documents[:, back:] == documents[:, : documents.shape[1] - back]
    return same
