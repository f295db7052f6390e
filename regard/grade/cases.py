"""The cases with which a submission is called, and the random tensors in them."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class GradeCase:
    """One call of a submission: its arguments in order and, for a class, those of its constructor.

    `words` say what is particular about the case ("with a causal mask"), for messages.
    """

    arguments: tuple[Any, ...]
    constructor: tuple[Any, ...] = ()
    words: str = ""


@dataclass(frozen=True)
class Draw:
    """Draws the inputs of cases: the numbers depend on the seed alone."""

    seed: int
    generator: torch.Generator = field(init=False)
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "generator", torch.Generator().manual_seed(self.seed))
        object.__setattr__(self, "random", random.Random(self.seed))

    def normal(self, *shape: int) -> Tensor:
        """Returns a tensor of standard normal numbers in float32."""
        return torch.randn(shape, generator=self.generator)

    def visible(self, B: int, T: int, S: int) -> Tensor:
        """Returns a random mask [B,T,S], True where a query may see a key; every query sees at least one."""
        mask = torch.rand(B, T, S, generator=self.generator) < 0.6
        mask[..., 0] = True
        return mask


def causal_mask(T: int) -> Tensor:
    """Returns the mask [T,T] in which a query sees itself and what comes before it."""
    return torch.ones(T, T, dtype=torch.bool).tril()


MakeCases = Callable[[Draw], Iterable[Any]]


def make_cases(make: MakeCases, seed: int) -> list[GradeCase]:
    """Returns the cases that a function yields; a tuple that it yields is the arguments of a call."""
    cases = []
    for made in make(Draw(seed)):
        if isinstance(made, GradeCase):
            cases.append(made)
        else:
            cases.append(GradeCase(tuple(made)))
    return cases


def copy_arguments(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments with tensors copied, so that a call cannot change those of later calls."""
    return tuple(x.clone() if isinstance(x, Tensor) else x for x in arguments)


def describe_case(case: GradeCase, called: Any) -> str:
    """Returns in words the shapes and values of a case's arguments, with the parameters' names of what is called."""
    try:
        names = list(inspect.signature(called).parameters)
    except (TypeError, ValueError):
        names = []
    if case.words and not any(isinstance(value, Tensor) for value in case.arguments):
        return case.words
    shown = []
    for n, value in enumerate(case.arguments):
        name = ""
        if n < len(names) and isinstance(value, Tensor):
            name = f"{names[n]} "
        shown.append(name + _describe(value))
    text = ", ".join(shown)
    if case.constructor:
        text = f"built with {', '.join(_describe(x) for x in case.constructor)}; {text}"
    if case.words:
        return f"{case.words}: {text}"
    return text


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(list(value.shape)).replace(" ", "")
    if callable(value):
        return getattr(value, "__name__", "a function")
    text = repr(value)
    if len(text) > 24:
        return text[:23] + "…"
    return text
