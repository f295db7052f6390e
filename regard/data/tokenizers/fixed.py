"""Tokenizers with a fixed list of tokens: one a character, or one a byte."""

from __future__ import annotations

import codecs
import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from regard.data.tokenizers.base import Pieces, TextError, Tokenizer, TokenizerFileError, tokenizer

BYTES = 256


class FixedTokenizer(Tokenizer):
    """A tokenizer that finds its special tokens in a text; of several that begin at one place, the longest counts."""

    def __init__(self, special: Sequence[str] = ()) -> None:
        self.special = tuple(special)
        if len(set(self.special)) < len(self.special) or "" in self.special:
            raise TextError(f"special tokens must differ and not be empty: {list(self.special)}")
        # Alternatives of a pattern are tried in order.
        longest_first = sorted(self.special, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def encode(self, text: str) -> list[int]:
        parts = [text]
        if self.special:
            parts = self._pattern.split(text)  # special tokens and what is between them, in order
        ids: list[int] = []
        start = 0
        for part in parts:
            special_id = self.id(part)
            if special_id is None:
                ids += self._encode_plain(part, start)
            else:
                ids.append(special_id)
            start += len(part)
        return ids

    @abstractmethod
    def _encode_plain(self, text: str, start: int) -> list[int]:
        """Returns the ids of a text without special tokens, which starts at character `start` of the whole."""


@tokenizer("characters")
class Characters(FixedTokenizer):
    """One token for each of a list of characters; special tokens have the first ids."""

    open_vocabulary = False

    def __init__(self, characters: Sequence[str], special: Sequence[str] = ()) -> None:
        super().__init__(special)
        self.tokens = [*self.special, *(c for c in characters if c not in self.special)]
        self._ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self._ids) < len(self.tokens) or any(len(c) != 1 for c in self.tokens[len(self.special) :]):
            raise TextError("a character vocabulary lists single characters, each once")

    @classmethod
    def of(cls, text: str, special: Sequence[str] = ()) -> Characters:
        """Returns the tokenizer of the characters that occur in a text, in order."""
        return cls(sorted(set(text)), special)

    @classmethod
    def train(cls, texts: Iterable[str], size: int, special: Sequence[str] = ()) -> Characters:
        """Returns the tokenizer of all characters of the texts, however many there are."""
        return cls(sorted(set().union(*texts)), special)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Characters:
        if not isinstance(document.get("characters"), str):
            raise TokenizerFileError(f"kind '{cls.kind}' without 'characters', which lists them in one text")
        return cls(document["characters"], _special_tokens(document))

    @property
    def size(self) -> int:
        return len(self.tokens)

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.tokens[i] for i in self.check_ids(ids))

    def id(self, special: str) -> int | None:
        if special not in self.special:
            return None
        return self._ids[special]

    def as_json(self) -> dict[str, Any]:
        characters = "".join(self.tokens[len(self.special) :])
        return self.document(characters=characters, special=list(self.special))

    def _encode_plain(self, text: str, start: int) -> list[int]:
        try:  # the usual case, and the fastest
            return [self._ids[c] for c in text]
        except KeyError:
            unknown = self.role("unknown")
            if unknown is not None:
                return [self._ids.get(c, unknown) for c in text]
        n, c = next((n, c) for n, c in enumerate(text) if c not in self._ids)
        raise TextError(
            f"character {c!r} (U+{ord(c):04X}) at position {start + n} is not among the {self.size} known ones. Leave "
            "it out, build the tokenizer from text that has it, or give it the special token '<unknown>'."
        )


@tokenizer("bytes")
class Bytes(FixedTokenizer):
    """One token for each byte of UTF-8, 256 of them, then the special tokens; any text can be encoded."""

    @classmethod
    def train(cls, texts: Iterable[str], size: int, special: Sequence[str] = ()) -> Bytes:
        """Returns the tokenizer, which is the same whatever the texts."""
        return cls(special)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Bytes:
        return cls(_special_tokens(document))

    @property
    def size(self) -> int:
        return BYTES + len(self.special)

    def decode(self, ids: Iterable[int]) -> str:
        decoder = self.pieces()
        return "".join([*(decoder.push(i) for i in self.check_ids(ids)), decoder.finish()])

    def id(self, special: str) -> int | None:
        if special not in self.special:
            return None
        return BYTES + self.special.index(special)

    def pieces(self) -> Pieces:
        return _BytePieces(self)

    def as_json(self) -> dict[str, Any]:
        return self.document(special=list(self.special))

    def _encode_plain(self, text: str, start: int) -> list[int]:
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise TextError(
                f"character {text[error.start]!r} at position {start + error.start} is half of a surrogate pair and "
                "has no UTF-8. Repair the text where it was read."
            ) from None


class _BytePieces(Pieces):
    """Decodes bytes one at a time with a UTF-8 decoder that keeps its state; nothing is decoded twice."""

    def __init__(self, tokenizer: Bytes) -> None:
        super().__init__(tokenizer)
        self.special = tokenizer.special
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token < BYTES:
            return self.utf8.decode(bytes([token]))
        return self.finish() + self.special[token - BYTES]

    def finish(self) -> str:
        return self.utf8.decode(b"", final=True)


def _special_tokens(document: Mapping[str, Any]) -> list[str]:
    """Returns the special tokens that a tokenizer.json lists."""
    special = document.get("special", [])
    if not isinstance(special, list) or not all(isinstance(token, str) for token in special):
        raise TokenizerFileError("'special' must be a list of texts")
    return special
