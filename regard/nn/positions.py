"""Where a token stands. A position is the number of visible tokens before it, so padding never shifts anything.

Learned and sinusoidal positions are added to the embeddings; rotary ones turn queries and keys; `none` does neither.

Sinusoidal:  PE[t, 2i] = sin(t·ωᵢ),  PE[t, 2i+1] = cos(t·ωᵢ),  ωᵢ = 10000^(−2i/d). A pair shares one frequency, so
moving by one position turns each pair: p_{t+s} = Mˢ p_t with M = diag([[cos ωᵢ, sin ωᵢ], [−sin ωᵢ, cos ωᵢ]]).
Rotary:  the pairs (xᵢ, x_{i+K/2}) of a query or key at position t are turned by the angle t·ωᵢ, ωᵢ = base^(−2i/K), so
that q·k depends on the difference of the positions only. For longer texts than it learned from, a model turns more
slowly: each ωᵢ is divided by `factor`, or only those of long waves (see `stretched`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import OptionError
from regard.mechanisms import mechanism
from regard.registry import Registry
from regard.shapes import Weights


class Rotation(NamedTuple):
    """Cosines and sines for each token, [#B,1,T,K]."""

    cos: Tensor
    sin: Tensor


class Positions(nn.Module):
    """Where tokens stand. `length`: the most positions there are; None means any number."""

    length: int | None = None

    def __init__(self) -> None:  # nn.Module's own would take any argument
        super().__init__()

    def added(self, positions: Int[Tensor, "B T"], reach: int, dtype: torch.dtype) -> Float[Tensor, "B T D"] | None:
        """What to add to the embeddings. `reach`: positions are below it."""
        return None

    def rotation(self, positions: Int[Tensor, "B T"], reach: int, dtype: torch.dtype) -> Rotation | None:
        """How to turn queries and keys."""
        return None


POSITIONS: Registry[Callable[..., Positions]] = Registry("kind of position")
POSITIONS.add("none")(Positions)


@POSITIONS.add("learned")
class Learned(Positions):
    """One learned vector a position, for at most `length` of them."""

    def __init__(self, D: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.table = nn.Embedding(length, D)

    def added(self, positions: Int[Tensor, "B T"], reach: int, dtype: torch.dtype) -> Float[Tensor, "B T D"]:
        # An invisible token behind the last visible one may stand one past the end.
        last = self.table.num_embeddings - 1
        out: Tensor = self.table(positions if reach <= last + 1 else positions.clamp(max=last))
        return out


class Table:
    """Rows computed once in float64 and kept for each device and dtype; it grows as far as positions reach."""

    def __init__(self, compute: Callable[[int], Tensor]) -> None:
        self.compute = compute
        self.kept: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def rows(self, positions: Tensor, reach: int, dtype: torch.dtype) -> Tensor:
        key = (positions.device, dtype)
        table = self.kept.get(key)
        if table is None or table.shape[0] < reach:
            with torch.inference_mode(False):  # it outlives this call, and training may be next
                table = self.compute(max(64, 1 << (reach - 1).bit_length())).to(*key)
            self.kept[key] = table
        return table[positions]


def frequencies(d: int, base: float = 10000.0) -> Float[Tensor, " d2"]:
    """ωᵢ = base^(−2i/d) for each pair, in float64."""
    return base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)


def stretched(
    omega: Float[Tensor, " d2"], factor: float, low: float, high: float, original: int
) -> Float[Tensor, " d2"]:
    """Llama 3's rule: waves that fit `original` positions fewer than `low` times get `factor` times as long, those that
    fit more than `high` times stay, and those between are mixed: ω·((1 − s)/factor + s), s = (n − low)/(high − low)."""
    fits = original * omega / (2 * math.pi)
    stay = ((fits - low) / (high - low)).clamp(0, 1)
    return omega * ((1 - stay) / factor + stay)


def sinusoids(length: int, d: int) -> Float[Tensor, "length d"]:
    """The table of sinusoidal positions in float64; for odd d, that of d + 1 less its last column."""
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies(d + d % 2)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :d]


def shift_matrix(d: int, steps: int = 1) -> Float[Tensor, "d d"]:
    """Mˢ, which moves a sinusoidal position by s: p_{t+s} = Mˢ p_t."""
    if d % 2:
        raise OptionError(
            f"sinusoidal positions of odd width {d} have no shift matrix: the last sine lacks its cosine. "
            f"Use the even width {d + 1}."
        )
    angles = steps * frequencies(d)
    cos, sin = angles.cos(), angles.sin()
    pairs = torch.stack([torch.stack([cos, sin], -1), torch.stack([-sin, cos], -1)], -2)
    shift: Tensor = torch.block_diag(*pairs)
    return shift


def attend_to_offset(length: int, d: int, offset: int, sharpness: float = 30.0) -> Weights:
    """Weights [1,1,T,T] of a head that looks `offset` positions away, by position alone.

    The query of position i is Mˢ p_i and the keys are the p_j: their product Σ cos(ω(i+s−j)) is largest at j = i+s.
    """
    p = sinusoids(length, d)[None, None]
    return mechanism("softmax", scale=sharpness / math.sqrt(d)).weights(p @ shift_matrix(d, offset).mT, p)


@POSITIONS.add("sinusoidal")
class Sinusoidal(Positions):
    """Sines and cosines, for any length."""

    def __init__(self, D: int) -> None:
        super().__init__()
        self.table = Table(lambda length: sinusoids(length, D))

    def added(self, positions: Int[Tensor, "B T"], reach: int, dtype: torch.dtype) -> Float[Tensor, "B T D"]:
        return self.table.rows(positions, reach, dtype)


@POSITIONS.add("rotary")
class Rotary(Positions):
    """Turns the two halves of queries and keys, as Llama does; `factor` times as slowly. With `original`, the length
    that the model learned from, Llama 3's rule says how much each frequency slows down, between `low` and `high`."""

    def __init__(
        self,
        K: int,
        base: float = 10000.0,
        factor: float = 1.0,
        original: int | None = None,
        low: float = 1.0,
        high: float = 4.0,
    ) -> None:
        super().__init__()
        if K % 2:
            raise OptionError(f"rotary positions turn pairs: the key width K = {K} must be even")
        if base <= 0 or factor <= 0 or low >= high or (original is not None and original < 1):
            raise OptionError(
                f"rotary positions: base {base}, factor {factor}, low {low}, high {high}, original {original}; "
                "expected base, factor and original above 0 and low below high"
            )

        def compute(length: int) -> Tensor:
            omega = frequencies(K, base)
            omega = omega / factor if original is None else stretched(omega, factor, low, high, original)
            angles = torch.arange(length, dtype=torch.float64)[:, None] * omega.repeat(2)
            return torch.cat([angles.cos(), angles.sin()], -1)

        self.table = Table(compute)

    def rotation(self, positions: Int[Tensor, "B T"], reach: int, dtype: torch.dtype) -> Rotation:
        return Rotation(*self.table.rows(positions, reach, dtype)[:, None].chunk(2, -1))


def rotate(x: Float[Tensor, "B N T K"], rotation: Rotation) -> Float[Tensor, "B N T K"]:
    """x with the pairs (xᵢ, x_{i+K/2}) turned: x·cos + [−x₂, x₁]·sin."""
    first, second = x.chunk(2, -1)
    return x * rotation.cos + torch.cat([-second, first], -1) * rotation.sin
