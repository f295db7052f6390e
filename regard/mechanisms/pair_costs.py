"""What attention costs that is computed pair by pair."""

from __future__ import annotations

from dataclasses import replace

from regard.mechanisms.base import Cost, Face, Mechanism, gradient_bytes, needed_widths
from regard.shapes import Size


def count_pairs(size: Size) -> int:
    """Returns the pairs of query and key that count: the causal half where the queries are the last T keys."""
    if not size.causal:
        return size.T * size.S
    return size.T * size.S - size.T * (size.T - 1) // 2


def pair_cost(mechanism: Mechanism, size: Size, face: Face, score: int, elementwise: int = 5) -> Cost:
    """Returns the cost of all pairs: `score` FLOPs each for the score, 2V for the mixing."""
    B, H, G, V = size.B, size.H, size.G, size.V
    q_width, k_width = needed_widths(mechanism, size)
    mixing = 2 * V
    outputs = G * size.S * V + H * size.T * V  # numbers moved: the values, and the output
    if face == "weights":
        mixing = 0
        outputs = H * size.T * size.S
    inputs = H * size.T * q_width + G * size.S * k_width
    per_pair = _score_batch(mechanism, size) * score + B * mixing
    useful = count_pairs(replace(size, causal=size.causal or face == "recurrent"))
    return Cost(
        matmul=H * size.T * size.S * per_pair,
        useful=H * useful * per_pair,
        elementwise=B * H * useful * elementwise,
        bytes=B * (inputs + outputs) * size.e,
        state=B * G * size.S * (k_width + V) * size.e,
    )


def pair_gradient_cost(mechanism: Mechanism, size: Size, score: int, learns: bool, elementwise: int = 4) -> Cost:
    """Returns the cost of the gradients of all pairs.

    The values take one product. Where weights learn, they take one, too, and each score two.
    """
    useful = count_pairs(size)
    per_pair = 2 * size.B * size.V
    work = 0
    if learns:
        per_pair += 2 * size.B * size.V + 2 * _score_batch(mechanism, size) * score
        work = size.B * size.H * useful * elementwise
    return Cost(
        matmul=size.H * size.T * size.S * per_pair,
        useful=size.H * useful * per_pair,
        elementwise=work,
        bytes=gradient_bytes(mechanism, size),
        state=0,
    )


def _score_batch(mechanism: Mechanism, size: Size) -> int:
    """Returns how often scores are computed: once for each sequence, but once in all where they do without q."""
    if "q" in mechanism.needs:
        return size.B
    return 1
