"""One head of attention by design: matrices Q, K and V with which given tokens read given outputs.

Tokens x_1 … x_n of width D; output i is Σ_j softmax_j(scale · x_i Q Kᵀ x_jᵀ) x_j V. Two things are known without
computing. Where the tokens are independent, any scores and any values can be had: each token attends to itself and
carries its output as its value, so that Q = β X⁺X⁺ᵀ, K = I and V = X⁺C solve it. And in general all that a head sees of
the tokens are their coordinates in a basis of what they span, so that equal tokens have equal outputs, the outputs have
at most the rank of the tokens, and a token of zeros reads the mean. Between these the head is searched for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.lab.design.certificates import TOLERANCE, DesignError, format_vector
from regard.lab.design.result import DesignResult, Vectors, check_precision, check_vectors, format_indices

_MOST_PRINTED = 8  # rows and columns of a matrix that an explanation prints
_SEARCHES = 12  # starts of the search, from random matrices
_STEPS = 300  # of the optimiser, each start


@dataclass(frozen=True)
class EqualTokens:
    """Proof that no head exists: two tokens are the same, and the outputs wanted of them are not."""

    first: int
    second: int
    outputs: tuple[tuple[float, ...], tuple[float, ...]]

    def explain(self) -> str:
        """Returns the proof in words, with the numbers to check by hand."""
        first, second = (format_vector(torch.tensor(x)) for x in self.outputs)
        return (
            f"Certificate: tokens {self.first} and {self.second} are the same vector, so that every head gives them "
            f"the same output; wanted are {first} and {second}."
        )


@dataclass(frozen=True)
class TooFewDirections:
    """Proof that no head exists: each output is a mix of the tokens times V, so their rank is no more than theirs."""

    tokens: int
    outputs: int

    def explain(self) -> str:
        """Returns the proof in words, with the numbers to check by hand."""
        return (
            f"Certificate: the tokens span {self.tokens} dimensions, and every output is a mix of tokens times V: "
            f"outputs span at most as many; those wanted span {self.outputs}."
        )


@dataclass(frozen=True)
class OppositeTokens:
    """Proof that no head exists: all tokens come with their opposites, and the outputs of two are not opposite.

    `first` and `second` are the same where the token is zero, whose output then has to be zero.
    """

    first: int
    second: int
    outputs: tuple[tuple[float, ...], tuple[float, ...]]

    def explain(self) -> str:
        """Returns the proof in words, with the numbers to check by hand."""
        first, second = (format_vector(torch.tensor(x)) for x in self.outputs)
        which = f"tokens {self.first} and {self.second} are opposite, and must get opposite outputs"
        wanted = f"wanted are {first} and {second}"
        if self.first == self.second:
            which = f"token {self.first} is its own opposite, and must get zero"
            wanted = f"wanted is {first}"
        return (
            "Certificate: with each token x its opposite −x is among the tokens. The scores of −x are those of x with "
            "x_j and −x_j exchanged, so are its weights, and V turns −x_j into minus what it makes of x_j: whatever "
            f"Q, K and V, the output of −x is minus that of x. {which[0].upper()}{which[1:]}; {wanted}."
        )


@dataclass(frozen=True)
class WrongOrder:
    """Proof that no head exists: three tokens of one line through zero, with outputs in another order than theirs."""

    tokens: tuple[int, int, int]  # the one between the others in the middle
    places: tuple[float, float, float]  # of the tokens on their line
    outputs: tuple[float, float, float]  # places of the outputs on theirs

    def explain(self) -> str:
        """Returns the proof in words, with the numbers to check by hand."""
        places = ", ".join(f"{x:.4g}" for x in self.places)
        outputs = ", ".join(f"{x:.4g}" for x in self.outputs)
        return (
            "Certificate: all tokens lie on one line, x_i = t_i·u, and output i is g(s·t_i)·uV, where g(z) is the mean "
            "of the t_j by the weights softmax(z·t_j). Its slope is their variance, never below zero, so that outputs "
            f"come in the order of the tokens or the reverse. Tokens {format_indices(self.tokens)} lie at {places}; "
            f"the outputs wanted lie at {outputs} of theirs."
        )


Proof = EqualTokens | TooFewDirections | OppositeTokens | WrongOrder


@dataclass(frozen=True, eq=False)
class HeadDesign(DesignResult):
    """A head for given tokens [N,D] and outputs [N,V], or why there is none, or that none was found.

    q, k [D,D] and v [D,V] are applied to rows. `asked` are the tokens whose outputs were wanted. `error`: the largest
    coordinate by which an output misses, relative to the largest wanted. `proved`: the answer is a proof either way.
    """

    tokens: Vectors
    outputs: Float[Tensor, "N V"]
    asked: tuple[int, ...]
    precision: float
    scale: float
    feasible: bool
    proved: bool
    error: float
    q: Float[Tensor, "D D"] | None = None
    k: Float[Tensor, "D D"] | None = None
    v: Float[Tensor, "D V"] | None = None
    weights: Float[Tensor, "N N"] | None = None
    reached: Float[Tensor, "N V"] | None = None
    certificate: Proof | None = None

    def explain(self) -> str:
        """Returns the matrices or the proof in words, with the numbers to check by hand."""
        if self.certificate is not None:
            return f"No head gives these outputs.\n{self.certificate.explain()}"
        assert self.q is not None and self.k is not None and self.v is not None and self.weights is not None
        if not self.feasible:
            return (
                f"No head was found, and no proof that there is none: of {_SEARCHES} searches the best misses an "
                f"output by {self.error:.3g} of the largest (allowed {1 - self.precision:.3g}). The tokens are "
                "dependent; with independent ones there always is a head."
            )
        lines = []
        if self.proved:
            lines.append(
                "The tokens are independent, so each can attend to itself and carry its output as its value: "
                "x·V is the output, and x_i·Q·x_jᵀ is β for i = j and 0 otherwise."
            )
        else:
            lines.append("The tokens are dependent; a search has found this head.")
        for name, matrix in (("Q", self.q), ("K", self.k), ("V", self.v)):
            lines.append(f"{name} = {format_matrix(matrix)}")
        least = float(self.weights.diagonal()[list(self.asked)].min())
        if self.proved:
            lines.append(f"The least weight of a token on itself is {least:.6g} (wanted {self.precision:g}).")
        lines.append(
            f"Outputs of tokens {format_indices(self.asked)} are off by at most {self.error:.3g} of the largest wanted."
        )
        return "\n".join(lines)


def design_head(
    tokens: Vectors,
    outputs: Float[Tensor, "N V"],
    precision: float = 0.99,
    scale: float = 1.0,
) -> HeadDesign:
    """Returns matrices Q, K and V with which the tokens read the outputs, a proof that none can, or the best found.

    A row of `outputs` that is NaN throughout is not asked for. An output may miss by 1 − `precision` of the largest.
    """
    tokens = check_vectors(tokens, "tokens")
    if outputs.dim() != 2 or len(outputs) != len(tokens):
        raise DesignError(f"outputs {tuple(outputs.shape)}: expected one row a token, {len(tokens)} in all")
    check_precision(precision, scale)
    asked = tuple(i for i in range(len(tokens)) if not bool(outputs[i].isnan().all()))
    if not asked:
        raise DesignError("no output is wanted; expected a row of numbers for at least one token")
    wanted = torch.zeros(outputs.shape, dtype=torch.float64)
    wanted[list(asked)] = check_vectors(outputs[list(asked)], "outputs")
    proof = _prove_none(tokens, wanted, asked, 1 - precision)
    if proof is not None:
        return HeadDesign(tokens, wanted, asked, precision, scale, False, True, math.inf, certificate=proof)
    if _rank(tokens) == len(tokens):
        inverse = torch.linalg.pinv(tokens)  # [D,N]
        n = len(tokens)
        # Off-diagonal weights of e^−β each, and values that differ by at most twice the largest output.
        beta = math.log(max(1, n - 1) * 2 * precision / (1 - precision))
        q = beta / scale * inverse @ inverse.T
        return _judged(tokens, wanted, asked, precision, scale, True, _drop_residue(q), _drop_residue(inverse @ wanted))
    q, v = _search(tokens, wanted, asked, scale, 1 - precision)
    return _judged(tokens, wanted, asked, precision, scale, False, q, v)


def format_matrix(matrix: Tensor) -> str:
    """Formats a matrix row by row, cut where it is large."""
    rows = [format_vector(row[:_MOST_PRINTED]) for row in matrix[:_MOST_PRINTED]]
    more = ""
    if max(matrix.shape) > _MOST_PRINTED:
        more = f" … of {matrix.shape[0]}×{matrix.shape[1]}"
    return f"[{', '.join(rows)}]{more}"


def _drop_residue(matrix: Tensor) -> Tensor:
    """Returns a matrix with entries set to zero that are rounding errors, relative to its largest entry."""
    return matrix.masked_fill(matrix.abs() < 1e-13 * matrix.abs().max(), 0.0)


def _rank(x: Tensor) -> int:
    """Returns the rank of a matrix at the tolerance of all designs."""
    return int(torch.linalg.matrix_rank(x, rtol=TOLERANCE))


def _prove_none(tokens: Tensor, wanted: Tensor, asked: tuple[int, ...], allowed: float) -> Proof | None:
    """Returns a proof that no head exists, if one of the known proofs applies; else None."""
    size = float(tokens.abs().max())
    spread = float(wanted.abs().max())
    for n, i in enumerate(asked):
        for j in asked[n + 1 :]:
            same = float((tokens[i] - tokens[j]).abs().max()) <= TOLERANCE * size
            if same and float((wanted[i] - wanted[j]).abs().max()) > TOLERANCE * spread:
                return EqualTokens(i, j, (tuple(wanted[i].tolist()), tuple(wanted[j].tolist())))
    ranks = _rank(tokens), _rank(wanted[list(asked)])
    if ranks[1] > ranks[0]:
        return TooFewDirections(*ranks)
    opposite = _find_opposites(tokens, wanted, asked, allowed)
    if opposite is not None or ranks != (1, 1):
        return opposite
    return _find_wrong_order(tokens, wanted, asked, allowed)


def _find_opposites(tokens: Tensor, wanted: Tensor, asked: tuple[int, ...], allowed: float) -> OppositeTokens | None:
    """Returns two opposite tokens whose outputs cannot be had, where every token has its opposite among them.

    Outputs c and d that miss by `allowed` of the largest at most could still be opposite if |c + d| were twice that.
    """
    nearest = TOLERANCE * float(tokens.abs().max())
    equal = torch.cdist(tokens, tokens, p=math.inf) <= nearest
    opposite = torch.cdist(tokens, -tokens, p=math.inf) <= nearest
    if not torch.equal(equal.sum(1), opposite.sum(1)):
        return None
    most = 2 * allowed * float(wanted[list(asked)].abs().max())
    for n, i in enumerate(asked):
        for j in asked[n:]:
            if opposite[i, j] and float((wanted[i] + wanted[j]).abs().max()) > most:
                return OppositeTokens(i, j, (tuple(wanted[i].tolist()), tuple(wanted[j].tolist())))
    return None


def _find_wrong_order(tokens: Tensor, wanted: Tensor, asked: tuple[int, ...], allowed: float) -> WrongOrder | None:
    """Returns three tokens of a line whose outputs, on a line too, are in another order by more than they may miss."""
    places = tokens @ torch.linalg.svd(tokens, full_matrices=False).Vh[0]
    # One coordinate tells the order on the line; errors are measured by the largest.
    coordinate = int(wanted[list(asked)].abs().amax(0).argmax())
    outputs = wanted[:, coordinate] / wanted[list(asked), coordinate].abs().max()
    order = sorted(asked, key=lambda i: float(places[i]))
    for n in range(1, len(order) - 1):
        for sign in (1, -1):  # the middle one above the lowest of either side, or below the highest
            signed = (sign * outputs).tolist()
            first = min(order[:n], key=signed.__getitem__)
            last = min(order[n + 1 :], key=signed.__getitem__)
            middle = order[n]
            if signed[middle] > max(signed[first], signed[last]) + 2 * allowed:
                three = (first, middle, last)
                return WrongOrder(three, _pick(places, three), _pick(outputs, three))
    return None


def _pick(numbers: Tensor, three: tuple[int, int, int]) -> tuple[float, float, float]:
    """Returns three of the numbers."""
    first, second, third = (float(numbers[i]) for i in three)
    return first, second, third


def _judged(
    tokens: Tensor,
    wanted: Tensor,
    asked: tuple[int, ...],
    precision: float,
    scale: float,
    proved: bool,
    q: Tensor,
    v: Tensor,
) -> HeadDesign:
    """Returns the design of these matrices with K = I, after computing what it reads."""
    k = torch.eye(tokens.shape[1], dtype=torch.float64)
    weights = (scale * tokens @ q @ k.T @ tokens.T).softmax(-1)
    reached = weights @ tokens @ v
    rows = list(asked)
    largest = max(float(wanted[rows].abs().max()), torch.finfo(torch.float64).tiny)
    error = float((reached - wanted)[rows].abs().max()) / largest
    feasible = error <= 1 - precision
    if proved and not feasible:
        raise DesignError(
            f"rounding spoils the head: an output is off by {error:.3g} of the largest; the tokens are too near to "
            "being dependent"
        )
    return HeadDesign(tokens, wanted, asked, precision, scale, feasible, proved, error, q, k, v, weights, reached)


def _search(
    tokens: Tensor, wanted: Tensor, asked: tuple[int, ...], scale: float, allowed: float
) -> tuple[Tensor, Tensor]:
    """Returns Q [D,D] and V [D,V] with the least squares of the outputs' errors that the searches find.

    V is the best for the weights that Q gives, by least squares, so that only Q is searched for.
    """
    rows = list(asked)
    goal = wanted[rows]
    generator = torch.Generator().manual_seed(0)
    best: tuple[float, Tensor, Tensor] | None = None

    def solve(q: Tensor) -> tuple[Tensor, Tensor]:
        mixes = (scale * tokens[rows] @ q @ tokens.T).softmax(-1) @ tokens
        # A little ridge keeps the gradient finite where mixes are dependent.
        square = mixes.T @ mixes
        ridge = 1e-10 * square.diagonal().mean().clamp(min=1e-30) * torch.eye(len(square), dtype=square.dtype)
        v = torch.linalg.solve(square + ridge, mixes.T @ goal)
        return v, (mixes @ v - goal).square().sum()

    for start in range(_SEARCHES):
        D = tokens.shape[1]
        q = torch.randn(D, D, dtype=torch.float64, generator=generator) * (0.3 * (start + 1) / scale)
        q = q.requires_grad_()
        optimiser = torch.optim.LBFGS([q], max_iter=_STEPS, line_search_fn="strong_wolfe", tolerance_change=1e-14)

        def closure(q: Tensor = q, optimiser: torch.optim.LBFGS = optimiser) -> Tensor:
            optimiser.zero_grad()
            _, loss = solve(q)
            loss.backward()
            return loss

        optimiser.step(closure)
        with torch.no_grad():
            v, loss = solve(q)
        if bool(loss.isfinite()) and (best is None or float(loss) < best[0]):
            best = (float(loss), q.detach(), v)
        if best is not None and math.sqrt(best[0]) <= 0.1 * allowed * float(goal.abs().max()):
            break
    if best is None:
        raise DesignError("the search for a head came upon numbers that are not finite; give smaller tokens")
    return best[1], best[2]
