"""Positions of tokens. A position is the number of visible tokens before one, so padding never shifts anything.

Learned and sinusoidal positions are added to the embeddings, rotary ones turn queries and keys, ALiBi adds to the
scores, and `none` does nothing.

Sinusoidal:  PE[t, 2i] = sin(t·ωᵢ),  PE[t, 2i+1] = cos(t·ωᵢ),  ωᵢ = 10000^(−2i/d). A pair shares one frequency, so
moving by one position turns each pair: p_{t+s} = Mˢ p_t with M = diag([[cos ωᵢ, sin ωᵢ], [−sin ωᵢ, cos ωᵢ]]). Rotary:
the pairs (xᵢ, x_{i+K/2}) of a query or key at position t are turned by the angle t·ωᵢ, ωᵢ = base^(−2i/K), so that q·k
depends on the difference of the positions only. With a `share` of the width, only so many of its first numbers are
turned, as if the head were that narrow. For texts longer than those of training, pairs are turned more slowly: each ωᵢ
is divided by `factor`, or only the low ones (see `llama3_frequencies`). ALiBi:  −slope_h · |distance| is added to the
scores of head h, with slopes 2^(−8/H), 2^(−16/H), … for H heads.
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
from regard.shapes import Mask, Weights


class Rotation(NamedTuple):
    """The cosines and sines by which the queries and keys of each token are turned, [#B,1,T,K]."""

    cos: Tensor
    sin: Tensor


class Positions(nn.Module):
    """The base class of positions: three hooks, each of which does nothing unless a subclass overrides it.

    `length` is the number of positions that exist; None means any number.
    """

    length: int | None = None

    def __init__(self) -> None:  # nn.Module's own would take any argument
        super().__init__()

    def added(self, positions: Int[Tensor, "B T"], reach: int, dtype: torch.dtype) -> Float[Tensor, "B T D"] | None:
        """Returns the vectors [B,T,D] to add to the embeddings, or None; every position is below `reach`."""
        return None

    def rotation(self, positions: Int[Tensor, "B T"], reach: int, dtype: torch.dtype) -> Rotation | None:
        """Returns the rotation of queries and keys, or None; every position is below `reach`."""
        return None

    def bias(self, rules: Mask) -> Mask:
        """Returns the rules of self-attention with what positions add to the scores.

        That is `slopes` (see `Alibi`), or `relative`, a function from distances [#B,T,S] to numbers [#B,H,T,S]. The
        rules travel with a decoding state, so a bias holds there too.
        """
        return rules

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Returns the tables computed so far: a captured CUDA graph is valid only while these tensors exist."""
        return ()


POSITIONS: Registry[Callable[..., Positions]] = Registry("kind of position")
POSITIONS.add("none")(Positions)


@POSITIONS.add("learned")
class Learned(Positions):
    """One learned vector for each position, added to the embeddings, for at most `length` positions."""

    def __init__(self, D: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.table = nn.Embedding(length, D)

    def added(self, positions: Int[Tensor, "B T"], reach: int, dtype: torch.dtype) -> Float[Tensor, "B T D"]:
        # An invisible token behind the last visible one may stand one past the end.
        last = self.table.num_embeddings - 1
        if reach > last + 1:
            positions = positions.clamp(max=last)
        out: Tensor = self.table(positions)
        return out


class TabulatedPositions(Positions):
    """Positions given by a formula, whose values are kept in a table [positions, columns] that grows as needed.

    There is one table for each device and dtype: a model cast to half precision still gets values that were computed
    in float64 and rounded once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def compute_table(self, length: int) -> Float[Tensor, "length columns"]:
        """Returns the values of the first `length` positions in float64."""
        raise NotImplementedError

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return tuple(self._tables.values())

    def look_up(self, positions: Int[Tensor, "B T"], reach: int, dtype: torch.dtype) -> Float[Tensor, "B T columns"]:
        """Returns the rows of the table at these positions, all of them below `reach`."""
        key = (positions.device, dtype)
        table = self._tables.get(key)
        if table is None or table.shape[0] < reach:
            # The table is kept, and training, which may follow, cannot use a tensor made in inference mode.
            with torch.inference_mode(False):
                table = self.compute_table(max(64, 1 << (reach - 1).bit_length())).to(*key)
            # torch.export and functorch pass subclasses of tensors, which are invalid after the call.
            if type(table) is Tensor:
                self._tables[key] = table
        return table[positions]


def frequencies(d: int, base: float = 10000.0) -> Float[Tensor, " d2"]:
    """Returns ωᵢ = base^(−2i/d) for each pair, in float64."""
    return base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)


def llama3_frequencies(
    omega: Float[Tensor, " d2"], factor: float, low: float, high: float, original: int
) -> Float[Tensor, " d2"]:
    """Returns frequencies by Llama 3's rule, for texts `factor` times as long as those of training.

    Let n be the number of a wave's periods in `original` positions. Frequencies with n < low are divided by `factor`,
    those with n > high stay, and those between are mixed: ω·((1 − s)/factor + s) with s = (n − low)/(high − low).
    """
    fits = original * omega / (2 * math.pi)
    stay = ((fits - low) / (high - low)).clamp(0, 1)
    return omega * ((1 - stay) / factor + stay)


def sinusoids(length: int, d: int) -> Float[Tensor, "length d"]:
    """Returns the table of sinusoidal positions in float64; for odd d it is that of d + 1 less its last column."""
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies(d + d % 2)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :d]


def shift_matrix(d: int, steps: int = 1) -> Float[Tensor, "d d"]:
    """Returns Mˢ, which moves a sinusoidal position by s: p_{t+s} = Mˢ p_t."""
    if d % 2:
        raise OptionError(
            f"sinusoidal positions of odd width {d} have no shift matrix: the last sine lacks its cosine. "
            f"Use the even width {d + 1}."
        )
    angles = steps * frequencies(d)
    cos = angles.cos()
    sin = angles.sin()
    pairs = torch.stack([torch.stack([cos, sin], -1), torch.stack([-sin, cos], -1)], -2)
    shift: Tensor = torch.block_diag(*pairs)
    return shift


def attend_to_offset(length: int, d: int, offset: int, sharpness: float = 30.0) -> Weights:
    """Returns the weights [1,1,T,T] of a head that looks `offset` positions away, by position alone.

    The query of position i is Mˢ p_i and the keys are the p_j: their product Σ cos(ω(i+s−j)) is largest at j = i+s.
    """
    p = sinusoids(length, d)[None, None]
    return mechanism("softmax", scale=sharpness / math.sqrt(d)).weights(p @ shift_matrix(d, offset).mT, p)


@POSITIONS.add("sinusoidal")
class Sinusoidal(TabulatedPositions):
    """Sines and cosines that are added to the embeddings, for any length."""

    def __init__(self, D: int) -> None:
        super().__init__()
        self.width = D

    def compute_table(self, length: int) -> Float[Tensor, "length D"]:
        return sinusoids(length, self.width)

    def added(self, positions: Int[Tensor, "B T"], reach: int, dtype: torch.dtype) -> Float[Tensor, "B T D"]:
        return self.look_up(positions, reach, dtype)


@POSITIONS.add("rotary")
class Rotary(TabulatedPositions):
    """Positions that turn pairs of numbers of queries and keys, one from each half of the width, as in Llama.

    With a `share` below 1, the first K·share numbers are turned and the others left as they are. Frequencies are
    divided by `factor`: all, or, with `original`, the length of the model's training texts, by Llama 3's rule with
    `low` and `high` (see `llama3_frequencies`).
    """

    def __init__(
        self,
        K: int,
        base: float = 10000.0,
        factor: float = 1.0,
        original: int | None = None,
        low: float = 1.0,
        high: float = 4.0,
        share: float = 1.0,
    ) -> None:
        super().__init__()
        width = int(K * share)
        if not 0 < share <= 1 or width % 2 or width == 0:
            raise OptionError(
                f"rotary positions turn pairs: the key width K = {K} must be even, and so must {share} of it, which is "
                f"{width}; expected a share above 0 and at most 1"
            )
        if base <= 0 or factor <= 0 or low >= high or (original is not None and original < 1):
            raise OptionError(
                f"rotary positions: base {base}, factor {factor}, low {low}, high {high}, original {original}; "
                "expected base, factor and original above 0 and low below high"
            )
        self.width = width
        self.base = base
        self.factor = factor
        self.original = original
        self.low = low
        self.high = high

    def frequencies(self) -> Float[Tensor, " K2"]:
        """Returns the angle by which each pair turns from one position to the next, in float64."""
        omega = frequencies(self.width, self.base)
        if self.original is None:
            return omega / self.factor
        return llama3_frequencies(omega, self.factor, self.low, self.high, self.original)

    def compute_table(self, length: int) -> Float[Tensor, "length 2K"]:
        angles = torch.arange(length, dtype=torch.float64)[:, None] * self.frequencies().repeat(2)
        return torch.cat([angles.cos(), angles.sin()], -1)

    def rotation(self, positions: Int[Tensor, "B T"], reach: int, dtype: torch.dtype) -> Rotation:
        return Rotation(*self.look_up(positions, reach, dtype)[:, None].chunk(2, -1))


def alibi_slopes(H: int) -> Float[Tensor, " H"]:
    """Returns ALiBi's slope of each head in float64: 2^(−8/H), 2^(−16/H), … where H is a power of two.

    For any other H these are the slopes of the power of two below it, and then every second slope of the one above.
    """
    below = 1 << (H.bit_length() - 1)
    slopes = 2.0 ** (-8 / below * torch.arange(1, below + 1, dtype=torch.float64))
    between = 2.0 ** (-4 / below * (2 * torch.arange(H - below, dtype=torch.float64) + 1))
    return torch.cat([slopes, between])


@POSITIONS.add("alibi")
class Alibi(Positions):
    """Attention with linear biases: the farther a key, the lower its score, by a slope that differs from head to head.

    It takes any length, and needs a mechanism with scores (`softmax`, `argmax`, the synthesizers).
    """

    slopes: Tensor

    def __init__(self, H: int) -> None:
        super().__init__()
        # Not saved, as they follow from the number of heads.
        self.register_buffer("slopes", alibi_slopes(H).float(), persistent=False)

    def bias(self, rules: Mask) -> Mask:
        return rules.but(slopes=self.slopes)


def rotate(x: Float[Tensor, "B N T K"], rotation: Rotation) -> Float[Tensor, "B N T K"]:
    """Returns x with the pairs (xᵢ, x_{i+K/2}) turned: x·cos + [−x₂, x₁]·sin.

    A rotation narrower than K turns pairs among the first numbers of x; the others stay.
    """
    width = rotation.cos.shape[-1]
    if width < x.shape[-1]:
        turned, rest = x.split_with_sizes([width, x.shape[-1] - width], -1)
        return torch.cat([rotate(turned, rotation), rest], -1)
    first, second = x.chunk(2, -1)
    return x * rotation.cos + torch.cat([-second, first], -1) * rotation.sin
