"""Laws that can be asked of any attention from outside: a mechanism, a function, a module."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck

from regard.laws.case import TOLERANCE, Case, DoesNotApply, Finding, comparable, difference, spread, worst
from regard.laws.subjects import Subject
from regard.mechanisms import Argmax, Mechanism, Softmax
from regard.shapes import Mask


def looks_ahead(subject: Subject, case: Case) -> Finding:
    """never looks ahead: changing token j leaves every output before j as it was"""
    if not subject.causal:
        raise DoesNotApply("it does not claim to be causal")
    case = case.but(causal=True, padding="none", documents=False)
    findings = []
    tokens = subject.token_axis
    # A stabiliser over the whole sequence shows itself by its epsilon, or where early keys are huge and late ones not.
    for size in (1.0, 30.0):
        inputs = [x * size for x in subject.inputs(case)]
        inputs[-1] = inputs[-1] / size  # values of moderate size
        before = subject.run(case, inputs)
        for j in sorted({case.T - 1, case.T // 2} - {0}):
            for factor in (1.0, 3.0, 30.0, 0.0):
                changed = [x.clone() for x in inputs]
                for n, x in enumerate(changed):
                    shape = x.select(tokens, j).shape
                    x.select(tokens, j).copy_(factor * case.draw(*shape, stream=10 + n))
                after = subject.run(case, changed)
                axis = subject.token_axis
                gap = difference(after.narrow(axis, 0, j), before.narrow(axis, 0, j), before.abs().max())
                limit = TOLERANCE.get(case.type, torch.finfo(case.type).eps)
                findings.append(
                    Finding(gap, limit, f"outputs before token {j} of {case.T} when it changes (×{factor:g})")
                )
    if not findings:
        raise DoesNotApply("one token has nothing ahead of it")
    found = worst(findings)
    return found if found.broken else worst([found, _prefix_alone(subject, case)])


def _prefix_alone(subject: Subject, case: Case) -> Finding:
    """The first half of the tokens alone: what depends on the length of the whole looks ahead, too."""
    n = (case.T + 1) // 2
    inputs = subject.inputs(case)
    whole = subject.run(case, inputs).narrow(subject.token_axis, 0, n)
    alone = subject.run(case, [x.narrow(subject.token_axis, 0, n) for x in inputs])
    scale, sure = subject.spread(case, inputs), subject.certain(case, inputs)
    scale = whole.abs().max() if scale is None else scale.narrow(subject.token_axis, 0, n)
    if sure is not None:
        alone, whole = alone[sure[..., :n]], whole[sure[..., :n]]
    limit = TOLERANCE.get(case.type, 2 * torch.finfo(case.type).eps)
    return Finding(
        difference(alone, whole, scale), limit, f"outputs of the first {n} of {case.T} tokens without the rest"
    )


def hidden_keys_are_inert(subject: Subject, case: Case) -> Finding:
    """a row with nothing to see gives zeros; hidden keys are inert, NaN included, in outputs and gradients"""
    if not subject.takes_visible:
        raise DoesNotApply("it takes no mask of visible keys")
    case = case.but(documents=False, padding=case.padding if case.padding != "none" else "inside")
    visible = case.visible(case.T)
    assert visible is not None
    blind = visible.clone()
    blind[0] = False
    findings = []
    clean = subject.inputs(case)
    nothing = subject.run(case, clean, blind)[0]
    findings.append(
        Finding(difference(nothing, torch.zeros_like(nothing), 1.0), 0.0, "outputs of rows that see nothing")
    )
    if case.causal and case.T > 1:  # queries before the first visible key see nothing, though later keys are visible
        late = case.range(case.T).expand(case.B, -1) >= case.T // 2
        early = subject.run(case, clean, late).narrow(subject.token_axis, 0, case.T // 2)
        what = "outputs of queries before the first visible key"
        findings.append(Finding(difference(early, torch.zeros_like(early), 1.0), 0.0, what))
    dirty = [x.clone() for x in clean]
    spoilt = range(len(dirty)) if len(dirty) == 1 else range(1, len(dirty))  # queries are nobody's key
    for n in spoilt:
        hidden = ~visible if subject.token_axis == 1 else ~visible[:, None]
        hidden = hidden.expand(dirty[n].shape[:-1])
        dirty[n][hidden] = float("nan") if n % 2 else float("inf")
    results = []
    for tensors in (clean, dirty):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = subject.run(case, leaves, visible)
        if len(leaves) == 1:  # a token's own output may be anything where the token is
            out = out[visible]
        grads = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True) if out.requires_grad else []
        results.append((out, [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=False)]))
    (want, want_grads), (got, got_grads) = results
    limit = TOLERANCE.get(case.type, torch.finfo(case.type).eps)
    findings.append(Finding(difference(got, want), limit, "outputs with NaN or infinity in hidden keys and values"))
    if len(clean) > 1:
        for n, (g, w) in enumerate(zip(got_grads, want_grads, strict=True)):
            findings.append(
                Finding(difference(g, w), limit, f"gradient of {'qkv'[n]} with NaN or infinity in hidden keys")
            )
            if n:
                own = g[~visible[:, None].expand(g.shape[:-1])]
                findings.append(
                    Finding(difference(own, torch.zeros_like(own), 1.0), 0.0, f"gradient of hidden {'qkv'[n]}")
                )
    return worst(findings)


def batch_does_not_matter(subject: Subject, case: Case) -> Finding:
    """padding (left, right, inside), batch size and batch order do not matter"""
    case = case.but(B=max(case.B, 2), window=case.window if subject.mechanism(case) is not None else None)
    findings = []
    axis = subject.token_axis
    style: Literal["none", "left", "right", "inside"] = case.padding
    plain = case.but(padding="none", documents=False)
    inputs = subject.inputs(plain)
    whole = subject.run(plain, inputs)
    limit = TOLERANCE.get(case.type, 2 * torch.finfo(case.type).eps)
    largest = whole.abs().max()
    weigh = subject.spread(plain, inputs)

    def gap(got: Tensor, b: int | slice, want: Tensor) -> float:
        sure = subject.certain(plain, inputs)
        if sure is not None:
            got, want = got[sure[b]], want[sure[b]]
        return difference(got, want, largest if weigh is None else weigh[b])

    order = case.range(case.B).roll(1)
    findings.append(
        Finding(
            gap(subject.run(plain, [x[order] for x in inputs])[order.argsort()], slice(None), whole),
            limit,
            "order of the batch",
        )
    )
    for b in range(case.B):
        alone = subject.run(plain, [x[b : b + 1] for x in inputs])[0]
        findings.append(Finding(gap(alone, b, whole[b]), limit, f"sequence {b} alone and in a batch"))
    if subject.takes_visible and style != "none":
        for b in range(case.B):
            longer = case.T + 1 + b
            visible = case.but(B=case.B).visible(longer)
            assert visible is not None
            visible = _exactly(visible[b : b + 1], case.T)
            padded = []
            for n, x in enumerate(inputs):
                shape = list(x[b : b + 1].shape)
                shape[axis] = longer
                wide = 3 * case.draw(*shape, stream=20 + n)
                place = visible if axis == 1 else visible[:, None].expand(shape[:-1])
                wide[place] = x[b : b + 1].reshape(-1, x.shape[-1])
                padded.append(wide)
            out = subject.run(plain, padded, visible)
            kept = out[visible] if axis == 1 else out[visible[:, None].expand(out.shape[:-1])].view(1, *whole.shape[1:])
            findings.append(Finding(gap(kept.view(whole[b].shape), b, whole[b]), limit, f"sequence {b} padded {style}"))
    if case.documents and subject.mechanism(case) is not None and case.T > 1:
        findings.append(_packed_is_separate(subject, plain, inputs, limit))
    return worst(findings)


def _exactly(visible: Tensor, n: int) -> Tensor:
    """The same pattern with exactly n visible."""
    off = (~visible[0]).nonzero()[:, 0].tolist()
    on = visible[0].nonzero()[:, 0].tolist()
    keep = sorted((on + off)[:n])
    made = torch.zeros_like(visible)
    made[0, keep] = True
    return made


def _packed_is_separate(subject: Subject, case: Case, inputs: list[Tensor], limit: float) -> Finding:
    mechanism = subject.mechanism(case)
    assert mechanism is not None
    cut = case.T // 2
    documents = (case.range(case.T) >= cut).long().expand(case.B, -1)
    mask = Mask(case.causal, window=case.window)
    q, k, v = inputs
    packed = mechanism(q, k, v, mask.but(documents=documents))
    separate = [mechanism(*(x[:, :, part] for x in inputs), mask) for part in (slice(0, cut), slice(cut, case.T))]
    scale = spread(mechanism, mechanism.weights(q, k, mask.but(documents=documents)), v)
    got, want = packed, torch.cat(separate, 2)
    if scale is None:
        got, want = comparable(mechanism, q, k, mask.but(documents=documents), got, want)
    return Finding(difference(got, want, scale), limit, "two documents packed and apart")


def gradients_are_right(subject: Subject, case: Case) -> Finding:
    """gradients agree with finite differences (argmax: only v has any; straight-through: dq, dk are softmax's)"""
    case = case.but(dtype="float64", T=min(case.T, 5), B=1, padding="none", window=None, documents=False)
    inputs = subject.inputs(case)
    # Moderate queries and keys: finite differences mean nothing where rounding is magnified, as near (q·k + 1)² = 0.
    inputs = [(0.3 * x if n + 1 < len(inputs) else x).requires_grad_() for n, x in enumerate(inputs)]
    mechanism = subject.mechanism(case)
    if isinstance(mechanism, Argmax):
        return _argmax_gradients(mechanism, case, inputs)
    out = subject.run(case, inputs)
    if not out.requires_grad:
        raise DoesNotApply("its output carries no gradient")
    used = [
        x
        for x, g in zip(inputs, torch.autograd.grad(out.sum(), inputs, allow_unused=True), strict=True)
        if g is not None
    ]
    needed = inputs if mechanism is None else [x for x, n in zip(inputs, "qkv", strict=True) if n in mechanism.needs]
    if len(used) < len(needed):
        return Finding(math.inf, 0.0, "an input that the output depends on gets no gradient")

    def run(*leaves: Tensor) -> Tensor:
        given = iter(leaves)
        return subject.run(case, [next(given) if any(x is u for u in used) else x for x in inputs])

    try:
        gradcheck(run, used, eps=1e-6, atol=1e-6, rtol=1e-4, fast_mode=True)
    except GradcheckError as error:
        return Finding(math.inf, 1e-4, "gradcheck: " + " ".join(str(error).split())[:160])
    return Finding(0.0, 1e-4, "gradcheck in float64")


def _argmax_gradients(mechanism: Argmax, case: Case, inputs: list[Tensor]) -> Finding:
    mask = Mask(case.causal)
    weigh = case.draw(case.B, case.H, case.T, case.V, stream=30)

    def grads(m: Mechanism) -> list[Tensor]:
        found = torch.autograd.grad((m(*inputs, mask) * weigh).sum(), inputs, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]

    got, hard = grads(mechanism), grads(Argmax())
    soft = grads(Softmax()) if mechanism.gradient == "straight_through" else [torch.zeros_like(x) for x in inputs]
    weights = Argmax().weights(inputs[0], inputs[1], mask).detach()
    by_hand = (weights.mT @ weigh).reshape(case.B, case.G, -1, case.T, case.V).sum(2)
    return worst(
        [
            Finding(difference(got[0], soft[0], 1.0), 1e-10, "dq against softmax's, or zero"),
            Finding(difference(got[1], soft[1], 1.0), 1e-10, "dk against softmax's, or zero"),
            Finding(difference(got[2], by_hand), 1e-10, "dv against onehotᵀ dout"),
            Finding(difference(hard[2], by_hand), 1e-10, "dv against onehotᵀ dout"),
        ]
    )


def heads_and_shapes(subject: Subject, case: Case) -> Finding:
    """out is [B,H,T,V], and query head h reads key/value head h // (H/G)"""
    case = case.but(padding="none", window=None, documents=False)
    inputs = subject.inputs(case)
    out = subject.run(case, inputs)
    if len(inputs) == 1:
        fits = out.shape[:2] == inputs[0].shape[:2]
        return Finding(0.0 if fits else math.inf, 0.0, f"module output [B,T,·]: {list(out.shape)}")
    expected = (case.B, case.H, case.T, case.V)
    if tuple(out.shape) != expected or out.dtype != case.type:
        return Finding(math.inf, 0.0, f"got {list(out.shape)} {out.dtype}, expected {list(expected)} {case.type}")
    findings = [Finding(0.0 if bool(out.isfinite().all()) else math.inf, 0.0, "finite outputs from ordinary inputs")]
    group = case.H // case.G
    for g in range(case.G if case.G > 1 else 0):
        q, k, v = (x.clone() for x in inputs)
        v[:, g] += 1
        moved = (subject.run(case, [q, k, v]) - out).detach().abs().amax((0, 2, 3)).double()
        should = case.range(case.H) // group == g
        findings.append(Finding(float(moved[~should].max()), 0.0, f"heads outside group {g} that value head {g} moves"))
        still = 0.0 if bool((moved[should] > 0).all()) else math.inf
        findings.append(Finding(still, 0.0, f"heads of group {g} that value head {g} does not move"))
    return worst(findings)
