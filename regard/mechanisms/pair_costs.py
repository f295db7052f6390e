"""What attention costs that is computed pair by pair."""

from __future__ import annotations

from dataclasses import replace

from regard.mechanisms.base import Cost, Face, Mechanism, gradient_bytes, needed_widths
from regard.shapes import Size


def count_pairs(size: Size) -> int:
    """Returns the pairs of query and key that count: those within the window, the causal half where it is causal.

    Causal queries are the last T keys; with a window, queries that are not causal are the keys themselves.
    """
    if size.window is not None and size.window < size.S:
        return _count_windowed_pairs(size, size.window)
    if not size.causal:
        return size.T * size.S
    return size.T * size.S - size.T * (size.T - 1) // 2


def _count_windowed_pairs(size: Size, window: int) -> int:
    """Returns the pairs less than `window` apart."""
    # Of the first window − 1 keys each sees one more than the one before it; all later ones see `window`.
    rising = max(0, min(size.T, size.T - size.S + window - 1))
    first = size.S - size.T + 1
    causal = rising * first + rising * (rising - 1) // 2 + (size.T - rising) * window
    if size.causal:
        return causal
    return 2 * causal - size.T  # as many after a query as before it, and itself


def attended_size(size: Size, face: Face) -> Size:
    """Returns the size of what a face computes on: a state with a window holds no more than the window.

    T new tokens attend to themselves and to the window − 1 before them.
    """
    if face != "recurrent" or size.window is None:
        return size
    return replace(size, S=min(size.S - size.T, size.window - 1) + size.T)


def cache_bytes(mechanism: Mechanism, size: Size) -> int:
    """Returns the bytes of the keys and values that a state of S tokens keeps: of a window, no more than it has."""
    _, k_width = needed_widths(mechanism, size)
    slots = size.S
    if size.window is not None:
        slots = min(slots, size.window)
    return size.B * size.G * slots * (k_width + size.V) * size.e


def pair_cost(mechanism: Mechanism, size: Size, face: Face, score: int, elementwise: int = 5) -> Cost:
    """Returns the cost of all pairs: `score` FLOPs each for the score, 2V for the mixing."""
    B, H, G, V = size.B, size.H, size.G, size.V
    state = cache_bytes(mechanism, size)
    size = attended_size(size, face)
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
        state=state,
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
