"""The base class of tokenizers, their registry, streaming, and their files.

Special tokens are pieces of text that are always one token, also where they occur in a text. Some have a role that the
rest of regard looks up: `tokenizer.role("end")` is the id of "<end>", "<|endoftext|>", "</s>" …, or None.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from regard.errors import RegardError, did_you_mean, quote
from regard.reading import read_json_object
from regard.registry import Registry

FORMAT = 1
# The kind of a tokenizer.json that names none: such a file has the format of the `tokenizers` library.
LIBRARY_KIND = "bpe"

ROLES = {
    "end": ("<end>", "<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]"),
    "start": ("<start>", "<s>", "<bos>", "<|begin_of_text|>", "[CLS]"),
    "pad": ("<pad>", "[PAD]", "□"),
    "unknown": ("<unknown>", "<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]", "⁇"),
}


class TextError(RegardError, ValueError):
    """A text or a list of token ids that a tokenizer cannot take."""


class TokenizerFileError(RegardError, ValueError):
    """A tokenizer file that is missing, damaged or of another kind."""


class Tokenizer(ABC):
    """Text to token ids and back.

    `kind` is the name by which recipes and files know the class; the decorator `tokenizer` sets it. `open_vocabulary`
    says whether any text can be encoded; if not, the special token "<unknown>" stands for what is not known.
    """

    kind: ClassVar[str]
    open_vocabulary: ClassVar[bool] = True
    special: tuple[str, ...] = ()

    @classmethod
    def train(cls, texts: Iterable[str], size: int, special: Sequence[str] = ()) -> Tokenizer:
        """Returns a new tokenizer made from texts; `size` is how many tokens it should have, if that can be chosen."""
        raise NotImplementedError(f"{cls.__name__} is not made from texts")

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Tokenizer:
        """Returns the tokenizer whose `as_json` gave the document; raises TokenizerFileError where it is damaged."""
        raise NotImplementedError(f"{cls.__name__} is not read from a tokenizer.json")

    @property
    @abstractmethod
    def size(self) -> int:
        """Returns how many ids there are."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids, special tokens included."""

    @abstractmethod
    def id(self, special: str) -> int | None:
        """Returns the id of a special token, or None."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Returns the content of tokenizer.json: `self.document(…)` of the fields that `from_json` needs."""

    def document(self, **fields: Any) -> dict[str, Any]:
        """Returns the content of a tokenizer.json: format and kind, which `load_tokenizer` checks, then the fields."""
        return {"format_version": FORMAT, "kind": self.kind, **fields}

    def role(self, role: str) -> int | None:
        """Returns the id of the special token with that role (end, start, pad, unknown, mask), or None."""
        return next((self.id(name) for name in ROLES[role] if name in self.special), None)

    @property
    def ends(self) -> frozenset[int]:
        """Returns the ids that end a text."""
        end = self.role("end")
        if end is None:
            return frozenset()
        return frozenset({end})

    def pieces(self) -> Pieces:
        """Returns a decoder that takes one id at a time, for streaming."""
        return Pieces(self)

    def save(self, path: str | Path) -> None:
        """Writes tokenizer.json."""
        Path(path).write_text(json.dumps(self.as_json(), ensure_ascii=False), encoding="utf-8")

    def check_ids(self, ids: Iterable[int]) -> list[int]:
        """Returns the ids as a list; raises TextError where one is outside the vocabulary."""
        ids = [int(i) for i in ids]
        for n, i in enumerate(ids):
            if not 0 <= i < self.size:
                raise TextError(f"token {i} at position {n}: expected 0 to {self.size - 1}")
        return ids

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size} tokens)"


TOKENIZERS: Registry[type[Tokenizer]] = Registry("tokenizer")
T = TypeVar("T", bound=Tokenizer)


def tokenizer(name: str) -> Callable[[type[T]], type[T]]:
    """Decorator: registers a tokenizer class under the name that recipes and files use."""

    def register(cls: type[T]) -> type[T]:
        cls.kind = name
        TOKENIZERS.put(name, cls)
        return cls

    return register


class Pieces:
    """An incremental decoder: it returns a piece of text once no later token can change it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.start = 0  # the index from which ids are decoded again
        self.emitted = 0  # the number of ids whose text has been returned

    def push(self, token: int) -> str:
        """Takes a token and returns the new text that no later token can change; "" within a character."""
        self.ids.append(token)
        return self._next(final=False)

    def finish(self) -> str:
        """Returns the text that was held back, at the end of the tokens."""
        return self._next(final=True)

    def _next(self, final: bool) -> str:
        """Returns the text of the ids that has not been returned yet; "" if later ids may change it, unless `final`."""
        # The last piece is decoded too, as some tokenizers decode the first token of a text differently.
        before = self.tokenizer.decode(self.ids[self.start : self.emitted])
        text = self.tokenizer.decode(self.ids[self.start :])
        if not final and self._may_change(text):
            return ""
        self.start = self.emitted
        self.emitted = len(self.ids)
        return text[len(before) :]

    def _may_change(self, text: str) -> bool:
        """Returns whether a later token may change the end of the text: an unfinished character decodes to "�"."""
        return text.endswith("�")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Returns the tokenizer of a tokenizer.json: one of regard's, or one of the `tokenizers` library."""
    path = Path(path)
    document = read_json_object(path, TokenizerFileError)
    kind = document.get("kind", LIBRARY_KIND)
    if "kind" in document and document.get("format_version") != FORMAT:
        raise TokenizerFileError(
            f"{path} has format_version {quote(document.get('format_version'))}, this regard knows {FORMAT}; "
            "update regard"
        )
    if not isinstance(kind, str) or kind not in TOKENIZERS:
        raise TokenizerFileError(
            f"{path}: no tokenizer has the kind {quote(kind)}.{did_you_mean(str(kind), TOKENIZERS)}"
        )
    try:
        return TOKENIZERS[kind].from_json(document)
    except (TokenizerFileError, TextError) as error:
        raise TokenizerFileError(f"{path}: {error}") from None
