"""Attention by a matrix memory S [K,V] that decays, is written to and is read at each token: gated and delta attention.

    S ← e^{a_t} S,    S ← S + b_t k_t (v_t − [erases] Sᵀ k_t)ᵀ,    out_t = scale · Sᵀ q_t + skip · v_t

Its weights and its contents are computed here from q, k, v, a and b alone, token by token and in float64. Row i of the
weights is found backwards from token i: r is the query after all decays and erasures between token j and token i, so a
row costs as much as a row of q·k, and no exponential can overflow:

    r ← scale · q_i;   for j = i, i − 1, …:   W_ij = b_j k_j·r,   r ← e^{a_j} (r − [erases] W_ij k_j)

The formula that is usually drawn for such a layer, scale · q_i·k_j · b_j · e^{c_i − c_j} with c the running sum of a,
leaves the erasing out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

HALF = 0.5  # half of a write is gone when at most this share of it is left


class Ends(NamedTuple):
    """The token at which half of each token's write was gone, −1 for never, and which part of the loss was decay."""

    token: Int[Tensor, "h S"]
    by_decay: Float[Tensor, "h S"]  # share of the loss until that token; the rest was overwritten


@dataclass(frozen=True)
class RecordedMemory:
    """What the memories of h heads are computed from, in float64; each head has a memory of its own."""

    q: Float[Tensor, "h T K"]
    k: Float[Tensor, "h T K"]
    v: Float[Tensor, "h T V"]
    a: Float[Tensor, "h T X"]  # log of each token's decay; X is 1, or K if each key channel has its own
    b: Float[Tensor, "h T"]  # how strongly each token is written
    skip: Float[Tensor, " h"]
    scale: float
    erases: bool

    def weights(self, rows: Int[Tensor, " R"]) -> Float[Tensor, "h R T"]:
        """Returns the exact weights of some rows: weights @ v is the output of the head."""
        h, T, K = self.k.shape
        weights = self.k.new_zeros(h, len(rows), T)
        carried = self.k.new_zeros(h, len(rows), K)
        for j in range(int(rows.max()) if len(rows) else -1, -1, -1):
            starts = rows == j
            carried[:, starts] = self.scale * self.q[:, j, None]
            # [h,R,K] @ [h,K,1]
            weights[:, :, j] = (carried @ self.k[:, j, :, None])[..., 0] * self.b[:, j, None]
            if self.erases:
                carried -= weights[:, :, j, None] * self.k[:, j, None]
            carried *= self.a[:, j, None].exp()
        at = torch.arange(len(rows))
        weights[:, at, rows] += self.skip[:, None]
        return weights

    def without_erasing(self) -> RecordedMemory:
        """Returns a memory with the same inputs that never erases: its weights are the formula usually drawn."""
        return replace(self, erases=False)

    def answers(self) -> Float[Tensor, "h T T"]:
        """Returns [h,t,j] k_jᵀ S_t v_j / (‖k_j‖² ‖v_j‖²): how much of v_j key j reads from the memory after token t.

        It is 1 where the key reads v_j, and 0 for tokens j after t.
        """
        h, T, K = self.k.shape
        state = self.k.new_zeros(h, K, self.v.shape[2])
        sizes = self.k.square().sum(-1) * self.v.square().sum(-1)
        answers = self.k.new_zeros(h, T, T)
        for t in range(T):
            state = state * self.a[:, t, :, None].exp()
            new = self.v[:, t, None]
            if self.erases:
                new = new - self.k[:, t, None] @ state
            state = state + self.b[:, t, None, None] * self.k[:, t, :, None] * new
            read = ((self.k[:, : t + 1] @ state) * self.v[:, : t + 1]).sum(-1)
            answers[:, t, : t + 1] = read / sizes[:, : t + 1].clamp(min=1e-300)
        return answers

    def left(self) -> Float[Tensor, "h T T"]:
        """Returns [h,t,j] the share of token j's write that its own key still reads at token t: 1 at t = j."""
        return self._follow()[0]

    def ends(self) -> Ends:
        """Returns at which token half of each token's write was gone, and which part of the loss was decay."""
        left, decayed = self._follow()
        T = left.shape[1]
        later = torch.ones(T, T, dtype=torch.bool).tril()
        gone = (left.abs() <= HALF) & later
        token = torch.where(gone.any(1), gone.int().argmax(1), -1)
        at = token.clamp(min=0)[:, None]
        lost = 1 - left.gather(1, at)[:, 0]
        share = decayed.gather(1, at)[:, 0] / lost.masked_fill(lost == 0, 1)
        return Ends(token, share.clamp(0, 1).masked_fill(token < 0, 0))

    def _follow(self) -> tuple[Float[Tensor, "h T T"], Float[Tensor, "h T T"]]:
        """Returns [h,t,j] the share of write j that is left at token t, and the share that decays took until t."""
        h, T, K = self.k.shape
        written = self.k.new_zeros(h, T, K)  # row j: what is left of k_j as it was written
        left = self.k.new_zeros(h, T, T)
        decayed = self.k.new_zeros(h, T, T)
        taken = self.k.new_zeros(h, T)
        sizes = self.k.square().sum(-1).clamp(min=1e-300)
        before = self.k.new_zeros(h, T)
        for t in range(T):
            written = written * self.a[:, t, None].exp()
            taken = taken + before - (written * self.k).sum(-1) / sizes
            if self.erases:
                found = (written @ self.k[:, t, :, None]) * self.b[:, t, None, None]
                written = written - found * self.k[:, t, None]
            written[:, t] = self.k[:, t]
            before = (written * self.k).sum(-1) / sizes
            left[:, t] = before
            decayed[:, t] = taken
        return left, decayed
