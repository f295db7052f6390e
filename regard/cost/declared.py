"""Declared costs: of a mechanism's face, and of one decoding step of a whole attention layer."""

from __future__ import annotations

from typing import Any

from regard.errors import OptionError
from regard.mechanisms import Cost, Face, Mechanism, on_meta
from regard.shapes import Size


def of(
    mechanism: str | Mechanism, size: Size, face: Face = "parallel", *, training: bool = False, **options: Any
) -> Cost:
    """Returns the cost of one face of a mechanism, by name or built. `training`: with its gradients.

    Training reads whole sequences, so `training` needs the parallel face.
    """
    if not isinstance(mechanism, Mechanism):
        mechanism = on_meta(mechanism, size, **options)
    cost = mechanism.cost(size, face)
    if not training:
        return cost
    if face != "parallel":
        raise OptionError(f"face = '{face}' with training: expected 'parallel', as training reads whole sequences")
    return cost + mechanism.gradient_cost(size)


def decode(b: int, n: int, D: int, H: int, G: int, K: int, V: int, e: int = 2) -> Cost:
    """Returns the cost of one token for each of b sequences with n cached, through a softmax layer of width D.

    A number has e bytes. FLOPs = 2bD(HK+GK+GV+HV) + 2bH(n+1)(K+V): their second term is the same for any G. The cache
    has G heads, not H, so that multi-query attention (G = 1) moves 1/H of its bytes.
    """
    widths = H * K + G * K + G * V + H * V
    flops = 2 * b * D * widths + 2 * b * H * (n + 1) * (K + V)
    weights = D * widths
    cache = b * G * (n + 1) * (K + V)
    vectors = b * (2 * D + widths)  # in and out of the layer, and between its projections
    return Cost(
        matmul=flops,
        useful=flops,
        elementwise=5 * b * H * (n + 1),
        bytes=e * (weights + cache + vectors),
        state=e * cache,
    )
