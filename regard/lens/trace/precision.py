"""How finely queries and keys have to be kept so that no weight moves by more than a thousandth.

A score moves by Σ_d (δq_d·k_d + q_d·δk_d), so a column of q may be as coarse as ε over the size of that column of k.
ε is found by trying on some rows; then all rows are looked at. Two things let steps be coarse:

- rows are normalised again with the scores that are kept: what moves all scores of a row moves no weight;
- queries are fitted to the keys as they are kept: q̂ is near q, and q̂·k̂ is q·k for the keys that it looks at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.lens.trace.arrays import LARGEST, on_grid, round_to_steps, steps
from regard.lens.trace.formulas import Feature, SoftmaxFormula
from regard.lens.trace.trace import Attended, Recording, of_heads, weigh

LIMIT = 1e-3  # the most that a weight may move
ROWS = 128  # rows by which steps are found
SURE = 0.65  # of the limit is aimed at where there are more: they may be worse
TRIES = 8
COARSER = 4  # how much coarser keys are than queries, which can make up for it
TOP = 8  # keys of a row whose scores a query is fitted to
RIDGE = 1e-4  # of the square of a key, since keys may be alike

Storage = tuple[str, Tensor | None]  # the type of an array, and its steps where it has any


class StoredVectors(NamedTuple):
    """q, k and n as they are to be stored, how each q and k is, and how far the weights of each head move by it."""

    q: Float[Tensor, "H T K"]
    k: Float[Tensor, "N S K"]
    n: Float[Tensor, "H T"] | None
    q_storage: list[Storage]
    k_storage: list[Storage]
    error: list[float]


def choose_precision(recording: Recording, attended: Attended) -> StoredVectors:
    """Returns the coarsest way to store q and k that keeps weights within the limit."""
    q = attended.q
    k = attended.k
    assert q is not None and k is not None
    if isinstance(attended.formula, SoftmaxFormula):
        return _fit_softmax(recording, attended)
    if isinstance(attended.formula, Feature):
        return _halve_features(recording, attended)
    return StoredVectors(q, k, attended.n, _storage(q, steps(q)), _storage(k, steps(k)), [0.0] * attended.heads)


def _fit_softmax(recording: Recording, attended: Attended) -> StoredVectors:
    """Returns softmax attention with the ε of some rows, a smaller one where another row turns out to need it."""
    q, k, n = attended.q, attended.k, attended.n
    assert q is not None and k is not None and n is not None
    group = _group(attended)
    eps = _search(recording, attended)
    fitted_q = q.clone()
    fitted_n = n.clone()
    error = torch.zeros(len(q))
    wrong = eps > 0
    for _ in range(TRIES):
        heads = wrong[group].nonzero()[:, 0]
        if not len(heads):
            break
        q_step, k_step = _steps(attended, eps)
        rough = replace(attended, q=fitted_q, k=round_to_steps(k, k_step[:, None]), n=None)
        error[heads] = 0.0
        for rows in recording.spans(attended, len(heads)):
            exact = weigh(attended, *recording.read(attended), heads.tolist(), rows)[0]
            fitted_n[heads[:, None], rows], moved = _fit(
                recording, attended, rough, q_step, heads.tolist(), rows, exact
            )
            error[heads] = torch.maximum(error[heads], moved)
        worst = _group_max(error, group, len(k))
        wrong &= worst > LIMIT
        eps = torch.where(wrong, eps * SURE * LIMIT / worst, eps)
    # Heads that no ε does for are stored as they are.
    lost = (wrong | (eps == 0))[group]
    fitted_q[lost] = q[lost]
    fitted_n[lost] = n[lost]
    error[lost] = 0.0
    q_step, k_step = _steps(attended, eps.masked_fill(wrong, 0))
    return StoredVectors(fitted_q, k, fitted_n, _storage(q, q_step), _storage(k, k_step), error.tolist())


def _search(recording: Recording, attended: Attended) -> Float[Tensor, " N"]:
    """Returns the largest ε of each group of heads that does for some rows; 0 where none does."""
    q, k, formula = attended.q, attended.k, attended.formula
    assert q is not None and k is not None and isinstance(formula, SoftmaxFormula)
    rows = _sample_rows(q.shape[1])
    N = len(k)
    group = _group(attended)
    eps = torch.full((N,), 4e-3 / (abs(formula.scale) * q.shape[-1] ** 0.5 + 1e-30))
    most = (steps(k) * _group_max(_rms(q), group, N)).amax(1) / COARSER  # larger ones change nothing
    most = torch.maximum(most, _group_max((steps(q) * _rms(k)[group]).amax(1), group, N))
    limit = LIMIT
    if len(rows) < q.shape[1]:
        limit = SURE * LIMIT
    good = torch.zeros(N)  # the largest ε that does
    bad = torch.full((N,), torch.inf)  # the smallest that does not
    exact = weigh(attended, *recording.read(attended), range(len(q)), rows)[0]
    done = torch.zeros(N, dtype=torch.bool)
    for _ in range(TRIES):
        q_step, k_step = _steps(attended, eps)
        rough = replace(attended, q=q.clone(), k=round_to_steps(k, k_step[:, None]), n=None)
        worst = _group_max(_fit(recording, attended, rough, q_step, range(len(q)), rows, exact)[1], group, N)
        does = worst <= limit
        good = torch.where(does, good.maximum(eps), good)
        bad = torch.where(does, bad, bad.minimum(eps))
        done |= does & (worst > 0.85 * limit) | (good >= most) | (good * 1.1 > bad)
        if bool(done.all()):
            break
        # The error grows about as ε does; between one that does and one that does not, bisect their logarithms.
        guess = (eps * (0.93 * limit / worst.clamp(min=1e-9)).clamp(1 / 64, 64)).minimum(most)
        between = (good > 0) & (bad < torch.inf)
        eps = torch.where(between, (good * bad).sqrt(), guess)
    return good


def _fit(
    recording: Recording,
    attended: Attended,
    rough: Attended,
    step: Float[Tensor, "H K"],
    heads: Sequence[int],
    rows: Int[Tensor, " R"],
    exact: Float[Tensor, "h R s"],
) -> tuple[Float[Tensor, "h R"], Float[Tensor, " h"]]:
    """Writes queries in steps that go with the rough keys into `rough`.

    Returns their normalisers, and how far the weights of each head then move.
    """
    assert attended.q is not None and attended.k is not None and rough.q is not None and rough.k is not None
    share, top = exact.topk(min(TOP, exact.shape[2]), -1)
    every_head = torch.arange(len(heads))[:, None, None]
    rough_k, true_k = (
        of_heads(x, heads, attended.heads)[every_head, top] * (share > 0)[..., None] for x in (rough.k, attended.k)
    )
    q = attended.q[list(heads)][:, rows, :, None]
    reach = steps(attended.q)[list(heads), None, :, None]
    low = q - reach
    high = q + reach
    wanted = true_k @ q  # the scores that the fitted query should have
    ridge = RIDGE * rough_k.square().sum(-1).mean(-1, keepdim=True) + 1e-30
    K = q.shape[2]
    step = step[list(heads), None, :, None]
    # What rounding the first columns does to scores, those that are left can make up for.
    for first, last in ((0, K // 2), (K // 2, K - K // 4), (K - K // 4, K)):
        free = rough_k[..., first:]
        gram = free @ free.mT
        gram.diagonal(dim1=-2, dim2=-1).add_(ridge)
        moved = q[:, :, first:] + free.mT @ torch.linalg.solve_ex(gram, wanted - rough_k @ q)[0]
        q[:, :, first:] = moved.clamp(low[:, :, first:], high[:, :, first:])
        q[:, :, first:last] = round_to_steps(q[:, :, first:last], step[:, :, first:last])
    rough.q[torch.tensor(heads)[:, None], rows] = q[..., 0]
    weights, n, _ = weigh(rough, *recording.read(attended), heads, rows)
    total = exact.sum(-1)  # less than 1 where a sink takes the rest
    error = (weights * total[..., None] - exact).abs().amax((1, 2)).nan_to_num(1.0, 1.0)
    return torch.where(total > 0, n - total.log(), -torch.inf), error


def _steps(attended: Attended, eps: Float[Tensor, " N"]) -> tuple[Float[Tensor, "H K"], Float[Tensor, "N K"]]:
    """Returns the steps of q and k for ε, no coarser than those of any array; 0 where ε is."""
    q, k, group = attended.q, attended.k, _group(attended)
    assert q is not None and k is not None
    fine_q = eps[group, None] / _rms(k)[group].clamp(min=1e-30)
    fine_k = COARSER * eps[:, None] / _group_max(_rms(q), group, len(k)).clamp(min=1e-30)
    q_step = on_grid(steps(q).minimum(fine_q))
    k_step = on_grid(steps(k).minimum(fine_k))
    return q_step.masked_fill((eps == 0)[group, None], 0), k_step.masked_fill((eps == 0)[:, None], 0)


def _group(attended: Attended) -> Int[Tensor, " H"]:
    """Returns the number of the key head that each head uses."""
    assert attended.k is not None
    return torch.arange(attended.heads) * len(attended.k) // attended.heads


def _group_max(x: Float[Tensor, "H *any"], group: Int[Tensor, " H"], N: int) -> Float[Tensor, "N *any"]:
    """Returns the largest of the heads that share keys."""
    return torch.stack([x[group == g].amax(0) for g in range(N)])


def _storage(x: Tensor, step: Float[Tensor, "N K"]) -> list[Storage]:
    """Returns steps where there are some and they can be counted; else that numbers are stored as they are."""
    countable = (x.abs().amax(1) < LARGEST * step).all(1)
    return [("step", s) if good else ("f32", None) for s, good in zip(step, countable.tolist(), strict=True)]


def _halve_features(recording: Recording, attended: Attended) -> StoredVectors:
    """Returns kernel attention in half precision where that will do."""
    q, k, group = attended.q, attended.k, _group(attended)
    assert q is not None and k is not None
    rows = _sample_rows(q.shape[1])
    heads = range(attended.heads)
    half = replace(attended, q=q.half().float(), k=k.half().float())
    error = (recording.cells(half, heads, rows) - recording.cells(attended, heads, rows)).abs().amax((1, 2))
    good = _group_max(error.nan_to_num(1.0, 1.0), group, len(k)) <= LIMIT
    by_group: list[Storage] = [("f16" if does else "f32", None) for does in good.tolist()]
    by_head = [by_group[int(g)] for g in group]
    return StoredVectors(q, k, attended.n, by_head, by_group, error.where(good[group], 0.0).tolist())


def _rms(x: Float[Tensor, "N T K"]) -> Float[Tensor, "N K"]:
    size: Tensor = x.square().mean(1).sqrt()
    return size


def _sample_rows(T: int) -> Int[Tensor, " R"]:
    """Returns rows over the whole text; more of the first ones, which may see few keys and give them much."""
    first = torch.arange(min(T, ROWS // 4))
    rows: Tensor = torch.cat([first, torch.linspace(0, T - 1, ROWS).round().long()]).unique()
    return rows
