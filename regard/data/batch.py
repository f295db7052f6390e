"""The batch of a training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

IGNORE = -100  # a target without a loss


class Batch(NamedTuple):
    """Tokens x [B,T] and a target for each, y [B,T], IGNORE where there is no loss; one a row, y [B], for classes.

    `visible` says which tokens may be seen; None: all. `source` [B,S] is what the encoder of an encoder-decoder reads,
    and `source_visible` which of its tokens may be seen.
    """

    x: Int[Tensor, "B T"]
    y: Int[Tensor, "B T"] | Int[Tensor, "B"]
    visible: Bool[Tensor, "B T"] | None = None
    source: Int[Tensor, "B S"] | None = None
    source_visible: Bool[Tensor, "B S"] | None = None

    @property
    def tokens(self) -> int:
        """Returns how many tokens the batch has, those of the source and padding included."""
        if self.source is None:
            return self.x.numel()
        return self.x.numel() + self.source.numel()

    def rows(self, start: int, stop: int) -> Batch:
        """Returns the batch of the rows from `start` to before `stop`."""
        return self._map(lambda t: t[start:stop])

    def to(self, device: torch.device) -> Batch:
        """Returns the batch on a device."""
        batch = self._map(Tensor.contiguous)
        if device.type == "cuda":
            batch = batch._map(Tensor.pin_memory)  # a GPU copies asynchronously only from pinned memory
        return batch._map(lambda t: t.to(device, non_blocking=True))

    def columns(self, stop: int) -> Batch:
        """Returns the batch with only the first `stop` tokens of each row; a source stays as it is."""
        first = self._replace(x=self.x[:, :stop], y=self.y[:, :stop])
        if self.visible is not None:
            first = first._replace(visible=self.visible[:, :stop])
        return first

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Returns the batch with `change` applied to each of its tensors."""
        return self._replace(**{name: change(t) for name, t in self._asdict().items() if t is not None})
