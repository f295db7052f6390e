"""Whether attention computes what another computes, and if not, which common slip explains the difference.

The slips are tried on the reference: one that reproduces the subject's outputs to rounding is named in the finding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard.laws.case import Case, Compared, Finding, agree, difference, worst
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
            findings.append(agree(case, lambda c: self._outputs(subject, c, _pad(subject, c)), "outputs with padding"))
        if findings[0].broken:
            slip = self._find_slip(subject, case)
            if slip is not None:
                return findings[0]._replace(what=f"outputs (those of {slip})")
        return worst(findings)

    def _outputs(self, subject: Subject, case: Case, visible: Tensor | None) -> Compared:
        """Returns the outputs of subject and reference, on rows that rounding does not decide, and their scale."""
        inputs = subject.inputs(case)
        got = subject.run(case, inputs, visible)
        want = self.reference.run(case, inputs, visible)
        sure = self.reference.unambiguous_rows(case, inputs)
        if sure is None:
            return got, want, self.reference.cancellation_scale(case, inputs)
        if got.shape == want.shape:
            got = got[sure]
            want = want[sure]
        return got, want, None

    def _find_slip(self, subject: Subject, case: Case) -> str | None:
        """Returns the slip that makes the reference give what the subject gives, or None.

        It is tried on a case too large for a coincidence.
        """
        case = self.reference.fit(subject.fit(case.but(B=2, T=11, H=4, G=2, K=3, V=5, padding="none")))
        inputs = subject.inputs(case)
        if len(inputs) != 3 or case.tolerance is None:
            return None
        got = subject.run(case, inputs)
        for words, slip in SLIPS.items():
            slipped = slip(self.reference, case, inputs)
            if slipped is not None and difference(got, slipped) <= case.tolerance:
                return words.format(self.reference.label)
        return None


def _pad(subject: Subject, case: Case) -> Tensor | None:
    """Returns which keys may be seen, [B,T].

    Every query sees the first one, unless the subject promises zeros where nothing is seen: libraries differ there.
    """
    visible = case.visible(case.T)
    if visible is not None and not subject.promises_zeros:
        visible[:, 0] = True
    return visible


def _scale_queries(power: float) -> Slip:
    """Returns the slip of multiplying queries by K to some power."""

    def slip(reference: Subject, case: Case, inputs: list[Tensor]) -> Tensor:
        q, k, v = inputs
        return reference.run(case, [q * q.shape[-1] ** power, k, v])

    return slip


def _ignore_causal(causal: bool) -> Slip:
    """Returns the slip of being causal always, or never."""

    def slip(reference: Subject, case: Case, inputs: list[Tensor]) -> Tensor:
        return reference.run(case.but(causal=causal), inputs)

    return slip


def _transpose_mask(reference: Subject, case: Case, inputs: list[Tensor]) -> Tensor:
    """Returns causal attention backwards in time: each query sees itself and what comes after."""
    return reference.run(case, [x.flip(2) for x in inputs]).flip(2)


def _tile_heads(reference: Subject, case: Case, inputs: list[Tensor]) -> Tensor:
    """Returns attention with key/value heads in the order a b a b."""
    q, k, v = inputs
    times = q.shape[1] // k.shape[1]
    return reference.run(case.but(G=case.H), [q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1)])


def _normalise_over_queries(reference: Subject, case: Case, inputs: list[Tensor]) -> Tensor | None:
    """Returns attention with softmax down the columns; None for a reference that has no scores to do it with."""
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
    "{} with q multiplied by √K: is the factor 1/√K missing?": _scale_queries(0.5),
    "{} with q divided by √K: are scores divided by K instead of √K?": _scale_queries(-0.5),
    "{} with q multiplied by K: are scores multiplied by √K instead of divided?": _scale_queries(1.0),
    "{} over all keys: is causal=True ignored?": _ignore_causal(False),
    "causal {}: is causal=False ignored?": _ignore_causal(True),
    "{} with each query seeing itself and what comes after: is the mask transposed?": _transpose_mask,
    "{} with key/value heads in the order a b a b: query head h needs head h // (H/G), a a b b": _tile_heads,
    "{} normalised over the queries: the softmax belongs over the keys, the last axis": _normalise_over_queries,
}
