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
from regard.lens.trace.trace import Attended, Recording, of_heads, weighed

LIMIT = 1e-3  # the most that a weight may move
ROWS = 128  # rows by which steps are found
SURE = 0.65  # of the limit is aimed at where there are more: they may be worse
TRIES = 8
COARSER = 4  # how much coarser keys are than queries, which can make up for it
TOP = 8  # keys of a row whose scores a query is fitted to
RIDGE = 1e-4  # of the square of a key, since keys may be alike

Way = tuple[str, Tensor | None]


class Kept(NamedTuple):
    """q, k and n as they are to be stored; a type and steps for each q and k; how far the weights of a head move."""

    q: Float[Tensor, "H T K"]
    k: Float[Tensor, "N S K"]
    n: Float[Tensor, "H T"] | None
    ways_q: list[Way]
    ways_k: list[Way]
    error: list[float]


def kept(recording: Recording, attended: Attended) -> Kept:
    """The coarsest way to store q and k that keeps weights within the limit."""
    q, k = attended.q, attended.k
    assert q is not None and k is not None
    if isinstance(attended.formula, SoftmaxFormula):
        return _fitting(recording, attended)
    if isinstance(attended.formula, Feature):
        return _halved(recording, attended)
    return Kept(q, k, attended.n, _ways(q, steps(q)), _ways(k, steps(k)), [0.0] * attended.heads)


def _fitting(recording: Recording, attended: Attended) -> Kept:
    """SoftmaxFormula attention with the ε of some rows, a smaller one where another row turns out to need it."""
    q, k, n = attended.q, attended.k, attended.n
    assert q is not None and k is not None and n is not None
    group, eps = _group(attended), _search(recording, attended)
    made_q, made_n, error = q.clone(), n.clone(), torch.zeros(len(q))
    wrong = eps > 0
    for _ in range(TRIES):
        heads = wrong[group].nonzero()[:, 0]
        if not len(heads):
            break
        step_q, step_k = _steps(attended, eps)
        rough = replace(attended, q=made_q, k=round_to_steps(k, step_k[:, None]), n=None)
        error[heads] = 0.0
        for rows in recording.spans(attended, len(heads)):
            exact = weighed(attended, *recording.read(attended), heads.tolist(), rows)[0]
            made_n[heads[:, None], rows], far = _fit(recording, attended, rough, step_q, heads.tolist(), rows, exact)
            error[heads] = torch.maximum(error[heads], far)
        worst = _each(error, group, len(k))
        wrong &= worst > LIMIT
        eps = torch.where(wrong, eps * SURE * LIMIT / worst, eps)
    lost = (wrong | (eps == 0))[group]
    made_q[lost], made_n[lost], error[lost] = q[lost], n[lost], 0.0
    step_q, step_k = _steps(attended, eps.masked_fill(wrong, 0))
    return Kept(made_q, k, made_n, _ways(q, step_q), _ways(k, step_k), error.tolist())


def _search(recording: Recording, attended: Attended) -> Float[Tensor, " N"]:
    """The largest ε of each group of heads that does for some rows; 0 where none does."""
    q, k, formula = attended.q, attended.k, attended.formula
    assert q is not None and k is not None and isinstance(formula, SoftmaxFormula)
    rows, N, group = _spread(q.shape[1]), len(k), _group(attended)
    eps = torch.full((N,), 4e-3 / (abs(formula.scale) * q.shape[-1] ** 0.5 + 1e-30))
    most = (steps(k) * _each(_rms(q), group, N)).amax(1) / COARSER  # larger ones change nothing
    most = torch.maximum(most, _each((steps(q) * _rms(k)[group]).amax(1), group, N))
    limit = LIMIT if len(rows) == q.shape[1] else SURE * LIMIT
    good, bad = torch.zeros(N), torch.full((N,), torch.inf)  # the largest ε that does, the smallest that does not
    exact = weighed(attended, *recording.read(attended), range(len(q)), rows)[0]
    found = torch.zeros(N, dtype=torch.bool)
    for _ in range(TRIES):
        step_q, step_k = _steps(attended, eps)
        rough = replace(attended, q=q.clone(), k=round_to_steps(k, step_k[:, None]), n=None)
        worst = _each(_fit(recording, attended, rough, step_q, range(len(q)), rows, exact)[1], group, N)
        does = worst <= limit
        good, bad = torch.where(does, good.maximum(eps), good), torch.where(does, bad, bad.minimum(eps))
        found |= does & (worst > 0.85 * limit) | (good >= most) | (good * 1.1 > bad)
        if bool(found.all()):
            break
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
    """Puts queries in steps that go with rough keys into `rough`; their normalisers, and how far weights then move."""
    assert attended.q is not None and attended.k is not None and rough.q is not None and rough.k is not None
    share, at = exact.topk(min(TOP, exact.shape[2]), -1)
    one = torch.arange(len(heads))[:, None, None]
    near, true = (of_heads(x, heads, attended.heads)[one, at] * (share > 0)[..., None] for x in (rough.k, attended.k))
    q = attended.q[list(heads)][:, rows, :, None]
    far = steps(attended.q)[list(heads), None, :, None]
    low, high, wanted = q - far, q + far, true @ q
    ridge = RIDGE * near.square().sum(-1).mean(-1, keepdim=True) + 1e-30
    K, step = q.shape[2], step[list(heads), None, :, None]
    # What rounding the first columns does to scores, those that are left can make up for.
    for first, last in ((0, K // 2), (K // 2, K - K // 4), (K - K // 4, K)):
        free = near[..., first:]
        gram = free @ free.mT
        gram.diagonal(dim1=-2, dim2=-1).add_(ridge)
        moved = q[:, :, first:] + free.mT @ torch.linalg.solve_ex(gram, wanted - near @ q)[0]
        q[:, :, first:] = moved.clamp(low[:, :, first:], high[:, :, first:])
        q[:, :, first:last] = round_to_steps(q[:, :, first:last], step[:, :, first:last])
    rough.q[torch.tensor(heads)[:, None], rows] = q[..., 0]
    weights, n, _ = weighed(rough, *recording.read(attended), heads, rows)
    total = exact.sum(-1)  # less than 1 where a sink takes the rest
    error = (weights * total[..., None] - exact).abs().amax((1, 2)).nan_to_num(1.0, 1.0)
    return torch.where(total > 0, n - total.log(), -torch.inf), error


def _steps(attended: Attended, eps: Float[Tensor, " N"]) -> tuple[Float[Tensor, "H K"], Float[Tensor, "N K"]]:
    """Steps of q and k for ε, no coarser than those of any array; 0 where ε is."""
    q, k, group = attended.q, attended.k, _group(attended)
    assert q is not None and k is not None
    fine_q = eps[group, None] / _rms(k)[group].clamp(min=1e-30)
    fine_k = COARSER * eps[:, None] / _each(_rms(q), group, len(k)).clamp(min=1e-30)
    step_q, step_k = on_grid(steps(q).minimum(fine_q)), on_grid(steps(k).minimum(fine_k))
    return step_q.masked_fill((eps == 0)[group, None], 0), step_k.masked_fill((eps == 0)[:, None], 0)


def _group(attended: Attended) -> Int[Tensor, " H"]:
    """Which keys a head uses."""
    assert attended.k is not None
    return torch.arange(attended.heads) * len(attended.k) // attended.heads


def _each(x: Float[Tensor, "H *any"], group: Int[Tensor, " H"], N: int) -> Float[Tensor, "N *any"]:
    """The largest of the heads that share keys."""
    return torch.stack([x[group == g].amax(0) for g in range(N)])


def _ways(x: Tensor, step: Float[Tensor, "N K"]) -> list[Way]:
    """Steps where there are some and they can be counted; else the numbers as they are."""
    counted = (x.abs().amax(1) < LARGEST * step).all(1)
    return [("step", one) if good else ("f32", None) for one, good in zip(step, counted.tolist(), strict=True)]


def _halved(recording: Recording, attended: Attended) -> Kept:
    """Kernel attention: half precision where that will do."""
    q, k, group = attended.q, attended.k, _group(attended)
    assert q is not None and k is not None
    rows, heads = _spread(q.shape[1]), range(attended.heads)
    half = replace(attended, q=q.half().float(), k=k.half().float())
    error = (recording.cells(half, heads, rows) - recording.cells(attended, heads, rows)).abs().amax((1, 2))
    good = _each(error.nan_to_num(1.0, 1.0), group, len(k)) <= LIMIT
    ways: list[Way] = [("f16" if does else "f32", None) for does in good.tolist()]
    return Kept(q, k, attended.n, [ways[int(g)] for g in group], ways, error.where(good[group], 0.0).tolist())


def _rms(x: Float[Tensor, "N T K"]) -> Float[Tensor, "N K"]:
    size: Tensor = x.square().mean(1).sqrt()
    return size


def _spread(T: int) -> Int[Tensor, " R"]:
    """Rows over the whole text; more of the first ones, which may see few keys and give them much."""
    first = torch.arange(min(T, ROWS // 4))
    rows: Tensor = torch.cat([first, torch.linspace(0, T - 1, ROWS).round().long()]).unique()
    return rows
