"""Laws of a mechanism: its faces agree with each other, its cost with the count, its kernels with the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

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
from regard.laws.states import continued_is_whole
from regard.laws.subjects import Subject
from regard.mechanisms import Linear, Mechanism, Pairwise, fork, mix
from regard.shapes import Mask, Size


def mechanism_of(subject: Subject, case: Case) -> Mechanism:
    """Returns the mechanism of a case; what is no mechanism has no faces to compare."""
    mechanism = subject.mechanism(case)
    if mechanism is None:
        raise DoesNotApply("a bare function or module has only one face")
    return mechanism


def _against_forward(mechanism: Mechanism, out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Compared:
    """Returns an output and that of `forward` to compare it with, on rows whose result does not hang on rounding."""
    want = mechanism(q, k, v, mask)
    scale = cancellation_scale(mechanism, q, k, mask, v)
    if scale is None:
        out, want = comparable(mechanism, q, k, mask, out, want)
    return out, want, scale


def parallel_is_weights(subject: Subject, case: Case) -> Finding:
    """parallel = weights @ v"""
    mechanism_of(subject, case)

    def compute(case: Case) -> Compared:
        mechanism = mechanism_of(subject, case)
        S = case.T
        if case.causal and case.window is None and not case.documents:
            S = case.T + case.S  # the queries are the last T keys
            if mechanism.length is not None:
                S = min(S, mechanism.length)
        elif mechanism.crosses and case.window is None and not case.documents and case.adjust != "slopes":
            S = case.S
        q, k, v = case.qkv(S=S)
        mask = case.mask(case.T, S)
        weights = mechanism.weights(q, k, mask)
        values = mask.zero_hidden(v).to(weights.dtype)
        out = mechanism(q, k, v, mask)
        want = mix(weights, values)
        scale = cancellation_scale(mechanism, q, k, mask, v)
        if scale is None:
            out, want = comparable(mechanism, q, k, mask, out, want)
        return out, want, scale

    return agree(case, compute, "forward against weights @ v")


def recurrent_is_parallel(subject: Subject, case: Case) -> Finding:
    """recurrent = causal parallel, for any split into chunks"""
    if subject.state_call is not None:
        return continued_is_whole(subject, case)
    mechanism_of(subject, case)
    case = case.but(causal=True, documents=False).without_bias()
    some_chunks = _draw_chunks(case)
    single_tokens = [1] * min(case.T, 9) + [case.T - 9] * (case.T > 9)

    def compute(case: Case, chunks: list[int]) -> Compared:
        mechanism = mechanism_of(subject, case)
        q, k, v = case.qkv()
        mask = case.mask(case.T, case.T)
        state = mechanism.empty(case.size(S=2), state_rules(mask))
        parts = []
        visible = split_visible(mask.visible, chunks)
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
    """Compares the gradients of two chunks, through the state between them, with those of the whole sequence."""
    mechanism = mechanism_of(subject, case)
    mask = case.mask(case.T, case.T)
    half = case.T // 2
    sizes = [half, case.T - half]
    directions = case.draw(case.B, case.H, case.T, case.V, stream=5)
    results = []
    for in_chunks in (True, False):
        leaves = [x.requires_grad_() for x in case.qkv()]
        q, k, v = leaves
        if in_chunks:
            state = mechanism.empty(case.size(S=2), state_rules(mask))
            parts = []
            visible = split_visible(mask.visible, sizes)
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
    mechanism = mechanism_of(subject, case)
    q, k, v = case.qkv()
    mask = case.mask(case.T, case.T)
    order = case.range(case.B).roll(1)
    sizes = [case.T // 2, case.T - case.T // 2]
    seen_before, seen_after = split_visible(mask.visible, sizes)
    before, after = zip(*(x.split(sizes, 2) for x in (q, k, v)), strict=True)
    state = mechanism.empty(case.size(S=2), state_rules(mask))
    first, state = mechanism.extend(before[0], before[1], before[2], state, seen_before)
    if seen_after is not None:
        seen_after = seen_after[order]
    moved = [x[order] for x in after]
    second, _ = mechanism.extend(moved[0], moved[1], moved[2], fork(state, order), seen_after)
    out = torch.cat([first, second[order.argsort()]], 2)
    return _against_forward(mechanism, out, q, k, v, mask)


def state_rules(mask: Mask) -> Mask:
    """Returns the rules of a mask that a state keeps for every step."""
    return Mask(window=mask.window, slopes=mask.slopes, softcap=mask.softcap, sinks=mask.sinks)


def _draw_chunks(case: Case) -> list[int]:
    """Returns a random split of the case's tokens into chunks."""
    generator = torch.Generator().manual_seed(case.seed)
    chunks: list[int] = []
    while sum(chunks) < case.T:
        n = 1 + int(torch.randint(0, 1 + case.T // 2, (), generator=generator))
        chunks.append(min(n, case.T - sum(chunks)))
    return chunks


def split_visible(visible: Tensor | None, chunks: list[int]) -> Sequence[Tensor | None]:
    """Splits a mask of visible keys [B,T] into chunks of these lengths; None gives None for each chunk."""
    if visible is None:
        return [None] * len(chunks)
    parts: Sequence[Tensor] = visible.split(chunks, 1)
    return parts


def rows_sum_to_one(subject: Subject, case: Case) -> Finding:
    """rows of weights sum to one, or are all zero where nothing is visible"""
    mechanism = mechanism_of(subject, case)
    if not mechanism.normalised:
        raise DoesNotApply("its weights are what a memory still holds of each token: they fade and are erased")
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
    mechanism = mechanism_of(subject, case)
    if not mechanism.crosses:
        raise DoesNotApply("it has no cross-attention")
    case = case.but(causal=False, window=None, documents=False, adjust="none")

    def compute(case: Case) -> Compared:
        mechanism = mechanism_of(subject, case)
        q, k, v = case.qkv(S=case.S)
        visible = case.visible(case.S)
        state = mechanism.empty(case.size(S=3))
        half = case.S // 2
        halves = [half, case.S - half]
        for ks, vs, seen in zip(k.split(halves, 2), v.split(halves, 2), split_visible(visible, halves), strict=True):
            state = mechanism.write(state, ks, vs, seen)
        parts = [mechanism.read(part, state) for part in q.split(max(1, case.T // 2), 2)]
        return _against_forward(mechanism, torch.cat(parts, 2), q, k, v, Mask(visible=visible))

    return agree(case, compute, "write in two parts and read, against forward")


def flops_as_declared(subject: Subject, case: Case) -> Finding:
    """declared matmul FLOPs = FlopCounterMode on the plain reference, of each face and of the gradients"""
    from torch.utils.flop_counter import FlopCounterMode  # it loads triton where there is one, which takes its time

    mechanism = mechanism_of(subject, case)
    if not _declares_costs(mechanism):
        raise DoesNotApply("it declares no costs of its own")
    mechanism.use = "plain"
    case = case.but(documents=False, padding="none", adjust="none")
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
    """Returns whether a mechanism declares the cost of its scores.

    A user's subclass of `Pairwise` inherits the cost of weights @ v, but not that of the weights it computes itself.
    """
    if not isinstance(mechanism, Pairwise) or type(mechanism).__module__.startswith("regard."):
        return True
    cls: type[Pairwise] = type(mechanism)
    return cls.score_flops is not Pairwise.score_flops or cls.cost is not Pairwise.cost


def gradients_or_zeros(total: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradient of a number for each leaf, zeros for one that it does not depend on."""
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    filled = []
    for grad, leaf in zip(grads, leaves, strict=True):
        if grad is None:
            grad = torch.zeros_like(leaf)
        filled.append(grad)
    return filled
