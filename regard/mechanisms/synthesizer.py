"""Synthesizers: attention whose scores do not come from comparing tokens.

Dense, per head:   softmax(ReLU(X A + b₁) B + b₂) (X V),   A [D, K], B [K, ℓ].

The layer's query projection is X A + b₁, so the mechanism is handed that as q. Each token proposes a score for each of
ℓ positions. Written as q' = [ReLU(q), 1] and learned keys [Bᵀ, b₂] it **is** softmax attention at scale 1, and runs on
the same kernels; it needs no key projection and no key cache, only values. It is still quadratic in length.
With `relative`, columns of B are distances instead: row i takes the score of key j from column i − j. What a token has
learned to look for then holds wherever it stands, as with relative positions of softmax attention.

Random: the score of row i for column j is a learned (or fixed) number R[i, j], also factorised as R = R₁R₂ᵀ.

Rows and columns are positions, so padding does not shift them. Another sequence has no such positions: there is no
cross-attention.

Tay et al. 2020, arXiv:2005.00743.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from regard.errors import LengthError, OptionError, ShapeError
from regard.mechanisms.base import register, without_autocast
from regard.mechanisms.pair_costs import count_pairs
from regard.mechanisms.pairwise import Pairwise
from regard.shapes import Keys, Mask, Queries, Size, Weights, upcast_half


class Positional(Pairwise):
    """A mechanism whose scores go by position, for at most `length` visible tokens: what both synthesizers share."""

    crosses = False
    memory = "N·G·V"
    length: int

    def __init__(self, heads: int, length: int) -> None:
        super().__init__()
        for name, x in (("heads", heads), ("length", length)):
            if x < 1:
                raise OptionError(f"{type(self).__name__}: {name} = {x}, expected at least 1")
        self.heads = heads
        self.length = length

    def check_queries(self, q: Tensor | None, width: int | None = None) -> None:
        """Raises where q has other heads, or another width, than the mechanism was built for."""
        if q is None:
            return
        if q.dim() != 4 or q.shape[1] != self.heads or q.shape[3] != (width or q.shape[3]):
            sizes = f"heads = {self.heads}"
            if width:
                sizes += f", width = {width}"
            raise ShapeError(
                f"{self.name} was built for {sizes}; expected q [B,{self.heads},T,{width or 'K'}]. "
                f"Given: q {list(q.shape)}."
            )

    def key_positions(self, S: int, mask: Mask, device: torch.device) -> Int[Tensor, "#B S"]:
        """Returns the positions of the keys, which are columns of the scores, or raises where there are too many."""
        positions = mask.positions(S, device)
        if self.length < S:
            self.check_length(_longest(positions, mask))
        return self._clamp(positions)

    def query_positions(self, T: int, S: int, mask: Mask, device: torch.device) -> Int[Tensor, "#B T"]:
        """Returns the positions of the queries, which are rows of the scores."""
        return self._clamp(mask.query_positions(T, S, device).position)

    def _clamp(self, positions: Tensor) -> Tensor:
        """Returns positions within the learned scores: tokens that nobody sees may stand past their end."""
        return positions.clamp(max=self.length - 1)

    def check_length(self, n: int) -> None:
        """Raises where n visible tokens are more than the mechanism was built for."""
        if n > self.length:
            raise LengthError(
                f"{self.name}: {n} visible tokens, but it was built for length = {self.length}. "
                f"Shorten the input or build it with length ≥ {n}; its scores cannot be extended."
            )


def _longest(positions: Int[Tensor, "#B S"], mask: Mask) -> int:
    """Returns the visible tokens of the longest document; to know it may mean to wait for the device.

    The slots of a cache have no mask of their own: those that count are below the limits of its rows.
    """
    if mask.rows is not None:
        counts = mask.rows.limit
    elif mask.visible is None and mask.documents is None:
        return positions.shape[1]
    else:
        counts = positions + 1
    if mask.visible is not None:
        counts = counts.masked_fill(~mask.visible, 0)
    if counts.is_meta or counts.numel() == 0:
        return 0
    return int(counts.amax())


@register("synthesizer")
class Synthesizer(Positional):
    formula = "softmax(ReLU(XA+b₁)B+b₂) XV"
    needs = "qv"
    biases = ("offset",)

    def __init__(self, heads: int, width: int, length: int, relative: bool = False) -> None:
        super().__init__(heads, length)
        if width < 1:
            raise OptionError(f"synthesizer: width = {width}, expected at least 1")
        self.width = width
        self.relative = relative
        columns = length
        if relative:
            columns = 2 * length - 1  # column c is the distance c − (length − 1); those of keys ahead come first
        self.keys = nn.Parameter(torch.randn(heads, columns, width) / math.sqrt(width))
        self.offset = nn.Parameter(torch.zeros(heads, columns))

    def as_softmax(self, q: Queries, mask: Mask, k: Keys | None = None) -> tuple[Tensor, Tensor]:
        """Returns queries and keys whose softmax attention at scale 1 this is.

        The queries are q' = [ReLU(q), 1] [B,H,T,K+1]; the keys are the learned [Bᵀ, b₂] in the order of the tokens,
        [B,H,S,K+1]. Of k, where it is given, only the length S is used.
        """
        self.check_queries(q, self.width)
        _, S = mask.size(q, k)
        q = upcast_half(q).relu()
        keys = torch.cat([self.keys, self.offset[..., None]], -1).to(q.dtype)
        keys = keys[:, self.key_positions(S, mask, q.device)].transpose(0, 1)
        return torch.cat([q, torch.ones_like(q[..., :1])], -1), keys.expand(q.shape[0], -1, -1, -1)

    def weights(self, q: Queries, k: Keys | None = None, mask: Mask = Mask()) -> Weights:  # type: ignore[override]
        with without_autocast(q):
            if self.relative:
                return mask.softmax(self.distance_scores(q, mask, k))
            queries, keys = self.as_softmax(q, mask, k)
            return mask.softmax(queries @ keys.mT)

    def distance_scores(self, q: Queries, mask: Mask, k: Keys | None = None) -> Float[Tensor, "B H T S"]:
        """Returns the scores by distance: row i has at key j what its token proposes for i − j.

        Keys that the mask hides may lie at distances that there are no columns for, and get the score of another.
        """
        self.check_queries(q, self.width)
        q = upcast_half(q).relu()
        T, S = mask.size(q, k)
        is_plain = mask.visible is None and mask.documents is None and mask.rows is None
        if is_plain and mask.causal and T == S <= self.length:
            return self._shifted_scores(q)
        rows = self.query_positions(T, S, mask, q.device)
        distance = rows[:, :, None] - self.key_positions(S, mask, q.device)[:, None, :]
        columns = (distance + self.length - 1).clamp(0, 2 * self.length - 2)  # [B|1,T,S]
        keys = self.keys.to(q.dtype)[:, columns]  # [H,B|1,T,S,K]
        offset = self.offset.to(q.dtype)[:, columns].transpose(0, 1)
        if len(columns) == 1:
            # All rows have the same distances: at each query [B,K] @ [K,S], and no key is repeated for the batch.
            products = q.permute(1, 2, 0, 3) @ keys[:, 0].mT  # [H,T,B,S]
            return products.permute(2, 0, 1, 3) + offset
        products = q.transpose(0, 1)[..., None, :] @ keys.mT  # [H,B,T,1,K] @ [H,B,T,K,S]
        return products[..., 0, :].transpose(0, 1) + offset

    def _shifted_scores(self, q: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H T T"]:
        """Returns the scores by distance of a whole causal sequence, after ReLU; those of keys ahead mean nothing.

        The product has a column for each distance, the farthest first. A zero before each row, and rows counted T
        instead of T + 1 wide, move row i by T − 1 − i to the left, so that the columns become keys: unlike picking
        single keys, that has a cheap gradient.
        """
        B, H, T, _ = q.shape
        used = slice(self.length - 1, self.length - 1 + T)
        keys = self.keys[:, used].flip(1).to(q.dtype)
        offset = self.offset[:, used].flip(1).to(q.dtype)
        products = q @ keys.mT + offset[:, None]  # [B,H,T,T]
        return functional.pad(products, (1, 0)).view(B, H, T + 1, T)[:, :, 1:]

    def score_flops(self, K: int) -> int:
        if self.relative:
            return 2 * K  # the offset is added
        return 2 * (K + 1)

    def learned_numbers(self, size: Size) -> int:
        columns = size.S
        if self.relative and not size.causal:
            columns = size.T + size.S - 1
        return size.H * columns * (size.K + 1)


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
        self.right = None
        if rank is None:
            self.left = nn.Parameter(torch.randn(heads, length, length), requires_grad=learned)
        else:
            # Two factors of deviation rank^(−1/4) give scores of unit deviation, as the full matrix has.
            deviation = rank**-0.25
            self.left = nn.Parameter(deviation * torch.randn(heads, length, rank), requires_grad=learned)
            self.right = nn.Parameter(deviation * torch.randn(heads, length, rank), requires_grad=learned)

    @property
    def learns(self) -> bool:
        return self.left.requires_grad

    def scores(self, mask: Mask, q: Tensor | None = None, k: Tensor | None = None) -> Float[Tensor, "#B H T S"]:
        """Returns R at the positions of the queries and keys."""
        if self.right is not None:
            left, right = self.factors(mask, q, k)
            with without_autocast(left):
                return left @ right.mT  # [B|1,H,T,r] @ [B|1,H,r,S]
        rows, columns = self._positions(mask, q, k)
        return upcast_half(self.left)[:, rows[:, :, None], columns[:, None, :]].transpose(0, 1)

    def factors(self, mask: Mask, q: Tensor | None = None, k: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns R₁ at the queries' positions and R₂ at the keys': what softmax attention at scale 1 compares."""
        assert self.right is not None
        rows, columns = self._positions(mask, q, k)
        # Widened before they are picked: gradients of a whole batch add up in float32.
        left = upcast_half(self.left)[:, rows].transpose(0, 1)
        right = upcast_half(self.right)[:, columns].transpose(0, 1)
        return left, right

    def _positions(self, mask: Mask, q: Tensor | None, k: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the positions of the queries and of the keys: the rows and columns of R."""
        self.check_queries(q)
        T, S = mask.size(q, k)
        device = self.left.device
        return self.query_positions(T, S, mask, device), self.key_positions(S, mask, device)

    def weights(self, q: Queries | None = None, k: Keys | None = None, mask: Mask = Mask()) -> Weights:
        scores = self.scores(mask, q, k)
        if q is not None:
            scores = scores.expand(q.shape[0], -1, -1, -1)
        return mask.softmax(scores)

    def score_flops(self, K: int) -> int:
        return 2 * (self.rank or 0)

    def learned_numbers(self, size: Size) -> int:
        if self.rank is None:
            return size.H * count_pairs(size)
        return size.H * (size.T + size.S) * self.rank
