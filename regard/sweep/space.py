"""What a sweep varies: keys of a recipe with values to choose from (`64,128`) or a range (`1e-5..1e-3:log`)."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regard.config import ConfigError
from regard.errors import RegardError
from regard.train.recipe import parse

if TYPE_CHECKING:
    from optuna.trial import Trial

MOST = 10_000  # trials of a sweep
FEW = 8  # whole numbers that are listed rather than a range
DRAWN = 32  # combinations of a search that one of its values is tried in
_NUMBER = r"[+-]?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?"  # as TOML has them
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::(log|{_NUMBER}))?")

Texts = Mapping[str, str]  # a key and its value as it would be typed


@dataclass(frozen=True)
class Choices:
    """Values to choose from, as they were typed."""

    key: str
    texts: tuple[str, ...]

    @property
    def choices(self) -> list[Any]:
        """As the study stores them: plain values; a list or a table is stored as its text."""
        values = [_read(self.key, text) for text in self.texts]
        return [v if isinstance(v, bool | int | float | str) else t for v, t in zip(values, self.texts, strict=True)]

    @property
    def listed(self) -> list[Any]:
        """The values in the order of an axis: numbers rising, others as they were typed."""
        return sorted(self.choices) if self.numeric else self.choices

    @property
    def numeric(self) -> bool:
        return all(isinstance(x, int | float) and not isinstance(x, bool) for x in self.choices)

    @property
    def log(self) -> bool:
        """Whether numbers are told apart by their ratios rather than by their differences."""
        return self.numeric and min(self.choices) > 0 and max(self.choices) >= 4 * min(self.choices)

    @property
    def probes(self) -> tuple[str, ...]:
        """Values that stand for all of them."""
        return self.texts

    def suggested(self, trial: Trial) -> str:
        return self.text(trial.suggest_categorical(self.key, self.choices))

    def text(self, value: Any) -> str:
        """A value of the study as it would be typed."""
        return self.texts[self.choices.index(value)]

    def drawn(self, source: random.Random) -> str:
        return source.choice(self.texts)


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included: whole ones where both are, in steps or by their logarithm."""

    key: str
    low: float
    high: float
    step: float | None
    log: bool

    @property
    def listed(self) -> list[Any]:
        """All values, where they are few whole numbers."""
        few = list(range(int(self.low), int(self.high) + 1, int(self.step or 1))) if self.whole and not self.log else []
        return few if len(few) <= FEW else []

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def probes(self) -> tuple[str, ...]:
        return repr(self.low), repr(self.high)

    def suggested(self, trial: Trial) -> str:
        if self.whole:
            low, high, step = int(self.low), int(self.high), int(self.step or 1)
            return self.text(trial.suggest_int(self.key, low, high, step=step, log=self.log))
        return self.text(trial.suggest_float(self.key, self.low, self.high, step=self.step, log=self.log))

    def text(self, value: Any) -> str:
        return repr(value)

    def drawn(self, source: random.Random) -> str:
        if self.step:
            return repr(self.low + self.step * source.randint(0, int((self.high - self.low) / self.step)))
        if self.log:
            found = math.exp(source.uniform(math.log(self.low), math.log(self.high)))
            return repr(min(max(round(found), self.low), self.high) if self.whole else found)
        if self.whole:
            return repr(source.randint(int(self.low), int(self.high)))
        return repr(source.uniform(self.low, self.high))


Parameter = Choices | Range


def read(pairs: Sequence[str], ranges: bool) -> tuple[list[Parameter], list[str]]:
    """`key=value,value` as parameters, and those with a single value, which are nothing but changes."""
    parameters: list[Parameter] = []
    single: list[str] = []
    for pair in pairs:
        key, sign, value = (part.strip() for part in pair.partition("="))
        if not sign or "." not in key:
            raise ConfigError(f"'{pair}': expected section.key=values, e.g. train.lr=1e-4,5e-5")
        if key in {p.key for p in parameters} | {s.partition("=")[0] for s in single}:
            raise ConfigError(f"'{pair}': {key} is varied twice; name all its values in one place")
        found = _RANGE.fullmatch(value)
        if found:
            if not ranges:
                listed = f"{key}={found[1]},{found[2]}"
                raise ConfigError(f"'{pair}': a grid has values, e.g. {listed}; a range is for --search")
            parameters.append(_range(pair, key, *found.groups()))
            continue
        texts = split(value)
        if "" in texts:
            raise ConfigError(f"'{pair}': a value is empty; expected values with commas between, e.g. {key}=1,2")
        if len(texts) == 1:
            single.append(f"{key}={texts[0]}")
            continue
        choice = Choices(key, tuple(texts))
        twice = [t for n, t in enumerate(texts) if choice.choices[n] in choice.choices[:n]]
        if twice:
            raise ConfigError(f"'{pair}': {twice[0]} is named twice")
        parameters.append(choice)
    return parameters, single


def split(text: str) -> list[str]:
    """The parts between commas that stand in no bracket and in no quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        if letter == "," and not quote and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def combinations(parameters: Sequence[Choices]) -> list[dict[str, str]]:
    """Every combination, the last key changing fastest."""
    total = math.prod(len(p.texts) for p in parameters)
    if total > MOST:
        raise ConfigError(f"a grid of {total:,} combinations; expected at most {MOST:,}: search with --trials instead")
    keys = [p.key for p in parameters]
    return [dict(zip(keys, texts, strict=True)) for texts in itertools.product(*(p.texts for p in parameters))]


def check(parameters: Sequence[Parameter], grid: bool, attempt: Callable[[Texts], object]) -> None:
    """An error where a value can be in no trial at all: each is attempted in every combination of a grid, and in some
    of a search."""
    for parameter in parameters:
        others = [p for p in parameters if p is not parameter]
        for text in parameter.probes:
            error: RegardError | None = None
            for rest in _around(others, grid):
                try:
                    attempt({parameter.key: text, **rest})
                    error = None
                    break
                except RegardError as refused:
                    error = error or refused
            if error is not None:
                raise ConfigError(f"{parameter.key}={text}: {error}") from None


def _around(others: Sequence[Parameter], grid: bool) -> list[dict[str, str]]:
    if grid:
        return combinations([p for p in others if isinstance(p, Choices)])
    source = random.Random(0)
    return [{p.key: p.drawn(source) for p in others} for _ in range(DRAWN if others else 1)]


def _range(pair: str, key: str, low: str, high: str, how: str | None) -> Range:
    start, end = (_read(key, text) for text in (low, high))
    step = None if how in (None, "log") else _read(key, str(how))
    made = Range(key, start, end, step, how == "log")
    if not start < end:
        raise ConfigError(f"'{pair}': expected a range that rises, e.g. {key}={high}..{low}")
    if made.log and start <= 0:
        raise ConfigError(f"'{pair}': a logarithmic range begins above 0")
    if step is not None and not 0 < step <= end - start:
        raise ConfigError(f"'{pair}': expected a step above 0 that fits between {low} and {high}")
    if made.whole and step is not None and not isinstance(step, int):
        raise ConfigError(f"'{pair}': whole numbers go in whole steps; write {float(start)}..{float(end)} for others")
    if step is not None and not math.isclose((end - start) / step, round((end - start) / step)):
        last = start + step * math.floor((end - start) / step)
        raise ConfigError(f"'{pair}': steps of {step} from {low} end at {last:.6g}, not at {high}")
    return made


def _read(key: str, text: str) -> Any:
    """A value as a recipe reads it."""
    found: Any = parse([f"{key}={text}"])
    for part in key.split("."):
        found = found[part]
    return found
