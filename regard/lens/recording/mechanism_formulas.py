"""How the weights of each of regard's mechanisms follow from what a trace keeps.

Softmax attention and kernels are kept as queries, keys and a formula; a choice of one key as its index. Any other
mechanism is asked for its weights, and they are kept themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.lens.trace.arrays import pack
from regard.lens.trace.formulas import Dense, Feature, Formula, OneHot, SoftmaxFormula
from regard.lens.trace.trace import CELLS, Attended
from regard.mechanisms import Mechanism
from regard.mechanisms.argmax import Argmax
from regard.mechanisms.features import Elu, Quadratic
from regard.mechanisms.linear import Linear
from regard.mechanisms.random_features import Fourier, Performer, RandomFeatures
from regard.mechanisms.softmax import Softmax
from regard.mechanisms.synthesizer import RandomSynthesizer, Synthesizer
from regard.shapes import Mask, Rows

TILE = 64  # rows of dense weights that are pack together
_FEATURE_MAPS: dict[type[Mechanism], str] = {
    Elu: "elu",
    Quadratic: "quadratic",
    Performer: "performer",
    Fourier: "fourier",
}


@dataclass(frozen=True)
class LayerInputs:
    """What one attention layer read: q [1,H,T,K], k [1,G,S,K], v [1,G,S,V], and the mask with its sizes (T, S)."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor
    mask: Mask
    cross: bool


def fill_formula(attended: Attended, mechanism: Mechanism, inputs: LayerInputs) -> Formula:
    """Returns how weights follow from what is kept, and keeps that in `attended`.

    A subclass may compute something else than its parent, so only exact classes are known.
    """
    q, k, mask = inputs.q, inputs.k, inputs.mask
    cls = type(mechanism)
    attended.q = first_row(q)
    attended.k = first_row(k)
    if mask.documents is not None or mask.bias is not None or mask.relative is not None:
        return _dense(attended, mechanism, inputs)
    if isinstance(mechanism, Softmax) and cls is Softmax:
        assert q is not None
        if mask.slopes is not None:
            attended.slopes = mask.slopes.detach().float().cpu()
        return SoftmaxFormula(mechanism.score_scale(q.shape[-1]), mask.softcap)
    if isinstance(mechanism, Synthesizer) and cls is Synthesizer and not mask.adjusts_scores:
        assert q is not None
        attended.q, attended.k = map(first_row, mechanism.as_softmax(q, mask))
        return SoftmaxFormula(1.0)
    if isinstance(mechanism, RandomSynthesizer) and cls is RandomSynthesizer and mechanism.right is not None:
        attended.q, attended.k = map(first_row, mechanism.factors(mask))
        return SoftmaxFormula(1.0)
    if isinstance(mechanism, Argmax) and cls is Argmax:
        attended.choice = _choices(mechanism, inputs)
        return OneHot()
    if isinstance(mechanism, Linear) and q is not None and k is not None:
        return _feature(attended, mechanism, q, k)
    return _dense(attended, mechanism, inputs)


def _feature(attended: Attended, mechanism: Linear, q: Tensor, k: Tensor) -> Feature:
    """Returns the formula of a linear mechanism; feature maps that a trace does not know are kept as features."""
    name = _FEATURE_MAPS.get(type(mechanism))
    if name is None:
        query_features, query_shift = mechanism.features(q.float())
        key_features, key_shift = mechanism.features(k.float())
        attended.q = first_row(query_features)
        attended.k = first_row(key_features)
        attended.cq = first_row(query_shift)
        attended.ck = first_row(key_shift)
        return Feature("stored")
    if isinstance(mechanism, RandomFeatures):
        assert mechanism.w is not None
        attended.w = mechanism.w.detach().float().cpu()
    return Feature(name)


def _weight_tiles(mechanism: Mechanism, inputs: LayerInputs, step: int) -> Iterator[Float[Tensor, "H R S"]]:
    """Yields the explicit weights, `step` queries at a time."""
    mask = inputs.mask
    assert mask.size_override is not None
    T, S = mask.size_override
    positions = None
    if not inputs.cross:
        positions = mask.query_positions(T, S, inputs.v.device)
    for start in range(0, T, step):
        stop = min(T, start + step)
        rows = None
        if positions is not None:
            rows = Rows(*(x[:, start:stop] for x in positions))
        bias = mask.bias
        if bias is not None and bias.dim() > 1 and bias.shape[-2] == T > 1:
            bias = bias[..., start:stop, :]
        q = inputs.q
        if q is not None:
            q = q[:, :, start:stop]
        part = mask.but(rows=rows, size_override=(stop - start, S), bias=bias)
        yield mechanism.weights(q, inputs.k, part)[0].detach().float().cpu()


def _choices(mechanism: Mechanism, inputs: LayerInputs) -> Int[Tensor, "H T"]:
    """Returns the key that each query chooses, −1 where it sees none."""
    assert inputs.q is not None
    step = max(1, CELLS // max(1, inputs.q.shape[1] * inputs.v.shape[2]))
    best = (weights.max(-1) for weights in _weight_tiles(mechanism, inputs, step))
    return torch.cat([torch.where(x.values > 0.5, x.indices, -1) for x in best], 1)


def _dense(attended: Attended, mechanism: Mechanism, inputs: LayerInputs) -> Dense:
    """Returns the weights themselves in float16, and keeps the largest error of each head."""
    tiles: list[list[bytes]] = [[] for _ in range(attended.heads)]
    error = torch.zeros(attended.heads)
    for weights in _weight_tiles(mechanism, inputs, TILE):
        error = torch.maximum(error, (weights - weights.half().float()).abs().amax((1, 2)))
        for head, rows in zip(tiles, weights, strict=True):
            head.append(pack(rows, "f16"))
    attended.error = error.tolist()
    return Dense(TILE, tiles)


def first_row(x: Tensor | None) -> Any:
    """Returns the first row of a batch as float32 on the CPU, in memory of its own; None for None."""
    if x is None:
        return None
    return x[0].detach().float().cpu().contiguous()
