"""The weights that each layer of a model gives, for any mechanism, also one that never forms them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.errors import OptionError
from regard.mechanisms import Mechanism
from regard.mechanisms.base import without_autocast
from regard.models.base import Model
from regard.models.seq2seq import Seq2Seq
from regard.models.stack import Stack
from regard.nn.capture import capture_attention
from regard.shapes import Mask


@torch.no_grad()
def attention_maps(
    model: Model[Any],
    tokens: Int[Tensor, "B T"],
    visible: Bool[Tensor, "B T"] | None = None,
    *,
    source: Int[Tensor, "B S"] | None = None,
    source_visible: Bool[Tensor, "B S"] | None = None,
    cross: bool = False,
) -> list[Float[Tensor, "B H T _"]]:
    """Returns the weights of every layer's attention to its own tokens, in evaluation mode: weights @ v is its output.

    A Seq2Seq is given the target as `tokens` and what it reads as `source`; the maps are those of its decoder: to its
    own tokens, or, with `cross`, to the source.
    """
    stack = model.stack
    assert isinstance(stack, Stack)
    maps: list[Tensor] = []
    with evaluation_mode(model), ExitStack() as captures:
        for block in stack.layers:
            attention = block.cross if cross else block.attention
            if attention is None:
                raise OptionError("cross=True: only a Seq2Seq attends to another sequence")
            add = partial(_add_weights, maps, attention.mechanism)
            captures.enter_context(capture_attention(attention, add))
        if not isinstance(model, Seq2Seq):
            model(tokens, visible)
        elif source is None:
            raise OptionError("a Seq2Seq writes about something that it reads: give it as source=[B,S]")
        else:
            model(source, tokens, source_visible, visible)
    return maps


def _add_weights(
    maps: list[Tensor], mechanism: Mechanism, q: Tensor | None, k: Tensor | None, v: Tensor | None, mask: Mask | None
) -> None:
    """Appends the explicit weights [B,H,T,S] behind one call, each row of the batch on its own."""
    assert v is not None and mask is not None
    if "k" not in mechanism.needs:
        T = v.shape[2] if q is None else q.shape[2]
        mask = mask.but(size_override=(T, v.shape[2]))
    if k is not None:
        k = mask.zero_hidden(k)
    with without_autocast(v):
        weights = mechanism.weights(q, k, mask)
    maps.append(weights.expand(v.shape[0], -1, -1, -1))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode; afterwards every module is in the mode it was in."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training
