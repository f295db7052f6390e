"""Another key in place of one, so that queries which are given select it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from regard.lab.design.certificates import TOLERANCE, Array, DesignError, Share, mixed, nonnegative, vector
from regard.lab.design.result import Result, Vectors, checked, checked_index, checked_numbers, least_length, listed


@dataclass(frozen=True)
class NoKey:
    """Proof that no key has the scores needed: a mix of the queries is zero, and would have to score `needed` > 0.

    `residual`: the largest coordinate of the mix, whose coefficients are not negative and have sum one.
    """

    queries: tuple[Share, ...]
    needed: float
    residual: float
    tolerance: float

    def explain(self) -> str:
        return (
            f"Certificate: {mixed(self.queries, 'q')} = 0 (largest coordinate {self.residual:.1e}, "
            f"tolerance {self.tolerance:.1e}).\n  So every key's scores, mixed in the same way, are 0; the mix "
            f"of the scores needed is {self.needed:.4g}."
        )


@dataclass(frozen=True)
class TooShort:
    """Proof that no unit key is selected: q·k ≤ ‖q‖ = `length` for all of them, and key `other` scores as much."""

    length: float
    other: int
    score: float

    def explain(self) -> str:
        return (
            f"Certificate: a key of unit length scores at most ‖q‖ = {self.length:.6g}, that of q/‖q‖ itself; "
            f"key {self.other} scores {self.score:.6g} (tolerance {TOLERANCE:.0e} of the larger)."
        )


@dataclass(frozen=True, eq=False)
class Replacement(Result):
    """Keys with one replaced, so that each query [T,K] selects it, or why there is no such key.

    scores and weights [T,S] are those of beta·queries at the new keys; margin: by how much the new key's score
    exceeds every other, before `scale`, at beta = 1. beta is one unless the new key has to be of unit length.
    """

    keys: Vectors
    index: int
    queries: Float[Tensor, "T K"]
    unit: bool
    precision: float
    scale: float
    feasible: bool
    margin: float
    beta: float
    key: Float[Tensor, "K"] | None = None
    scores: Float[Tensor, "T S"] | None = None
    weights: Float[Tensor, "T S"] | None = None
    certificate: NoKey | TooShort | None = None

    def explain(self) -> str:
        kind, many = "key of unit length" if self.unit else "key", len(self.queries) > 1
        which = "all queries select it" if many else "the query selects it"
        if self.certificate is not None:
            return f"No {kind} can stand for key {self.index} so that {which}.\n{self.certificate.explain()}"
        assert self.key is not None and self.weights is not None
        weight = float(self.weights[:, self.index].min())
        lines = [f"In place of key {self.index}: {vector(self.key)}, and {which}."]
        if self.unit:
            lines.append(
                f"It is q/‖q‖: no other unit key scores more than ‖q‖ = {float(self.queries[0].norm()):.6g}. "
                f"{self.beta:.4g}·q is the shortest multiple of q with the precision wanted."
            )
        else:
            moved = float((self.key - self.keys[self.index]).norm())
            lines.append(
                f"It is as near to key {self.index} as possible, {moved:.4g} away: a query needs a score of "
                "ln Σ exp(other scores) + ln(precision/(1−precision)) there."
            )
        least = "least weight" if many else "weight"
        lines.append(f"Margin {self.margin:.4g}; {least} {weight:.6g} (wanted {self.precision:g}).")
        return "\n".join(lines)


def replace_key(
    keys: Vectors,
    i: int,
    queries: Float[Tensor, "T K"] | Float[Tensor, "K"],
    unit: bool = False,
    precision: float = 0.99,
    scale: float = 1.0,
) -> Replacement:
    """The key nearest to key i that gets at least `precision` of the weight of each query, when it takes i's place.

    `unit`: a key of length one, for one query. The best is q/‖q‖, with the score ‖q‖, and it works exactly where ‖q‖
    exceeds the score of every other key; a multiple of the query then has the precision.
    """
    keys = checked(keys)
    asked = checked(torch.atleast_2d(queries), "queries")
    checked_index(i, len(keys))
    checked_numbers(precision, scale)
    if asked.shape[1] != keys.shape[1]:
        raise DesignError(f"queries of {asked.shape[1]} numbers, keys of {keys.shape[1]}; expected as many")
    if unit and len(asked) > 1:
        raise DesignError(f"{len(asked)} queries for a key of unit length: expected one")
    others = [j for j in range(len(keys)) if j != i]
    beta, made = 1.0, _unit(keys, others, asked[0]) if unit else _nearest(keys, i, others, asked, precision, scale)
    if not isinstance(made, Tensor):
        return Replacement(keys, i, asked, unit, precision, scale, False, 0.0, math.inf, certificate=made)
    new = keys.clone()
    new[i] = made
    gaps = (asked @ made)[:, None] - asked @ keys[others].T
    if unit:
        beta = least_length(gaps[0].numpy(), 1, precision, scale)
    scores = scale * beta * asked @ new.T
    weights = scores.softmax(-1)
    if not weights[:, i].min() >= precision - 1e-9:
        worst = int(weights[:, i].argmin())
        raise DesignError(
            f"query {worst}: rounding spoils the key (weight {float(weights[worst, i]):.6g} of {precision:g} wanted); "
            f"queries {listed(range(len(asked)))} are too near to cancelling each other"
        )
    margin = float(gaps.min()) if others else math.inf
    return Replacement(keys, i, asked, unit, precision, scale, True, margin, beta, made, scores, weights)


def _unit(keys: Tensor, others: list[int], q: Tensor) -> Tensor | TooShort:
    length = float(q.norm())
    if not others:
        return q / length if length else torch.eye(len(q), dtype=q.dtype)[0]
    best = max(others, key=lambda j: float(q @ keys[j]))
    score = float(q @ keys[best])
    if length - score <= TOLERANCE * max(length, abs(score)):
        return TooShort(length, best, score)
    return q / length


def _nearest(
    keys: Tensor, i: int, others: list[int], queries: Tensor, precision: float, scale: float
) -> Tensor | NoKey:
    """min ‖x‖ subject to q_t·(k_i + x) ≥ needed_t, by non-negative least squares on the dual."""
    if not others:
        return keys[i]
    needed = (scale * queries @ keys[others].T).logsumexp(1) + math.log(precision / (1 - precision))
    short: Array = (needed / scale - queries @ keys[i]).numpy()
    if (short <= 0).all():
        return keys[i]
    # A little more than needed, so that rounding does not take it back.
    short = short + 1e-10 * np.abs(needed.numpy()) / scale
    lengths = queries.norm(dim=1).numpy()
    lengths[lengths == 0] = 1
    rows, rises = queries.numpy() / lengths[:, None], short / lengths
    far = float(np.abs(rises).max())
    height = np.vstack([rows.T, rises / far])
    u = nonnegative(height, np.eye(len(height))[-1])
    mix = rows.T @ u
    if np.abs(mix).max() <= TOLERANCE * u.sum():
        return _no_key(queries.numpy(), needed.numpy() / scale, u / lengths)
    return keys[i] + torch.from_numpy(far * mix / (1 - float(rises @ u) / far))


def _no_key(queries: Array, needed: Array, u: Array) -> NoKey:
    """The certificate with these coefficients of the queries, once it has been multiplied out."""
    shares = u / u.sum()
    residual, tolerance = np.abs(shares @ queries).max(), TOLERANCE * float(shares @ np.linalg.norm(queries, axis=1))
    wanted = float(shares @ needed)
    if residual > tolerance or wanted <= 0:
        raise DesignError(
            f"the queries are too near to cancelling each other to decide: a mix of them is {residual:.1e} at a "
            f"tolerance of {tolerance:.1e} and needs a score of {wanted:.1e}; leave some out"
        )
    kept = tuple((t, float(c)) for t, c in enumerate(shares) if c > 0)
    return NoKey(kept, wanted, float(residual), tolerance)
