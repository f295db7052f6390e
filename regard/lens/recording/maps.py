"""The weights that each layer of a model gives, for any mechanism, also one that never forms them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
    """The weights of every layer's attention to its own tokens, in evaluation mode: weights @ v is what it computes.

    A Seq2Seq is given the target as `tokens` and what it reads as `source`; the maps are those of its decoder: to its
    own tokens, or, with `cross`, to the source.
    """
    stack = model.stack
    assert isinstance(stack, Stack)
    maps: list[Tensor] = []

    def keep(mechanism: nn.Module, given: tuple[Any, ...]) -> None:
        assert isinstance(mechanism, Mechanism)
        maps.append(_weights(mechanism, *given))

    with evaluating(model), ExitStack() as hooks:
        for block in stack.layers:
            looks = block.cross if cross else block.attention
            if looks is None:
                raise OptionError("cross=True: only a Seq2Seq attends to another sequence")
            hooks.callback(looks.mechanism.register_forward_pre_hook(keep).remove)
        if not isinstance(model, Seq2Seq):
            model(tokens, visible)
        elif source is None:
            raise OptionError("a Seq2Seq writes about something that it reads: give it as source=[B,S]")
        else:
            model(source, tokens, source_visible, visible)
    return maps


def _weights(mechanism: Mechanism, q: Tensor | None, k: Tensor | None, v: Tensor, mask: Mask) -> Tensor:
    """The explicit matrix behind one call, on its own for each row of the batch."""
    if "k" not in mechanism.needs:
        mask = mask.but(size_override=(v.shape[2] if q is None else q.shape[2], v.shape[2]))
    with without_autocast(v):
        weights = mechanism.weights(q, None if k is None else mask.zero_hidden(k), mask)
    return weights.expand(v.shape[0], -1, -1, -1)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; every part is then as it was, whatever that was."""
    before = {part: part.training for part in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for part, training in before.items():
            part.training = training
