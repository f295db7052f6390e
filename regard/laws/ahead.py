"""The law that attention never looks ahead, by changing later tokens and by leaving them out."""

from __future__ import annotations

import math

from torch import Tensor

from regard.laws.case import Case, DoesNotApply, Finding, difference, most_telling, worst
from regard.laws.padding import very_low_scores
from regard.laws.subjects import Subject

LARGEST_ROUNDING = 0.1  # how far rounding in float32 may move outputs where scores are tens of thousands


def looks_ahead(subject: Subject, case: Case) -> Finding:
    """never looks ahead: changing token j leaves every output before j as it was"""
    if not subject.causal:
        raise DoesNotApply("it does not claim to be causal")
    case = case.but(causal=True, padding="none", documents=False).without_bias()
    findings = []
    factors = [1.0, 3.0, 30.0, 0.0]  # the plainest first
    if case.T > 500:  # what such a case is for begins late, and takes long to ask
        factors = [3.0]
    strain = 0
    for size, inputs in _start_inputs(subject, case).items():
        before = subject.run(case, inputs)
        for j in sorted({case.T - 1, case.T // 2} - {0}):
            for factor in factors:
                after = subject.run(case, _replace_token(subject, case, inputs, j, factor))
                what = f"outputs before token {j} of {case.T} when it changes (×{factor:g}){size}"
                found = _compare_prefix(subject, case, after, before, j, what)
                if found.broken and (size or factor > 1):
                    found = _without_rounding(subject, case, found, (size, j, factor))
                findings.append(found._replace(strain=strain + factors.index(factor)))
        if not findings:
            raise DoesNotApply("one token has nothing ahead of it")
        if worst(findings).broken:  # by ordinary inputs, if these show it
            return most_telling(findings)
        strain += len(factors)
    return worst([*findings, _prefix_alone(subject, case)])


def _start_inputs(subject: Subject, case: Case) -> dict[str, list[Tensor]]:
    """Returns the inputs in which a token is changed: of ordinary size, large, and with scores of about −30,000.

    Large inputs show a stabiliser, such as a maximum, that is taken over the whole sequence. Low scores show a mask
    that adds −10,000 and so does not hide a token where all visible ones score less.
    """
    ordinary = subject.inputs(case)
    large = [30 * x for x in ordinary]
    low = very_low_scores(subject, ordinary)
    if not subject.projects:
        large[-1] = ordinary[-1]  # values of moderate size
    return {"": ordinary, ", queries and keys ×30": large, ", scores of about −30,000": low}


def _replace_token(subject: Subject, case: Case, inputs: list[Tensor], j: int, factor: float) -> list[Tensor]:
    """Returns the inputs with another token j, `factor` times as large as usual."""
    changed = [x.clone() for x in inputs]
    for n, x in enumerate(changed):
        token = x.select(subject.token_axis, j)
        token.copy_(factor * case.draw(*token.shape, stream=10 + n))
    return changed


def _compare_prefix(subject: Subject, case: Case, after: Tensor, before: Tensor, j: int, what: str) -> Finding:
    """Returns the largest change of an output before token j, relative to the largest of all outputs."""
    if after.shape != before.shape:
        return Finding(math.inf, 0.0, f"{what}: the output's shape changes")
    got = after.narrow(subject.token_axis, 0, j)
    want = before.narrow(subject.token_axis, 0, j)
    if not bool(want.isfinite().all()):  # inputs beyond what it can compute: another law asks about those
        return Finding(0.0, 0.0, what)
    return Finding(difference(got, want, want.abs().max()), case.tolerance_or(1.0), what)


def _without_rounding(subject: Subject, case: Case, found: Finding, change: tuple[str, int, float]) -> Finding:
    """Returns the finding of the same change in float64 if the law holds there, and else the given one.

    This is asked of somebody else's attention only, where large scores lose digits: subtracting the mean key, which
    leaves softmax as it is, lets a later token change the rounding of earlier scores.
    """
    exact = subject.fit(case.but(dtype="float64"))
    if subject.own or found.error > LARGEST_ROUNDING or case.dtype == "float64":
        return found
    if exact.dtype != "float64" or exact.precision is not None:
        return found
    size, j, factor = change
    inputs = _start_inputs(subject, exact)[size]
    before = subject.run(exact, inputs)
    after = subject.run(exact, _replace_token(subject, exact, inputs, j, factor))
    again = _compare_prefix(subject, exact, after, before, j, found.what)
    if again.broken:
        return found
    return again


def _prefix_alone(subject: Subject, case: Case) -> Finding:
    """Compares the outputs of the first half of the tokens alone with its outputs before the rest.

    Attention that depends on the length of the whole sequence looks ahead, too.
    """
    n = (case.T + 1) // 2
    what = f"outputs of the first {n} of {case.T} tokens without the rest"
    if not subject.takes_length(n):
        return Finding(0.0, 0.0, what)
    inputs = subject.inputs(case)
    whole = subject.run(case, inputs).narrow(subject.token_axis, 0, n)
    alone = subject.run(case, [x.narrow(subject.token_axis, 0, n) for x in inputs])
    scale = subject.cancellation_scale(case, inputs)
    if scale is None:
        scale = whole.abs().max()
    else:
        scale = scale.narrow(subject.token_axis, 0, n)
    sure = subject.unambiguous_rows(case, inputs)
    if sure is not None:
        alone = alone[sure[..., :n]]
        whole = whole[sure[..., :n]]
    return Finding(difference(alone, whole, scale), case.tolerance_or(2.0), what)
