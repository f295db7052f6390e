"""Laws of a call as such: it can be repeated, it looks at other tokens, and its numbers bear large scores."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from regard.laws.asking import inputs_matter
from regard.laws.case import Case, CouldNotBeAsked, DoesNotApply, Finding, difference, worst
from regard.laws.subjects import Subject

# Queries and keys times these give scores of hundreds, where exp overflows unless a maximum is subtracted: beyond 709
# in float64, 88 in float32, 11 in float16. The scores themselves fit each dtype many times over.
# In float16 exp overflows beyond 11: scores of tens show it, and leave random features what they can represent.
SIZES = {"float64": 40.0, "float32": 14.0, "float16": 2.5}
# A module makes its own queries and keys from tokens, about half as large as these.
TOKEN_SIZES = {"float64": 120.0, "float32": 40.0, "float16": 6.0}
# Rounding to float32 leaves steps of about 1e-7 of the output, to float16 or bfloat16 of 1e-4 to 1e-2.
COARSEST = 3e-6


def calls_are_pure(subject: Subject, case: Case) -> Finding:
    """a call is pure: repeated, it gives the same, its inputs stay as they were, and nothing is kept between calls"""
    case = subject.fit(case.but(padding="none", documents=False, T=min(case.T, 131)))
    inputs = subject.inputs(case)
    copies = [x.clone() for x in inputs]
    with torch.no_grad():
        first = subject.run(case, inputs)
        # A mask, a cache or a maximum that is kept would be noticed by the next call.
        subject.run(case, [2 * x + 1 for x in copies])
        again = subject.run(case, copies)
    changed = 0.0
    if subject.changed_inputs or any(not torch.equal(x, y) for x, y in zip(inputs, copies, strict=True)):
        changed = math.inf
    scale = None
    if first.isfinite().all():
        scale = first.abs().max()
    what = "outputs of one call made twice, with another between them"
    kept_what = "outputs of a first call and of a second: what is kept?"
    numbers_before = torch.get_rng_state()
    with torch.no_grad():
        third = subject.run(case, copies)
    # What is kept may differ once only; what is drawn (dropout) differs from call to call, in a small case by chance.
    if not torch.equal(torch.get_rng_state(), numbers_before):
        what = "outputs of one call made twice: is dropout left on, or anything else drawn at random?"
        kept_what = what
    elif difference(third, again, scale) > case.tolerance_or(1.0):
        what = "outputs of one call, another at each call: is a state kept between calls, or something drawn at random?"
    repeated = Finding(difference(again, first, scale), case.tolerance_or(1.0), what)
    if not bool(first.isfinite().all()):  # another law asks about those
        repeated = Finding(0.0, case.tolerance_or(1.0), what)
    findings = [repeated, Finding(changed, 0.0, "inputs are modified in place")]
    if _writes_into_masks(subject, case, copies):
        findings.append(Finding(math.inf, 0.0, "a mask is modified in place"))
    call_fresh = getattr(subject, "call_fresh", None)
    if call_fresh is not None and bool(first.isfinite().all()):
        with torch.no_grad():
            after_another = call_fresh(case, [2 * x + 1 for x in copies], copies)
            alone = call_fresh(case, copies)
        kept = difference(after_another, alone, scale)
        findings.append(Finding(kept, case.tolerance_or(1.0), kept_what))
        if subject.takes_visible and case.T > 1:
            visible = torch.ones(case.B, case.T, dtype=torch.bool, device=case.device)
            visible[:, -1] = False
            with torch.no_grad():
                after_mask = call_fresh(case, copies, copies, visible=visible)
            what = "outputs without a mask, after a call with one: is a mask kept, or written into a buffer?"
            findings.append(Finding(difference(after_mask, alone, scale), case.tolerance_or(1.0), what))
    return worst(findings)


def _writes_into_masks(subject: Subject, case: Case, inputs: list[Tensor]) -> bool:
    """Returns whether a call writes into its masks, with all keys visible or with the last one hidden."""
    if subject.own:
        return False
    subject.changed_masks = False  # trying what a mask means may have handed over one of another form
    with torch.no_grad():
        subject.run(case, inputs)
        if subject.takes_visible and case.T > 1:
            visible = torch.ones(case.B, case.T, dtype=torch.bool, device=case.device)
            visible[:, -1] = False
            subject.run(case, inputs, visible)
    return subject.changed_masks


def other_tokens_matter(subject: Subject, case: Case) -> Finding:
    """it attends: a token's output depends on other tokens"""
    if subject.own:
        raise DoesNotApply("the weights of a mechanism say it")
    case = case.but(padding="none", documents=False)
    if case.T < 2:
        raise DoesNotApply("one token has no other")
    inputs = subject.inputs(case)
    before = subject.run(case, inputs)
    limit = case.tolerance_or(1.0)  # weights that sum to one may do so but for rounding
    error = math.inf
    what = "the last token's output, which no change of the others moves"
    is_moved = _moves_with_others(subject, case, inputs, before, 1) > limit
    # The last token may be alone in its block of keys; then the one before it has company.
    if not is_moved and case.T > 2:
        is_moved = _moves_with_others(subject, case, inputs, before, 2) > limit
    if not is_moved:
        zero = _zero_parameter(subject)
        if zero:
            what += f": {zero} is all zero, as layers begin that are to be switched on by training"
        return Finding(error, 0.0, what, noted=bool(zero))
    asks = inputs_matter(subject, case, inputs)
    return asks._replace(noted=asks.noted or bool(_zero_parameter(subject)))


def _moves_with_others(subject: Subject, case: Case, inputs: list[Tensor], before: Tensor, place: int) -> float:
    """Returns how far an output moves when all other tokens change; `place` counts from the end, the last is 1."""
    axis = subject.token_axis
    moved = 0.0
    for factor in (1.0, 30.0, -30.0):  # a key of either sign, so large that one of both is looked at by an argmax
        changed = [x.clone() for x in inputs]
        for n, x in enumerate(changed):
            if n > 0 or len(changed) == 1:
                own = x.narrow(axis, x.shape[axis] - place, 1).clone()
                x.copy_(factor * case.draw(*x.shape, stream=80 + n))
                x.narrow(axis, x.shape[axis] - place, 1).copy_(own)
        after = subject.run(case, changed)
        row = max(after.shape[axis] - place, 0)  # what pools tokens gives fewer of them
        moved = max(moved, difference(after.narrow(axis, row, 1), before.narrow(axis, row, 1)))
    return moved


def _zero_parameter(subject: Subject) -> str:
    """Returns the name of a module's parameter that is zero throughout, biases aside, or nothing."""
    module = getattr(subject, "f", None)
    if not isinstance(module, nn.Module):
        return ""
    named = module.named_parameters()
    return next((name for name, x in named if not name.endswith("bias") and not bool(x.any())), "")


def numbers_bear_large_scores(subject: Subject, case: Case) -> Finding:
    """large scores stay finite, in float16 too, and float32 is not rounded to half precision on the way"""
    case = case.but(padding="none", documents=False, T=min(case.T, 131))
    findings = []
    for dtype in ("float64", "float32", "float16"):
        asked = subject.fit(case.but(dtype=dtype, precision=None))
        if asked.dtype != dtype or (dtype == "float16" and subject.own):
            continue
        found = _with_large_scores(subject, asked)
        if found is None and dtype == "float16":
            found = _with_few_tokens(subject, asked)
        if found is not None:
            findings.append(found)
    roughness = getattr(subject, "roughness", None)
    if roughness is not None and "float64" in subject.dtypes:  # type: ignore[attr-defined]
        what = "steps in outputs of float64 inputs that change little: is something computed in half precision?"
        findings.append(Finding(roughness(2e-5), COARSEST, what))
    if not findings:
        raise DoesNotApply("ordinary inputs of no dtype give finite outputs")
    return worst(findings)


def _with_large_scores(subject: Subject, case: Case) -> Finding | None:
    """Tests that large queries and keys give finite outputs; returns None if ordinary ones do not."""
    sizes = SIZES
    if subject.projects:
        sizes = TOKEN_SIZES
    inputs = subject.inputs(case)
    # Of one sign: scores are large and positive, where exp overflows, and features such as elu + 1 do not vanish.
    large = [sizes[case.dtype] * x.abs() for x in inputs]
    if not subject.projects:
        large[-1] = inputs[-1]  # values stay as they are
    finite = low_finite = True
    try:
        with torch.no_grad():
            ordinary = _finite(subject.run(case, inputs))
            finite = _finite(subject.run(case, large))
            if ordinary and finite and _reads_differences_only(subject, case, inputs):
                low_finite = _finite(subject.run(case, [large[0], -large[1], large[2]]))
    except CouldNotBeAsked:
        if case.dtype == "float16":  # many a function has no float16, and says so
            return None
        raise
    if not ordinary:
        return None
    error = 0.0
    if not (finite and low_finite):
        error = math.inf
    scores = "tens" if case.dtype == "float16" else "hundreds"
    why = "is exp taken less a maximum?"
    noted = False
    if not low_finite:
        scores = f"−{scores}"
        why = "does a maximum begin at zero, which all scores of a row may lie below?"
    elif not finite and subject.projects and not _overflows(subject, case, large):
        # Such large tokens make queries of either sign, for which all features such as elu + 1 may vanish, and powers
        # that overflow.
        noted = True
        why = "no exponential overflows, but features that are all zero, or a power of the tokens, may do it"
    return Finding(error, 0.0, f"NaN or infinity from scores of {scores} in {case.dtype}: {why}", noted)


def _with_few_tokens(subject: Subject, case: Case) -> Finding | None:
    """Tests that three tokens give finite outputs in float16 if they do in float32; returns None if neither runs.

    So few overflow no sum: what is left is a number that float16 cannot hold, such as −1e9 in the place of −∞.
    """
    few = case.but(T=3, S=3)
    try:
        with torch.no_grad():
            if not _finite(subject.run(few.but(dtype="float32"), subject.inputs(few.but(dtype="float32")))):
                return None
            finite = _finite(subject.run(few, subject.inputs(few)))
    except CouldNotBeAsked:
        return None
    error = 0.0 if finite else math.inf
    what = (
        "NaN or infinity from three ordinary tokens in float16, finite in float32: is −1e9 multiplied by a mask there?"
    )
    return Finding(error, 0.0, what)


class _Overflow(TorchDispatchMode):
    """Notices an exponential that is infinite."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: bool = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and re.match(r"aten\.(exp|exp2|expm1)_?\.", str(func)):
            self.seen = self.seen or bool(made.isposinf().any())
        return made


def _overflows(subject: Subject, case: Case, inputs: list[Tensor]) -> bool:
    watch = _Overflow()
    with torch.no_grad(), watch:
        subject.run(case, inputs)
    return watch.seen


def _reads_differences_only(subject: Subject, case: Case, inputs: list[Tensor]) -> bool:
    """Returns whether a number added to all scores of a query changes nothing, as in a softmax over the keys.

    If it changes something, features of keys that point away may vanish for good reason, so very low scores are not
    tried. Regard's own mechanisms are tried with scores of −30,000 in `hidden` and `looks-ahead`.
    """
    if subject.own or subject.projects or len(inputs) != 3 or case.T < 2 or case.tolerance is None:
        return False
    q, k, v = inputs
    shift = case.draw(1, 1, 1, k.shape[-1], stream=90)
    shifted = subject.run(case, [q, k + shift, v])
    return difference(shifted, subject.run(case, inputs)) <= 1e3 * case.tolerance


def _finite(out: Tensor) -> bool:
    return bool(out.isfinite().all())
