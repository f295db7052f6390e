"""What a step of training reads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

IGNORE = -100  # a target that carries no loss


class Batch(NamedTuple):
    """Tokens and the targets at their places; IGNORE where a place carries no loss. `visible` None: all tokens are.

    `source`: what a model reads before it writes x, with what of it is visible.
    """

    x: Int[Tensor, "B T"]
    y: Int[Tensor, "B T"]
    visible: Bool[Tensor, "B T"] | None = None
    source: Int[Tensor, "B S"] | None = None
    source_visible: Bool[Tensor, "B S"] | None = None

    @property
    def tokens(self) -> int:
        """How many there are, those of the source too."""
        return self.x.numel() + (0 if self.source is None else self.source.numel())

    def rows(self, start: int, stop: int) -> Batch:
        """Some of its rows."""
        return Batch(*(None if t is None else t[start:stop] for t in self))  # type: ignore[arg-type]

    def to(self, device: torch.device) -> Batch:
        """The same on a device; a GPU copies it while the host goes on."""
        own: list[Tensor | None] = [None if t is None else t.contiguous() for t in self]
        if device.type == "cuda":
            own = [None if t is None else t.pin_memory() for t in own]
        return Batch(*(None if t is None else t.to(device, non_blocking=True) for t in own))  # type: ignore[arg-type]

    def columns(self, stop: int) -> Batch:
        """Only its first columns; a source stays as it is."""
        x, y, visible, *source = self
        return Batch(x[:, :stop], y[:, :stop], None if visible is None else visible[:, :stop], *source)
