"""The likeliest next token of each row, and its log probability."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.shapes import upcast_half


class Greedy(NamedTuple):
    """The likeliest tokens and their log-probabilities, in buffers that each step overwrites."""

    tokens: Int[Tensor, " B"]
    logp: Float[Tensor, " B"]


def pick_likeliest(logits: Float[Tensor, "B N"], into: Greedy) -> None:
    """Writes the likeliest token of each row and its log-probability into buffers, without waiting for the device."""
    if logits.is_cuda and logits.dtype != torch.float64 and find_spec("triton") is not None:
        from regard.kernels.decode.triton_greedy import pick_likeliest as pick

        pick(logits.contiguous(), into.tokens, into.logp)
        return
    tokens = logits.argmax(-1)
    into.tokens.copy_(tokens)
    into.logp.copy_(upcast_half(logits).log_softmax(-1).gather(-1, tokens[:, None])[:, 0])
