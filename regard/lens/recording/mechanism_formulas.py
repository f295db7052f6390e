"""The trace formula of each of regard's mechanisms, and the arrays that it needs.

For softmax and kernel attention q, k and a formula are stored; for one-hot attention the index of the attended key.
`Synthesizer` (unless `relative`), `RandomSynthesizer` with a rank, and `Gaussian` are stored as softmax attention: the
q and k that are stored are those whose softmax gives their weights. The weights themselves are computed and stored
(formula `Dense`) for any other mechanism, and for masks with documents, a bias or a relative position bias; for
synthesizers also if the mask has slopes or a softcap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.lens.trace.arrays import pack
from regard.lens.trace.formulas import Dense, Formula, KernelFormula, OneHot, SoftmaxFormula
from regard.lens.trace.rules import MAX_ENTRIES
from regard.lens.trace.trace import RecordedAttention
from regard.mechanisms import Mechanism
from regard.mechanisms.argmax import Argmax
from regard.mechanisms.features import Elu, Quadratic
from regard.mechanisms.linear import Linear
from regard.mechanisms.random_features import Fourier, Performer, RandomFeatures
from regard.mechanisms.similarity import Gaussian
from regard.mechanisms.softmax import Softmax
from regard.mechanisms.synthesizer import RandomSynthesizer, Synthesizer
from regard.shapes import Mask, Rows

TILE_ROWS = 64  # rows of dense weights that are packed together
_FEATURE_MAPS: dict[type[Mechanism], str] = {
    Elu: "elu",
    Quadratic: "quadratic",
    Performer: "performer",
    Fourier: "fourier",
}


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of one attention layer: q [1,H,T,K], k [1,G,S,K], v [1,G,S,V], and the mask.

    The mask's `size_override` is (T, S); `cross` tells whether it is cross-attention.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor
    mask: Mask
    cross: bool


def derive_formula(attended: RecordedAttention, mechanism: Mechanism, inputs: LayerInputs) -> Formula:
    """Returns the formula of a mechanism, and stores the arrays that it needs in `attended`.

    A subclass may compute something else than its parent, so a mechanism is recognised by its exact class. The
    exception is linear attention: for an unknown subclass of `Linear` the features are stored.
    """
    q, k, mask = inputs.q, inputs.k, inputs.mask
    cls = type(mechanism)
    attended.q = first_example(q)
    attended.k = first_example(k)
    if mask.documents is not None or mask.bias is not None or mask.relative is not None:
        return _dense(attended, mechanism, inputs)
    if isinstance(mechanism, Softmax) and cls is Softmax:
        assert q is not None
        if mask.slopes is not None:
            attended.slopes = mask.slopes.detach().float().cpu()
        return SoftmaxFormula(mechanism.score_scale(q.shape[-1]), mask.softcap)
    if isinstance(mechanism, Gaussian) and cls is Gaussian:
        assert q is not None and k is not None
        if mask.slopes is not None:
            attended.slopes = mask.slopes.detach().float().cpu()
        attended.q, attended.k = map(first_example, mechanism.as_softmax(q, k))
        return SoftmaxFormula(1.0, mask.softcap)
    if isinstance(mechanism, Synthesizer | RandomSynthesizer) and mask.adjusts_scores:
        return _dense(attended, mechanism, inputs)
    if isinstance(mechanism, Synthesizer) and cls is Synthesizer and not mechanism.relative:
        assert q is not None
        attended.q, attended.k = map(first_example, mechanism.as_softmax(q, mask))
        return SoftmaxFormula(1.0)
    if isinstance(mechanism, RandomSynthesizer) and cls is RandomSynthesizer and mechanism.right is not None:
        attended.q, attended.k = map(first_example, mechanism.factors(mask))
        return SoftmaxFormula(1.0)
    if isinstance(mechanism, Argmax) and cls is Argmax:
        attended.choice = _choices(mechanism, inputs)
        return OneHot()
    if isinstance(mechanism, Linear) and q is not None and k is not None:
        return _kernel_formula(attended, mechanism, q, k)
    return _dense(attended, mechanism, inputs)


def _kernel_formula(attended: RecordedAttention, mechanism: Linear, q: Tensor, k: Tensor) -> KernelFormula:
    """Returns the formula of a linear mechanism; if a trace has no name for its feature map, stores the features."""
    name = _FEATURE_MAPS.get(type(mechanism))
    if name is None:
        query_features, query_shift = mechanism.features(q.float())
        key_features, key_shift = mechanism.features(k.float())
        attended.q = first_example(query_features)
        attended.k = first_example(key_features)
        attended.cq = first_example(query_shift)
        attended.ck = first_example(key_shift)
        return KernelFormula("stored")
    if isinstance(mechanism, RandomFeatures):
        assert mechanism.w is not None
        attended.w = mechanism.w.detach().float().cpu()
    return KernelFormula(name)


def _weight_tiles(mechanism: Mechanism, inputs: LayerInputs, step: int) -> Iterator[Float[Tensor, "H R S"]]:
    """Yields the explicit weights of all queries, `step` queries at a time."""
    mask = inputs.mask
    assert mask.size_override is not None
    T, S = mask.size_override
    # A mask assumes that its queries are the last ones of the sequence. For a part of the queries this is wrong, so
    # their positions are given as `rows`. Masks of cross-attention do not depend on positions.
    positions = None
    if not inputs.cross:
        positions = mask.query_positions(T, S, inputs.v.device)
    for start in range(0, T, step):
        stop = min(T, start + step)
        rows = None
        if positions is not None:
            rows = Rows(*(x[:, start:stop] for x in positions))
        bias = mask.bias
        if bias is not None and bias.dim() > 1 and bias.shape[-2] == T > 1:  # one row per query, not one for all
            bias = bias[..., start:stop, :]
        q = inputs.q
        if q is not None:
            q = q[:, :, start:stop]
        part = mask.but(rows=rows, size_override=(stop - start, S), bias=bias)
        yield mechanism.weights(q, inputs.k, part)[0].detach().float().cpu()


def _choices(mechanism: Mechanism, inputs: LayerInputs) -> Int[Tensor, "H T"]:
    """Returns the index of the key that each query attends to; −1 if it attends to none."""
    assert inputs.q is not None
    step = max(1, MAX_ENTRIES // max(1, inputs.q.shape[1] * inputs.v.shape[2]))
    best = (weights.max(-1) for weights in _weight_tiles(mechanism, inputs, step))
    return torch.cat([torch.where(x.values > 0.5, x.indices, -1) for x in best], 1)


def _dense(attended: RecordedAttention, mechanism: Mechanism, inputs: LayerInputs) -> Dense:
    """Returns the weights themselves, packed in float16, and stores the largest rounding error of each head."""
    tiles: list[list[bytes]] = [[] for _ in range(attended.heads)]
    error = torch.zeros(attended.heads)
    for weights in _weight_tiles(mechanism, inputs, TILE_ROWS):
        error = torch.maximum(error, (weights - weights.half().float()).abs().amax((1, 2)))
        for head, rows in zip(tiles, weights, strict=True):
            head.append(pack(rows, "f16"))
    attended.error = error.tolist()
    return Dense(TILE_ROWS, tiles)


def first_example(x: Tensor | None) -> Any:
    """Returns the first example of a batch as a contiguous float32 tensor on the CPU; None for None."""
    if x is None:
        return None
    return x[0].detach().float().cpu().contiguous()
