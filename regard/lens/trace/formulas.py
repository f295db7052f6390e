"""How a weight is computed from the arrays of a trace: one formula for each kind of attention.

softmax   exp(scale·q·k + bias − n)          n = log Σ exp(…) of the row; with an attention sink, n includes the sink
feature   sign · φ(q)·φ(k) · exp(−n)         n = log |Σ φ(q)·φ(k)| of the row
onehot    1 at the chosen key, else 0
dense     the weights themselves, stored in tiles of rows
recurrence  the weights that the recurrence of a matrix memory amounts to, from q, k, a and b (see `memory.py`)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from regard.lens.trace.arrays import unpack

# (a, cq, ck) with φ(q)·φ(k) = a·exp(cq + ck); cq or ck is None if it is 0 everywhere.
KernelTerms = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class SoftmaxFormula:
    """Softmax attention: softmax(scale·q·kᵀ + bias); with `softcap` c, the scores are c·tanh(scale·q·kᵀ / c) + bias."""

    kind: ClassVar[str] = "softmax"
    scale: float
    softcap: float | None = None

    def scores(self, q: Float[Tensor, "H R K"], k: Float[Tensor, "H S K"]) -> Float[Tensor, "H R S"]:
        """Returns the scores before any bias."""
        scores = (q * self.scale) @ k.mT
        if self.softcap is None:
            return scores
        return scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "scale": self.scale, "softcap": self.softcap}


@dataclass(frozen=True)
class KernelFormula:
    """Kernel (linear) attention: weights proportional to φ(q)·φ(k); `feature_map` names φ."""

    kind: ClassVar[str] = "feature"
    feature_map: str

    def kernel_terms(self, q: Tensor, k: Tensor, w: Tensor | None) -> KernelTerms:
        """Returns (a, cq, ck) with φ(q)·φ(k) = a·exp(cq + ck), in float64; cq or ck is None if it is 0.

        For the map "stored", cq and ck are in the trace, and None is returned for both.
        """
        if w is not None:
            w = w.double()
        return _MAPS[self.feature_map](q.double(), k.double(), w)

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "map": self.feature_map}


@dataclass(frozen=True)
class OneHot:
    """One-hot attention: all weight on one key, or none if a query sees no key."""

    kind: ClassVar[str] = "onehot"

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind}


@dataclass(frozen=True)
class Dense:
    """Weights stored explicitly, in tiles of `tile` rows: tiles[h][n] is the packed n-th tile of head h."""

    kind: ClassVar[str] = "dense"
    tile: int
    tiles: list[list[bytes]]

    def rows(self, head: int, start: int, stop: int, T: int, S: int) -> Float[Tensor, "R S"]:
        """Returns rows `start` to `stop` (exclusive) of one head; only the tiles that contain them are unpacked."""
        first = start // self.tile
        last = max(start, stop - 1) // self.tile
        tiles = [
            unpack(self.tiles[head][n], "f16", (min(self.tile, T - n * self.tile), S)) for n in range(first, last + 1)
        ]
        return torch.cat(tiles).float()[start - first * self.tile : stop - first * self.tile]

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "tile": self.tile}


@dataclass(frozen=True)
class RecurrenceFormula:
    """Gated and delta attention: a matrix memory that decays at each token (see `memory.py`).

    `erases`: whether a write first takes out what the memory holds for its key, as the delta rule does.
    """

    kind: ClassVar[str] = "recurrence"
    scale: float
    erases: bool

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "scale": self.scale, "erases": self.erases}


Formula = SoftmaxFormula | KernelFormula | OneHot | Dense | RecurrenceFormula


def _elu(q: Tensor, k: Tensor, w: Tensor | None) -> KernelTerms:
    a, b = (x.relu() + x.clamp(max=0).exp() for x in (q, k))  # elu(x) + 1, without the rounding of 1 − small
    return a @ b.mT, None, None


def _quadratic(q: Tensor, k: Tensor, w: Tensor | None) -> KernelTerms:
    return (q @ k.mT + 1).square(), None, None


def _performer(q: Tensor, k: Tensor, w: Tensor | None) -> KernelTerms:
    assert w is not None
    query_features, cq = _positive(q * q.shape[-1] ** -0.25, w)
    key_features, ck = _positive(k * k.shape[-1] ** -0.25, w)
    return query_features @ key_features.mT, cq - math.log(w.shape[0]), ck


def _positive(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Returns exp(w·x − ‖x‖²/2) divided by its maximum over the features, and the log of that maximum."""
    b = x @ w.mT - x.square().sum(-1, keepdim=True) / 2
    peak = b.amax(-1, keepdim=True)
    return torch.exp(b - peak), peak[..., 0]


def _fourier(q: Tensor, k: Tensor, w: Tensor | None) -> KernelTerms:
    assert w is not None
    x, y = (z * z.shape[-1] ** -0.25 for z in (q, k))
    (a, b) = (torch.cat([(z @ w.mT).sin(), (z @ w.mT).cos()], -1) for z in (x, y))
    return a @ b.mT / w.shape[0], x.square().sum(-1) / 2, y.square().sum(-1) / 2


def _identity(q: Tensor, k: Tensor, w: Tensor | None) -> KernelTerms:
    """Returns q·k: the arrays hold features already."""
    return q @ k.mT, None, None


_MAPS: dict[str, Callable[[Tensor, Tensor, Tensor | None], KernelTerms]] = {
    "elu": _elu,
    "quadratic": _quadratic,
    "performer": _performer,
    "fourier": _fourier,
    "stored": _identity,
}
MAPS = tuple(_MAPS)
