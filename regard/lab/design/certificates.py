"""Can keys be told apart by a query? Either a direction that does it, or coefficients that prove that none does.

Let A be the wanted keys and k_a any of them. A direction y with y·(k_a − k_b) = 0 inside A and y·(k_a − k_j) > 0 for
all others exists exactly where the affine hull of A does not meet the convex hull of the others. Where they meet, the
common point is a certificate: Σ μ_a k_a = Σ λ_j k_j with Σ μ = Σ λ = 1 and λ ≥ 0.

Which of the two exists is decided by non-negative least squares on the unit vectors u_j along k_a − k_j: the distance
of their hull from the origin is the largest min_j y·u_j that a unit vector y reaches. That distance has no unit, so
that one far key does not blur the others, and it must exceed `TOLERANCE` to count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.errors import RegardError

Array = NDArray[np.float64]
Share = tuple[int, float]  # the number of a key or a query, and its coefficient in a mix

# Two hulls are taken to meet below this distance, in units of the distances between keys.
TOLERANCE = 1e-7
# Singular values of unit vectors, and coefficients, below this are taken for rounding errors.
_RANK = 1e-12
# The solver of linear programs may break a row by this, the least that it accepts.
_FEASIBILITY = 1e-10


class DesignError(RegardError, ValueError):
    """The input of a design is invalid, or rounding errors keep the result from what was asked."""


@dataclass(frozen=True)
class Certificate:
    """Proof that no query prefers `members` to all others: both mixes of keys are the same `point`.

    `residual`: the largest difference between a coordinate of the two mixes; `tolerance`: the most it may be.
    """

    members: tuple[Share, ...]
    others: tuple[Share, ...]
    point: tuple[float, ...]
    residual: float
    tolerance: float

    def explain(self) -> str:
        """Returns the proof in words, with the numbers to check by hand."""
        first = self.members[0][0]
        if len(self.members) == 1:  # also where a set's hulls meet at one of its own keys
            claim = f"key {first} lies in the convex hull of the others"
            same = f"which is key {first}"
            beaten = "key itself"
        else:
            claim = "the affine hull of the set meets the convex hull of the others"
            same = f"which is also {format_mix(self.members)}"
            beaten = "set's common score"
        return (
            f"Certificate: {claim}.\n"
            f"  {format_mix(self.others)} = {format_vector(self.point)}, {same}.\n"
            f"  Coefficients of the others: none negative, sum {sum(c for _, c in self.others):.6g}. "
            f"Largest difference of a coordinate: {self.residual:.1e} (tolerance {self.tolerance:.1e}).\n"
            "  A score is linear in the key, so for any query some key of the first mix scores at least as much as the "
            f"{beaten}."
        )


def format_mix(shares: Iterable[Share], letter: str = "k") -> str:
    """Formats a sum of keys or queries: 0.25·k2 − 0.5·k3."""
    text = " ".join(f"{'−' if c < 0 else '+'} {abs(c):.6g}·{letter}{j}" for j, c in shares)
    if text.startswith("+"):
        return text[2:]
    return text.replace(" ", "", 1)  # no space after a leading minus


def format_vector(x: Iterable[float], max_length: int = 8) -> str:
    """Formats a vector: (1, 0.5, −2), cut after `max_length` coordinates."""
    coordinates = [f"{v:.4g}".replace("-", "−", 1) for v in x]
    if len(coordinates) > max_length:
        coordinates = [*coordinates[:max_length], "…"]
    return f"({', '.join(coordinates)})"


def nonnegative_least_squares(a: Array, b: Array) -> Array:
    """Returns the u ≥ 0 with the least ‖a u − b‖."""
    from scipy import optimize  # importing it takes time that other commands need not wait for

    try:
        u: Array = optimize.nnls(a, b)[0]
    except RuntimeError as error:
        raise DesignError(f"least squares over {a.shape[1]} keys did not settle ({error}); leave some out") from error
    return u


def separate(keys: Array, members: tuple[int, ...]) -> Array | Certificate:
    """Returns the direction that prefers the members to all others by the largest margin, or a certificate.

    The direction [K] is found by linear programming over y with ‖y‖∞ ≤ 1; its largest coordinate is one. The
    certificate proves that no direction prefers the members at all. keys [S,K].
    """
    first = keys[members[0]]
    others = [j for j in range(len(keys)) if j not in set(members)]
    free = _free_directions(keys[list(members)] - first)
    differences = first - keys[others]
    gaps = differences @ free  # in the coordinates of the free directions
    lengths = np.linalg.norm(differences, axis=1)
    within = np.linalg.norm(gaps, axis=1)
    if not np.isfinite(lengths).all():
        raise DesignError("the distances between the keys overflow; divide all keys by the largest of them")
    # A key that differs from the members only where they differ among themselves lies in their affine hull.
    for j, whole, part in zip(others, lengths, within, strict=True):
        if part <= TOLERANCE * whole:
            return _certificate(keys, members, [(j, 1.0)])
    units = gaps / within[:, None]
    # The point of the units' hull that is nearest to the origin: minimise ‖Σ u_j unit_j‖² + (Σ u_j − 1)² over u ≥ 0.
    system = np.vstack([units.T, np.ones(len(others))])
    u = nonnegative_least_squares(system, np.eye(len(system))[-1])
    nearest = units.T @ u / u.sum()
    distance = float(np.linalg.norm(nearest))
    if (units @ nearest).min() <= TOLERANCE * distance:
        # u weighs unit vectors; the mix of keys needs what their lengths were divided by.
        shares = u / within
        shares /= shares.sum()
        return _certificate(keys, members, [(j, float(c)) for j, c in zip(others, shares, strict=True) if c > 0])
    return _widest_margin(free, gaps, within, free @ nearest)


def _free_directions(differences: Array) -> Array:
    """Returns an orthonormal basis [K, ·] of the directions in which the members do not differ."""
    lengths = np.linalg.norm(differences, axis=1)
    units = differences[lengths > 0] / lengths[lengths > 0, None]
    # The right singular vectors of the zero singular values span the orthogonal complement.
    _, sizes, axes = np.linalg.svd(units, full_matrices=True)
    basis: Array = axes[int((sizes > _RANK * max(units.shape, default=1)).sum()) :].T
    return basis


def _widest_margin(free: Array, gaps: Array, within: Array, start: Array) -> Array:
    """Returns the y with the largest m such that y·gap_j ≥ m for all j and ‖y‖∞ ≤ 1, within the free directions.

    It is never worse than `start`. m is counted in margins of `start`, and each row divided by the length of its gap,
    so that all numbers are near one. The solver may break a row a little: that is nothing for a near key, and more than
    the whole margin for one that is far enough. So the program is solved with room to spare, too, and the direction
    whose true margin is the largest is taken.
    """
    start = start / np.abs(start).max()
    known = float((gaps @ (free.T @ start)).min())
    found = [start]
    for spare in (0.0, 2 * _FEASIBILITY, 20 * _FEASIBILITY):
        solution = _solve_margin(free, gaps / within[:, None], known / within, spare)
        direction = free @ solution
        if np.abs(direction).max() > 0:
            found.append(direction / np.abs(direction).max())
    return max(found, key=lambda y: float((gaps @ (free.T @ y)).min()))


def _solve_margin(free: Array, units: Array, margins: Array, spare: float) -> Array:
    """Returns the y, in free directions, with the largest m such that y·unit_j ≥ m·margin_j + spare, ‖free y‖∞ ≤ 1."""
    from scipy import optimize

    rows = np.hstack([-units, margins[:, None]])
    box = np.hstack([np.vstack([free, -free]), np.zeros((2 * len(free), 1))])
    cost = np.zeros(rows.shape[1])
    cost[-1] = -1
    solved: Any = optimize.linprog(
        cost,
        A_ub=np.vstack([rows, box]),
        b_ub=np.concatenate([np.full(len(rows), -spare), np.ones(len(box))]),
        bounds=[(None, None)] * free.shape[1] + [(0, None)],
        method="highs",
        options={"primal_feasibility_tolerance": _FEASIBILITY, "dual_feasibility_tolerance": _FEASIBILITY},
    )
    if solved.x is None:
        raise DesignError(
            f"the linear program of {len(units)} keys was not solved ({solved.message}); "
            "bring the coordinates to like sizes"
        )
    solution: Array = solved.x[:-1]
    return solution


def _certificate(keys: Array, members: tuple[int, ...], others: list[Share]) -> Certificate:
    """Returns the certificate with these coefficients of the others, after computing both mixes.

    Raises a DesignError if rounding leaves the two mixes too far apart to prove anything.
    """
    first = keys[members[0]]
    offset = sum((c * (keys[j] - first) for j, c in others), np.zeros_like(first))
    edges = keys[list(members[1:])] - first
    inner = np.zeros(0)
    if len(edges):
        inner = np.linalg.lstsq(edges.T, offset, rcond=_RANK)[0]
    inner[np.abs(inner) < _RANK] = 0
    mix = [(members[0], 1 - float(inner.sum())), *((a, float(c)) for a, c in zip(members[1:], inner, strict=True))]
    residual = float(np.abs(offset - inner @ edges).max(initial=0.0))
    # Each key counts by its share, so that the tolerance is as small as the distances that matter.
    reach = sum(c * float(np.linalg.norm(keys[j] - first)) for j, c in others)
    tolerance = 4 * TOLERANCE * reach
    if residual > tolerance:
        raise DesignError(
            f"keys {', '.join(map(str, members))} are too near a tie to decide: the hulls miss each other by "
            f"{residual:.1e}, at a tolerance of {tolerance:.1e}; round the keys, or leave out near-duplicates"
        )
    point = np.where(np.abs(first + offset) <= _RANK * reach, 0, first + offset)
    kept = tuple((a, c) for a, c in mix if abs(c) >= _RANK)
    return Certificate(kept, tuple(others), tuple(map(float, point)), residual, tolerance)
