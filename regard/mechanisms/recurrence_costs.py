"""What gated and delta attention costs.

Solving the triangular systems of the delta rule is no product of matrices: it counts among the element-wise FLOPs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from regard.mechanisms.base import Cost, Face
from regard.mechanisms.decays import BLOCK
from regard.shapes import Size

if TYPE_CHECKING:
    from regard.mechanisms.recurrence import Recurrence


class Pairs(NamedTuple):
    """The pairs of tokens that products of matrices compare, as executed and as needed."""

    matmul: int
    useful: int


def recurrence_cost(mechanism: Recurrence, size: Size, face: Face) -> Cost:
    """Returns the cost of a face: T new tokens in the recurrent one, else S, the queries being the last T of them."""
    state = size.B * size.G * size.K * size.V * size.itemsize_at_least(mechanism.accumulate)
    if face == "weights":
        return _weights_cost(mechanism, size, state)
    tokens = size.S
    if face == "recurrent":
        tokens = size.T
    by_token, by_pair = _flops(mechanism, size)
    moved = size.e * size.B * (size.H * size.T * (size.K + size.V) + _numbers(mechanism, size, tokens))
    if face == "recurrent":
        moved += 2 * state  # read and written
    if face == "recurrent" and size.T == 1:
        read = 2 * size.B * size.K * size.V * (size.H + _erasing(mechanism, size))
        return Cost(read, read, 4 * size.B * size.G * size.K * size.V, moved, state)
    pairs = _chunk_pairs(mechanism, size, tokens)
    mixed = _mixed_pairs(mechanism, size, tokens)
    return Cost(
        matmul=by_token * tokens + by_pair * pairs.matmul + 2 * size.B * size.H * size.V * mixed.matmul,
        useful=by_token * tokens + by_pair * pairs.useful + 2 * size.B * size.H * size.V * mixed.useful,
        elementwise=_elementwise(mechanism, size, tokens),
        bytes=moved,
        state=state,
    )


def recurrence_gradient_cost(mechanism: Recurrence, size: Size) -> Cost:
    """Returns the cost of the gradients: two products for each one forward, and one for each triangular system.

    Nothing comes back to the memory before the first chunk, nor from the one after the last.
    """
    B, G, H, K, V = size.B, size.G, size.H, size.K, size.V
    by_token, by_pair = _flops(mechanism, size)
    pairs = _chunk_pairs(mechanism, size, size.S)
    mixed = _mixed_pairs(mechanism, size, size.S)
    chunks = size.chunk_counts(mechanism.chunk, size.S)
    erasing = _erasing(mechanism, size)
    spared = 2 * B * K * V * ((H + erasing) * chunks.first + 2 * G * chunks.last)
    per_mixed = 2 * B * V * (2 * H + erasing)
    numbers = size.H * size.T * K + _numbers(mechanism, size, size.S)
    return Cost(
        matmul=2 * by_token * size.S + 2 * by_pair * pairs.matmul + per_mixed * mixed.matmul - spared,
        useful=2 * by_token * size.S + 2 * by_pair * pairs.useful + per_mixed * mixed.useful,
        elementwise=2 * _elementwise(mechanism, size, size.S),
        bytes=size.e * B * (2 * numbers + H * size.T * V),
        state=0,
    )


def _erasing(mechanism: Recurrence, size: Size) -> int:
    """Returns the heads whose keys erase before they write: all value heads, or none."""
    if mechanism.erases:
        return size.G
    return 0


def _flops(mechanism: Recurrence, size: Size) -> tuple[int, int]:
    """Returns the FLOPs of each token with the memory, and of each pair of tokens that is compared.

    A query reads the memory and a key is added to it; where keys erase they read it, too, and meet each other.
    """
    erasing = _erasing(mechanism, size)
    by_token = 2 * size.B * size.K * size.V * (size.H + size.G + erasing)
    return by_token, 2 * size.B * size.K * (size.H + erasing)


def _chunk_pairs(mechanism: Recurrence, size: Size, tokens: int) -> Pairs:
    """Returns the pairs that are compared within chunks: by channel, only those of different blocks."""
    chunks = size.chunk_counts(mechanism.chunk, tokens)
    if not mechanism.channels:
        return Pairs(chunks.pairs, chunks.causal)
    before = (chunks.pairs - size.chunk_counts(BLOCK, tokens).pairs) // 2
    return Pairs(before, before)


def _mixed_pairs(mechanism: Recurrence, size: Size, tokens: int) -> Pairs:
    """Returns the pairs whose values are mixed within chunks."""
    chunks = size.chunk_counts(mechanism.chunk, tokens)
    return Pairs(chunks.pairs, chunks.causal)


def _numbers(mechanism: Recurrence, size: Size, tokens: int) -> int:
    """Returns the numbers of the keys, values, decays and write strengths of some tokens."""
    width = size.K + size.V
    if "a" in mechanism.needs and mechanism.channels:
        width += size.K
    elif "a" in mechanism.needs:
        width += 1
    if "b" in mechanism.needs:
        width += 1
    return size.G * tokens * width


def _elementwise(mechanism: Recurrence, size: Size, tokens: int) -> int:
    """Returns the FLOPs of everything but products: decays of pairs and tokens, and triangular systems."""
    pairs = size.chunk_counts(mechanism.chunk, tokens).pairs
    compared = size.H + _erasing(mechanism, size)
    work = pairs * (3 * size.G + compared) + tokens * (size.K * (compared + size.G) + size.H * size.V)
    if mechanism.channels:
        work += 3 * size.chunk_counts(BLOCK, tokens).pairs * size.K * (size.G + compared)
    if mechanism.erases:
        work += size.G * (pairs * (1 + size.V) + 2 * tokens * size.V)
    return size.B * work


def _weights_cost(mechanism: Recurrence, size: Size, state: int) -> Cost:
    """Returns the cost of the explicit weights: all pairs at once, and one triangular system as long as the whole."""
    T, S = size.T, size.S
    erasing = _erasing(mechanism, size)
    queries = Pairs(T * S, T * S - T * (T - 1) // 2)
    keys = Pairs(S * S, S * (S + 1) // 2)
    if mechanism.channels:
        before = T * (S - T) + (T * T - size.chunk_counts(BLOCK, T).pairs) // 2
        queries = Pairs(before, before)
        before = (S * S - size.chunk_counts(BLOCK, S).pairs) // 2
        keys = Pairs(before, before)
    solved = 0
    if mechanism.erases:
        solved = size.H * T * S * S
    per_pair = 2 * size.B * size.K
    numbers = size.H * T * (size.K + S) + _numbers(mechanism, size, S) - size.G * S * size.V
    return Cost(
        matmul=per_pair * (size.H * queries.matmul + erasing * keys.matmul),
        useful=per_pair * (size.H * queries.useful + erasing * keys.useful),
        elementwise=size.B * (5 * size.H * T * S + solved),
        bytes=size.e * size.B * numbers,
        state=state,
    )
