"""Laws of a mechanism: its faces agree with each other, its cost with the count, its kernels with the reference."""

from __future__ import annotations

from collections.abc import Callable
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
    comparable,
    difference,
    spread,
    worst,
)
from regard.laws.subjects import Subject
from regard.mechanisms import Mechanism, fork, mix
from regard.shapes import Mask, Size


def _mechanism(subject: Subject, case: Case) -> Mechanism:
    built = subject.mechanism(case)
    if built is None:
        raise DoesNotApply("a bare function or module has only one face")
    return built


def parallel_is_weights(subject: Subject, case: Case) -> Finding:
    """parallel = weights @ v"""
    _mechanism(subject, case)

    def compute(case: Case) -> Compared:
        mechanism = _mechanism(subject, case)
        S = case.S if mechanism.crosses and not case.causal and case.window is None and not case.documents else case.T
        q, k, v = case.qkv(S=S)
        mask = case.mask(case.T, S)
        weights = mechanism.weights(q, k, mask)
        hidden = mask.zero_hidden(v).to(weights.dtype)
        out, want = mechanism(q, k, v, mask), mix(weights, hidden)
        scale = spread(mechanism, weights, hidden)
        if scale is None:
            out, want = comparable(mechanism, q, k, mask, out, want)
        return out, want, scale

    return agree(case, compute, "forward against weights @ v")


def recurrent_is_parallel(subject: Subject, case: Case) -> Finding:
    """recurrent = causal parallel, for any split into chunks"""
    _mechanism(subject, case)
    case = case.but(causal=True, documents=False)
    splits = torch.Generator().manual_seed(case.seed)
    chunks: list[int] = []
    while sum(chunks) < case.T:
        chunks.append(min(1 + int(torch.randint(0, 1 + case.T // 2, (), generator=splits)), case.T - sum(chunks)))

    def compute(case: Case, chunks: list[int]) -> Compared:
        mechanism = _mechanism(subject, case)
        q, k, v = case.qkv()
        mask = case.mask(case.T, case.T)
        state = mechanism.empty(case.size(S=2), Mask(window=mask.window))
        parts = []
        seen = [None] * len(chunks) if mask.visible is None else mask.visible.split(chunks, 1)
        for qs, ks, vs, visible in zip(q.split(chunks, 2), k.split(chunks, 2), v.split(chunks, 2), seen, strict=True):
            out, state = mechanism.extend(qs, ks, vs, fork(state), visible)
            parts.append(out)
        out, want = torch.cat(parts, 2), mechanism(q, k, v, mask)
        scale = spread(mechanism, mechanism.weights(q, k, mask), mask.zero_hidden(v)) if mechanism.signed else None
        if scale is None:
            out, want = comparable(mechanism, q, k, mask, out, want)
        return out, want, scale

    return worst(
        agree(case, partial(compute, chunks=chunks), f"chunks of {chunks} against the whole")
        for chunks in (chunks, [1] * min(case.T, 9) + [case.T - 9] * (case.T > 9))
    )


def rows_sum_to_one(subject: Subject, case: Case) -> Finding:
    """rows of weights sum to one, or are all zero where nothing is visible"""
    mechanism = _mechanism(subject, case)
    q, k, _ = case.qkv()
    mask = case.mask(case.T, case.T)
    weights = mechanism.weights(q, k, mask).detach().double()
    allowed = mask.allowed(case.T, case.T, q.device)
    sees = torch.ones_like(weights, dtype=torch.bool) if allowed is None else allowed.expand_as(weights)
    limit = TOLERANCE.get(weights.dtype if case.type == torch.float64 else torch.float32, 1e-5)
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
        for part in (slice(0, half), slice(half, case.S)):
            state = mechanism.write(state, k[:, :, part], v[:, :, part], None if visible is None else visible[:, part])
        parts = [mechanism.read(part, state) for part in q.split(max(1, case.T // 2), 2)]
        mask = Mask(visible=visible)
        out, want = torch.cat(parts, 2), mechanism(q, k, v, mask)
        scale = spread(mechanism, mechanism.weights(q, k, mask), mask.zero_hidden(v)) if mechanism.signed else None
        if scale is None:
            out, want = comparable(mechanism, q, k, mask, out, want)
        return out, want, scale

    return agree(case, compute, "write in two parts and read, against forward")


def flops_as_declared(subject: Subject, case: Case) -> Finding:
    """declared matmul FLOPs = FlopCounterMode on the plain reference, of each face and of the gradients"""
    from torch.utils.flop_counter import FlopCounterMode  # it loads triton where there is one, which takes its time

    mechanism = _mechanism(subject, case)
    mechanism.use = "plain"
    case = case.but(window=None, documents=False, padding="none")
    q, k, v = case.qkv()
    state = mechanism.empty(case.size(S=2 * case.T))
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
        counted, declared = counter.get_total_flops(), mechanism.cost(size, face).matmul
        what = f"{face}: {declared:,} declared, {counted:,} counted"
        findings.append(Finding(abs(declared - counted) / max(counted, 1), 0.0, what))
    leaves = [x.requires_grad_() for x in (q, k, v)] + [x for x in mechanism.parameters() if x.requires_grad]
    out = mechanism(q, k, v, mask)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(out.sum(), leaves, allow_unused=True)
    counted, declared = counter.get_total_flops(), mechanism.gradient_cost(case.size()).matmul
    what = f"gradients: {declared:,} declared, {counted:,} counted"
    findings.append(Finding(abs(declared - counted) / max(counted, 1), 0.0, what))
    return worst(findings)


def kernel_is_reference(subject: Subject, case: Case) -> Finding:
    """kernel = reference, forward and gradients, with NaN-poisoned output buffers"""
    registry = _mechanism(subject, case).kernels
    kernels = [(face, kernel) for faces in registry.values() for face, kernel in faces.items()]
    if not kernels:
        raise DoesNotApply("no kernel is registered for it")
    findings, refusals = [], []
    for face, kernel in kernels:
        # A state is first extended plainly, by nothing, by half, and by all tokens but one.
        for start in sorted({0, case.T // 2, case.T - 1}) if face == "extend" else [0]:
            refusal = kernel.refuses(*_kernel_arguments(subject, case, face, start))
            if refusal is not None:
                refusals.append(f"{kernel.name}: {refusal}")
                continue
            with _poisoned():
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
    """The mechanism, and the arguments of its face; for "extend", a state that `start` tokens have been through."""
    mechanism = _mechanism(subject, case)
    q, k, v = case.qkv()
    mask = case.mask(case.T, case.T)
    if face == "forward":
        return mechanism, q, k, v, mask if "k" in mechanism.needs else mask.but(size_override=(case.T, case.T))
    mechanism.use = "plain"
    state = mechanism.empty(case.size(S=case.T + 1), Mask(window=mask.window))
    seen = [None, None] if mask.visible is None else mask.visible.split([start, case.T - start], 1)
    (q0, q), (k0, k), (v0, v) = (x.split([start, case.T - start], 2) for x in (q, k, v))
    _, state = mechanism.extend(q0, k0, v0, state, seen[0])
    return mechanism, q, k, v, state, seen[1]


def _kernel_results(subject: Subject, case: Case, face: str, start: int, use: str) -> list[Tensor]:
    """The output and, where it carries any, the gradients."""
    mechanism, q, k, v, *rest = _kernel_arguments(subject, case, face, start)
    mechanism.use = use
    if face == "extend":
        with torch.no_grad():
            out, state = mechanism.extend(q, k, v, *rest)
        return [out, state.tokens.to(out.dtype)]
    leaves = [x.requires_grad_() for x in (q, k, v)] + [x for x in mechanism.parameters() if x.requires_grad]
    out = mechanism(q, k, v, *rest)
    # Where weights cancel, a direction that depended on out would add out's rounding to the gradient.
    direction = case.draw(*out.shape, stream=4) if mechanism.signed else out.detach().cos()
    grads = torch.autograd.grad((out * direction).sum(), leaves, allow_unused=True)
    return [out, *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True))]


def _kernel_scale(subject: Subject, case: Case, face: str, start: int) -> Tensor | None:
    """What rounding of the output is relative to where weights may be negative."""
    exact = case.but(dtype="float64", rounded=case.rounded or case.dtype)
    mechanism = _mechanism(subject, exact)
    if not mechanism.signed:
        return None
    q, k, v = exact.qkv()
    mask = exact.mask(case.T, case.T)
    mask = mask.but(causal=True, documents=None) if face == "extend" else mask
    scale = spread(mechanism, mechanism.weights(q, k, mask), mask.zero_hidden(v))
    return None if scale is None else scale[:, :, start:]


def _kernel_findings(
    what: str,
    case: Case,
    fast: list[Tensor],
    plain: list[Tensor],
    truth: list[Tensor],
    output_scale: Tensor | None,
) -> list[Finding]:
    """Outputs against the largest output (or their own scale), gradients against the largest gradient."""
    findings = []
    largest = [truth[0].abs().max(), max((t.abs().max() for t in truth[1:]), default=truth[0].abs().max())]
    if output_scale is not None:
        largest[0] = output_scale
    for n, (f, p, t) in enumerate(zip(fast, plain, truth, strict=True)):
        scale = largest[min(n, 1)].clamp(min=1e-30)
        limit = TOLERANCE.get(case.type)
        if limit is None:
            limit = (2 if n == 0 else 3) * max(difference(p, t, scale), torch.finfo(case.type).eps / 2)
        name = "output" if n == 0 else f"gradient {n}"
        findings.append(Finding(difference(f, t, scale), limit, f"{what}: {name}"))
    return findings


class _poisoned:
    """Inside, memory from torch.empty is NaN, so that a kernel cannot forget to write a part of its output."""

    def __enter__(self) -> None:
        self.before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(self.before)
