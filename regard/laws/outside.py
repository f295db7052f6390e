"""Laws that can be asked of any attention from outside: a mechanism, a function, a module."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck

from regard.laws.case import (
    Case,
    DoesNotApply,
    Finding,
    cancellation_scale,
    comparable,
    difference,
    worst,
)
from regard.laws.certain import heads_are_not_views
from regard.laws.faces import gradients_or_zeros
from regard.laws.habits import mixes_along
from regard.laws.late import late_gradients_are_right
from regard.laws.padding import gradients_under_masks
from regard.laws.subjects import Subject
from regard.mechanisms import Argmax, Mechanism, Softmax
from regard.shapes import Mask


def batch_does_not_matter(subject: Subject, case: Case) -> Finding:
    """padding (left, right, inside), batch size and batch order do not matter"""
    case = case.but(B=max(case.B, 2)).without_bias()
    findings = []
    plain = case.but(padding="none", documents=False)
    inputs = subject.inputs(plain)
    whole = subject.run(plain, inputs)
    sure = subject.unambiguous_rows(plain, inputs)
    scale = subject.cancellation_scale(plain, inputs)

    def compare(got: Tensor, rows: int | slice, what: str) -> Finding:
        want = whole[rows]
        relative_to = whole.abs().max()
        if got.shape != want.shape:
            return Finding(math.inf, 0.0, f"{what}: output {list(got.shape)} instead of {list(want.shape)}")
        if scale is not None:
            relative_to = scale[rows]
        if sure is not None:
            got = got[sure[rows]]
            want = want[sure[rows]]
        return Finding(difference(got, want, relative_to), case.tolerance_or(2.0), what)

    order = case.range(case.B).roll(1)
    reordered = subject.run(plain, [x[order] for x in inputs])
    findings.append(compare(reordered[order.argsort()], slice(None), "order of the batch"))
    for b in range(case.B):
        alone = subject.run(plain, [x[b : b + 1] for x in inputs])
        found = compare(alone[0], b, f"sequence {b} alone and in a batch")
        if found.broken and _attends_along_batch(subject, plain):
            what = f"{found.what}: it attends along the first axis; does it want tokens first, [T,B,D] (batch_first)?"
            found = found._replace(what=what)
        findings.append(found)
    # The same numbers, laid out as a transposed tensor is.
    transposed = subject.run(plain, [x.mT.contiguous().mT for x in inputs])
    findings.append(compare(transposed, slice(None), "inputs that are not contiguous"))
    if subject.takes_visible and case.padding != "none":
        for b in range(case.B):
            if not subject.takes_length(case.T + 1 + b):
                continue
            padded, visible = _pad(subject, case, inputs, b)
            out = subject.run(plain, padded, visible)
            kept = out[0]
            if not subject.pools and not subject.queries_meet:
                kept = out[_expand(visible, out, subject)].view(whole[b].shape)
            found = compare(kept, b, f"sequence {b} padded {case.padding}")
            if found.exceeded and case.padding != "right" and subject.knows_positions:
                what = f"{found.what}: it counts positions, and hidden tokens count, too"
                found = found._replace(what=what, noted=True)
            findings.append(found)
    if getattr(subject, "takes_packed", False):
        findings.append(_packed_is_alone(subject, plain, inputs))
    if case.documents and subject.mechanism(case) is not None and case.T > 1:
        findings.append(_packed_is_separate(subject, plain, inputs))
    return worst(findings)


def _attends_along_batch(subject: Subject, case: Case) -> bool:
    """Returns whether a module mixes the sequences of a batch, and not their tokens."""
    if not subject.projects:
        return False
    case = subject.fit(case.but(B=3, T=max(case.T, 3)))  # a single token has no others to mix with
    if case.T < 2:
        return False

    def run(inputs: list[Tensor]) -> Tensor:
        return subject.run(case, inputs)

    inputs = subject.inputs(case)
    return mixes_along(0, run, case, inputs) and not mixes_along(1, run, case, inputs)


def _pad(subject: Subject, case: Case, inputs: list[Tensor], b: int) -> tuple[list[Tensor], Tensor]:
    """Returns one sequence of a batch among tokens that are to be hidden, and which tokens are visible, [1,T]."""
    longer = case.T + 1 + b
    pattern = case.visible(longer)
    assert pattern is not None
    visible = _choose(pattern[b : b + 1], case.T)
    padded = []
    for n, x in enumerate(inputs):
        sequence = x[b : b + 1]
        if n == 0 and subject.queries_meet:  # they attend to one another, and the mask is that of their context
            padded.append(sequence)
            continue
        shape = list(sequence.shape)
        shape[subject.token_axis] = longer
        filled = 3 * case.draw(*shape, stream=20 + n)
        filled[_expand(visible, filled, subject)] = sequence.reshape(-1, x.shape[-1])
        padded.append(filled)
    return padded, visible


def _expand(tokens: Tensor, x: Tensor, subject: Subject) -> Tensor:
    """Returns a mask of tokens [B,T] for all of x's axes but the last."""
    if subject.token_axis == 2:
        tokens = tokens[:, None]
    return tokens.expand(x.shape[:-1])


def _choose(visible: Tensor, n: int) -> Tensor:
    """Returns the pattern [1,T] with exactly n visible."""
    hidden = (~visible[0]).nonzero()[:, 0].tolist()
    shown = visible[0].nonzero()[:, 0].tolist()
    chosen = torch.zeros_like(visible)
    chosen[0, sorted((shown + hidden)[:n])] = True
    return chosen


def _packed_is_alone(subject: Any, case: Case, inputs: list[Tensor]) -> Finding:
    """Returns whether sequences of unequal lengths, packed one after another, give what each gives alone."""
    axis = subject.token_axis
    lengths = [max(1, case.T - b * (case.T // 2)) for b in range(case.B)]
    sequences = [[x[b : b + 1].narrow(axis, 0, n) for x in inputs] for b, n in enumerate(lengths)]
    together = subject.call_packed(case, sequences)
    alone = [subject.run(case, sequence) for sequence in sequences]
    scale = max(x.abs().max() for x in alone)
    error = max(difference(got, want, scale) for got, want in zip(together, alone, strict=True))
    return Finding(error, case.tolerance_or(2.0), f"sequences of {lengths} tokens packed one after another, and alone")


def _packed_is_separate(subject: Subject, case: Case, inputs: list[Tensor]) -> Finding:
    """Returns whether two documents packed into one row give what each gives alone."""
    mechanism = subject.mechanism(case)
    assert mechanism is not None
    cut = case.T // 2
    documents = (case.range(case.T) >= cut).long().expand(case.B, -1)
    apart = case.adjusted(Mask(case.causal, window=case.window), case.T, case.T)
    together = apart.but(documents=documents)
    q, k, v = inputs
    got = mechanism(q, k, v, together)
    halves = zip(*(x.split([cut, case.T - cut], 2) for x in inputs), strict=True)
    want = torch.cat([mechanism(*half, apart) for half in halves], 2)
    scale = cancellation_scale(mechanism, q, k, together, v)
    if scale is None:
        got, want = comparable(mechanism, q, k, together, got, want)
    return Finding(difference(got, want, scale), case.tolerance_or(2.0), "two documents packed and apart")


def gradients_are_right(subject: Subject, case: Case) -> Finding:
    """gradients agree with finite differences, and are finite wherever outputs are (of argmax only v has any)"""
    under_masks = gradients_under_masks(subject, case)
    if any(found.broken for found in under_masks):
        return worst(under_masks)
    whole = case
    case = case.but(dtype="float64", T=min(case.T, 5), B=1, padding="none", window=None, documents=False)
    case = subject.fit(case)
    if case.dtype != "float64" or case.precision is not None:
        raise DoesNotApply("it does not compute in float64, which finite differences need")
    *others, values = subject.inputs(case)
    # Moderate queries and keys: finite differences mean nothing where rounding is magnified, as near (q·k + 1)² = 0.
    inputs = [x.requires_grad_() for x in [*(0.3 * x for x in others), values]]
    mechanism = subject.mechanism(case)
    if isinstance(mechanism, Argmax):
        return _argmax_gradients(mechanism, case, inputs)
    out = subject.run(case, inputs)
    if not out.requires_grad:
        raise DoesNotApply("its output carries no gradient")
    grads = torch.autograd.grad(out.sum(), inputs, allow_unused=True)
    used = [x for x, g in zip(inputs, grads, strict=True) if g is not None]
    for n, grad in enumerate(grads):
        if grad is None and _depends_on(subject, case, inputs, n):
            return Finding(math.inf, 0.0, "an input that the output depends on gets no gradient: is it detached?")

    def run(*leaves: Tensor) -> Tensor:
        replaced = dict(zip(map(id, used), leaves, strict=True))
        return subject.run(case, [replaced.get(id(x), x) for x in inputs])

    findings = [_gradcheck(run, used, "")]
    if not findings[0].broken:
        findings += late_gradients_are_right(subject, whole)
    if subject.takes_visible and case.T > 1:
        visible = torch.ones(case.B, case.T, dtype=torch.bool, device=case.device)
        visible[:, slice(1, None, 1 if subject.hides_ends_only else 2)] = (
            False  # every query sees the first key: who sees nothing is another law's question
        )

        def run_padded(*leaves: Tensor) -> Tensor:
            replaced = dict(zip(map(id, used), leaves, strict=True))
            padded = subject.run(case, [replaced.get(id(x), x) for x in inputs], visible)
            if len(inputs) == 1 and not subject.pools:
                padded = padded[visible]
            return padded

        findings.append(_gradcheck(run_padded, used, " with hidden keys"))
    return worst(findings)


def _depends_on(subject: Subject, case: Case, inputs: list[Tensor], n: int) -> bool:
    """Returns whether another n-th input gives another output."""
    changed = list(inputs)
    changed[n] = case.draw(*inputs[n].shape, stream=31)
    with torch.no_grad():
        return not torch.equal(subject.run(case, changed), subject.run(case, inputs))


def _gradcheck(run: Callable[..., Tensor], leaves: list[Tensor], where: str) -> Finding:
    """Returns whether autograd's gradients agree with finite differences."""
    try:
        gradcheck(run, leaves, eps=1e-6, atol=1e-6, rtol=1e-4, fast_mode=True)
    except GradcheckError as error:
        return Finding(math.inf, 1e-4, f"gradcheck{where}: " + " ".join(str(error).split())[:160])
    return Finding(0.0, 1e-4, f"gradcheck in float64{where}")


def _argmax_gradients(mechanism: Argmax, case: Case, inputs: list[Tensor]) -> Finding:
    """Returns whether argmax has its own gradients: dv by the chosen keys, dq and dk none, or softmax's."""
    mask = Mask(case.causal)
    direction = case.draw(case.B, case.H, case.T, case.V, stream=30)

    def grads(of: Mechanism) -> list[Tensor]:
        return gradients_or_zeros((of(*inputs, mask) * direction).sum(), inputs)

    got = grads(mechanism)
    hard = grads(Argmax())
    soft = [torch.zeros_like(x) for x in inputs]
    if mechanism.gradient == "straight_through":
        soft = grads(Softmax())
    weights = Argmax().weights(inputs[0], inputs[1], mask).detach()
    by_hand = (weights.mT @ direction).reshape(case.B, case.G, -1, case.T, case.V).sum(2)
    return worst(
        [
            Finding(difference(got[0], soft[0], 1.0), 1e-10, "dq against softmax's, or zero"),
            Finding(difference(got[1], soft[1], 1.0), 1e-10, "dk against softmax's, or zero"),
            Finding(difference(got[2], by_hand), 1e-10, "dv against onehotᵀ dout"),
            Finding(difference(hard[2], by_hand), 1e-10, "dv against onehotᵀ dout"),
        ]
    )


def queries_are_independent(subject: Subject, case: Case) -> Finding:
    """a query's output is its own: fewer queries over the same keys get what they get among all"""
    if not subject.takes_fewer_queries(False) and not subject.takes_fewer_queries(True):
        raise DoesNotApply("it takes as many queries as keys")
    if subject.queries_meet:
        raise DoesNotApply("its queries attend to one another, too")
    case = subject.fit(case.but(padding="none", window=None, documents=False)).without_bias()
    findings = []
    for causal in (False, True):
        asked = case.but(causal=causal)
        if not causal:
            asked = asked.but(adjust="none")  # without causality, where fewer queries stand is not known
        if not subject.takes_fewer_queries(causal) or not subject.takes_length(asked.T):
            continue
        for n in sorted({1, (asked.T + 1) // 2}):
            findings.append(_ask_last_queries(subject, asked, n))
    if not findings:
        raise DoesNotApply("it cannot be asked about fewer queries")
    return worst(findings)


def _ask_last_queries(subject: Subject, case: Case, n: int) -> Finding:
    """Returns whether the last n queries alone get what they get among all.

    Causal queries are the last of the keys. Some libraries take them for the first ones instead (the mask is aligned at
    the top left), which is a convention of theirs and only noted. So is self-attention that reads as many keys as it
    has queries, and is not made for more.
    """
    inputs = subject.inputs(case)
    q, *keys = inputs
    axis = subject.token_axis
    T = q.shape[axis]
    last = q.narrow(axis, T - n, n)
    want = subject.run(case, inputs).narrow(axis, T - n, n)
    got = subject.run(case, [last, *keys])
    what = f"the last {n} of {T} queries, causal = {case.causal}"
    if got.shape != want.shape:
        return Finding(math.inf, 0.0, f"{what}: output {list(got.shape)} instead of {list(want.shape)}")
    scale = subject.cancellation_scale(case, inputs)
    if scale is None:
        scale = want.abs().max()
    else:
        scale = scale.narrow(axis, T - n, n)
    sure = subject.unambiguous_rows(case, inputs)
    if sure is not None:
        got = got[sure[..., T - n :]]
        want = want[sure[..., T - n :]]
    found = Finding(difference(got, want, scale), case.tolerance_or(2.0), what)
    if found.broken and not subject.own:
        first = subject.run(case, [last, *(x.narrow(axis, 0, n) for x in keys)])
        if difference(got, first, first.abs().max()) <= found.limit:
            # Right for whoever expects it, and wrong for tokens after a cache, or for other keys than the queries' own.
            words = "it reads as many keys as there are queries"
            if case.causal:
                words = "they are taken for the first of the keys, not the last"
            return found._replace(what=f"{what}: {words}", noted=True)
        if subject.knows_positions:  # of fewer queries than keys nobody says where they stand
            return found._replace(what=f"{what}: it counts positions, and takes them for the first", noted=True)
    return found


def heads_and_shapes(subject: Subject, case: Case) -> Finding:
    """out is [B,H,T,V], and output head h reads query head h and key/value head h // (H/G)"""
    case = case.but(padding="none", window=None, documents=False)
    inputs = subject.inputs(case)
    out = subject.run(case, inputs)
    if subject.token_axis == 1:
        if subject.pools:
            raise DoesNotApply("it gives as many outputs of any number of tokens, and has no heads to look at")
        if out.dim() == 3 and out.shape[:2] == inputs[0].shape[:2]:
            return worst([_all_finite(out), *_views_inside(subject, case)])
        return Finding(math.inf, 0.0, f"module output {list(out.shape)}, expected [{case.B}, {case.T}, ·]")
    expected = (case.B, case.H, case.T, case.V)
    if tuple(out.shape) != expected:
        return Finding(math.inf, 0.0, f"got {list(out.shape)}, expected {list(expected)}")
    if out.dtype != case.type:
        return Finding(math.inf, 0.0, f"got {out.dtype} from inputs of {case.type}", noted=not subject.own)
    findings = [_all_finite(out)]
    if case.H > 1:
        findings += _heads_that_move(subject, case, inputs, out)
    return worst(findings)


def _views_inside(subject: Subject, case: Case) -> list[Finding]:
    """Returns whether a module's heads are mixed with its tokens by a view, where that can be asked."""
    try:
        return [heads_are_not_views(subject, case)]
    except DoesNotApply:
        return []


def _all_finite(out: Tensor) -> Finding:
    error = 0.0
    if not bool(out.isfinite().all()):
        error = math.inf
    return Finding(error, 0.0, "finite outputs from ordinary inputs")


def _heads_that_move(subject: Subject, case: Case, inputs: list[Tensor], out: Tensor) -> list[Finding]:
    """Returns whether changing one head of q, k or v moves the output heads that read it, and no others."""
    findings = []
    group = case.H // case.G
    sizes = out.detach().abs().amax((0, 2, 3))
    mechanism = subject.mechanism(case)
    for n, name in enumerate("qkv"):
        if mechanism is not None and name not in mechanism.needs:
            continue
        heads = case.H
        size = 1
        if name != "q":
            heads = case.G
            size = group
        for h in range(heads):
            changed = [x.clone() for x in inputs]
            changed[n][:, h] = case.draw(*changed[n][:, h].shape, stream=70 + n)
            moved = (subject.run(case, changed) - out).detach().abs().amax((0, 2, 3)).double()
            reads = case.range(case.H) // size == h
            others = moved[~reads]
            limit = case.tolerance_or(2.0) * float(out.detach().abs().max())
            told = f"{name} head {h} is for output {_list_heads(reads)}; it moved {_list_heads(moved > limit)}"
            if others.numel():
                findings.append(Finding(float(others.max()), limit, told))
            # With one token every weight is one, so that only values matter; argmax may choose the same key again.
            if name == "v":
                # Weights may all be zero, as those of relu(q·k): outputs are then zero, too.
                error = 0.0
                if bool(((moved == 0) & (sizes > 0))[reads].any()):
                    error = math.inf
                findings.append(Finding(error, 0.0, told))
    return findings


def _list_heads(chosen: Tensor) -> str:
    """Returns the heads that are True in a tensor [H], in words."""
    numbers = chosen.nonzero().flatten().tolist()
    if not numbers:
        return "no head"
    if len(numbers) == 1:
        return f"head {numbers[0]}"
    return f"heads {', '.join(map(str, numbers))}"
