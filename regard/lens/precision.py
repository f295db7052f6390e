"""How finely queries and keys have to be kept so that no weight moves by more than a thousandth.

A score moves by Σ_d (δq_d·k_d + q_d·δk_d), so a column of q may be as coarse as ε over the size of that column of k.
ε is found by trying: the weights of some rows, computed from what would be stored, are compared with the exact ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.lens.arrays import LARGEST, rounded, steps
from regard.lens.formulas import Feature, Softmax
from regard.lens.trace import Attended, Recording

LIMIT = 1e-3  # the most that a weight may move
ROWS = 128  # rows that are looked at
TRIES = 8


class Kept(NamedTuple):
    """How q and k of each head and group are stored: a type, and steps for s16; and how far weights then move."""

    q: list[tuple[str, Tensor | None]]
    k: list[tuple[str, Tensor | None]]
    error: list[float]


def kept(recording: Recording, attended: Attended) -> Kept:
    """The coarsest way to store q and k that keeps weights within the limit."""
    assert attended.q is not None and attended.k is not None
    rows = _spread(len(recording.read(attended)[0]))
    if isinstance(attended.formula, Softmax):
        return _stepped(recording, attended, rows)
    if isinstance(attended.formula, Feature):
        return _halved(recording, attended, rows)
    q, k = ([("s16", step) for step in steps(x)] for x in (attended.q, attended.k))
    return Kept(q, k, [0.0] * attended.heads)


def _stepped(recording: Recording, attended: Attended, rows: Int[Tensor, " R"]) -> Kept:
    q, k, formula = attended.q, attended.k, attended.formula
    assert q is not None and k is not None and isinstance(formula, Softmax)
    H, N = q.shape[0], k.shape[0]
    group = torch.arange(H) * N // H
    size_k = _rms(k)
    size_q = _each(_rms(q), group, N)
    coarse_q, coarse_k = steps(q), steps(k)
    exact = _weights(recording, attended, rows)
    eps = torch.full((N,), 4e-3 / (abs(formula.scale) * q.shape[-1] ** 0.5 + 1e-30))
    good, bad = torch.zeros(N), torch.full((N,), float("inf"))  # the largest ε that will do, the smallest that will not
    found_q, found_k, left = torch.zeros_like(coarse_q), torch.zeros_like(coarse_k), torch.zeros(H)
    for _ in range(TRIES):
        steps_q = torch.minimum(coarse_q, eps[group, None] / size_k[group].clamp(min=1e-30))
        steps_k = torch.minimum(coarse_k, eps[:, None] / size_q.clamp(min=1e-30))
        stored = replace(attended, q=rounded(q, steps_q[:, None]), k=rounded(k, steps_k[:, None]))
        error = (_weights(recording, stored, rows) - exact).abs().amax((1, 2)).nan_to_num(1.0, 1.0)
        worst = _each(error, group, N)
        better = (worst <= LIMIT) & (eps > good)
        good, bad = torch.where(better, eps, good), torch.where(worst > LIMIT, torch.minimum(bad, eps), bad)
        found_k[better], mine = steps_k[better], better[group]
        found_q[mine], left[mine] = steps_q[mine], error[mine]
        coarsest = (eps[:, None] > coarse_k * size_q).all(1)
        if bool((better & ((worst >= LIMIT / 2) | coarsest) | (good * 1.3 > bad)).all()):
            break
        guess = eps * (0.7 * LIMIT / worst.clamp(min=1e-9)).clamp(1 / 64, 64)
        inside = (good > 0) & (bad < float("inf")) & ((guess <= good) | (guess >= bad))
        eps = torch.where(inside, (good * bad).sqrt(), guess)
    left = torch.where(good[group] > 0, left, 0.0)
    return Kept(_ways(q, found_q), _ways(k, found_k), left.tolist())


def _each(x: Float[Tensor, "H *any"], group: Int[Tensor, " H"], N: int) -> Float[Tensor, "N *any"]:
    """The largest of the heads that share keys."""
    return torch.stack([x[group == g].amax(0) for g in range(N)])


def _ways(x: Tensor, found: Float[Tensor, "N K"]) -> list[tuple[str, Tensor | None]]:
    """The smallest type that holds as many steps as there are; no steps were found: as it is."""
    most = (x.abs().amax(1) / found).amax(1).nan_to_num(float("inf"))
    kinds = [next((kind for kind, n in LARGEST.items() if m < n), "f32") for m in most.tolist()]
    return [(kind, None if kind == "f32" else step) for kind, step in zip(kinds, found, strict=True)]


def _halved(recording: Recording, attended: Attended, rows: Int[Tensor, " R"]) -> Kept:
    q, k = attended.q, attended.k
    assert q is not None and k is not None
    H, N = q.shape[0], k.shape[0]
    group = torch.arange(H) * N // H
    exact = _weights(recording, attended, rows)
    half = _weights(recording, replace(attended, q=q.half().float(), k=k.half().float()), rows)
    error = (half - exact).abs().amax((1, 2))
    good = torch.stack([(error[group == g] <= LIMIT).all() for g in range(N)])  # NaN is not good
    types = ["f16" if x else "f32" for x in good.tolist()]
    left = torch.where(good[group], error, 0.0)
    return Kept([(types[int(g)], None) for g in group], [(t, None) for t in types], left.tolist())


def _weights(recording: Recording, attended: Attended, rows: Tensor) -> Float[Tensor, "H R S"]:
    return recording.cells(attended, range(attended.heads), rows)


def _rms(x: Float[Tensor, "N T K"]) -> Float[Tensor, "N K"]:
    size: Tensor = x.square().mean(1).sqrt()
    return size


def _spread(T: int) -> Int[Tensor, " R"]:
    """Rows over the whole text, the last among them."""
    rows: Tensor = torch.linspace(0, T - 1, min(T, ROWS)).round().long().unique()
    return rows
