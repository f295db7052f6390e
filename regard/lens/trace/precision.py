"""Chooses how q and k are stored; for softmax attention, such that no attention weight changes by more than 1e-3.

The following is about softmax attention; `choose_precision` says how q and k of other attention are stored.

Quantisation changes a score by Σ_d (δq_d·k_d + q_d·δk_d). Each column d may contribute an error of about ε: the step
size of column d of q is ε divided by the RMS of column d of k, and the other way round. For each key head, the largest
ε is searched on a sample of rows, and then verified on all rows. Two things allow large steps:

- the normalisers are computed again from the quantised q and k, so an error that all scores of a row share cancels;
- queries are fitted to the quantised keys k̂: q̂ stays near q, and q̂·k̂ ≈ q·k for the keys with the largest weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.lens.trace.arrays import MAX_CODE, default_steps, round_down_steps, round_to_steps
from regard.lens.trace.formulas import KernelFormula, RecurrenceFormula, SoftmaxFormula
from regard.lens.trace.trace import RecordedAttention, Recording
from regard.lens.trace.weighing import kv_for_heads, weigh

LIMIT = 1e-3  # largest allowed change of a weight
SHORT = 512  # tokens of the longest text that is stored without loss
FEW = 3_000_000  # numbers in q, k, v and gradients up to which it is: 12 MB before compression
ROWS = 128  # number of rows, spread over the text, in the sample that ε is searched on (see `_sample_rows`)
SAFETY = 0.65  # if there are more rows than the sample, aim at this fraction of LIMIT: other rows may be worse
TRIES = 8  # largest number of values of ε that are tried
COARSER = 4  # keys get steps this many times larger: the fitted queries compensate for part of the keys' error
TOP = 8  # each query is fitted to the scores of this many keys, those with the largest weights
RIDGE = 1e-4  # ridge term as a fraction of the mean squared key norm; needed where keys are nearly collinear

Storage = tuple[str, Tensor | None]  # the storage type of an array, and its step sizes if the type is "step"


class StoredVectors(NamedTuple):
    """The q, k and n to store, the storage type of each head's q and k, and the largest weight error per head.

    N is the number of heads of k: G, or H for synthesizers, which have keys for every head. k is rounded to its steps
    only when it is packed. The errors of kernel attention are those of the sampled rows.
    """

    q: Float[Tensor, "H T K"]
    k: Float[Tensor, "N S K"]
    n: Float[Tensor, "H T"] | None
    q_storage: list[Storage]
    k_storage: list[Storage]
    error: list[float]


class _QuerySteps(NamedTuple):
    """The quantisation step of each column of the queries, and how far fitting may move an entry of it."""

    step: Float[Tensor, "H K"]
    largest_change: Float[Tensor, "H K"]


class _Wanted(NamedTuple):
    """What the fitted queries of R rows should give: the keys with the largest weights, and their exact scores."""

    exact: Float[Tensor, "h R s"]  # the weights before quantisation
    top: Int[Tensor, "h R M"]  # the keys with the largest weights
    counts: Bool[Tensor, "h R M 1"]  # False for a key without weight
    scores: Float[Tensor, "h R M 1"]


def choose_precision(recording: Recording, attended: RecordedAttention) -> StoredVectors:
    """Quantises q and k of softmax attention as coarsely as LIMIT and `default_steps` allow.

    The q and k of kernel attention are stored as floats, and those of a memory or of a short text as they are. In other
    attention no weight is computed from q and k, so they are quantised with `default_steps`.
    """
    q = attended.q
    k = attended.k
    assert q is not None and k is not None
    if isinstance(attended.formula, RecurrenceFormula) or is_lossless(recording):
        whole: list[Storage] = [("f32", None)]
        return StoredVectors(q, k, attended.n, whole * len(q), whole * len(k), [0.0] * attended.heads)
    if isinstance(attended.formula, SoftmaxFormula):
        return _fit_softmax(recording, attended)
    if isinstance(attended.formula, KernelFormula):
        return _choose_float_types(recording, attended)
    return StoredVectors(
        q, k, attended.n, _storage(q, default_steps(q)), _storage(k, default_steps(k)), [0.0] * attended.heads
    )


def is_lossless(recording: Recording) -> bool:
    """Tells whether q, k, v and gradients of a recording are stored in float32: where texts are short and heads few.

    Quantised numbers take a fifth of the room, which a page of many heads or of a long text needs.
    """
    arrays = [getattr(attended, name) for attended in recording.attentions for name in ("q", "k", "v", "g")]
    numbers = sum(x.numel() for x in arrays if x is not None)
    return max(map(len, recording.sequences)) <= SHORT and numbers <= FEW


def _fit_softmax(recording: Recording, attended: RecordedAttention) -> StoredVectors:
    """Fits q to the quantised k with the ε found on sampled rows, and reduces ε while any row exceeds LIMIT.

    Returns the fitted q; k is returned unrounded with its steps, since `pack_steps` rounds it to the same multiples
    that q was fitted to.
    """
    q, k, n = attended.q, attended.k, attended.n
    assert q is not None and k is not None and n is not None
    group = _group(attended)
    eps = _search(recording, attended)
    fitted_q = q.clone()
    fitted_n = n.clone()
    error = torch.zeros(len(q))
    wrong = eps > 0  # key heads whose error is not known to be within LIMIT
    largest_change = default_steps(q)
    for _ in range(TRIES):
        heads = wrong[group].nonzero()[:, 0]
        if not len(heads):
            break
        q_step, k_step = _steps(attended, eps)
        quantised = replace(attended, q=fitted_q, k=round_to_steps(k, k_step[:, None]), n=None)
        error[heads] = 0.0
        for rows in recording.row_chunks(attended, len(heads)):
            wanted = _wanted(recording, attended, heads.tolist(), rows)
            fitted_n[heads[:, None], rows], moved = _fit(
                recording, attended, quantised, _QuerySteps(q_step, largest_change), heads.tolist(), rows, wanted
            )
            error[heads] = torch.maximum(error[heads], moved)
        worst = _group_max(error, group, len(k))
        wrong &= worst > LIMIT
        eps = torch.where(wrong, eps * SAFETY * LIMIT / worst, eps)
    # Heads for which no ε meets LIMIT are stored in float32.
    lost = (wrong | (eps == 0))[group]
    fitted_q[lost] = q[lost]
    fitted_n[lost] = n[lost]
    error[lost] = 0.0
    q_step, k_step = _steps(attended, eps.masked_fill(wrong, 0))  # steps of 0, which _storage turns into float32
    return StoredVectors(fitted_q, k, fitted_n, _storage(q, q_step), _storage(k, k_step), error.tolist())


def _search(recording: Recording, attended: RecordedAttention) -> Float[Tensor, " N"]:
    """Returns for each key head the largest ε found, in a few tries, that meets the limit on sampled rows; else 0."""
    q, k, formula = attended.q, attended.k, attended.formula
    assert q is not None and k is not None and isinstance(formula, SoftmaxFormula)
    rows = _sample_rows(q.shape[1])
    N = len(k)
    group = _group(attended)
    eps = torch.full((N,), 4e-3 / (abs(formula.scale) * q.shape[-1] ** 0.5 + 1e-30))
    # Beyond largest_eps the default steps apply.
    largest_eps = (default_steps(k) * _group_max(_rms(q), group, N)).amax(1) / COARSER
    largest_eps = torch.maximum(largest_eps, _group_max((default_steps(q) * _rms(k)[group]).amax(1), group, N))
    limit = LIMIT
    if len(rows) < q.shape[1]:
        limit = SAFETY * LIMIT
    good = torch.zeros(N)  # the largest ε within the limit so far
    bad = torch.full((N,), torch.inf)  # the smallest ε beyond the limit so far
    every = range(len(q))
    # In parts, because the first rows of a causal mask reach few keys.
    parts = [(part, _wanted(recording, attended, every, part)) for part in rows.split(ROWS // 4)]
    done = torch.zeros(N, dtype=torch.bool)
    largest_change = default_steps(q)
    for _ in range(TRIES):
        q_step, k_step = _steps(attended, eps)
        quantised = replace(attended, q=q.clone(), k=round_to_steps(k, k_step[:, None]), n=None)
        steps = _QuerySteps(q_step, largest_change)
        error = torch.stack([_fit(recording, attended, quantised, steps, every, part, x)[1] for part, x in parts])
        worst = _group_max(error.amax(0), group, N)
        within_limit = worst <= limit
        good = torch.where(within_limit, good.maximum(eps), good)
        bad = torch.where(within_limit, bad, bad.minimum(eps))
        done |= within_limit & (worst > 0.85 * limit) | (good >= largest_eps) | (good * 1.1 > bad)
        if bool(done.all()):
            break
        # The error is roughly proportional to ε; once both bounds are known, bisect their logarithms.
        guess = (eps * (0.93 * limit / worst.clamp(min=1e-9)).clamp(1 / 64, 64)).minimum(largest_eps)
        between = (good > 0) & (bad < torch.inf)
        eps = torch.where(between, (good * bad).sqrt(), guess)
    return good


def _fit(
    recording: Recording,
    attended: RecordedAttention,
    quantised: RecordedAttention,
    steps: _QuerySteps,
    heads: Sequence[int],
    rows: Int[Tensor, " R"],
    wanted: _Wanted,
) -> tuple[Float[Tensor, "h R"], Float[Tensor, " h"]]:
    """Fits quantised queries to the quantised keys, and writes them into `quantised.q`.

    Returns the new log-normalisers of the rows, and the largest change of a weight of each head.
    """
    assert attended.q is not None and quantised.q is not None and quantised.k is not None
    quantised_k = _keys_at(quantised.k, heads, attended.heads, wanted.top) * wanted.counts
    q = attended.q[list(heads)][:, rows, :, None]
    largest_change = steps.largest_change[list(heads), None, :, None]
    low = q - largest_change
    high = q + largest_change
    ridge = RIDGE * quantised_k.square().sum(-1).mean(-1, keepdim=True) + 1e-30
    K = q.shape[2]
    step = steps.step[list(heads), None, :, None]
    # The columns are rounded in three parts; those not yet rounded compensate for the error of those that are.
    # The correction is the smallest change of the columns not yet rounded that gives the wanted scores (ridge
    # regression).
    for first, last in ((0, K // 2), (K // 2, K - K // 4), (K - K // 4, K)):
        free = quantised_k[..., first:]
        gram = free @ free.mT
        gram.diagonal(dim1=-2, dim2=-1).add_(ridge)
        corrected = q[:, :, first:] + free.mT @ torch.linalg.solve_ex(gram, wanted.scores - quantised_k @ q)[0]
        q[:, :, first:] = corrected.clamp(low[:, :, first:], high[:, :, first:])
        q[:, :, first:last] = round_to_steps(q[:, :, first:last], step[:, :, first:last])
    quantised.q[torch.tensor(heads)[:, None], rows] = q[..., 0]
    weights, n, _ = weigh(quantised, *recording.query_and_key_tokens(attended), heads, rows)
    total = wanted.exact.sum(-1)  # less than 1 if an attention sink takes the rest
    error = weights.mul_(total[..., None]).sub_(wanted.exact).abs_().amax((1, 2)).nan_to_num(1.0, 1.0)
    return torch.where(total > 0, n - total.log(), -torch.inf), error


def _wanted(
    recording: Recording, attended: RecordedAttention, heads: Sequence[int], rows: Int[Tensor, " R"]
) -> _Wanted:
    """Returns what the fitted queries of these heads and rows should give."""
    assert attended.q is not None and attended.k is not None
    exact = weigh(attended, *recording.query_and_key_tokens(attended), heads, rows)[0]
    weights, top = exact.topk(min(TOP, exact.shape[2]), -1)
    counts = (weights > 0)[..., None]
    keys = _keys_at(attended.k, heads, attended.heads, top) * counts
    return _Wanted(exact, top, counts, keys @ attended.q[list(heads)][:, rows, :, None])


def _keys_at(k: Tensor, heads: Sequence[int], H: int, at: Int[Tensor, "h R M"]) -> Float[Tensor, "h R M K"]:
    """Returns the keys of each head (out of H) at some places."""
    keys: Tensor = kv_for_heads(k, heads, H)[torch.arange(len(heads))[:, None, None], at]
    return keys


def _steps(attended: RecordedAttention, eps: Float[Tensor, " N"]) -> tuple[Float[Tensor, "H K"], Float[Tensor, "N K"]]:
    """Returns the step sizes of q and k for ε, never larger than `default_steps`; 0 where ε is 0."""
    q, k, group = attended.q, attended.k, _group(attended)
    assert q is not None and k is not None
    fine_q = eps[group, None] / _rms(k)[group].clamp(min=1e-30)
    fine_k = COARSER * eps[:, None] / _group_max(_rms(q), group, len(k)).clamp(min=1e-30)
    q_step = round_down_steps(default_steps(q).minimum(fine_q))
    k_step = round_down_steps(default_steps(k).minimum(fine_k))
    return q_step.masked_fill((eps == 0)[group, None], 0), k_step.masked_fill((eps == 0)[:, None], 0)


def _group(attended: RecordedAttention) -> Int[Tensor, " H"]:
    """Returns for each query head the index of its key head."""
    assert attended.k is not None
    return torch.arange(attended.heads) * len(attended.k) // attended.heads


def _group_max(x: Float[Tensor, "H *any"], group: Int[Tensor, " H"], N: int) -> Float[Tensor, "N *any"]:
    """Returns for each key head the maximum of x over the query heads that use it."""
    return torch.stack([x[group == g].amax(0) for g in range(N)])


def _storage(x: Tensor, step: Float[Tensor, "N K"]) -> list[Storage]:
    """Returns for each head ("step", its steps) if all its values fit the integer range, else ("f32", None).

    With a step of 0 no value fits.
    """
    fits = (x.abs().amax(1) < MAX_CODE * step).all(1)
    return [("step", s) if good else ("f32", None) for s, good in zip(step, fits.tolist(), strict=True)]


def _choose_float_types(recording: Recording, attended: RecordedAttention) -> StoredVectors:
    """Chooses float16 for q and k of kernel attention if the weights of the sampled rows change by at most LIMIT.

    Otherwise it chooses float32. Query heads that share a key head are decided together.
    """
    q, k, group = attended.q, attended.k, _group(attended)
    assert q is not None and k is not None
    rows = _sample_rows(q.shape[1])
    heads = range(attended.heads)
    half = replace(attended, q=q.half().float(), k=k.half().float())
    error = (
        (recording.head_weights(half, heads, rows) - recording.head_weights(attended, heads, rows)).abs().amax((1, 2))
    )
    good = _group_max(error.nan_to_num(1.0, 1.0), group, len(k)) <= LIMIT
    by_group: list[Storage] = [("f16" if accurate else "f32", None) for accurate in good.tolist()]
    by_head = [by_group[int(g)] for g in group]
    return StoredVectors(q, k, attended.n, by_head, by_group, error.where(good[group], 0.0).tolist())


def _rms(x: Float[Tensor, "N T K"]) -> Float[Tensor, "N K"]:
    rms: Tensor = x.square().mean(1).sqrt()
    return rms


def _sample_rows(T: int) -> Int[Tensor, " R"]:
    """Returns the sampled rows: ROWS spread over the text, and the first ROWS // 4, each once.

    Under a causal mask the first rows see few keys, whose weights are large.
    """
    first = torch.arange(min(T, ROWS // 4))
    rows: Tensor = torch.cat([first, torch.linspace(0, T - 1, ROWS).round().long()]).unique()
    return rows
