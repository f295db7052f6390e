"""A trial, what it found, and what counts as agreement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from regard.devices import DTYPES
from regard.mechanisms import Mechanism, mix
from regard.shapes import Mask, Size

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


class DoesNotApply(Exception):
    """A law that cannot be asked of this subject, and why."""


class Finding(NamedTuple):
    """The worst error found and how much was allowed, both relative; `what` says where."""

    error: float
    limit: float
    what: str

    @property
    def broken(self) -> bool:
        return not self.error <= self.limit  # so that NaN is broken


@dataclass(frozen=True)
class Case:
    """One trial, completely determined."""

    B: int = 2
    T: int = 5
    S: int = 7
    H: int = 2
    G: int = 1
    K: int = 3
    V: int = 2
    causal: bool = True
    padding: Literal["none", "left", "right", "inside"] = "none"
    window: int | None = None
    documents: bool = False
    dtype: str = "float64"
    seed: int = 0
    device: str = "cpu"
    rounded: str | None = None  # inputs rounded to this dtype first, for an exact answer to the same question

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def __repr__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Case({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    @property
    def type(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def draw(self, *shape: int, stream: int = 0) -> Tensor:
        """Standard normal numbers in the case's dtype; each stream is another draw."""
        made = torch.Generator().manual_seed(self.seed * 1009 + stream)
        x = torch.randn(shape, generator=made, dtype=torch.float64)
        return x.to(DTYPES[self.rounded or self.dtype]).to(self.device, self.type)

    def qkv(self, T: int | None = None, S: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        T, S = T or self.T, S or self.T
        return (
            self.draw(self.B, self.H, T, self.K, stream=1),
            self.draw(self.B, self.G, S, self.K, stream=2),
            self.draw(self.B, self.G, S, self.V, stream=3),
        )

    def range(self, n: int) -> Tensor:
        """0 … n−1 on the case's device."""
        return torch.arange(n, device=self.device)

    def visible(self, S: int) -> Tensor | None:
        """Padding in the case's style, more of it in each further row."""
        if self.padding == "none":
            return None
        visible = torch.ones(self.B, S, dtype=torch.bool, device=self.device)
        for b in range(self.B):
            n = (b + 1 + self.seed) % max(S, 1)  # now and then none, never all
            if self.padding == "left":
                visible[b, :n] = False
            elif self.padding == "right":
                visible[b, S - n :] = False
            else:
                visible[b, (self.range(n) * 2 + b) % S] = False
        return visible

    def mask(self, T: int, S: int) -> Mask:
        documents = (self.range(S) * 3 // max(S, 1)).expand(self.B, S) if self.documents and T == S else None
        window = self.window if T == S else None
        return Mask(self.causal, self.visible(S), window, documents)

    def size(self, T: int | None = None, S: int | None = None) -> Size:
        return Size(
            self.B, T or self.T, S or self.T, self.H, self.G, self.K, self.V, self.causal, self.type, self.device
        )


def worst(findings: Iterable[Finding]) -> Finding:
    """The finding that exceeds its limit most."""

    def excess(f: Finding) -> float:
        ratio = f.error / f.limit if f.limit else (0.0 if f.error == 0 else math.inf)
        return math.inf if math.isnan(ratio) else ratio

    return max(findings, key=excess)


def difference(got: Tensor, want: Tensor, scale: Tensor | float | None = None) -> float:
    """Largest |got − want| relative to the largest |want|, or to `scale`; NaN and infinity are infinitely wrong."""
    if got.shape != want.shape:
        return math.inf
    if got.numel() == 0:
        return 0.0
    got, want = got.detach().double(), want.detach().double()
    if scale is None:
        scale = want.abs().max()
    gap = (got - want).abs() / torch.as_tensor(scale).detach().double().clamp(min=1e-30)
    same = (got == want) | (got.isnan() & want.isnan())
    gap = torch.where(same, 0.0, gap)
    return math.inf if not bool(gap.isfinite().all()) else float(gap.max())


Compared = tuple[Tensor, Tensor, Tensor | float | None]


def agree(case: Case, compute: Callable[[Case], Compared], what: str, times: float = 2.0) -> Finding:
    """Whether `compute` gives (got, want) that agree at the case's precision."""
    got, want, scale = compute(case)
    if case.type in TOLERANCE:
        return Finding(difference(got, want, scale), TOLERANCE[case.type], what)
    _, truth, scale = compute(case.but(dtype="float64", rounded=case.dtype))
    half_a_step = torch.finfo(case.type).eps / 2  # rounding the answer alone may cost this much
    allowed = max(difference(want.to(case.type), truth, scale), half_a_step)
    return Finding(difference(got, truth, scale), times * allowed, what)


def comparable(mechanism: Mechanism, q: Tensor, k: Tensor, mask: Mask, *tensors: Tensor) -> list[Tensor]:
    """Rows on which rounding cannot decide."""
    sure = mechanism.unambiguous_rows(q, k, mask)
    return list(tensors) if sure is None else [x[sure] for x in tensors]


def spread(mechanism: Mechanism, weights: Tensor, v: Tensor) -> Tensor | None:
    """Where weights may be negative, what rounding is relative to: Σ|w||v| of each row."""
    if not mechanism.signed:
        return None
    return mix(weights.abs(), v.to(weights.dtype).norm(dim=-1, keepdim=True)).clamp(min=1e-30)
