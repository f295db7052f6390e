"""Costs as formulas in the letters of shapes.py, made by the code that computes the numbers.

A mechanism's cost is computed for a size whose fields are letters instead of numbers, so a formula cannot differ from
the number. A whole sequence has N queries and N keys; the recurrent face has T new tokens of S in all; `step` is one
new token.

    e  bytes of a number                 w  bytes of a number of the state: float32 or better, whatever e
    R  pairs within chunks of C tokens: C²·⌊T/C⌋ + (T mod C)²        Q  those of them that are causal: (R + T)/2
    P  pairs within blocks of 16 tokens, where decays go by channel
    A, Z  tokens of the first chunk and of the last
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, Literal, cast, get_args

from regard.mechanisms import Face, Mechanism
from regard.mechanisms.decays import BLOCK
from regard.mechanisms.linear import CHUNK
from regard.mechanisms.recurrence import CHUNK as RECURRENT_CHUNK
from regard.shapes import Chunks, Size

Expression = Any  # of sympy, which has no types
Kind = Literal["parallel", "training", "recurrent", "step", "weights"]
KINDS: tuple[Kind, ...] = get_args(Kind)
QUANTITIES = ("matmul", "useful", "elementwise", "bytes", "state")
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def _letter(name: str) -> Any:
    """Returns a letter as a symbol of sympy."""
    import sympy  # type: ignore[import-untyped]  # a dependency of torch that is slow to import

    return sympy.Symbol(name, positive=True, integer=True)


class _SymbolicSize(Size):
    """A size made of letters."""

    @property
    def e(self) -> Any:
        return _letter("e")

    def itemsize_at_least(self, dtype: Any) -> Any:
        return _letter("w")

    def chunk_counts(self, C: int, tokens: Any = None) -> Chunks:
        if C == BLOCK:
            return Chunks(_letter("P"), 0, 0, 0)
        return Chunks(*map(_letter, "RQAZ"))


def _symbolic_size(kind: Kind, causal: bool) -> Size:
    """Returns the size of a kind of call: N tokens for a whole sequence; S for a state, of which T or one are new."""
    letters = {name: _letter(name) for name in "BHGKV"}
    new = in_all = _letter("N")
    if kind in ("recurrent", "step"):
        new = _letter("T")
        in_all = _letter("S")
    if kind == "step":
        new = 1
    return _SymbolicSize(T=new, S=in_all, causal=causal, **letters)


def _with_letters(mechanism: Mechanism) -> Mechanism:
    """Returns a copy of a mechanism whose own sizes are letters, too."""
    twin = copy.copy(mechanism)
    for name, letter in mechanism.letters.items():
        known: Any = getattr(mechanism, name)
        if known is None:
            continue
        symbol = _letter(letter)
        if callable(known):
            twin.__dict__[name] = partial(_constant, symbol)
        else:
            twin.__dict__[name] = symbol
    return twin


def _constant(value: Expression, *_: Any) -> Expression:
    return value


def formula(mechanism: Mechanism, kind: Kind = "parallel", causal: bool = True) -> dict[str, str]:
    """Returns the formulas of matmul, useful, elementwise, bytes and state as text; kind "training" adds gradients."""
    return {name: format_expression(x) for name, x in symbolic(mechanism, kind, causal).items()}


def symbolic(mechanism: Mechanism, kind: Kind = "parallel", causal: bool = True) -> dict[str, Expression]:
    """Returns the same formulas as expressions of sympy."""
    import sympy

    size = _symbolic_size(kind, causal)
    twin = _with_letters(mechanism)
    face = cast(Face, {"training": "parallel", "step": "recurrent"}.get(kind, kind))
    cost = twin.cost(size, face)
    if kind == "training":
        cost = cost + twin.gradient_cost(size)
    expressions = {name: sympy.sympify(getattr(cost, name)) for name in QUANTITIES}
    # Only halves of products n(n + 1), which are whole, are rounded down, so rounding changes nothing.
    return {name: _group_terms(x.replace(sympy.floor, lambda y: y)) for name, x in expressions.items()}


def _group_terms(x: Expression) -> Expression:
    """Returns x as a sum over products of the letters R, Q, P, A, Z, w and e, each with a factorised coefficient.

    Terms are thus grouped by pairs in chunks, by the chunks' ends, and by the size of numbers.
    """
    import sympy

    letters = [letter for letter in map(_letter, "RQPAZwe") if x.has(letter)]
    if not letters:
        return sympy.factor(x)
    groups = []
    for powers, coefficient in sympy.Poly(sympy.expand(x), *letters).terms():
        product = sympy.prod(letter**power for letter, power in zip(letters, powers, strict=True))
        groups.append(sympy.factor(coefficient) * product)
    return sympy.Add(*groups)


def values(mechanism: Mechanism, size: Size) -> dict[str, int]:
    """Returns what each letter stands for at a size, so that formulas can be worked out by hand."""
    accumulate = getattr(mechanism, "accumulate", size.dtype)
    known = {letter: getattr(size, letter) for letter in "BTSHGKV"}
    known |= {"N": size.T, "e": size.e, "w": size.itemsize_at_least(accumulate)}
    known |= dict(zip("RQAZ", size.chunk_counts(getattr(mechanism, "chunk", CHUNK)), strict=True))
    known["P"] = size.chunk_counts(BLOCK).pairs
    for name, letter in mechanism.letters.items():
        value: Any = getattr(mechanism, name)
        if callable(value):  # the number of features, which follows from the width
            value = value(size.K)
        if value is not None:
            known[letter] = value
    return known


def format_expression(x: Expression) -> str:
    """Returns an expression as one writes it by hand: 2BHN²(K + V)."""
    if x.is_Add:
        text = " + ".join(format_expression(term) for term in _sorted_terms(x))
        return text.replace("+ −", "− ")
    number, rest = x.as_coeff_Mul()
    sign = ""
    if number < 0:
        sign = "−"
        number = -number
    factors = ""
    if rest != 1:
        factors = "".join(_format_factor(f) for f in sorted(rest.as_ordered_factors(), key=_factor_order))
    numerator = str(number.p)
    if number.p == 1 and factors:
        numerator = ""
    denominator = ""
    if number.q != 1:
        denominator = f"/{number.q}"
    return sign + numerator + factors + denominator


def _format_factor(x: Expression) -> str:
    """Returns a power as one writes it by hand: N² or (K + V)."""
    base, power = x.as_base_exp()
    text = str(base)
    if base.is_Add:
        text = f"({format_expression(base)})"
    if power != 1:
        text += str(power).translate(_SUPERSCRIPTS)
    return text


def _sorted_terms(x: Expression) -> list[Any]:
    """Returns the terms of a sum: those with letters first, the positive ones before the others."""
    return sorted(x.as_ordered_terms(), key=lambda t: (bool(t.is_number), bool(t.as_coeff_Mul()[0] < 0)))


_ORDER = "weBHGNTSRQPAZFrKV"  # of the letters in a product; sums in brackets come last


def _factor_order(x: Expression) -> tuple[int, str]:
    """Returns the key by which the factors of a product are sorted."""
    base, _ = x.as_base_exp()
    if base.is_Add:
        return len(_ORDER), str(base)
    return _ORDER.index(str(base)), str(base)


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
    "R": f"pairs within chunks of C = {CHUNK} ({RECURRENT_CHUNK} for gated and delta): C²⌊N/C⌋ + (N mod C)²",
    "Q": "causal pairs within chunks: (R + N)/2",
    "P": f"pairs within blocks of {BLOCK}",
    "A": "tokens of the first chunk",
    "Z": "tokens of the last chunk",
}


def legend(formulas: list[str]) -> dict[str, str]:
    """Returns what the letters in some formulas mean."""
    used = set("".join(formulas))
    return {letter: meaning for letter, meaning in LEGEND.items() if letter in used}
