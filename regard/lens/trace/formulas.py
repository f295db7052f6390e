"""How a weight is computed from what a trace keeps: one formula for each kind of attention.

softmax   exp(scale·q·k + bias − n)          n = log Σ exp(…) of the row
feature   sign · φ(q)·φ(k) · exp(−n)         n = log |Σ φ(q)·φ(k)|
onehot    1 at the chosen column
dense     the weights themselves, in tiles of rows
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from regard.lens.trace.arrays import unpack

Similar = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class SoftmaxFormula:
    """softmax(scale·q·kᵀ, perhaps capped, plus bias)."""

    kind: ClassVar[str] = "softmax"
    scale: float
    softcap: float | None = None

    def scores(self, q: Float[Tensor, "H R K"], k: Float[Tensor, "H S K"]) -> Float[Tensor, "H R S"]:
        """Returns the scores before any bias."""
        scores = q @ k.mT * self.scale
        if self.softcap is None:
            return scores
        return self.softcap * torch.tanh(scores / self.softcap)

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "scale": self.scale, "softcap": self.softcap}


@dataclass(frozen=True)
class Feature:
    """Similarities that are products of features; `map` says which."""

    kind: ClassVar[str] = "feature"
    map: str

    def similar(self, q: Tensor, k: Tensor, w: Tensor | None) -> Similar:
        """Returns (a, cq, ck) with φ(q)·φ(k) = a·exp(cq + ck), all in float64; c None means 0."""
        if w is not None:
            w = w.double()
        return _MAPS[self.map](q.double(), k.double(), w)

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "map": self.map}


@dataclass(frozen=True)
class OneHot:
    """All weight on one key."""

    kind: ClassVar[str] = "onehot"

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind}


@dataclass(frozen=True)
class Dense:
    """Weights kept as they are, `tile` rows at a time: tiles[h][n] are packed rows of head h."""

    kind: ClassVar[str] = "dense"
    tile: int
    tiles: list[list[bytes]]

    def rows(self, head: int, start: int, stop: int, T: int, S: int) -> Float[Tensor, "R S"]:
        """Returns rows of one head; only tiles that hold some of them are unpacked."""
        first = start // self.tile
        last = max(start, stop - 1) // self.tile
        tiles = [
            unpack(self.tiles[head][n], "f16", (min(self.tile, T - n * self.tile), S)) for n in range(first, last + 1)
        ]
        return torch.cat(tiles).float()[start - first * self.tile : stop - first * self.tile]

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "tile": self.tile}


Formula = SoftmaxFormula | Feature | OneHot | Dense


def _elu(q: Tensor, k: Tensor, w: Tensor | None) -> Similar:
    return (functional.elu(q) + 1) @ (functional.elu(k) + 1).mT, None, None


def _quadratic(q: Tensor, k: Tensor, w: Tensor | None) -> Similar:
    return (q @ k.mT + 1).square(), None, None


def _performer(q: Tensor, k: Tensor, w: Tensor | None) -> Similar:
    assert w is not None
    query_features, cq = _positive(q * q.shape[-1] ** -0.25, w)
    key_features, ck = _positive(k * k.shape[-1] ** -0.25, w)
    return query_features @ key_features.mT, cq - math.log(w.shape[0]), ck


def _positive(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Returns exp(w·x − ‖x‖²/2) over its largest entry, and the logarithm of that."""
    b = x @ w.mT - x.square().sum(-1, keepdim=True) / 2
    peak = b.amax(-1, keepdim=True)
    return torch.exp(b - peak), peak[..., 0]


def _fourier(q: Tensor, k: Tensor, w: Tensor | None) -> Similar:
    assert w is not None
    x, y = (z * z.shape[-1] ** -0.25 for z in (q, k))
    (a, b) = (torch.cat([(z @ w.mT).sin(), (z @ w.mT).cos()], -1) for z in (x, y))
    return a @ b.mT / w.shape[0], x.square().sum(-1) / 2, y.square().sum(-1) / 2


def _stored(q: Tensor, k: Tensor, w: Tensor | None) -> Similar:
    return q @ k.mT, None, None


_MAPS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Similar]] = {
    "elu": _elu,
    "quadratic": _quadratic,
    "performer": _performer,
    "fourier": _fourier,
    "stored": _stored,
}
MAPS = tuple(_MAPS)
