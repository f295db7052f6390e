"""Synthesizers: attention whose scores do not come from comparing tokens.

Dense, per head:   softmax(ReLU(X A + b₁) B + b₂) (X V),   A [D, K], B [K, ℓ].

The layer's query projection is X A + b₁, so the mechanism is handed that as q. Each token proposes a score for each of
ℓ positions. Written as q' = [ReLU(q), 1] and learned keys [Bᵀ, b₂] it **is** softmax attention at scale 1, and runs on
the same kernels; it needs no key projection and no key cache, only values. It is still quadratic in length.

Random: the score of row i for column j is a learned (or fixed) number R[i, j], also factorised as R = R₁R₂ᵀ.

Rows and columns are positions, so padding does not shift them. Another sequence has no such positions: there is no
cross-attention.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import LengthError, OptionError, ShapeError
from regard.mechanisms.base import register
from regard.mechanisms.pairwise import Pairwise, count_pairs
from regard.shapes import Keys, Mask, Queries, Size, Weights, upcast_half


class Positional(Pairwise):
    """What both synthesizers share: scores by position, for at most `length` visible tokens."""

    crosses = False
    memory = "N·G·V"

    def __init__(self, heads: int, length: int) -> None:
        super().__init__()
        for name, x in (("heads", heads), ("length", length)):
            if x < 1:
                raise OptionError(f"{type(self).__name__}: {name} = {x}, expected at least 1")
        self.heads, self.length = heads, length

    def fits(self, q: Tensor | None, width: int | None = None) -> None:
        """An error where q has other heads, or another width, than it was built for."""
        if q is None:
            return
        if q.dim() != 4 or q.shape[1] != self.heads or q.shape[3] != (width or q.shape[3]):
            raise ShapeError(
                f"{self.name} was built for heads = {self.heads}{f', width = {width}' if width else ''}; "
                f"expected q [B,{self.heads},T,{width or 'K'}]. Given: q {list(q.shape)}."
            )

    def columns(self, S: int, mask: Mask, device: torch.device) -> Tensor:
        """Positions of the keys, [B|1,S]."""
        return self._within(mask.positions(S, device), mask.visible)

    def rows(self, T: int, S: int, mask: Mask, device: torch.device) -> Tensor:
        """Positions of the queries, [B|1,T]."""
        return self._within(mask.query_positions(T, S, device).position, None)

    def _within(self, positions: Tensor, visible: Tensor | None) -> Tensor:
        if visible is None and positions.shape[0] == 1:
            self.reaches(positions.shape[1])
        if positions.shape[1] > self.length and visible is not None:
            self.reaches(int((positions + 1).masked_fill(~visible, 0).amax()))
        return positions.clamp(max=self.length - 1)  # invisible tokens may stand one past the end

    def reaches(self, n: int) -> None:
        """An error where n visible tokens are more than it was built for."""
        if n > self.length:
            raise LengthError(
                f"{self.name}: {n} visible tokens, but it was built for length = {self.length}. "
                f"Shorten the input or build it with length ≥ {n}; its scores cannot be extended."
            )


@register("synthesizer")
class Synthesizer(Positional):
    formula = "softmax(ReLU(XA+b₁)B+b₂) XV"
    needs = "qv"

    def __init__(self, heads: int, width: int, length: int) -> None:
        super().__init__(heads, length)
        if width < 1:
            raise OptionError(f"synthesizer: width = {width}, expected at least 1")
        self.width = width
        self.keys = nn.Parameter(torch.randn(heads, length, width) / math.sqrt(width))
        self.offset = nn.Parameter(torch.zeros(heads, length))

    def as_softmax(self, q: Queries, mask: Mask) -> tuple[Tensor, Tensor]:
        """q' = [ReLU(q), 1] and the learned keys [Bᵀ, b₂] in the order of the tokens: softmax attention at scale 1."""
        self.fits(q, self.width)
        _, S = mask.size(q, None)
        q = upcast_half(q).relu()
        keys = torch.cat([self.keys, self.offset[..., None]], -1).to(q.dtype)
        keys = keys[:, self.columns(S, mask, q.device)].transpose(0, 1)
        return torch.cat([q, torch.ones_like(q[..., :1])], -1), keys.expand(q.shape[0], -1, -1, -1)

    def weights(self, q: Queries, k: Keys | None = None, mask: Mask = Mask()) -> Weights:  # type: ignore[override]
        queries, keys = self.as_softmax(q, mask)
        return mask.softmax(queries @ keys.mT)

    def score_flops(self, K: int) -> int:
        return 2 * (K + 1)

    def learned_numbers(self, size: Size) -> int:
        return size.H * size.S * (size.K + 1)


@register("synthesizer-random")
class RandomSynthesizer(Positional):
    formula = "softmax(R) XV, R learned or fixed"
    needs = "v"
    training_memory = "N²+N·V"
    letters: ClassVar[dict[str, str]] = {"rank": "r"}

    def __init__(self, heads: int, length: int, rank: int | None = None, learned: bool = True) -> None:
        super().__init__(heads, length)
        self.rank = rank
        if rank is not None and rank < 1:
            raise OptionError(f"synthesizer-random: rank = {rank}, expected at least 1, or None for the full matrix")
        shape = (heads, length, length if rank is None else rank)
        # Two factors of deviation rank^(−1/4) give scores of unit deviation, as the full matrix has.
        spread = 1.0 if rank is None else rank**-0.25
        self.left = nn.Parameter(spread * torch.randn(shape), requires_grad=learned)
        self.right = None if rank is None else nn.Parameter(spread * torch.randn(shape), requires_grad=learned)

    @property
    def learns(self) -> bool:
        return self.left.requires_grad

    def scores(self, mask: Mask, q: Tensor | None = None, k: Tensor | None = None) -> Float[Tensor, "#B H T S"]:
        """R at the positions of rows and columns."""
        if self.right is not None:
            left, right = self.factors(mask, q, k)
            return left @ right.mT
        rows, columns = self._places(mask, q, k)
        return upcast_half(self.left)[:, rows[:, :, None], columns[:, None, :]].transpose(0, 1)

    def factors(self, mask: Mask, q: Tensor | None = None, k: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """R₁ at the rows and R₂ at the columns: the queries and keys of softmax attention at scale 1."""
        assert self.right is not None
        rows, columns = self._places(mask, q, k)
        # Widened before they are picked: gradients of a whole batch add up in float32.
        return upcast_half(self.left)[:, rows].transpose(0, 1), upcast_half(self.right)[:, columns].transpose(0, 1)

    def _places(self, mask: Mask, q: Tensor | None, k: Tensor | None) -> tuple[Tensor, Tensor]:
        self.fits(q)
        T, S = mask.size(q, k)
        device = self.left.device
        return self.rows(T, S, mask, device), self.columns(S, mask, device)

    def weights(self, q: Queries | None = None, k: Keys | None = None, mask: Mask = Mask()) -> Weights:
        scores = self.scores(mask, q, k)
        if q is not None:
            scores = scores.expand(q.shape[0], -1, -1, -1)
        return mask.softmax(scores)

    def score_flops(self, K: int) -> int:
        return 0 if self.rank is None else 2 * self.rank

    def learned_numbers(self, size: Size) -> int:
        return size.H * (count_pairs(size) if self.rank is None else (size.T + size.S) * self.rank)
