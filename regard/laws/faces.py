"""Laws of a mechanism: its faces agree with each other, its cost with the count, its kernels with the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from regard.laws.case import (
    TOLERANCE,
    Case,
    Compared,
    DoesNotApply,
    Finding,
    agree,
    cancellation_scale,
    comparable,
    difference,
    worst,
)
from regard.laws.subjects import Subject
from regard.mechanisms import Linear, Mechanism, Pairwise, fork, mix
from regard.shapes import Mask, Size


def _mechanism(subject: Subject, case: Case) -> Mechanism:
    """Returns the mechanism of a case; what is no mechanism has no faces to compare."""
    mechanism = subject.mechanism(case)
    if mechanism is None:
        raise DoesNotApply("a bare function or module has only one face")
    return mechanism


def _against_forward(mechanism: Mechanism, out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Compared:
    """Returns an output beside that of the parallel face, on the rows that rounding does not decide."""
    want = mechanism(q, k, v, mask)
    scale = cancellation_scale(mechanism, mechanism.weights(q, k, mask), mask.zero_hidden(v))
    if scale is None:
        out, want = comparable(mechanism, q, k, mask, out, want)
    return out, want, scale


def parallel_is_weights(subject: Subject, case: Case) -> Finding:
    """parallel = weights @ v"""
    _mechanism(subject, case)

    def compute(case: Case) -> Compared:
        mechanism = _mechanism(subject, case)
        S = case.T
        if mechanism.crosses and not case.causal and case.window is None and not case.documents:
            S = case.S
        q, k, v = case.qkv(S=S)
        mask = case.mask(case.T, S)
        weights = mechanism.weights(q, k, mask)
        values = mask.zero_hidden(v).to(weights.dtype)
        out = mechanism(q, k, v, mask)
        want = mix(weights, values)
        scale = cancellation_scale(mechanism, weights, values)
        if scale is None:
            out, want = comparable(mechanism, q, k, mask, out, want)
        return out, want, scale

    return agree(case, compute, "forward against weights @ v")


def recurrent_is_parallel(subject: Subject, case: Case) -> Finding:
    """recurrent = causal parallel, for any split into chunks"""
    _mechanism(subject, case)
    case = case.but(causal=True, documents=False)
    some_chunks = _draw_chunks(case)
    single_tokens = [1] * min(case.T, 9) + [case.T - 9] * (case.T > 9)

    def compute(case: Case, chunks: list[int]) -> Compared:
        mechanism = _mechanism(subject, case)
        q, k, v = case.qkv()
        mask = case.mask(case.T, case.T)
        state = mechanism.empty(case.size(S=2), Mask(window=mask.window))
        parts = []
        visible = _split_visible(mask.visible, chunks)
        for qs, ks, vs, seen in zip(q.split(chunks, 2), k.split(chunks, 2), v.split(chunks, 2), visible, strict=True):
            # A state is used up by extending it: a copy shows whether anything is kept outside of it.
            out, state = mechanism.extend(qs, ks, vs, fork(state), seen)
            parts.append(out)
        return _against_forward(mechanism, torch.cat(parts, 2), q, k, v, mask)

    findings = [
        agree(case, partial(compute, chunks=chunks), f"chunks of {chunks} against the whole")
        for chunks in (some_chunks, single_tokens)
    ]
    if case.dtype == "float64" and 1 < case.T < 20:
        findings.append(_gradients_through_state(subject, case))
    if case.B > 1 and case.T > 1:
        findings.append(agree(case, partial(_reordered_state, subject), "a state whose rows changed places"))
    return worst(findings)


def _gradients_through_state(subject: Subject, case: Case) -> Finding:
    """Returns whether gradients through a state are those of the whole sequence."""
    mechanism = _mechanism(subject, case)
    mask = case.mask(case.T, case.T)
    half = case.T // 2
    sizes = [half, case.T - half]
    directions = case.draw(case.B, case.H, case.T, case.V, stream=5)
    results = []
    for in_chunks in (True, False):
        leaves = [x.requires_grad_() for x in case.qkv()]
        q, k, v = leaves
        if in_chunks:
            state = mechanism.empty(case.size(S=2), Mask(window=mask.window))
            parts = []
            visible = _split_visible(mask.visible, sizes)
            for qs, ks, vs, seen in zip(q.split(sizes, 2), k.split(sizes, 2), v.split(sizes, 2), visible, strict=True):
                out, state = mechanism.extend(qs, ks, vs, state, seen)
                parts.append(out)
            out = torch.cat(parts, 2)
        else:
            out = mechanism(q, k, v, mask)
        sure = mechanism.unambiguous_rows(q, k, mask)
        weigh = directions
        if sure is not None:
            weigh = directions * sure[..., None]
        results.append(torch.cat([g.flatten() for g in gradients_or_zeros((out * weigh).sum(), leaves)]))
    got, want = results
    # Where weights cancel, rounding is magnified once more on the way back.
    limit = 1e-8
    if mechanism.signed:
        limit = 1e-4
    return Finding(difference(got, want), limit, "gradients through a state against those of the whole")


def _reordered_state(subject: Subject, case: Case) -> Compared:
    """Returns the outputs of a state whose rows were reordered halfway, put back in order, beside the whole."""
    mechanism = _mechanism(subject, case)
    q, k, v = case.qkv()
    mask = case.mask(case.T, case.T)
    order = case.range(case.B).roll(1)
    sizes = [case.T // 2, case.T - case.T // 2]
    seen_before, seen_after = _split_visible(mask.visible, sizes)
    before, after = zip(*(x.split(sizes, 2) for x in (q, k, v)), strict=True)
    state = mechanism.empty(case.size(S=2), Mask(window=mask.window))
    first, state = mechanism.extend(before[0], before[1], before[2], state, seen_before)
    if seen_after is not None:
        seen_after = seen_after[order]
    moved = [x[order] for x in after]
    second, _ = mechanism.extend(moved[0], moved[1], moved[2], fork(state, order), seen_after)
    out = torch.cat([first, second[order.argsort()]], 2)
    return _against_forward(mechanism, out, q, k, v, mask)


def _draw_chunks(case: Case) -> list[int]:
    """Returns a random split of the case's tokens into chunks."""
    generator = torch.Generator().manual_seed(case.seed)
    chunks: list[int] = []
    while sum(chunks) < case.T:
        n = 1 + int(torch.randint(0, 1 + case.T // 2, (), generator=generator))
        chunks.append(min(n, case.T - sum(chunks)))
    return chunks


def _split_visible(visible: Tensor | None, chunks: list[int]) -> Sequence[Tensor | None]:
    """Returns the part of each chunk of a mask of visible keys [B,T]."""
    if visible is None:
        return [None] * len(chunks)
    parts: Sequence[Tensor] = visible.split(chunks, 1)
    return parts


def rows_sum_to_one(subject: Subject, case: Case) -> Finding:
    """rows of weights sum to one, or are all zero where nothing is visible"""
    mechanism = _mechanism(subject, case)
    q, k, _ = case.qkv()
    mask = case.mask(case.T, case.T)
    weights = mechanism.weights(q, k, mask).detach().double()
    allowed = mask.allowed(case.T, case.T, q.device)
    if allowed is None:
        allowed = torch.ones_like(weights, dtype=torch.bool)
    sees = allowed.expand_as(weights)
    limit = TOLERANCE[torch.float32]  # weights are kept in float32 or better
    if case.type == torch.float64:
        limit = TOLERANCE[torch.float64]
    size = weights.abs().sum(-1).clamp(min=1)
    findings = [
        Finding(difference(weights.sum(-1) / size, sees.any(-1) / size, 1.0), limit, "row sums"),
        Finding(float(weights.masked_fill(sees, 0).abs().max()), 0.0, "weight on a key that may not be seen"),
    ]
    if not mechanism.signed:
        findings.append(Finding(float((-weights).clamp(min=0).max()), limit, "a negative weight"))
    return worst(findings)


def written_is_cross(subject: Subject, case: Case) -> Finding:
    """a written state read later = cross-attention"""
    mechanism = _mechanism(subject, case)
    if not mechanism.crosses:
        raise DoesNotApply("it has no cross-attention")
    case = case.but(causal=False, window=None, documents=False)

    def compute(case: Case) -> Compared:
        mechanism = _mechanism(subject, case)
        q, k, v = case.qkv(S=case.S)
        visible = case.visible(case.S)
        state = mechanism.empty(case.size(S=3))
        half = case.S // 2
        halves = [half, case.S - half]
        for ks, vs, seen in zip(k.split(halves, 2), v.split(halves, 2), _split_visible(visible, halves), strict=True):
            state = mechanism.write(state, ks, vs, seen)
        parts = [mechanism.read(part, state) for part in q.split(max(1, case.T // 2), 2)]
        return _against_forward(mechanism, torch.cat(parts, 2), q, k, v, Mask(visible=visible))

    return agree(case, compute, "write in two parts and read, against forward")


def flops_as_declared(subject: Subject, case: Case) -> Finding:
    """declared matmul FLOPs = FlopCounterMode on the plain reference, of each face and of the gradients"""
    from torch.utils.flop_counter import FlopCounterMode  # it loads triton where there is one, which takes its time

    mechanism = _mechanism(subject, case)
    if not _declares_costs(mechanism):
        raise DoesNotApply("it declares no costs of its own")
    mechanism.use = "plain"
    case = case.but(documents=False, padding="none")
    if type(mechanism).cost not in (Pairwise.cost, Linear.cost):
        case = case.but(window=None)  # somebody's own declaration need not know of windows
    q, k, v = case.qkv()
    state = mechanism.empty(case.size(S=2 * case.T), Mask(window=case.window))
    _, state = mechanism.extend(q, k, v, state)
    mask = case.mask(case.T, case.T)
    faces: list[tuple[Literal["parallel", "recurrent", "weights"], Size, Callable[[], object]]] = [
        ("parallel", case.size(), lambda: mechanism(q, k, v, mask)),
        ("weights", case.size(), lambda: mechanism.weights(q, k, mask)),
        ("recurrent", case.size(S=2 * case.T), lambda: mechanism.extend(q, k, v, state)),
    ]
    findings = []
    for face, size, run in faces:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            run()
        findings.append(_compare_flops(face, mechanism.cost(size, face).matmul, counter.get_total_flops()))
    leaves = [x.requires_grad_() for x in (q, k, v)] + [x for x in mechanism.parameters() if x.requires_grad]
    out = mechanism(q, k, v, mask)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(out.sum(), leaves, allow_unused=True)
    declared = mechanism.gradient_cost(case.size()).matmul
    findings.append(_compare_flops("gradients", declared, counter.get_total_flops()))
    return worst(findings)


def _compare_flops(what: str, declared: int, counted: int) -> Finding:
    error = abs(declared - counted) / max(counted, 1)
    return Finding(error, 0.0, f"{what}: {declared:,} declared, {counted:,} counted")


def _declares_costs(mechanism: Mechanism) -> bool:
    """Returns whether a mechanism says what its scores cost.

    One of regard's families knows the cost of weights @ v, but not that of weights somebody else computes.
    """
    if not isinstance(mechanism, Pairwise) or type(mechanism).__module__.startswith("regard."):
        return True
    cls: type[Pairwise] = type(mechanism)
    return cls.score_flops is not Pairwise.score_flops or cls.cost is not Pairwise.cost


def kernel_is_reference(subject: Subject, case: Case) -> Finding:
    """kernel = reference, forward and gradients, with NaN-poisoned output buffers"""
    registry = _mechanism(subject, case).kernels
    kernels = [(face, kernel) for faces in registry.values() for face, kernel in faces.items()]
    if not kernels:
        raise DoesNotApply("no kernel is registered for it")
    findings: list[Finding] = []
    refusals: list[str] = []
    for face, kernel in kernels:
        starts = [0]
        if face == "extend":  # a state that no token, half of them, or all but one have been through
            starts = sorted({0, case.T // 2, case.T - 1})
        for start in starts:
            refusal = kernel.refuses(*_kernel_arguments(subject, case, face, start))
            if refusal is not None:
                refusals.append(f"{kernel.name}: {refusal}")
                continue
            with _poisoned_memory():
                fast = _kernel_results(subject, case, face, start, kernel.name)
            plain = _kernel_results(subject, case, face, start, "plain")
            truth = plain
            if case.type not in TOLERANCE:
                truth = _kernel_results(subject, case.but(dtype="float64", rounded=case.dtype), face, start, "plain")
            scale = _kernel_scale(subject, case, face, start)
            findings += _kernel_findings(f"{kernel.name} {face}", case, fast, plain, truth, scale)
    if not findings:
        raise DoesNotApply("; ".join(dict.fromkeys(refusals)))
    return worst(findings)


def _kernel_arguments(subject: Subject, case: Case, face: str, start: int) -> tuple[Any, ...]:
    """Returns the mechanism and the arguments of its face.

    For "extend", that is a state that `start` tokens have been through, and the tokens after them.
    """
    mechanism = _mechanism(subject, case)
    q, k, v = case.qkv()
    mask = case.mask(case.T, case.T)
    if face == "forward":
        if "k" not in mechanism.needs:
            mask = mask.but(size_override=(case.T, case.T))
        return mechanism, q, k, v, mask
    mechanism.use = "plain"
    state = mechanism.empty(case.size(S=case.T + 1), Mask(window=mask.window))
    sizes = [start, case.T - start]
    before, after = zip(*(x.split(sizes, 2) for x in (q, k, v)), strict=True)
    seen_before, seen_after = _split_visible(mask.visible, sizes)
    q, k, v = before
    _, state = mechanism.extend(q, k, v, state, seen_before)
    return mechanism, *after, state, seen_after


def _kernel_results(subject: Subject, case: Case, face: str, start: int, use: str) -> list[Tensor]:
    """Returns the output and, where it carries any, the gradients."""
    mechanism, *arguments = _kernel_arguments(subject, case, face, start)
    mechanism.use = use
    if face == "extend":
        with torch.no_grad():
            out, state = mechanism.extend(*arguments)
        return [out, state.tokens.to(out.dtype)]
    leaves = [x.requires_grad_() for x in arguments[:3]] + [x for x in mechanism.parameters() if x.requires_grad]
    out = mechanism(*arguments)
    direction = out.detach().cos()
    if mechanism.signed:  # where weights cancel, a direction that depends on out adds out's rounding to the gradient
        direction = case.draw(*out.shape, stream=4)
    return [out, *gradients_or_zeros((out * direction).sum(), leaves)]


def gradients_or_zeros(total: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradient of a number for each leaf, zeros for one that it does not depend on."""
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    filled = []
    for grad, leaf in zip(grads, leaves, strict=True):
        if grad is None:
            grad = torch.zeros_like(leaf)
        filled.append(grad)
    return filled


def _kernel_scale(subject: Subject, case: Case, face: str, start: int) -> Tensor | None:
    """Returns what rounding of the output is relative to where weights may be negative, [B,H,T,1]; else None."""
    exact = case.but(dtype="float64", rounded=case.rounded or case.dtype)
    mechanism = _mechanism(subject, exact)
    if not mechanism.signed:
        return None
    q, k, v = exact.qkv()
    mask = exact.mask(case.T, case.T)
    if face == "extend":
        mask = mask.but(causal=True, documents=None)
    scale = cancellation_scale(mechanism, mechanism.weights(q, k, mask), mask.zero_hidden(v))
    assert scale is not None
    return scale[:, :, start:]


def _kernel_findings(
    what: str,
    case: Case,
    fast: list[Tensor],
    plain: list[Tensor],
    truth: list[Tensor],
    output_scale: Tensor | None,
) -> list[Finding]:
    """Returns how far a kernel is from the truth: outputs relative to the largest output or to their own scale,
    gradients relative to the largest gradient."""
    findings = []
    if output_scale is None:
        output_scale = truth[0].abs().max()
    gradient_scale = max((t.abs().max() for t in truth[1:]), default=truth[0].abs().max())
    for n, (f, p, t) in enumerate(zip(fast, plain, truth, strict=True)):
        name = "output"
        times = 2
        scale = output_scale
        if n > 0:
            name = f"gradient {n}"
            times = 3
            scale = gradient_scale
        scale = scale.clamp(min=1e-30)
        limit = case.tolerance
        if limit is None:
            limit = times * max(difference(p, t, scale), torch.finfo(case.type).eps / 2)
        findings.append(Finding(difference(f, t, scale), limit, f"{what}: {name}"))
    return findings


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Fills memory from torch.empty with NaN, so that a kernel cannot forget to write a part of its output."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
