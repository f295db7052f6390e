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

from regard.lab.design.certificates import TOLERANCE, Certificate, DesignError, format_vector, separate
from regard.lab.design.replacement import Replacement, replace_key
from regard.lab.design.result import (
    DesignResult,
    Vectors,
    check_index,
    check_precision,
    check_vectors,
    format_indices,
    shortest_length,
)

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
class Design(DesignResult):
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
    def goal(self) -> str:
        """What the query shall do, in words."""
        if len(self.members) == 1:
            return f"select key {self.members[0]}"
        return f"average keys {format_indices(self.members)}"

    def explain(self) -> str:
        """Returns the query or the proof in words, with the numbers to check by hand."""
        n = len(self.keys)
        a = len(self.members)
        if self.certificate is not None:
            most = "none that weighs them equally gives them"
            if a == 1:
                most = "none gives it"
            refusal = f"No query can {self.goal}: {most} more than {a}/{a + 1} of the weight."
            return f"{refusal}\n{self.certificate.explain()}"
        assert self.q is not None and self.direction is not None and self.weights is not None
        if n == a:
            return f"To {self.goal}: there is no other key, so q = 0 gives each of them {1 / n:.4g}."
        bound = math.log(self.precision * (n - a) / (a * (1 - self.precision))) / (self.scale * self.margin)
        sure = f"ln({self.precision:g}·{n - a} / ({a}·{1 - self.precision:.4g})) / ({self.scale:.4g}·{self.margin:.4g})"
        pronoun = "them"
        noun = "the set"
        if a == 1:
            pronoun = "it"
            noun = "the key"
        lines = [
            f"To {self.goal} of {n}: q = {format_vector(self.q)} = {self.beta:.4g} · {format_vector(self.direction)}.",
            f"The direction, its largest coordinate 1, prefers {pronoun} to every other key by at "
            f"least the margin {self.margin:.4g}, the largest that linear programming finds.",
            f"Length: {sure} = {bound:.4g} always suffices, {self.beta:.4g} is the least that does here.",
            f"Weight of {noun}: {float(self.weights[list(self.members)].sum()):.6g} (wanted {self.precision:g}).",
        ]
        spread = float((self.keys - self.keys[self.members[0]]).norm(dim=1).max())
        if self.margin < 1e-3 * spread:
            lines.append(
                f"A close call: the margin is {self.margin / spread:.1e} of the distance to the farthest key; less "
                f"than {TOLERANCE:.0e} of the distance to a key would count as none."
            )
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Identity(DesignResult):
    """A design for each key; if all exist, also the matrix q [S,K] with softmax(scale · q·keysᵀ) = weights ≈ I.

    output = weights · values, where values are given.
    """

    keys: Vectors
    precision: float
    scale: float
    designs: tuple[Design, ...]
    feasible: bool
    q: Vectors | None = None
    weights: Float[Tensor, "S S"] | None = None
    output: Float[Tensor, "S V"] | None = None

    @property
    def refused(self) -> tuple[Design, ...]:
        """The designs of the keys that no query selects, with their certificates."""
        return tuple(d for d in self.designs if not d.feasible)

    def explain(self) -> str:
        """Returns what the queries do, or the proofs that there are none, in words."""
        if self.feasible:
            assert self.weights is not None
            least = float(self.weights.diagonal().min())
            margins = [d.margin for d in self.designs]
            return (
                f"Every one of the {len(self.keys)} keys is a corner of the hull of all: row i of q selects key i.\n"
                f"Margins {min(margins):.4g} to {max(margins):.4g}; the least weight on the diagonal is {least:.6g} "
                f"(wanted {self.precision:g})."
            )
        which = format_indices(d.members[0] for d in self.refused)
        proofs = [d.explain() for d in self.refused]
        return "\n".join([f"No matrix of queries is the identity: key {which} cannot be selected.", *proofs])


@dataclass(frozen=True, eq=False)
class Fit(DesignResult):
    """The query whose scores are nearest to those wanted in the sum of squares; it need not order them rightly."""

    keys: Vectors
    wanted: Float[Tensor, "S"]
    scale: float
    q: Float[Tensor, "K"]
    scores: Float[Tensor, "S"]
    weights: Float[Tensor, "S"]

    def explain(self) -> str:
        """Returns the query in words, and how far its scores are from those wanted."""
        off = float((self.scores - self.wanted).abs().max())
        return (
            f"Least squares towards the scores {format_vector(self.wanted)}: q = {format_vector(self.q)}.\n"
            f"Scores {format_vector(self.scores)}, off by up to {off:.4g}; weights {format_vector(self.weights)}."
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
        """Returns the weight of each member: 1 / (a + (n−a)·exp(−rise·β·scale))."""
        return 1 / (self.members + self.others * math.exp(-self.rise * beta * self.scale))

    def other(self, beta: float) -> float:
        """Returns the weight of each other key."""
        return math.exp(-self.rise * beta * self.scale) * self.weight(beta)


def select(
    keys: Vectors,
    i: int,
    precision: float = 0.99,
    scale: float = 1.0,
    values: Float[Tensor, "S V"] | None = None,
) -> Design:
    """Returns the query that gives key i at least `precision` of the weight, or the proof that there is none.

    There is none exactly where key i lies in the convex hull of the others. `scale` is what the attention multiplies
    its scores by, such as 1/√K.
    """
    return average(keys, (i,), precision, scale, values)


def average(
    keys: Vectors,
    members: Iterable[int],
    precision: float = 0.99,
    scale: float = 1.0,
    values: Float[Tensor, "S V"] | None = None,
) -> Design:
    """Returns the query that gives the members equal weights with a sum of at least `precision`, or the proof that
    there is none.

    Where there is no such query, some other key always scores as much as the members do, and they get at most
    a/(a+1) together. `precision` has to be more than that, and one outcome excludes the other.
    """
    keys = check_vectors(keys)
    n = len(keys)
    chosen = tuple(dict.fromkeys(members))
    if not chosen:
        raise DesignError("no key is wanted; expected at least one")
    for i in chosen:
        check_index(i, n)
    if len(chosen) == n:  # any query that scores all keys alike will do
        check_precision(precision, scale, least=0)
        zero = keys.new_zeros(keys.shape[1])
        return _verified_design(keys, chosen, precision, scale, values, zero, math.inf, 0.0)
    check_precision(precision, scale, least=len(chosen) / (len(chosen) + 1))
    answer = separate(keys.numpy(), chosen)
    if isinstance(answer, Certificate):
        return Design(keys, chosen, precision, scale, False, 0.0, math.inf, certificate=answer)
    others = [j for j in range(n) if j not in set(chosen)]
    gaps = (keys.numpy()[chosen[0]] - keys.numpy()[others]) @ answer
    beta = shortest_length(gaps, len(chosen), precision, scale)
    direction = torch.from_numpy(answer)
    return _verified_design(keys, chosen, precision, scale, values, direction, float(gaps.min()), beta)


def identity(
    keys: Vectors,
    precision: float = 0.99,
    scale: float = 1.0,
    values: Float[Tensor, "S V"] | None = None,
) -> Identity:
    """Returns queries of which each selects its own key, or the keys for which there is none, with certificates."""
    keys = check_vectors(keys)
    designs = tuple(select(keys, i, precision, scale, values) for i in range(len(keys)))
    if not all(d.feasible for d in designs):
        return Identity(keys, precision, scale, designs, False)
    q = torch.stack([d.q for d in designs if d.q is not None])
    weights = torch.stack([d.weights for d in designs if d.weights is not None])
    output = None
    if values is not None:
        output = torch.stack([d.output for d in designs if d.output is not None])
    return Identity(keys, precision, scale, designs, True, q, weights, output)


def fit(keys: Vectors, wanted: Sequence[float] | Float[Tensor, "S"], scale: float = 1.0) -> Fit:
    """Returns the query with the least Σ_j (scale · q·k_j − wanted_j)²; of several, the shortest."""
    keys = check_vectors(keys)
    goal = torch.as_tensor(wanted, dtype=torch.float64)
    check_precision(0.99, scale)
    if goal.shape != keys.shape[:1] or not goal.isfinite().all():
        raise DesignError(f"wanted scores {tuple(goal.shape)}: expected one finite number a key, {len(keys)} in all")
    q = torch.from_numpy(np.linalg.lstsq(scale * keys.numpy(), goal.numpy(), rcond=None)[0])
    scores = scale * keys @ q
    return Fit(keys, goal, scale, q, scores, scores.softmax(0))


def orthogonal(keys: Vectors, members: Iterable[int], scale: float = 1.0) -> tuple[ClosedForm, ClosedForm]:
    """Returns two closed forms of an average over orthogonal keys: β·Σ members, and that less the sum of the others.

    Each key counts by k/‖k‖², which is k itself at unit length; so keys of unequal lengths are averaged too.
    """
    keys = check_vectors(keys)
    chosen = tuple(dict.fromkeys(members))
    lengths = keys.norm(dim=1)
    if not (lengths > 0).all():
        raise DesignError(f"key {int(lengths.argmin())} is zero; a closed form needs orthogonal keys, none zero")
    cosines = (keys @ keys.T / lengths.outer(lengths)).fill_diagonal_(0).abs()
    if cosines.max() > TOLERANCE:
        i, j = divmod(int(cosines.argmax()), len(keys))
        raise DesignError(f"keys {i} and {j} have cosine {float(cosines[i, j]):.4g}; expected 0: use `average` instead")
    for i in chosen:
        check_index(i, len(keys))
    sign = -keys.new_ones(len(keys))
    sign[list(chosen)] = 1
    dual = keys / lengths[:, None] ** 2
    sizes = (len(chosen), len(keys) - len(chosen))
    plus = ClosedForm("β·Σ members", sign.clamp(min=0) @ dual, 1, *sizes, scale)
    both = ClosedForm("β·(Σ members − Σ others)", sign @ dual, 2, *sizes, scale)
    return plus, both


def _verified_design(
    keys: Tensor,
    members: tuple[int, ...],
    precision: float,
    scale: float,
    values: Tensor | None,
    direction: Tensor,
    margin: float,
    beta: float,
) -> Design:
    """Returns the design of this direction and length, after computing its weights.

    Raises a DesignError where rounding has kept them from what was promised.
    """
    q = beta * direction
    # Softmax does not see a common shift, but rounding does: far from the origin only differences are exact.
    weights = (scale * (keys - keys[members[0]]) @ q).softmax(0)
    inside = weights[list(members)]
    total = float(inside.sum())
    uneven = float(inside.max() / inside.min() - 1)
    if not (total >= precision - 1e-6 and uneven <= 1e-6):
        raise DesignError(
            f"keys {format_indices(members)}: rounding spoils the query (weight {total:.9g} of {precision:g} wanted, "
            f"members uneven by {uneven:.1e}); the margin {margin:.1e} is too small for these keys"
        )
    output = None
    if values is not None:
        if values.dim() != 2 or len(values) != len(keys):
            raise DesignError(f"values {tuple(values.shape)}: expected [S,V] with one row a key, {len(keys)} in all")
        output = weights @ values.detach().to("cpu", torch.float64)
    scores = scale * keys @ q
    return Design(keys, members, precision, scale, True, margin, beta, direction, q, scores, weights, output)
