"""The space of a sweep: keys of a recipe with values to choose from (`64,128`) or a range (`1e-5..1e-3:log`)."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regard.config import ConfigError
from regard.errors import RegardError, quote
from regard.train.recipe import example_override, parse

if TYPE_CHECKING:
    from optuna.trial import Trial

MOST = 10_000  # trials of a sweep
FEW = 8  # the most whole numbers of a range that are listed on an axis
DRAWN = 32  # random combinations in which each value of a search is checked
_NUMBER = r"[+-]?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?"  # as TOML has them
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::(log|{_NUMBER}))?")

Texts = Mapping[str, str]  # values by key, as they would be typed


@dataclass(frozen=True)
class Choices:
    """A key with values to choose from, as they were typed."""

    key: str
    texts: tuple[str, ...]

    @property
    def choices(self) -> list[Any]:
        """Returns the values as the study stores them: plain ones; a list or a table is stored as its text."""
        choices = []
        for text in self.texts:
            value = _parse_text(self.key, text)
            if not isinstance(value, bool | int | float | str):
                value = text
            choices.append(value)
        return choices

    @property
    def axis_values(self) -> list[Any]:
        """Returns the values in the order of an axis: numbers rising, others as they were typed."""
        if self.numeric:
            return sorted(self.choices)
        return self.choices

    @property
    def numeric(self) -> bool:
        return all(isinstance(x, int | float) and not isinstance(x, bool) for x in self.choices)

    @property
    def log(self) -> bool:
        """Returns whether an axis of these values is logarithmic: positive numbers that differ at least fourfold."""
        return self.numeric and min(self.choices) > 0 and max(self.choices) >= 4 * min(self.choices)

    @property
    def probes(self) -> tuple[str, ...]:
        """Returns the values that are checked before a sweep starts: all of them."""
        return self.texts

    def suggest(self, trial: Trial) -> str:
        """Returns the value that a trial of the study gets, as it would be typed."""
        return self.text(trial.suggest_categorical(self.key, self.choices))

    def text(self, value: Any) -> str:
        """Returns a value of the study as it would be typed."""
        return self.texts[self.choices.index(value)]

    def draw(self, source: random.Random) -> str:
        """Returns a random value as it would be typed."""
        return source.choice(self.texts)


@dataclass(frozen=True)
class Range:
    """A key with numbers from `low` to `high`, both included, in steps or on a logarithmic scale; whole numbers if both
    ends are."""

    key: str
    low: float
    high: float
    step: float | None
    log: bool

    @property
    def axis_values(self) -> list[Any]:
        """Returns all values if they are few whole numbers; otherwise []."""
        if not self.whole or self.log:
            return []
        values = list(range(int(self.low), int(self.high) + 1, int(self.step or 1)))
        if len(values) > FEW:
            return []
        return values

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def probes(self) -> tuple[str, ...]:
        """Returns the values that are checked before a sweep starts: both ends."""
        return repr(self.low), repr(self.high)

    def suggest(self, trial: Trial) -> str:
        """Returns the value that a trial of the study gets, as it would be typed."""
        if self.whole:
            step = int(self.step or 1)
            return self.text(trial.suggest_int(self.key, int(self.low), int(self.high), step=step, log=self.log))
        return self.text(trial.suggest_float(self.key, self.low, self.high, step=self.step, log=self.log))

    def text(self, value: Any) -> str:
        """Returns a value of the study as it would be typed."""
        return repr(value)

    def draw(self, source: random.Random) -> str:
        """Returns a random value as it would be typed."""
        if self.step:
            return repr(self.low + self.step * source.randint(0, int((self.high - self.low) / self.step)))
        if self.log:
            value = math.exp(source.uniform(math.log(self.low), math.log(self.high)))
            if self.whole:
                return repr(min(max(round(value), self.low), self.high))
            return repr(value)
        if self.whole:
            return repr(source.randint(int(self.low), int(self.high)))
        return repr(source.uniform(self.low, self.high))


Parameter = Choices | Range


def parse_parameters(pairs: Sequence[str], ranges: bool, recipe: str = "") -> tuple[list[Parameter], list[str]]:
    """Returns `key=value,value` as parameters, and the pairs with a single value, which vary nothing.

    `ranges`: whether ranges are allowed, as in a search. `recipe`: the recipe whose keys errors suggest.
    """
    parameters: list[Parameter] = []
    single: list[str] = []
    for pair in pairs:
        key, sign, value = (part.strip() for part in pair.partition("="))
        if not sign or "." not in key:
            raise ConfigError(f"{quote(pair)}: expected section.key=values, e.g. {example_override(pair, recipe)}")
        if key in {p.key for p in parameters} | {s.partition("=")[0] for s in single}:
            raise ConfigError(f"{quote(pair)}: {key} is varied twice; name all its values in one place")
        match = _RANGE.fullmatch(value)
        if match:
            if not ranges:
                listed = f"{key}={match[1]},{match[2]}"
                raise ConfigError(f"{quote(pair)}: a grid has values, e.g. {listed}; a range is for --search")
            parameters.append(_parse_range(pair, key, *match.groups()))
            continue
        texts = split_values(value)
        if "" in texts:
            raise ConfigError(f"{quote(pair)}: a value is empty; expected values with commas between, e.g. {key}=1,2")
        if len(texts) == 1:
            single.append(f"{key}={texts[0]}")
        else:
            parameters.append(_parse_choices(pair, key, texts))
    return parameters, single


def _parse_choices(pair: str, key: str, texts: Sequence[str]) -> Choices:
    """Returns the choices of a key; raises a ConfigError if two texts have the same value."""
    choices = Choices(key, tuple(texts))
    values = choices.choices
    for n, text in enumerate(texts):
        if values[n] in values[:n]:
            raise ConfigError(f"{quote(pair)}: {text} is named twice")
    return choices


def _parse_range(pair: str, key: str, low: str, high: str, how: str | None) -> Range:
    """Returns the range from `low` to `high`; `how` is "log", a step, or None."""
    start = _parse_text(key, low)
    end = _parse_text(key, high)
    step: Any = None
    if how not in (None, "log"):
        step = _parse_text(key, str(how))
    parsed = Range(key, start, end, step, how == "log")
    if not start < end:
        raise ConfigError(f"{quote(pair)}: expected a range that rises, e.g. {key}={high}..{low}")
    if parsed.log and start <= 0:
        raise ConfigError(f"{quote(pair)}: a logarithmic range begins above 0")
    if step is None:
        return parsed
    if not 0 < step <= end - start:
        raise ConfigError(f"{quote(pair)}: expected a step above 0 that fits between {low} and {high}")
    if parsed.whole and not isinstance(step, int):
        raise ConfigError(
            f"{quote(pair)}: whole numbers go in whole steps; write {float(start)}..{float(end)} for others"
        )
    if not math.isclose((end - start) / step, round((end - start) / step)):
        last = start + step * math.floor((end - start) / step)
        raise ConfigError(f"{quote(pair)}: steps of {step} from {low} end at {last:.6g}, not at {high}")
    return parsed


def _parse_text(key: str, text: str) -> Any:
    """Returns the value of a text, as it is read for this key of a recipe."""
    value: Any = parse([f"{key}={text}"])
    for part in key.split("."):
        value = value[part]
    return value


def split_values(text: str) -> list[str]:
    """Returns the parts between commas, except commas in brackets or quotes."""
    parts = [""]
    depth = 0
    quote = ""
    for letter in text:
        if quote:
            if letter == quote:
                quote = ""
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
    """Returns every combination, the last key changing fastest."""
    total = math.prod(len(p.texts) for p in parameters)
    if total > MOST:
        raise ConfigError(f"a grid of {total:,} combinations; expected at most {MOST:,}: search with --trials instead")
    keys = [p.key for p in parameters]
    return [dict(zip(keys, texts, strict=True)) for texts in itertools.product(*(p.texts for p in parameters))]


def check_values(parameters: Sequence[Parameter], grid: bool, attempt: Callable[[Texts], object]) -> None:
    """Raises a ConfigError if a value is possible in no trial: each is passed to `attempt` in every combination of a
    grid, or in some random ones of a search, until one raises no error."""
    for parameter in parameters:
        others = [p for p in parameters if p is not parameter]
        for text in parameter.probes:
            error = _first_error(attempt, [{parameter.key: text, **rest} for rest in _settings_of(others, grid)])
            if error is not None:
                raise ConfigError(f"{parameter.key}={text}: {error}") from None


def _first_error(attempt: Callable[[Texts], object], settings: Sequence[Texts]) -> RegardError | None:
    """Returns the first error if every attempt fails; None as soon as one does not."""
    first: RegardError | None = None
    for texts in settings:
        try:
            attempt(texts)
        except RegardError as error:
            first = first or error
        else:
            return None
    return first


def _settings_of(parameters: Sequence[Parameter], grid: bool) -> list[dict[str, str]]:
    """Returns all settings of a grid's parameters, or DRAWN random ones of a search's."""
    if grid:
        return combinations([p for p in parameters if isinstance(p, Choices)])
    if not parameters:
        return [{}]
    source = random.Random(0)
    return [{p.key: p.draw(source) for p in parameters} for _ in range(DRAWN)]
