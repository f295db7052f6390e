"""What was read: tokens with the characters that they stand for, and the words that they make up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.data.tokenizers import Tokenizer

_LISTS = ("tokens", "starts", "ends", "words", "special", "visible", "positions")
_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")


@dataclass
class Tokens:
    """One sequence; all lists are as long as it has tokens. docs/trace-format.md says what each of them is."""

    name: str
    text: str
    tokens: list[str]
    ids: list[int] | None = None
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    special: list[int] = field(default_factory=list)
    visible: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    prompt: int | None = None
    steps: list[int] | None = None
    grid: list[int] | None = None

    def __post_init__(self) -> None:
        n = len(self.tokens)
        self.starts = self.starts or [-1] * n
        self.ends = self.ends or [-1] * n
        self.special = self.special or [0] * n
        self.visible = self.visible or [1] * n
        self.words = self.words or word_numbers(self.text, self.starts, self.ends)
        if not self.positions:
            seen = torch.tensor(self.visible, dtype=torch.long)
            self.positions = (seen.cumsum(0) - seen).tolist()

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def places(self) -> Int[Tensor, " T"]:
        """Positions as a tensor."""
        return torch.tensor(self.positions, dtype=torch.long)

    @cached_property
    def seen(self) -> Bool[Tensor, " T"]:
        """Which tokens are no padding."""
        return torch.tensor(self.visible, dtype=torch.bool)

    def until(self, n: int) -> Tokens:
        """Returns the first n tokens, as far as masks and biases care."""
        if n == len(self):
            return self
        return replace(self, **{name: getattr(self, name)[:n] for name in _LISTS}, ids=None)

    def mark_generated(self, prompt: int) -> None:
        """Says that the first `prompt` tokens were given and the rest generated, one a step."""
        self.prompt = prompt
        self.steps = [prompt] + [1] * (len(self) - prompt)

    def as_dict(self) -> dict[str, Any]:
        """Returns the entry of a trace's header."""
        return asdict(self)


def word_numbers(text: str, starts: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Returns the number of the word that holds the first character of each token that is no space; −1 for none."""
    word_at = [-1] * len(text)
    for number, match in enumerate(_WORD.finditer(text)):
        word_at[match.start() : match.end()] = [number] * (match.end() - match.start())
    inside = (word_at[max(start, 0) : max(end, 0)] for start, end in zip(starts, ends, strict=True))
    return [next((word for word in words if word >= 0), -1) for words in inside]


def tokens_of(tokenizer: Tokenizer | None, ids: Sequence[int], text: str | None = None, name: str = "text") -> Tokens:
    """Returns the tokens of ids by one of regard's tokenizers; without one they are shown as numbers."""
    ids = [int(i) for i in ids]
    if tokenizer is None:
        return Tokens(name, "", [str(i) for i in ids], ids)
    decoded, spans = _decode_spans(tokenizer, ids)
    if text is None or text == decoded:
        text = decoded
        shown = [decoded[start:end] for start, end in spans]
    else:  # a tokenizer that changes the text, as by lower case, leaves no trace of where its tokens came from
        shown = [tokenizer.decode([i]) for i in ids]
        spans = [(-1, -1)] * len(ids)
    special = {tokenizer.id(s) for s in tokenizer.special}
    return Tokens(
        name,
        text,
        [token or f"‹{i}›" for token, i in zip(shown, ids, strict=True)],
        ids,
        [start for start, _ in spans],
        [end for _, end in spans],
        special=[int(i in special) for i in ids],
    )


def _decode_spans(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """Returns the text of ids and the characters of each; those that share a character all stand for it."""
    pieces = tokenizer.pieces()
    text = ""
    spans: list[tuple[int, int]] = []
    waiting = 0  # tokens whose characters are not known yet
    for piece in [*(pieces.push(i) for i in ids), pieces.finish()]:
        waiting += 1
        if piece:
            spans += [(len(text), len(text) + len(piece))] * waiting
            text += piece
            waiting = 0
    spans += [(len(text), len(text))] * waiting
    return text, spans[: len(ids)]
