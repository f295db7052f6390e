"""How far random features can follow softmax, and a warning where inputs are beyond it.

With x = q·K^(−1/4), y = k·K^(−1/4) and independent directions, an estimate of exp(q·k/√K) has the relative variance
    performer   (e^s − 1) / F              s = ‖x+y‖²
    fourier     2 sinh²(s/2) / F           s = ‖x−y‖²
It grows exponentially in s and falls only like 1/F. For values that are independent of each other the standard
deviation of an entry is about the relative error of the output, so the s at which it reaches a third is the limit.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from regard.mechanisms.base import Mechanism, can_read
from regard.mechanisms.random_features import Fourier, Performer
from regard.shapes import Keys, Queries, Visible, upcast_half

DEVIATION = 1 / 3  # of an entry, relative: below are outputs right to 15%, above those off by 50%
SAMPLE = 32  # queries and keys of each head that are looked at, evenly spaced

_SETTLED: set[str] = set()  # names that have warned, or that need not be looked at again


def warn_if_inaccurate(mechanism: Mechanism, q: Queries, k: Keys, visible: Visible | None) -> None:
    """Warns once in a process and for each mechanism that its features cannot follow q and k.

    On a CPU each call is judged until one has warned. Elsewhere reading a number waits for the device, so only the
    first call is judged. Nothing is read where that is impossible: under compile, capture, tracing, or a transform.
    """
    if torch.compiler.is_compiling() or not isinstance(mechanism, Performer | Fourier):
        return
    if mechanism.name in _SETTLED or not can_read(q) or not can_read(k):
        return
    if q.device.type != "cpu":
        _SETTLED.add(mechanism.name)
    distance = float(_median_distance(mechanism, q, k, visible))
    limit = largest_distance(mechanism)
    if distance > limit:
        _SETTLED.add(mechanism.name)
        sign = "+" if isinstance(mechanism, Performer) else "−"
        warnings.warn(
            f"{mechanism.name}: q and k are too large for {mechanism.count} features to follow softmax "
            f"(‖q{sign}k‖²/√K is {distance:.3g}, at most {limit:.2g} would do): use smaller q and k, more features, "
            "or softmax.",
            stacklevel=3,
        )


def largest_distance(mechanism: Performer | Fourier) -> float:
    """Returns the s at which the standard deviation of an entry is `DEVIATION` of its mean."""
    if isinstance(mechanism, Performer):
        return math.log1p(mechanism.count * DEVIATION**2)
    return 2 * math.asinh(DEVIATION * math.sqrt(mechanism.count / 2))


@torch.no_grad()
def _median_distance(mechanism: Performer | Fourier, q: Queries, k: Keys, visible: Visible | None) -> Tensor:
    """Returns the median of s over pairs of sampled queries and visible keys; NaN where there are none, or only NaN."""
    stride = _sample_stride(k.shape[2])
    x = upcast_half(q[:, :, :: _sample_stride(q.shape[2])]) * q.shape[3] ** -0.25
    y = upcast_half(k[:, :, ::stride]) * k.shape[3] ** -0.25
    if visible is not None:
        y = y.masked_fill(~visible[:, None, ::stride, None], math.nan)  # which nanmedian leaves out
    x = x.reshape(y.shape[0], y.shape[1], -1, y.shape[3])  # the queries of a group side by side
    if isinstance(mechanism, Fourier):
        y = -y
    # ‖x+y‖² = ‖x‖² + ‖y‖² + 2x·y, the last a product of [B,G,R·T,K] with [B,G,K,S].
    squares = x.square().sum(-1)[..., :, None] + y.square().sum(-1)[..., None, :]
    distances: Tensor = squares + 2 * x @ y.mT
    return distances.nanmedian()


def _sample_stride(tokens: int) -> int:
    """Returns the stride at which at most `SAMPLE` of the tokens are looked at."""
    return max(1, math.ceil(tokens / SAMPLE))
