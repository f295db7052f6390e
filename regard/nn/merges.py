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
    """A decoding state was requested from a layer whose early outputs depend on later tokens."""


class Merge(nn.Module):
    """A way to put the outputs of all heads, [B,H,T,V], into one vector for each token, [B,T,H·V]."""

    looks_ahead: ClassVar[bool] = False

    def __init__(self) -> None:  # nn.Module's own would take any argument
        super().__init__()

    def forward(self, heads: Heads, visible: Bool[Tensor, "B T"] | None = None) -> Merged:
        heads = self.arrange(heads, visible)
        B, H, T, V = heads.shape
        if T > 1:  # a single token has the same memory either way
            heads = heads.transpose(1, 2)
        return heads.reshape(B, T, H * V)

    def arrange(self, heads: Heads, visible: Tensor | None) -> Heads:
        """Returns the heads [B,H,T,V] reordered or weighed."""
        return heads

    def check_state(self) -> None:
        """Raises a LooksAheadError if outputs depend on later tokens."""

    def check_documents(self) -> None:
        """Raises a LooksAheadError if documents packed into one row would change each other's outputs."""
        if self.looks_ahead:
            raise LooksAheadError("a merge that weighs heads over the whole row would mix the documents packed into it")


MERGES: Registry[type[Merge]] = Registry("merge")
MERGES.add("concatenate")(Merge)


@MERGES.add("shuffle")
class Shuffle(Merge):
    """Heads side by side, in a random order while training."""

    def arrange(self, heads: Heads, visible: Tensor | None) -> Heads:
        if not self.training:
            return heads
        return heads[:, torch.randperm(heads.shape[1], device=heads.device)]


@MERGES.add("shift")
class Shift(Merge):
    """Heads side by side, each one place further: head h stands where head h + 1 was."""

    def arrange(self, heads: Heads, visible: Tensor | None) -> Heads:
        return heads.roll(1, 1)


@MERGES.add("reweight")
class Reweight(Merge):
    """Heads weighed by the norm of their outputs at each position."""

    def arrange(self, heads: Heads, visible: Tensor | None) -> Heads:
        norms: Tensor = heads.norm(dim=-1, keepdim=True)
        mean = norms.mean(1, keepdim=True)
        return heads * (norms / mean.masked_fill(mean == 0, 1))


@MERGES.add("reweight-sequence")
class ReweightSequence(Merge):
    """Heads weighed by the norm of their outputs over the whole sequence.

    `at_inference=False` switches the weighing off outside training. `by_piece=True` allows decoding nevertheless: each
    piece is then weighed by the norm of its own outputs, which differ from those of the whole pass.
    """

    looks_ahead = True

    def __init__(self, at_inference: bool = True, by_piece: bool = False) -> None:
        super().__init__()
        self.at_inference = at_inference
        self.by_piece = by_piece

    def arrange(self, heads: Heads, visible: Tensor | None) -> Heads:
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
