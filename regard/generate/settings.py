"""The settings of a decoding, and its results."""

from __future__ import annotations

from dataclasses import dataclass

from regard.config import ConfigError, Section
from regard.errors import quote


@dataclass(frozen=True, kw_only=True)
class Settings(Section):
    """The settings of a decoding: greedy, unless temperature, top_k, top_p or min_p is set (sampling), or `beams`.

    `top_k`: only the k likeliest tokens. `top_p`: only the likeliest that together have probability p. `min_p`: only
    tokens at least p times as likely as the likeliest. `repetition_penalty` > 1 makes tokens that have occurred less
    likely. `n`: the number of distinct outputs, or fewer if sampling finds no more. `length_penalty` a: beams are
    ranked by log p / lengthᵃ; temperature, top_k, top_p and min_p then shape the distribution that they search. `stop`:
    texts that end an output, `stop_tokens`: tokens that do. `slide`: when the model's length is reached, forget the
    first half and continue.
    """

    place = "generate"

    max_tokens: int = 100
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    beams: int | None = None
    length_penalty: float = 0.0
    n: int = 1
    stop: str | tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    seed: int | None = None
    slide: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_tokens", "top_k", "beams", "n"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"generate.{name} = {value}: expected at least 1")
        for name in ("temperature", "repetition_penalty"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(
                    f"generate.{name} = {quote(value)}: expected a positive number. For the likeliest token each "
                    "time, leave out the temperature."
                )
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ConfigError(f"generate.{name} = {value}: expected more than 0 and at most 1")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"generate.seed = {quote(self.seed)}: expected 0 to {(1 << 63) - 1}")
        if "" in self.stops:
            raise ConfigError("generate.stop: an empty text would stop at once")
        if self.beams is not None and (self.slide or self.repetition_penalty != 1):
            raise ConfigError(
                "generate.beams needs one distribution throughout: leave out repetition_penalty and slide"
            )
        if self.n > (self.beams or self.n):
            raise ConfigError(f"generate.n = {self.n} outputs of {self.beams} beams: expected at most as many")
        if self.n > 1 and not self.samples and self.beams is None:
            raise ConfigError(f"generate.n = {self.n}: greedy decoding has one output; give a temperature, or beams")

    @property
    def samples(self) -> bool:
        """Returns whether tokens are drawn at random."""
        return any(x is not None for x in (self.temperature, self.top_k, self.top_p, self.min_p))

    @property
    def stops(self) -> tuple[str, ...]:
        """Returns the stop texts as a tuple."""
        if isinstance(self.stop, str):
            return (self.stop,)
        return self.stop


@dataclass(frozen=True)
class Choice:
    """One output.

    `score` is log p of its tokens, a stop token included (for beams, divided by lengthᵃ). `ended` says why it ended:
    "stop", "max" (it has `max_tokens`) or "full" (the model can read no more).
    """

    text: str | None
    tokens: list[int]
    score: float
    ended: str


@dataclass(frozen=True)
class Result:
    """The continuations of one prompt: beams best first, samples in order. `text`, `tokens`, `score` are the
    first's."""

    choices: tuple[Choice, ...]

    @property
    def text(self) -> str:
        """Returns the text, without the prompt."""
        if self.choices[0].text is None:
            raise ConfigError("no text without a tokenizer: set model.tokenizer, or take the tokens")
        return self.choices[0].text

    @property
    def tokens(self) -> list[int]:
        return self.choices[0].tokens

    @property
    def score(self) -> float:
        return self.choices[0].score

    def __str__(self) -> str:
        if self.choices[0].text is None:
            return str(self.tokens)
        return self.text
