"""What a step of training reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

IGNORE = -100  # a target that carries no loss


class Batch(NamedTuple):
    """Tokens and the targets at their places; IGNORE where a place carries no loss. `visible` None: all tokens are.

    A classifier has one target a row, y [B]. `source`: what a model reads before it writes x, with what of it is
    visible.
    """

    x: Int[Tensor, "B T"]
    y: Int[Tensor, "B T"] | Int[Tensor, "B"]
    visible: Bool[Tensor, "B T"] | None = None
    source: Int[Tensor, "B S"] | None = None
    source_visible: Bool[Tensor, "B S"] | None = None

    @property
    def tokens(self) -> int:
        """Returns how many tokens there are, those of the source too."""
        if self.source is None:
            return self.x.numel()
        return self.x.numel() + self.source.numel()

    def rows(self, start: int, stop: int) -> Batch:
        """Returns some of the rows."""
        return self._map(lambda t: t[start:stop])

    def to(self, device: torch.device) -> Batch:
        """Returns the batch on a device."""
        batch = self._map(Tensor.contiguous)
        if device.type == "cuda":
            batch = batch._map(Tensor.pin_memory)  # only from pinned memory a GPU copies while the host goes on
        return batch._map(lambda t: t.to(device, non_blocking=True))

    def columns(self, stop: int) -> Batch:
        """Returns only the first columns; a source stays as it is."""
        first = self._replace(x=self.x[:, :stop], y=self.y[:, :stop])
        if self.visible is not None:
            first = first._replace(visible=self.visible[:, :stop])
        return first

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Returns the batch with each tensor that it has changed."""
        return self._replace(**{name: change(t) for name, t in self._asdict().items() if t is not None})
