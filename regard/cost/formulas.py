"""Costs as formulas in the letters of shapes.py, made by the very code that gives the numbers.

A mechanism's cost is asked for a size whose fields are letters instead of numbers, so a formula cannot say anything
else than the number does. A whole sequence has N queries and N keys; in the recurrent face T tokens are new and S are
there in all; `step` is one new token.

    e  bytes of a number                 w  bytes of a number of the state: float32 or better, whatever e
    R  pairs within chunks of C tokens: C²·⌊T/C⌋ + (T mod C)²        Q  those of them that are causal: (R + T)/2
    A, Z  tokens of the first chunk and of the last
"""

from __future__ import annotations

import copy
from typing import Any, Literal, cast, get_args

from regard.mechanisms import Face, Mechanism
from regard.mechanisms.linear import CHUNK
from regard.shapes import Chunks, Size

Expression = Any  # of sympy, which has no types
Kind = Literal["parallel", "training", "recurrent", "step", "weights"]
KINDS: tuple[Kind, ...] = get_args(Kind)
QUANTITIES = ("matmul", "useful", "elementwise", "bytes", "state")
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def _letter(name: str) -> Any:
    import sympy  # type: ignore[import-untyped]  # a dependency of torch; it takes its time to load

    return sympy.Symbol(name, positive=True, integer=True)


class _Letters(Size):
    """A size made of letters."""

    @property
    def e(self) -> Any:
        return _letter("e")

    def itemsize_at_least(self, dtype: Any) -> Any:
        return _letter("w")

    def chunk_counts(self, C: int) -> Chunks:
        return Chunks(*map(_letter, "RQAZ"))


def _size(kind: Kind, causal: bool) -> Size:
    letters = {n: _letter(n) for n in "BHGKVNTS"}
    T = letters.pop("T") if kind == "recurrent" else 1 if kind == "step" else letters["N"]
    S = letters["S"] if kind in ("recurrent", "step") else letters["N"]
    rest = {n: x for n, x in letters.items() if n not in "NTS"}
    return _Letters(T=T, S=S, causal=causal, **rest)


def _lettered(mechanism: Mechanism) -> Mechanism:
    """A copy whose own sizes are letters, too."""
    twin = copy.copy(mechanism)
    for name, letter in mechanism.letters.items():
        known: Any = getattr(mechanism, name)
        if known is not None:
            symbol = _letter(letter)
            twin.__dict__[name] = (lambda *_, symbol=symbol: symbol) if callable(known) else symbol
    return twin


def formula(mechanism: Mechanism, kind: Kind = "parallel", causal: bool = True) -> dict[str, str]:
    """The formulas of matmul, useful, elementwise, bytes and state. `training`: a whole sequence, its gradients too."""
    return {name: written(x) for name, x in symbolic(mechanism, kind, causal).items()}


def symbolic(mechanism: Mechanism, kind: Kind = "parallel", causal: bool = True) -> dict[str, Expression]:
    """The same as expressions of sympy."""
    import sympy

    size, twin = _size(kind, causal), _lettered(mechanism)
    face = cast(Face, {"training": "parallel", "step": "recurrent"}.get(kind, kind))
    cost = twin.cost(size, face)
    if kind == "training":
        cost = cost + twin.gradient_cost(size)
    found = ((name, sympy.sympify(getattr(cost, name))) for name in QUANTITIES)
    # Halves of products of neighbours are whole, so that rounding down does nothing.
    return {name: _tidy(x.replace(sympy.floor, lambda y: y)) for name, x in found}


def _tidy(x: Expression) -> Expression:
    """A sum of products: what goes with pairs of chunks, with their ends, with either kind of number, and the rest."""
    import sympy

    apart = [letter for letter in map(_letter, "RQAZwe") if x.has(letter)]
    if not apart:
        return sympy.factor(x)
    terms = sympy.Poly(sympy.expand(x), *apart).terms()
    return sympy.Add(*(sympy.factor(n) * sympy.prod(a**p for a, p in zip(apart, m, strict=True)) for m, n in terms))


def values(mechanism: Mechanism, size: Size) -> dict[str, int]:
    """What each letter stands for at a size, so that formulas can be worked out by hand."""
    chunks, kept = size.chunk_counts(CHUNK), getattr(mechanism, "accumulate", size.dtype)
    own = {letter: getattr(mechanism, name) for name, letter in mechanism.letters.items()}
    known = {n: getattr(size, n) for n in "BTSHGKV"} | {"N": size.T, "e": size.e, "w": size.itemsize_at_least(kept)}
    known |= dict(zip("RQAZ", chunks, strict=True))
    return known | {n: x(size.K) if callable(x) else x for n, x in own.items() if x is not None}


def written(x: Expression) -> str:
    """An expression as one writes it by hand: 2BHN²(K + V)."""
    if x.is_Add:
        parts = [written(part) for part in _ordered(x)]
        return parts[0] + "".join(f" − {p[1:]}" if p[0] == "−" else f" + {p}" for p in parts[1:])
    number, rest = x.as_coeff_Mul()
    sign, number = ("−", -number) if number < 0 else ("", number)
    factors = "".join(_factor(f) for f in sorted(rest.as_ordered_factors(), key=_place)) if rest != 1 else ""
    over = "" if number.q == 1 else f"/{number.q}"
    return sign + (str(number.p) if number.p != 1 or not factors else "") + factors + over


def _factor(x: Expression) -> str:
    base, power = x.as_base_exp()
    shown = f"({written(base)})" if base.is_Add else str(base)
    return shown if power == 1 else shown + str(power).translate(_RAISED)


def _ordered(x: Expression) -> list[Any]:
    """The terms of a sum: those with letters first, the positive ones before the others."""
    return sorted(x.as_ordered_terms(), key=lambda t: (bool(t.is_number), bool(t.as_coeff_Mul()[0] < 0)))


_ORDER = "weBHGNTSRQAZFrKV"


def _place(x: Expression) -> tuple[int, str]:
    base = x.as_base_exp()[0]
    return (len(_ORDER) if base.is_Add else _ORDER.index(str(base)), str(base))


LEGEND: dict[str, str] = {
    "B": "batch",
    "N": "tokens of a whole sequence",
    "T": "new tokens",
    "S": "tokens in all",
    "H": "query heads",
    "G": "key/value heads",
    "K": "key width",
    "V": "value width",
    "F": "features",
    "r": "rank",
    "e": "bytes of a number",
    "w": "bytes of a number of the state",
    "R": f"pairs within chunks of C = {CHUNK}: C²⌊N/C⌋ + (N mod C)²",
    "Q": "causal pairs within chunks: (R + N)/2",
    "A": "tokens of the first chunk",
    "Z": "tokens of the last chunk",
}


def legend(formulas: list[str]) -> dict[str, str]:
    """What the letters in some formulas mean."""
    used = set("".join(formulas))
    return {letter: meaning for letter, meaning in LEGEND.items() if letter in used}
