"""Explicit attention weights of every layer of a model, for any mechanism, even one that never computes them itself."""

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
from regard.mechanisms.recurrence import repeat_shared
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
    """Returns the self-attention weights of every layer, in evaluation mode; weights @ v is the output of each head.

    For a Seq2Seq, `tokens` is the input of the decoder and `source` that of the encoder. The weights are those of the
    decoder: self-attention, or cross-attention to the source with `cross`. `visible` and `source_visible` are False for
    padding.
    """
    stack = getattr(model, "stack", None)
    if not isinstance(stack, Stack):
        raise OptionError(
            f"expected a model of regard's, given {_describe(model)}. regard.record(model, text) records any model, "
            "and regard.hub.load(name) brings the weights of Hugging Face's into regard's"
        )
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
            raise OptionError("a Seq2Seq also needs the encoder's input: give it as source=[B,S]")
        else:
            model(source, tokens, source_visible, visible)
    return maps


def _describe(model: object) -> str:
    """Returns what was given in place of a model."""
    if isinstance(model, type):
        return f"the class {model.__name__}"
    return f"a {type(model).__name__}"


def _add_weights(
    maps: list[Tensor],
    mechanism: Mechanism,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    mask: Mask | None,
    **gates: Tensor,
) -> None:
    """Computes the explicit weights [B,H,T,S] of one call and appends them to `maps`."""
    assert v is not None and mask is not None
    if "k" not in mechanism.needs:  # without keys, the mechanism takes the sizes (T, S) from the mask
        T = v.shape[2] if q is None else q.shape[2]
        mask = mask.but(size_override=(T, v.shape[2]))
    if k is not None:
        k = mask.zero_hidden(k)  # keys of padding tokens may hold anything, even NaN
    q, k = repeat_shared(mechanism, q, k, v.shape[1])
    with without_autocast(v):
        weights = mechanism.weights(q, k, mask, **gates)
    maps.append(weights.expand(v.shape[0], -1, -1, -1))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode; on exit, restores the mode of every module."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training
