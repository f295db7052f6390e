"""Putting the heads back together: [B,H,T,V] → [B,T,H·V].

concatenate        side by side
shuffle            side by side in a random order, another one at each layer and training pass; in order otherwise
shift              rotated by one head: concatenate with the row blocks of the output projection permuted
reweight           O_{h,t} · ‖O_{h,t}‖ / mean_h ‖O_{h,t}‖, at each position for itself
reweight-sequence  O_h · ‖O_h‖_F over the whole sequence. It looks ahead, grows like √T, and cannot be cached

"""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.errors import RegardError
from regard.registry import Registry

Heads = Float[Tensor, "B H T V"]
Merged = Float[Tensor, "B T HV"]


class LooksAheadError(RegardError, RuntimeError):
    """A state was asked of something whose early outputs depend on later tokens."""


class Merge(nn.Module):
    """The family: a mechanism's outputs, head by head, into one vector a token."""

    looks_ahead: ClassVar[bool] = False

    def __init__(self) -> None:  # nn.Module's own would take any argument
        super().__init__()

    def forward(self, heads: Heads, visible: Bool[Tensor, "B T"] | None = None) -> Merged:
        heads = self.weighed(heads, visible)
        B, H, T, V = heads.shape
        return (heads if T == 1 else heads.transpose(1, 2)).reshape(B, T, H * V)  # one token: the same memory

    def weighed(self, heads: Heads, visible: Tensor | None) -> Heads:
        """The heads in the order and with the weights that they get."""
        return heads

    def check_state(self) -> None:
        """An error where outputs so far would depend on tokens to come."""


MERGES: Registry[type[Merge]] = Registry("merge")
MERGES.add("concatenate")(Merge)


@MERGES.add("shuffle")
class Shuffle(Merge):
    """A random order of the heads while training."""

    def weighed(self, heads: Heads, visible: Tensor | None) -> Heads:
        return heads[:, torch.randperm(heads.shape[1], device=heads.device)] if self.training else heads


@MERGES.add("shift")
class Shift(Merge):
    """Head h where head h + 1 was."""

    def weighed(self, heads: Heads, visible: Tensor | None) -> Heads:
        return heads.roll(1, 1)


@MERGES.add("reweight")
class Reweight(Merge):
    """Heads with long outputs count more, at each position for itself."""

    def weighed(self, heads: Heads, visible: Tensor | None) -> Heads:
        norms: Tensor = heads.norm(dim=-1, keepdim=True)
        mean = norms.mean(1, keepdim=True)
        return heads * (norms / mean.masked_fill(mean == 0, 1))


@MERGES.add("reweight-sequence")
class ReweightSequence(Merge):
    """Heads weighed by their length over the whole sequence.

    `at_inference=False` switches the weighing off outside training. `by_piece=True` allows a state all the same:
    then each piece is weighed by its own length, and token by token differs from the whole pass.
    """

    looks_ahead = True

    def __init__(self, at_inference: bool = True, by_piece: bool = False) -> None:
        super().__init__()
        self.at_inference, self.by_piece = at_inference, by_piece

    def weighed(self, heads: Heads, visible: Tensor | None) -> Heads:
        if not self.training and not self.at_inference:
            return heads
        if visible is not None:
            heads = heads.masked_fill(~visible[:, None, :, None], 0)
        norms: Tensor = heads.norm(dim=(2, 3), keepdim=True)
        return heads * norms

    def check_state(self) -> None:
        off = not self.training and not self.at_inference
        if not off and not self.by_piece:
            raise LooksAheadError(
                "the merge 'reweight-sequence' weighs heads over the whole sequence, so it looks ahead and has no "
                "state. Use 'reweight', or switch it off at inference (at_inference=False, with model.eval()), or ask "
                "for by_piece=True, which weighs each piece by itself and then differs from the whole pass."
            )
