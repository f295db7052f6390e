"""Another key in place of one, so that a query which is given averages a set of keys with it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.lab.design.certificates import TOLERANCE, DesignError, format_vector
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
class UnequalScores:
    """Proof that no key makes the average: two other members score differently, so that their weights differ."""

    first: int
    second: int
    scores: tuple[float, float]

    def explain(self) -> str:
        """Returns the proof in words, with the numbers to check by hand."""
        ratio = math.exp(min(abs(self.scores[0] - self.scores[1]), 700.0))
        return (
            f"Certificate: q·k_{self.first} = {self.scores[0]:.6g} and q·k_{self.second} = {self.scores[1]:.6g}, so "
            f"that one gets {ratio:.4g} times the weight of the other, whatever the new key is."
        )


@dataclass(frozen=True)
class Outscored:
    """Proof that no key makes the average: equal weights fix the members' score, and key `other` scores as much."""

    score: float
    other: int
    other_score: float

    def explain(self) -> str:
        """Returns the proof in words, with the numbers to check by hand."""
        return (
            f"Certificate: for equal weights all members have the score {self.score:.6g} of those that stay, and key "
            f"{self.other}, none of them, scores {self.other_score:.6g}: no multiple of the query changes that."
        )


@dataclass(frozen=True)
class OutOfReach:
    """Proof that no unit key makes the average: the score it needs is larger than ‖q‖ = `length`."""

    score: float
    length: float

    def explain(self) -> str:
        """Returns the proof in words, with the numbers to check by hand."""
        return (
            f"Certificate: the new key needs the score {self.score:.6g} of the other members; a key of unit length has "
            f"at most ‖q‖ = {self.length:.6g} in size."
        )


@dataclass(frozen=True, eq=False)
class SharedReplacement(DesignResult):
    """Keys with one replaced, so that the query [K] averages the members, or why there is no such key.

    scores and weights [S] are those of beta·query at the new keys. beta is one where the query itself gives the
    members the precision wanted, else the least factor that does. `unchanged`: their weight at the query itself.
    """

    keys: Vectors
    index: int
    members: tuple[int, ...]
    query: Float[Tensor, "K"]
    unit: bool
    precision: float
    scale: float
    feasible: bool
    beta: float
    unchanged: float = 0.0
    key: Float[Tensor, "K"] | None = None
    scores: Float[Tensor, "S"] | None = None
    weights: Float[Tensor, "S"] | None = None
    certificate: UnequalScores | Outscored | OutOfReach | None = None

    def explain(self) -> str:
        """Returns the new key or the proof in words, with the numbers to check by hand."""
        kind = "key"
        if self.unit:
            kind = "key of unit length"
        goal = f"the query averages keys {format_indices(self.members)}"
        if self.certificate is not None:
            return f"No {kind} can stand for key {self.index} so that {goal}.\n{self.certificate.explain()}"
        assert self.key is not None and self.weights is not None
        moved = float((self.key - self.keys[self.index]).norm())
        score = float(self.query @ self.key)
        lines = [
            f"In place of key {self.index}: {format_vector(self.key)}, and {goal}.",
            f"It has their score, q·k = {score:.6g}, and is the nearest such {kind}, {moved:.4g} away.",
            f"Weight of the set at the query as it is: {self.unchanged:.6g} (wanted {self.precision:g}).",
        ]
        if self.beta != 1:
            total = float(self.weights[list(self.members)].sum())
            lines.append(f"{self.beta:.4g}·q is the shortest multiple with the precision wanted: {total:.6g}.")
        return "\n".join(lines)


def share_key(
    keys: Vectors,
    i: int,
    query: Float[Tensor, "K"],
    members: Iterable[int],
    unit: bool = False,
    precision: float = 0.99,
    scale: float = 1.0,
) -> SharedReplacement:
    """Returns the key nearest to key i with which the same query averages the members, of which i is one.

    Equal weights are equal scores, so the new key lies on the plane q·k = s, with s the score of the other members.
    With `unit` it has length one too.
    """
    keys = check_vectors(keys)
    check_index(i, len(keys))
    check_precision(precision, scale)
    q = check_vectors(torch.atleast_2d(query), "the query")
    if len(q) != 1 or q.shape[1] != keys.shape[1]:
        raise DesignError(f"a query {tuple(query.shape)}: expected one of {keys.shape[1]} numbers, as the keys have")
    chosen = tuple(sorted({i, *members}))
    for j in chosen:
        check_index(j, len(keys))
    if len(chosen) < 2:
        raise DesignError(f"to average key {i} alone is to select it; expected other keys beside it")
    found = _key_of_score(keys, i, [j for j in chosen if j != i], q[0], unit)
    if not isinstance(found, Tensor):
        return SharedReplacement(keys, i, chosen, q[0], unit, precision, scale, False, math.inf, certificate=found)
    new_keys = keys.clone()
    new_keys[i] = found
    others = [j for j in range(len(keys)) if j not in chosen]
    raw = new_keys @ q[0]
    unchanged = float((scale * raw).softmax(0)[list(chosen)].sum())
    beta = 1.0
    if unchanged < precision:
        best = max(others, key=lambda j: float(raw[j]))
        gaps = (raw[i] - raw[others]).numpy()
        if gaps.min() <= TOLERANCE * float(raw.abs().max()):
            proof = Outscored(float(raw[i]), best, float(raw[best]))
            return SharedReplacement(keys, i, chosen, q[0], unit, precision, scale, False, math.inf, certificate=proof)
        beta = shortest_length(gaps, len(chosen), precision, scale)
    scores = scale * beta * raw
    return SharedReplacement(
        keys, i, chosen, q[0], unit, precision, scale, True, beta, unchanged, found, scores, scores.softmax(0)
    )


def _key_of_score(
    keys: Tensor, i: int, staying: list[int], q: Tensor, unit: bool
) -> Tensor | UnequalScores | OutOfReach:
    """Returns the key [K] nearest to key i that scores as the members that stay, or the proof that there is none."""
    raw = (keys @ q).tolist()
    low = min(staying, key=lambda j: raw[j])
    high = max(staying, key=lambda j: raw[j])
    length = float(q.norm())
    if raw[high] - raw[low] > TOLERANCE * length * float(keys[staying].norm(dim=1).max()):
        return UnequalScores(low, high, (raw[low], raw[high]))
    score = sum(raw[j] for j in staying) / len(staying)
    if length == 0:  # every key scores zero
        if not unit:
            return keys[i]
        return _unit_direction(keys[i])
    along = q / length
    beside = keys[i] - (keys[i] @ along) * along
    if not unit:
        nearest: Tensor = beside + score / length * along
        return nearest
    share = score / length
    if abs(share) > 1 + TOLERANCE:
        return OutOfReach(score, length)
    if float(beside.norm()) <= TOLERANCE * max(1.0, float(keys[i].norm())):
        # Any direction beside the query is as near as any other: that of the axis that is least along it.
        axis = torch.eye(len(q), dtype=q.dtype)[int(along.abs().argmin())]
        beside = axis - (axis @ along) * along
        if len(q) == 1:
            beside = torch.zeros_like(q)
    rest = math.sqrt(max(0.0, 1 - share**2))
    if len(q) == 1 and rest > TOLERANCE:
        raise DesignError(f"keys of one number: the only unit keys score ±{length:.6g}, and {score:.6g} is needed")
    key: Tensor = share * along + rest * _unit_direction(beside)
    return key


def _unit_direction(x: Tensor) -> Tensor:
    """Returns x/‖x‖ [K]; of zeros, zeros."""
    direction: Tensor = x / x.norm().clamp(min=torch.finfo(x.dtype).tiny)
    return direction
