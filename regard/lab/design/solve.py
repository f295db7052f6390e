"""Queries by design: given keys, a query that selects one, averages some, or a matrix of queries that copies all.

A query q gives key j the weight softmax_j(scale · q·k_j). Selecting means at least `precision` of the weight; averaging
means equal weights whose sum is at least that. Both need a direction that prefers the wanted keys by a margin

    m = min_j direction·(k_a − k_j),   ‖direction‖∞ = 1,

and a length β for it, q = β·direction. ‖·‖∞ makes the best direction a linear program; it is also the bound that
says how large any one number of the query has to be. β = ln(precision·(n−a) / (a·(1−precision))) / (scale·m) always
suffices for a of n keys; the design takes the least β that does, which is less where some keys are far behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from regard.lab.design.certificates import TOLERANCE, Certificate, DesignError, separate, vector
from regard.lab.design.replacement import Replacement, replace_key
from regard.lab.design.result import Result, Vectors, checked, checked_index, checked_numbers, least_length, listed

__all__ = [
    "ClosedForm",
    "Design",
    "DesignError",
    "Fit",
    "Identity",
    "Replacement",
    "average",
    "fit",
    "identity",
    "orthogonal",
    "replace_key",
    "select",
]


@dataclass(frozen=True, eq=False)
class Design(Result):
    """A query for some keys, or why there is none; the fields of a query that does not exist are None.

    q = beta · direction; scores = scale · keys·q; weights = softmax(scores); output = weights · values, where given.
    margin: by how much the direction prefers the members to every other key; 0 where no direction does, infinite where
    there is no other key. beta is infinite where no length helps.
    """

    keys: Vectors
    members: tuple[int, ...]
    precision: float
    scale: float
    feasible: bool
    margin: float
    beta: float
    direction: Float[Tensor, "K"] | None = None
    q: Float[Tensor, "K"] | None = None
    scores: Float[Tensor, "S"] | None = None
    weights: Float[Tensor, "S"] | None = None
    output: Float[Tensor, "V"] | None = None
    certificate: Certificate | None = None

    @property
    def wish(self) -> str:
        return f"select key {self.members[0]}" if len(self.members) == 1 else f"average keys {listed(self.members)}"

    def explain(self) -> str:
        if self.certificate is not None:
            a = len(self.members)
            most = "none gives it" if a == 1 else "none that weighs them equally gives them"
            return f"No query can {self.wish}: {most} more than {a}/{a + 1} of the weight.\n" + (
                self.certificate.explain()
            )
        assert self.q is not None and self.direction is not None and self.weights is not None
        n, a = len(self.keys), len(self.members)
        if n == a:
            return f"To {self.wish}: there is no other key, so q = 0 gives each of them {1 / n:.4g}."
        bound = math.log(self.precision * (n - a) / (a * (1 - self.precision))) / (self.scale * self.margin)
        sure = f"ln({self.precision:g}·{n - a} / ({a}·{1 - self.precision:.4g})) / ({self.scale:.4g}·{self.margin:.4g})"
        lines = [
            f"To {self.wish} of {n}: q = {vector(self.q)} = {self.beta:.4g} · {vector(self.direction)}.",
            f"The direction, its largest coordinate 1, prefers {'it' if a == 1 else 'them'} to every other key by at "
            f"least the margin {self.margin:.4g}, the largest that linear programming finds.",
            f"Length: {sure} = {bound:.4g} always suffices, {self.beta:.4g} is the least that does here.",
            f"Weight of {'the key' if a == 1 else 'the set'}: {float(self.weights[list(self.members)].sum()):.6g} "
            f"(wanted {self.precision:g}).",
        ]
        spread = float((self.keys - self.keys[self.members[0]]).norm(dim=1).max())
        if self.margin < 1e-3 * spread:
            lines.append(
                f"A close call: the margin is {self.margin / spread:.1e} of the distance to the farthest key; less "
                f"than {TOLERANCE:.0e} of the distance to a key would count as none."
            )
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Identity(Result):
    """One design a key, and where all exist the matrix q [S,K] with softmax(scale · q·keysᵀ) = weights ≈ I."""

    keys: Vectors
    precision: float
    scale: float
    designs: tuple[Design, ...]
    feasible: bool
    q: Vectors | None = None
    weights: Float[Tensor, "S S"] | None = None

    @property
    def refused(self) -> tuple[Design, ...]:
        """The designs of the keys that no query selects, with their certificates."""
        return tuple(d for d in self.designs if not d.feasible)

    def explain(self) -> str:
        if self.feasible:
            assert self.weights is not None
            least, margins = float(self.weights.diagonal().min()), [d.margin for d in self.designs]
            return (
                f"Every one of the {len(self.keys)} keys is a corner of the hull of all: row i of q selects key i.\n"
                f"Margins {min(margins):.4g} to {max(margins):.4g}; the least weight on the diagonal is {least:.6g} "
                f"(wanted {self.precision:g})."
            )
        which = listed(d.members[0] for d in self.refused)
        told = [d.explain() for d in self.refused]
        return "\n".join([f"No matrix of queries is the identity: key {which} cannot be selected.", *told])


@dataclass(frozen=True, eq=False)
class Fit(Result):
    """The query whose scores are nearest to those wanted in the sum of squares; it need not order them rightly."""

    keys: Vectors
    wanted: Float[Tensor, "S"]
    scale: float
    q: Float[Tensor, "K"]
    scores: Float[Tensor, "S"]
    weights: Float[Tensor, "S"]

    def explain(self) -> str:
        off = float((self.scores - self.wanted).abs().max())
        return (
            f"Least squares towards the scores {vector(self.wanted)}: q = {vector(self.q)}.\n"
            f"Scores {vector(self.scores)}, off by up to {off:.4g}; weights {vector(self.weights)}."
        )


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """A query known without computing: q = β·direction; each member's score exceeds each other's by rise·β·scale."""

    formula: str
    direction: Float[Tensor, "K"]
    rise: int
    members: int
    others: int
    scale: float

    def weight(self, beta: float) -> float:
        """Of each member: 1 / (a + (n−a)·exp(−rise·β·scale))."""
        return 1 / (self.members + self.others * math.exp(-self.rise * beta * self.scale))

    def other(self, beta: float) -> float:
        """Of each other key."""
        return math.exp(-self.rise * beta * self.scale) * self.weight(beta)


def select(
    keys: Vectors,
    i: int,
    precision: float = 0.99,
    scale: float = 1.0,
    values: Float[Tensor, "S V"] | None = None,
) -> Design:
    """The query that gives key i at least `precision` of the weight, or the proof that key i lies among the others.

    `scale`: what the attention multiplies its scores by, such as 1/√K.
    """
    return average(keys, (i,), precision, scale, values)


def average(
    keys: Vectors,
    members: Iterable[int],
    precision: float = 0.99,
    scale: float = 1.0,
    values: Float[Tensor, "S V"] | None = None,
) -> Design:
    """The query that gives the members equal weights with a sum of at least `precision`, or the proof that none does.

    Where there is no such query, some other key always scores as much as the members do, and they get at most
    a/(a+1) together. `precision` has to be more than that, and one outcome excludes the other.
    """
    keys = checked(keys)
    n, chosen = len(keys), tuple(dict.fromkeys(members))
    if not chosen:
        raise DesignError("no key is wanted; expected at least one")
    for i in chosen:
        checked_index(i, n)
    checked_numbers(precision, scale, least=len(chosen) / (len(chosen) + 1) if len(chosen) < n else 0)
    if len(chosen) == n:
        nothing = keys.new_zeros(keys.shape[1])
        return _design(keys, chosen, precision, scale, values, nothing, math.inf, 0.0)
    found = separate(keys.numpy(), chosen)
    if isinstance(found, Certificate):
        return Design(keys, chosen, precision, scale, False, 0.0, math.inf, certificate=found)
    others = [j for j in range(n) if j not in set(chosen)]
    gaps = (keys.numpy()[chosen[0]] - keys.numpy()[others]) @ found
    beta = least_length(gaps, len(chosen), precision, scale)
    direction = torch.from_numpy(found)
    return _design(keys, chosen, precision, scale, values, direction, float(gaps.min()), beta)


def identity(keys: Vectors, precision: float = 0.99, scale: float = 1.0) -> Identity:
    """Queries of which each selects its own key, or the keys for which there is none, with certificates."""
    keys = checked(keys)
    designs = tuple(select(keys, i, precision, scale) for i in range(len(keys)))
    if not all(d.feasible for d in designs):
        return Identity(keys, precision, scale, designs, False)
    q = torch.stack([d.q for d in designs if d.q is not None])
    weights = torch.stack([d.weights for d in designs if d.weights is not None])
    return Identity(keys, precision, scale, designs, True, q, weights)


def fit(keys: Vectors, wanted: Sequence[float] | Float[Tensor, "S"], scale: float = 1.0) -> Fit:
    """The query with the least Σ_j (scale · q·k_j − wanted_j)²; of several, the shortest."""
    keys, goal = checked(keys), torch.as_tensor(wanted, dtype=torch.float64)
    checked_numbers(0.99, scale)
    if goal.shape != keys.shape[:1] or not goal.isfinite().all():
        raise DesignError(f"wanted scores {tuple(goal.shape)}: expected one finite number a key, {len(keys)} in all")
    q = torch.from_numpy(np.linalg.lstsq(scale * keys.numpy(), goal.numpy(), rcond=None)[0])
    scores = scale * keys @ q
    return Fit(keys, goal, scale, q, scores, scores.softmax(0))


def orthogonal(keys: Vectors, members: Iterable[int], scale: float = 1.0) -> tuple[ClosedForm, ClosedForm]:
    """The two closed forms of an average over orthogonal keys: β·Σ members, and the same less the sum of the others.

    Each key counts by k/‖k‖², which is k itself at unit length; so keys of unequal lengths are averaged too.
    """
    keys, chosen = checked(keys), tuple(dict.fromkeys(members))
    lengths = keys.norm(dim=1)
    if not (lengths > 0).all():
        raise DesignError(f"key {int(lengths.argmin())} is zero; a closed form needs orthogonal keys, none zero")
    cosines = (keys @ keys.T / lengths.outer(lengths)).fill_diagonal_(0).abs()
    if cosines.max() > TOLERANCE:
        i, j = divmod(int(cosines.argmax()), len(keys))
        raise DesignError(f"keys {i} and {j} have cosine {float(cosines[i, j]):.4g}; expected 0: use `average` instead")
    for i in chosen:
        checked_index(i, len(keys))
    sign = -keys.new_ones(len(keys))
    sign[list(chosen)] = 1
    dual = keys / lengths[:, None] ** 2
    a, rest = len(chosen), len(keys) - len(chosen)
    forms = {"β·Σ members": (sign.clamp(min=0) @ dual, 1), "β·(Σ members − Σ others)": (sign @ dual, 2)}
    plus, both = (ClosedForm(name, d, rise, a, rest, scale) for name, (d, rise) in forms.items())
    return plus, both


def _design(
    keys: Tensor,
    members: tuple[int, ...],
    precision: float,
    scale: float,
    values: Tensor | None,
    direction: Tensor,
    margin: float,
    beta: float,
) -> Design:
    """The design of this direction and length, once its weights have been computed and found as promised."""
    q = beta * direction
    # Softmax does not see a common shift, but rounding does: far from the origin only differences are exact.
    weights = (scale * (keys - keys[members[0]]) @ q).softmax(0)
    inside = weights[list(members)]
    total, uneven = float(inside.sum()), float(inside.max() / inside.min() - 1)
    if not (total >= precision - 1e-6 and uneven <= 1e-6):
        raise DesignError(
            f"keys {listed(members)}: rounding spoils the query (weight {total:.9g} of {precision:g} wanted, members "
            f"uneven by {uneven:.1e}); the margin {margin:.1e} is too small for these keys"
        )
    output = None
    if values is not None:
        if values.dim() != 2 or len(values) != len(keys):
            raise DesignError(f"values {tuple(values.shape)}: expected [S,V] with one row a key, {len(keys)} in all")
        output = weights @ values.detach().to("cpu", torch.float64)
    scores = scale * keys @ q
    return Design(keys, members, precision, scale, True, margin, beta, direction, q, scores, weights, output)
