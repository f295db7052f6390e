"""What a step of training reads."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Bool, Int
from torch import Tensor

IGNORE = -100  # a target that carries no loss


class Batch(NamedTuple):
    """Tokens and the targets at their places; IGNORE where a place carries no loss. `visible` None: all tokens are."""

    x: Int[Tensor, "B T"]
    y: Int[Tensor, "B T"]
    visible: Bool[Tensor, "B T"] | None = None

    def rows(self, start: int, stop: int) -> Batch:
        """Some of its rows."""
        return Batch(*(None if t is None else t[start:stop] for t in self))  # type: ignore[arg-type]

    def columns(self, stop: int) -> Batch:
        """Only its first columns."""
        return Batch(*(None if t is None else t[:, :stop] for t in self))  # type: ignore[arg-type]
