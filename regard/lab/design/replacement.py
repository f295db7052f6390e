"""Another key in place of one, so that queries which are given select it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from regard.lab.design.certificates import (
    TOLERANCE,
    Array,
    DesignError,
    Share,
    format_mix,
    format_vector,
    nonnegative_least_squares,
)
from regard.lab.design.result import (
    DesignResult,
    Vectors,
    check_index,
    check_precision,
    check_vectors,
    format_indices,
    shortest_length,
)


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
        """Returns the proof in words, with the numbers to check by hand."""
        return (
            f"Certificate: {format_mix(self.queries, 'q')} = 0 (largest coordinate {self.residual:.1e}, "
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
        """Returns the proof in words, with the numbers to check by hand."""
        return (
            f"Certificate: a key of unit length scores at most ‖q‖ = {self.length:.6g}, that of q/‖q‖ itself; "
            f"key {self.other} scores {self.score:.6g} (tolerance {TOLERANCE:.0e} of the larger)."
        )


@dataclass(frozen=True, eq=False)
class Replacement(DesignResult):
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

    @property
    def unchanged(self) -> float:
        """The least weight of the new key at the queries as they are, without beta; 0 where there is no such key."""
        if self.key is None:
            return 0.0
        new_keys = self.keys.clone()
        new_keys[self.index] = self.key
        weights = (self.scale * self.queries @ new_keys.T).softmax(-1)
        return float(weights[:, self.index].min())

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | {"unchanged": self.unchanged}

    def explain(self) -> str:
        """Returns the new key or the proof in words, with the numbers to check by hand."""
        kind = "key"
        if self.unit:
            kind = "key of unit length"
        which = "the query selects it"
        weight_name = "weight"
        if len(self.queries) > 1:
            which = "all queries select it"
            weight_name = "least weight"
        if self.certificate is not None:
            return f"No {kind} can stand for key {self.index} so that {which}.\n{self.certificate.explain()}"
        assert self.key is not None and self.weights is not None
        weight = float(self.weights[:, self.index].min())
        lines = [f"In place of key {self.index}: {format_vector(self.key)}, and {which}."]
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
        lines.append(f"Margin {self.margin:.4g}; {weight_name} {weight:.6g} (wanted {self.precision:g}).")
        if self.beta != 1:
            lines.append(f"At the query as it is, the weight is {self.unchanged:.6g}.")
        return "\n".join(lines)


def replace_key(
    keys: Vectors,
    i: int,
    queries: Float[Tensor, "T K"] | Float[Tensor, "K"],
    unit: bool = False,
    precision: float = 0.99,
    scale: float = 1.0,
) -> Replacement:
    """Returns the key nearest to key i that gets at least `precision` of each query's weight when it takes i's place.

    With `unit` the key has length one, and there may be one query only. The best is q/‖q‖, with the score ‖q‖, and it
    works exactly where ‖q‖ exceeds the score of every other key; a multiple of the query then has the precision.
    """
    keys = check_vectors(keys)
    queries = check_vectors(torch.atleast_2d(queries), "queries")
    check_index(i, len(keys))
    check_precision(precision, scale)
    if queries.shape[1] != keys.shape[1]:
        raise DesignError(f"queries of {queries.shape[1]} numbers, keys of {keys.shape[1]}; expected as many")
    if unit and len(queries) > 1:
        raise DesignError(f"{len(queries)} queries for a key of unit length: expected one")
    others = [j for j in range(len(keys)) if j != i]
    key = _unit_key(keys, others, queries[0]) if unit else _nearest_key(keys, i, others, queries, precision, scale)
    if not isinstance(key, Tensor):
        return Replacement(keys, i, queries, unit, precision, scale, False, 0.0, math.inf, certificate=key)
    new_keys = keys.clone()
    new_keys[i] = key
    gaps = (queries @ key)[:, None] - queries @ keys[others].T
    beta = 1.0
    if unit:
        beta = shortest_length(gaps[0].numpy(), 1, precision, scale)
    scores = scale * beta * queries @ new_keys.T
    weights = scores.softmax(-1)
    if not weights[:, i].min() >= precision - 1e-9:
        worst = int(weights[:, i].argmin())
        raise DesignError(
            f"query {worst}: rounding spoils the key (weight {float(weights[worst, i]):.6g} of {precision:g} wanted); "
            f"queries {format_indices(range(len(queries)))} are too near to cancelling each other"
        )
    margin = math.inf
    if others:
        margin = float(gaps.min())
    return Replacement(keys, i, queries, unit, precision, scale, True, margin, beta, key, scores, weights)


def _unit_key(keys: Tensor, others: list[int], q: Tensor) -> Tensor | TooShort:
    """Returns q/‖q‖ [K], or the proof that some other key scores as much as any unit key."""
    length = float(q.norm())
    if not others and not length:
        return torch.eye(len(q), dtype=q.dtype)[0]
    if not others:
        return q / length
    best = max(others, key=lambda j: float(q @ keys[j]))
    score = float(q @ keys[best])
    if length - score <= TOLERANCE * max(length, abs(score)):
        return TooShort(length, best, score)
    return q / length


def _nearest_key(
    keys: Tensor, i: int, others: list[int], queries: Tensor, precision: float, scale: float
) -> Tensor | NoKey:
    """Returns k_i + x [K] with the least ‖x‖ such that q_t·(k_i + x) ≥ needed_t, or the proof that there is none.

    It is found by non-negative least squares on the dual problem.
    """
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
    # Rows of length one and rises of at most one: the least squares is solved with numbers of like sizes.
    rows = queries.numpy() / lengths[:, None]
    rises = short / lengths
    far = float(np.abs(rises).max())
    system = np.vstack([rows.T, rises / far])
    u = nonnegative_least_squares(system, np.eye(len(system))[-1])
    # What is left of a coefficient by rounding would spoil the proof by a query of zeros, which has no tolerance.
    u = np.where(u > np.finfo(float).eps * u.max(), u, 0)
    mix = rows.T @ u
    if np.abs(mix).max() <= TOLERANCE * u.sum():
        return _prove_no_key(queries.numpy(), needed.numpy() / scale, u / lengths)
    return keys[i] + torch.from_numpy(far * mix / (1 - float(rises @ u) / far))


def _prove_no_key(queries: Array, needed: Array, u: Array) -> NoKey:
    """Returns the certificate with these coefficients of the queries, after multiplying it out."""
    shares = u / u.sum()
    residual = np.abs(shares @ queries).max()
    tolerance = TOLERANCE * float(shares @ np.linalg.norm(queries, axis=1))
    wanted = float(shares @ needed)
    if residual > tolerance or wanted <= 0:
        raise DesignError(
            f"the queries are too near to cancelling each other to decide: a mix of them is {residual:.1e} at a "
            f"tolerance of {tolerance:.1e} and needs a score of {wanted:.1e}; leave some out"
        )
    kept = tuple((t, float(c)) for t, c in enumerate(shares) if c > 0)
    return NoKey(kept, wanted, float(residual), tolerance)
