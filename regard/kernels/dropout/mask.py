"""Dropout on a CPU with randomness made in bulk: PyTorch draws every number by itself there, one after the other.

One draw from PyTorch's generator seeds a stream of random words, and each element takes 16 bits of it. So
`torch.manual_seed` decides everything, and nothing else does.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int16
from torch import Tensor
from torch.nn import functional

_DTYPES = (torch.float32, torch.float64)
_STEPS = 1 << 16  # how many values 16 bits have


def dropout(x: Float[Tensor, "*any"], p: float) -> Float[Tensor, "*any"]:
    """Returns x with a share p of its elements set to zero, and the rest divided by the share that is kept."""
    if not draws_bits(x):
        return functional.dropout(x, p)
    rate = DropRate(p)
    mask = RandomBits().draw(x.numel()).to(x.dtype).ge_(rate.first_kept)
    return x * mask.mul_(1 / rate.kept).view(x.shape)


def draws_bits(x: Tensor) -> bool:
    """Returns whether the randomness of dropout on x is drawn here, and not by PyTorch."""
    return x.device.type == "cpu" and x.dtype in _DTYPES and not torch.compiler.is_compiling()


class DropRate:
    """The share of elements to drop, rounded to what 16 random bits can decide.

    `kept` is the share that is kept. An element is kept where its bits, as a signed number, are at least `first_kept`.
    """

    def __init__(self, p: float) -> None:
        dropped = min(round(p * _STEPS), _STEPS - 1)  # something is kept, however close to one p is
        self.kept = 1 - dropped / _STEPS
        self.first_kept = dropped - _STEPS // 2


class RandomBits:
    """Random bits that depend on nothing but one draw from PyTorch's generator, which is their seed."""

    def __init__(self) -> None:
        self._words = np.random.SFC64(int(torch.randint(2**63 - 1, ())))

    def draw(self, count: int) -> Int16[Tensor, " count"]:
        """Returns the next numbers, uniform from −2¹⁵ to 2¹⁵ − 1."""
        # The generator gives words of 64 bits, which are four numbers each.
        words = self._words.random_raw(-(-count // 4))
        return torch.from_numpy(words.view(np.int16)[:count])
