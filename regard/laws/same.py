"""Whether attention computes what another computes, and if not, which common slip explains the difference.

The slips are tried on the reference: one that reproduces the subject's outputs to rounding is named in the finding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard.laws.case import TOLERANCE, Case, Compared, Finding, agree, difference, worst
from regard.laws.subjects import Subject
from regard.mechanisms import Softmax, mix, scores
from regard.shapes import Mask, default_scale

Slip = Callable[[Subject, Case, list[Tensor]], Tensor | None]


class SameAs:
    """The law that a subject gives what `reference` gives, on the same q, k, v and under the same mask."""

    def __init__(self, reference: Subject) -> None:
        self.reference = reference
        self.source = f"SameAs({reference.source})"
        self.__doc__ = f"gives what {reference.label} gives on the same inputs"

    def __call__(self, subject: Subject, case: Case) -> Finding:
        case = self.reference.fit(case.but(window=None, documents=False))
        findings = [agree(case, lambda c: self._outputs(subject, c, None), "outputs")]
        if case.padding != "none" and subject.takes_visible and self.reference.takes_visible:
            findings.append(agree(case, lambda c: self._outputs(subject, c, c.visible(c.T)), "outputs with padding"))
        found = worst(findings)
        slip = self._slip(subject, case) if findings[0].broken else None
        return found if slip is None else findings[0]._replace(what=f"outputs (those of {slip})")

    def _outputs(self, subject: Subject, case: Case, visible: Tensor | None) -> Compared:
        inputs = subject.inputs(case)
        got, want = subject.run(case, inputs, visible), self.reference.run(case, inputs, visible)
        sure = self.reference.certain(case, inputs)
        if sure is not None and got.shape == want.shape:
            got, want = got[sure], want[sure]
        return got, want, None if sure is not None else self.reference.spread(case, inputs)

    def _slip(self, subject: Subject, case: Case) -> str | None:
        """The slip that makes the reference give what the subject gives, on a case too large for a coincidence."""
        case = self.reference.fit(subject.fit(case.but(B=2, T=11, H=4, G=2, K=3, V=5, padding="none")))
        inputs = subject.inputs(case)
        if len(inputs) != 3 or case.type not in TOLERANCE:
            return None
        got = subject.run(case, inputs)
        for words, slip in SLIPS.items():
            slipped = slip(self.reference, case, inputs)
            if slipped is not None and difference(got, slipped) <= TOLERANCE[case.type]:
                return words.format(self.reference.label)
        return None


def _scaled(power: float) -> Slip:
    def slip(reference: Subject, case: Case, inputs: list[Tensor]) -> Tensor:
        q, k, v = inputs
        return reference.run(case, [q * q.shape[-1] ** power, k, v])

    return slip


def _causality(causal: bool) -> Slip:
    def slip(reference: Subject, case: Case, inputs: list[Tensor]) -> Tensor:
        return reference.run(case.but(causal=causal), inputs)

    return slip


def _backwards(reference: Subject, case: Case, inputs: list[Tensor]) -> Tensor:
    return reference.run(case, [x.flip(2) for x in inputs]).flip(2)


def _tiled(reference: Subject, case: Case, inputs: list[Tensor]) -> Tensor:
    q, k, v = inputs
    times = q.shape[1] // k.shape[1]
    return reference.run(case.but(G=case.H), [q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1)])


def _over_queries(reference: Subject, case: Case, inputs: list[Tensor]) -> Tensor | None:
    """softmax down the columns: only softmax attention has scores to do it with."""
    if not isinstance(reference.mechanism(case), Softmax):
        return None
    q, k, v = inputs
    mask = Mask(case.causal)
    raw = scores(q * default_scale(q.shape[-1]), k, mask)
    allowed = mask.allowed(q.shape[2], k.shape[2], q.device)
    if allowed is not None:
        raw = raw.masked_fill(~allowed, float("-inf"))
    return mix(torch.softmax(raw, -2), v)


SLIPS: dict[str, Slip] = {
    "{} with q multiplied by √K: is the factor 1/√K missing?": _scaled(0.5),
    "{} with q divided by √K: are scores divided by K instead of √K?": _scaled(-0.5),
    "{} with q multiplied by K: are scores multiplied by √K instead of divided?": _scaled(1.0),
    "{} over all keys: is causal=True ignored?": _causality(False),
    "causal {}: is causal=False ignored?": _causality(True),
    "{} with each query seeing itself and what comes after: is the mask transposed?": _backwards,
    "{} with key/value heads in the order a b a b: query head h needs head h // (H/G), a a b b": _tiled,
    "{} normalised over the queries: the softmax belongs over the keys, the last axis": _over_queries,
}
