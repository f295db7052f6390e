"""Describing how attention differs from another if no common slip explains it.

Attention is linear in its values, so one-hot values give back its weights; these say more than outputs do.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from regard.laws.case import Case, CouldNotBeAsked, difference
from regard.laws.subjects import Subject
from regard.shapes import Mask


def describe_rounding(subject: Subject, reference: Subject, case: Case) -> str:
    """Returns words where the difference is about as large as that of rounding to half precision."""
    inputs = subject.inputs(case)
    want = reference.run(case, inputs)
    error = difference(subject.run(case, inputs), want)
    for dtype, name in ((torch.float16, "float16"), (torch.bfloat16, "bfloat16")):
        rounded = difference(reference.run(case, [x.to(dtype).to(x.dtype) for x in inputs]), want)
        if rounded / 20 < error < 3 * rounded:
            return f"as far off as {name} is: is something computed in half precision?"
    return ""


def describe_lengths(subject: Subject, reference: Subject, case: Case) -> str:
    """Returns a sentence that says up to which length outputs are right; "" if they are wrong at two tokens already."""
    limit = case.tolerance_or(4.0)

    def is_right(T: int) -> bool:
        asked = reference.fit(subject.fit(case.but(T=T, padding="none")))
        inputs = subject.inputs(asked)
        return asked.T == T and difference(subject.run(asked, inputs), reference.run(asked, inputs)) <= limit

    if case.T < 4 or not is_right(2):
        return ""
    right = 2
    wrong = case.T
    while wrong - right > 1:
        middle = (right + wrong) // 2
        if is_right(middle):
            right = middle
        else:
            wrong = middle
    return f"right up to {right} tokens and wrong from {wrong} on: is a block left out, or not rescaled?"


def describe_weights(subject: Subject, reference: Subject, case: Case) -> str:
    """Returns what is odd about the weights: not linear in v, weight where none may be, row sums, scores."""
    try:
        got, linear = _weights(subject, case)
    except (CouldNotBeAsked, RuntimeError):
        return ""
    if not linear:
        return "it is not linear in its values"
    mechanism = reference.mechanism(case)
    assert mechanism is not None
    q, k, _ = case.qkv()
    want = mechanism.weights(q, k, Mask(case.causal)).to(got.dtype)
    small = 1e-6
    if bool((got.abs()[want == 0] > small).any()):
        return "weights on keys that may not be seen"
    sums = got.sum(-1)
    words = []
    if bool((got.abs()[want > 1e-3] < 1e-12).any()):
        words.append("no weight on some keys that may be seen: is there a window, or a top-k?")
    if float((sums - 1).abs().max()) > 1e-4 and float(sums.max() - sums.min()) < small and not words:
        words.append(f"its weights sum to {float(sums.mean()):.4g} in every row: are values or outputs scaled?")
    elif float((sums - 1).abs().max()) > 1e-4:
        words.append(f"its rows of weights sum to {float(sums.min()):.4g} … {float(sums.max()):.4g} instead of 1")
    elif not words:
        words.append(_describe_scores(got, want))
    return "; ".join(word for word in words if word)


def _weights(subject: Subject, case: Case) -> tuple[Tensor, bool]:
    """Returns the weights [B,H,T,S] through one-hot values, and whether outputs are linear in values."""
    q, k, v = case.qkv()
    columns = []
    eye = torch.eye(case.T, dtype=v.dtype, device=v.device)
    for keys in eye.split(case.V, 1):  # as some take values of one width only
        one_hot = functional.pad(keys, (0, case.V - keys.shape[1])).expand_as(v)
        columns.append(subject.run(case, [q, k, one_hot])[..., : keys.shape[1]])
    weights = torch.cat(columns, -1)
    doubled = subject.run(case, [q, k, 2 * v])
    return weights, difference(doubled, 2 * subject.run(case, [q, k, v])) <= 1e-4


def _describe_scores(got: Tensor, want: Tensor) -> str:
    """Returns how the scores behind the weights differ, from logarithms less each row's mean."""
    seen = (want > 0) & (got > 0)
    if bool((got < 0).any()) or not bool((seen.sum(-1) > 2).any()):
        return ""
    logs = [_centred(x, seen) for x in (got, want)]
    ours, theirs = logs
    slope = float((ours * theirs).sum() / theirs.square().sum().clamp(min=1e-30))
    if difference(ours, slope * theirs) < 1e-3:
        if abs(slope - 1) < 1e-2:
            return ""
        return f"its scores are {slope:.3g} times as large"
    gap = ours - theirs
    parts = _parts_of_rows(gap, seen)
    if parts:
        return parts
    by_row = gap.masked_fill(~seen, 0)
    # What does not depend on q and k is alike in both sequences of the case; ALiBi's differs from head to head.
    if difference(by_row[:1].expand_as(by_row), by_row) < 1e-3:
        return "something is added to its scores that does not depend on q and k: a bias, or positions?"
    return ""


def _parts_of_rows(gap: Tensor, seen: Tensor) -> str:
    """Returns a sentence if the ratios of weights are right within blocks of keys but wrong between blocks, else ""."""
    S = gap.shape[-1]
    same = ((gap[..., 1:] - gap[..., :-1]).abs() < 1e-4) | ~(seen[..., 1:] & seen[..., :-1])
    cuts = [n + 1 for n in range(S - 1) if not bool(same[..., n].all())]
    if not cuts or len(cuts) > S // 3:
        return ""
    told = " and ".join(f"{cut - 1} | {cut}" for cut in cuts)
    return f"weights are right within parts of the keys, cut at {told}, and not between them: how are parts merged?"


def _centred(weights: Tensor, seen: Tensor) -> Tensor:
    """Returns log weights less their mean over what is seen in each row, zero elsewhere."""
    logs = weights.clamp(min=1e-30).log().masked_fill(~seen, 0)
    mean = logs.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)
    return (logs - mean).masked_fill(~seen, 0)
