"""The tokens of a sequence, with the characters that each stands for and the word that each belongs to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
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
    """One sequence; the lists up to `positions` have one element per token.

    The names of the fields are keys of the trace format (docs/trace-format.md).
    """

    name: str
    text: str
    tokens: list[str]
    ids: list[int] | None = None
    starts: list[int] = field(default_factory=list)  # first character of each token in `text`, −1 for none
    ends: list[int] = field(default_factory=list)  # end of its characters, exclusive
    words: list[int] = field(default_factory=list)  # index of the word, −1 for none
    special: list[int] = field(default_factory=list)  # 1 for special tokens such as [CLS]
    visible: list[int] = field(default_factory=list)  # 0 for padding
    positions: list[int] = field(default_factory=list)  # number of tokens before it that are not padding
    prompt: int | None = None  # length of the prompt, if the rest was generated
    steps: list[int] | None = None  # for generated text: number of tokens that each step read
    grid: list[int] | None = None  # for an image: [rows, columns] of patches
    # For a pair of texts, which of the two each token belongs to: 0, 1, or −1 for neither, such as [SEP].
    segment: list[int] | None = None
    picture: str | None = None  # for an image: a JPEG of what the model saw, as a data: address

    def __post_init__(self) -> None:
        n = len(self.tokens)
        self.starts = self.starts or [-1] * n
        self.ends = self.ends or [-1] * n
        self.special = self.special or [0] * n
        self.visible = self.visible or [1] * n
        self.words = self.words or word_indices(self.text, self.starts, self.ends)
        if not self.positions:
            not_padding = torch.tensor(self.visible, dtype=torch.long)
            self.positions = (not_padding.cumsum(0) - not_padding).tolist()

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def position_tensor(self) -> Int[Tensor, " T"]:
        """The positions, as a tensor."""
        return torch.tensor(self.positions, dtype=torch.long)

    @cached_property
    def not_padding(self) -> Bool[Tensor, " T"]:
        """A Boolean tensor, False for padding tokens."""
        return torch.tensor(self.visible, dtype=torch.bool)

    def prefix(self, n: int) -> Tokens:
        """Returns the first n tokens: the lists are cut, the ids and segments dropped, the text is kept whole.

        The result is fit only for computing masks and biases.
        """
        if n == len(self):
            return self
        return replace(self, **{name: getattr(self, name)[:n] for name in _LISTS}, ids=None, segment=None)

    def mark_generated(self, prompt: int) -> None:
        """Marks the tokens after the first `prompt` as generated, one per step."""
        self.prompt = prompt
        self.steps = [prompt] + [1] * (len(self) - prompt)

    def as_dict(self) -> dict[str, Any]:
        """Returns the tokens as a dict for the header of a trace, without `segment` and `picture` if they are None."""
        # Not dataclasses.asdict, which copies every number of every list one by one.
        entry = {part.name: getattr(self, part.name) for part in fields(self)}
        for name in ("segment", "picture"):
            if entry[name] is None:
                del entry[name]
        return entry


def word_indices(text: str, starts: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Returns for each token the index of the word that contains its first non-space character; −1 for none."""
    word_at = [-1] * len(text)
    for number, match in enumerate(_WORD.finditer(text)):
        word_at[match.start() : match.end()] = [number] * (match.end() - match.start())
    inside = (word_at[max(start, 0) : max(end, 0)] for start, end in zip(starts, ends, strict=True))
    return [next((word for word in words if word >= 0), -1) for words in inside]


def tokens_of(tokenizer: Tokenizer | None, ids: Sequence[int], text: str | None = None, name: str = "text") -> Tokens:
    """Returns the tokens of ids, decoded by a tokenizer of regard; without a tokenizer ids are shown as numbers."""
    ids = [int(i) for i in ids]
    if tokenizer is None:
        return Tokens(name, "", [str(i) for i in ids], ids)
    decoded, spans = _decode_spans(tokenizer, ids)
    if text is None or text == decoded:
        text = decoded
        shown = [decoded[start:end] for start, end in spans]
    else:  # the tokenizer changed the text (lower case, say), so the characters of its tokens are not known
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
    """Returns the decoded text and the character span of each token.

    Tokens that together make one character, such as its bytes, all get its span.
    """
    pieces = tokenizer.pieces()
    text = ""
    spans: list[tuple[int, int]] = []
    waiting = 0  # tokens whose span is not known yet, because their character is incomplete
    # One piece per token, and one for the end, which may complete a character; the span of the end is cut off below.
    for piece in [*(pieces.push(i) for i in ids), pieces.finish()]:
        waiting += 1
        if piece:
            spans += [(len(text), len(text) + len(piece))] * waiting
            text += piece
            waiting = 0
    spans += [(len(text), len(text))] * waiting
    return text, spans[: len(ids)]
