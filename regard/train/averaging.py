"""The exponential moving average of a model's weights, which is measured and saved in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from regard.config import ConfigError
from regard.train.distributed import full_tensor, shard_like

PREFIX = "weight."  # a weight's name among the tensors of a checkpoint is this and its number


class WeightAverage:
    """The average of the trained weights w over the steps so far: after step n it is d·average + (1 − d)·w.

    d = min(decay, (1 + n) / (10 + n)), so that the first steps are soon forgotten. With a decay of 0 there is no
    average, and the weights themselves are used. Training does not depend on the average.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights: list[Tensor] = []
        if decay:
            self.weights = [p.detach() for p in model.parameters() if p.requires_grad]  # they share their memory
        self.averages = [w.clone() for w in self.weights]

    def update(self, step: int) -> None:
        """Updates the averages with the weights after a step; steps are counted from 1."""
        if self.weights:
            decay = min(self.decay, (1 + step) / (10 + step))
            get_ema_multi_avg_fn(decay)(self.averages, self.weights, step)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Exchanges the weights for their averages while the context lasts."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for weight, average in zip(self.weights, self.averages, strict=True):
            kept = weight.clone()
            weight.copy_(average)  # in place: a captured step reads this memory
            average.copy_(kept)

    def export_weights(self) -> dict[str, Tensor]:
        """Returns unsharded weights by number, for a checkpoint whose model has the averages. All ranks call this."""
        found = {}
        for number, weight in enumerate(self.weights):
            # A copy, since the averages take the place of the weights when the model is written.
            found[f"{PREFIX}{number}"] = full_tensor(weight).clone().cpu()
        return found

    def import_weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sets averages to the model's weights, and weights to those of a checkpoint; returns its other tensors."""
        for number, (weight, average) in enumerate(zip(self.weights, self.averages, strict=True)):
            saved = tensors.get(f"{PREFIX}{number}")
            if saved is None or (saved.shape, saved.dtype) != (weight.shape, weight.dtype):
                raise ConfigError(f"{PREFIX}{number} of the averaged weights is missing, or does not fit the model")
            average.copy_(weight)
            weight.copy_(shard_like(saved, weight))
        numbered = {f"{PREFIX}{number}" for number in range(len(self.weights))}
        return {name: x for name, x in tensors.items() if name not in numbered}
