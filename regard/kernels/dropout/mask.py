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
_STEPS = 1 << 16  # what 16 bits can tell apart


def dropout(x: Float[Tensor, "*any"], p: float) -> Float[Tensor, "*any"]:
    """x with a share p of its elements set to zero, and the rest divided by the share that is kept."""
    if not suits(x):
        return functional.dropout(x, p)
    share = Share(p)
    kept = Stream().bits(x.numel()).to(x.dtype).ge_(share.first_kept)
    return x * kept.mul_(1 / share.kept).view(x.shape)


def suits(x: Tensor) -> bool:
    """Whether the randomness of dropout on x is made here."""
    return x.device.type == "cpu" and x.dtype in _DTYPES and not torch.compiler.is_compiling()


class Share:
    """The share of elements to drop, as 16 bits have it: a number of bits is dropped where it is below `first_kept`."""

    def __init__(self, p: float) -> None:
        dropped = min(round(p * _STEPS), _STEPS - 1)  # something is kept, however close to one p is
        self.kept = 1 - dropped / _STEPS
        self.first_kept = dropped - _STEPS // 2


class Stream:
    """Random bits that depend on nothing but one draw from PyTorch's generator."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = int(torch.randint(2**63 - 1, ())) if seed is None else seed
        self._words = np.random.SFC64(self.seed)

    def bits(self, count: int) -> Int16[Tensor, " count"]:
        """The next numbers, uniform from −2¹⁵ to 2¹⁵ − 1."""
        words = self._words.random_raw(-(-count // 4))
        return torch.from_numpy(words.view(np.int16)[:count])
