"""A trial, what it found, and what counts as agreement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from regard.devices import DTYPES
from regard.laws.gating import TokenGated
from regard.mechanisms import Mechanism, mix
from regard.shapes import Mask, Size

PLAIN = 1e-3  # an error that nobody takes for rounding
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}

Padding = Literal["none", "left", "right", "inside"]
Adjust = Literal["none", "bias", "slopes", "softcap"]


class DoesNotApply(Exception):
    """A law that has nothing to say about this subject, and why."""


class CouldNotBeAsked(Exception):
    """A subject that raised an exception or could not be called, and where, and what to pass.

    An exception says nothing about a law: the law was not asked.
    """


class Finding(NamedTuple):
    """The worst error found and how much was allowed, both relative; `what` says where.

    `noted` is for what is worth knowing and no fault: attention that keeps every other law may differ there. `strain`
    says how unusual the inputs are that show it, 0 for ordinary ones: of two examples the plainer one tells more.
    """

    error: float
    limit: float
    what: str
    noted: bool = False
    strain: int = 0

    @property
    def exceeded(self) -> bool:
        """Whether the error is larger than allowed; NaN is."""
        return not self.error <= self.limit

    @property
    def tellingness(self) -> tuple[bool, int]:
        """A sort key of examples, the smallest for the one that tells most: an error too large for rounding (or NaN),
        shown by ordinary inputs."""
        return self.error < PLAIN, self.strain

    @property
    def broken(self) -> bool:
        return self.exceeded and not self.noted


@dataclass(frozen=True)
class Case:
    """One trial, completely determined.

    With `rounded`, inputs are first rounded to this dtype and stored in `dtype` again, so that an exact computation
    and one in lower precision start from the same numbers. `precision` is the dtype that the subject computes in; None
    means that of its inputs. `adjust` names a change of the scores: a bias, ALiBi's bias, or a softcap. `softcap` is
    the default that the subject declares.
    """

    B: int = 2
    T: int = 5
    S: int = 7
    H: int = 2
    G: int = 1
    K: int = 3
    V: int = 2
    causal: bool = True
    padding: Padding = "none"
    window: int | None = None
    documents: bool = False
    dtype: str = "float64"
    seed: int = 0
    device: str = "cpu"
    rounded: str | None = None
    precision: str | None = None
    adjust: Adjust = "none"
    softcap: float | None = None

    def but(self, **changes: Any) -> Case:
        """Returns the case with some fields changed."""
        return replace(self, **changes)

    def __repr__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Case({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    @property
    def type(self) -> torch.dtype:
        """The dtype of the inputs."""
        return DTYPES[self.dtype]

    @property
    def tolerance(self) -> float | None:
        """How far apart two ways of computing the same may be; None in half precision, where it is measured."""
        return TOLERANCE.get(DTYPES[self.precision or self.dtype])

    def tolerance_or(self, roundings: float) -> float:
        """Returns the tolerance or, in half precision, `roundings` times the machine epsilon."""
        if self.tolerance is not None:
            return self.tolerance
        return roundings * torch.finfo(self.type).eps

    def draw(self, *shape: int, stream: int = 0) -> Tensor:
        """Returns standard normal numbers in the case's dtype; each stream is another draw."""
        generator = torch.Generator().manual_seed(self.seed * 1009 + stream)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(DTYPES[self.rounded or self.dtype]).to(self.device, self.type)

    def qkv(self, T: int | None = None, S: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q [B,H,T,K], k [B,G,S,K] and v [B,G,S,V]; S is T unless said."""
        T = T or self.T
        S = S or self.T
        return (
            self.draw(self.B, self.H, T, self.K, stream=1),
            self.draw(self.B, self.G, S, self.K, stream=2),
            self.draw(self.B, self.G, S, self.V, stream=3),
        )

    def range(self, n: int) -> Tensor:
        """Returns 0 … n−1 on the case's device."""
        return torch.arange(n, device=self.device)

    def visible(self, S: int) -> Tensor | None:
        """Returns which of S keys may be seen, [B,S]: padding in the case's style, more of it in each further row."""
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

    def adjustment(self, T: int, S: int) -> Any:
        """Returns what `adjust` names: a bias [H,T,S], slopes [H], a softcap, or None."""
        if self.adjust == "bias":
            return self.draw(self.H, T, S, stream=4)
        if self.adjust == "slopes":
            return self.draw(self.H, stream=4).abs()
        if self.adjust == "softcap":
            return 1.5
        return None

    def without_bias(self) -> Case:
        """Returns the case without a bias, which belongs to one length; slopes and softcaps go with any."""
        if self.adjust == "bias":
            return self.but(adjust="none")
        return self

    def adjusted(self, mask: Mask, T: int, S: int) -> Mask:
        """Returns the mask with the case's bias, slopes or softcap."""
        if self.softcap is not None and self.adjust != "softcap":
            mask = mask.but(softcap=self.softcap)
        if self.adjust == "none":
            return mask
        return mask.but(**{self.adjust: self.adjustment(T, S)})

    def mask(self, T: int, S: int) -> Mask:
        """Returns the mask of T queries over S keys; windows and documents are for T = S."""
        if T != S:
            return self.adjusted(Mask(self.causal, self.visible(S)), T, S)
        documents = None
        if self.documents:
            documents = (self.range(S) * 3 // max(S, 1)).expand(self.B, S)
        return self.adjusted(Mask(self.causal, self.visible(S), self.window, documents), T, S)

    def size(self, T: int | None = None, S: int | None = None) -> Size:
        """Returns the sizes of a call; S is T unless said."""
        return Size(
            self.B, T or self.T, S or self.T, self.H, self.G, self.K, self.V, self.causal, self.type, self.device,
            self.window,
        )  # fmt: skip


def worst(findings: Iterable[Finding]) -> Finding:
    """Returns the finding that exceeds its limit most; one that is only noted counts after all others."""

    def excess(finding: Finding) -> tuple[bool, float]:
        if finding.limit > 0 and not math.isnan(finding.error):
            return finding.broken, finding.error / finding.limit
        if finding.exceeded:
            return finding.broken, math.inf
        return False, 0.0

    return max(findings, key=excess)


def most_telling(findings: Sequence[Finding]) -> Finding:
    """Returns the broken finding that tells most, of the plainest inputs; where none is broken, the worst."""
    broken = [f for f in findings if f.broken]
    if broken:
        return min(broken, key=lambda f: f.tellingness)
    return worst(findings)


def difference(got: Tensor, want: Tensor, scale: Tensor | float | None = None) -> float:
    """Returns the largest |got − want| relative to the largest |want|, or to `scale`.

    Returns infinity for another shape and for NaN, even if both have NaN at the same place.
    """
    if got.shape != want.shape:
        return math.inf
    if got.numel() == 0:
        return 0.0
    got = got.detach().double()
    want = want.detach().double()
    if scale is None:
        scale = want.abs().max()
    gap = (got - want).abs() / torch.as_tensor(scale).detach().double().clamp(min=1e-30)
    gap = torch.where(got == want, 0.0, gap)  # infinity less infinity would be NaN
    if not bool(gap.isfinite().all()):
        return math.inf
    return float(gap.max())


Compared = tuple[Tensor, Tensor, Tensor | float | None]


def agree(case: Case, compute: Callable[[Case], Compared], what: str, times: float = 2.0) -> Finding:
    """Compares the first two of what `compute` returns, (got, want, scale), at the case's precision.

    In half precision both are compared with the `want` of the same case in float64: the error of `got` may be `times`
    that of `want`.
    """
    got, want, scale = compute(case)
    if case.tolerance is not None:
        return Finding(difference(got, want, scale), case.tolerance, what)
    _, truth, scale = compute(case.but(dtype="float64", rounded=case.dtype))
    half_a_step = torch.finfo(case.type).eps / 2  # rounding the answer alone may cost this much
    allowed = max(difference(want.to(case.type), truth, scale), half_a_step)
    return Finding(difference(got, truth, scale), times * allowed, what)


def comparable(mechanism: Mechanism, q: Tensor, k: Tensor, mask: Mask, *tensors: Tensor) -> list[Tensor]:
    """Returns the rows of each tensor [B,H,T,·] whose result does not hang on rounding, as a tie of argmax does."""
    sure = mechanism.unambiguous_rows(q, k, mask)
    if sure is None:
        return list(tensors)
    return [x[sure] for x in tensors]


def cancellation_scale(mechanism: Mechanism, q: Tensor, k: Tensor, mask: Mask, v: Tensor) -> Tensor | None:
    """Returns what rounding is relative to where weights can cancel: Σ|w||v| of each row, [B,H,T,1]; else None.

    A weight of a memory is itself a sum that can cancel: there |w| is a bound on the terms of that sum.
    """
    weights = mechanism.weights(q, k, mask)
    if not mechanism.signed and not bool((weights < 0).any()):
        return None
    sizes = weights.abs()
    if isinstance(mechanism, TokenGated):
        sizes = mechanism.weight_bounds(q, k, mask)
    values = mask.zero_hidden(v).to(sizes.dtype)
    return mix(sizes, values.norm(dim=-1, keepdim=True)).clamp(min=1e-30)
