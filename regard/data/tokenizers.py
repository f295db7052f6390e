"""Text to numbers and back: by character, by byte, or by byte-pair encoding.

Special tokens are pieces of text that are always one token, also where they occur in a text. Some have a role that the
rest of regard looks up: `tokenizer.role("end")` is the id of "<end>", "<|endoftext|>", "</s>" …, or None.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from regard.errors import ExtraMissingError, RegardError

FORMAT = 1

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
    """Text to token ids and back."""

    kind: ClassVar[str]
    special: tuple[str, ...] = ()

    @property
    @abstractmethod
    def size(self) -> int:
        """How many ids there are."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens included."""

    @abstractmethod
    def id(self, special: str) -> int | None:
        """The id of a special token, or None."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """What tokenizer.json holds."""

    def role(self, role: str) -> int | None:
        """The id of the special token with that role (end, start, pad, unknown, mask), or None."""
        return next((self.id(name) for name in ROLES[role] if name in self.special), None)

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a text."""
        end = self.role("end")
        return frozenset() if end is None else frozenset({end})

    def pieces(self) -> Pieces:
        """Decodes one id at a time, for streaming."""
        return Pieces(self)

    def save(self, path: str | Path) -> None:
        """Writes tokenizer.json."""
        Path(path).write_text(json.dumps(self.as_json(), ensure_ascii=False), encoding="utf-8")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size} tokens)"


class Pieces:
    """Text as it grows: a piece is given out once no later token can change it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.start = self.told = 0  # ids from `start` on are decoded again; those before `told` were given out

    def push(self, token: int) -> str:
        """What is certain now, often one token's text, and "" in the middle of a character."""
        self.ids.append(token)
        return self._next(final=False)

    def finish(self) -> str:
        """What was held back."""
        return self._next(final=True)

    def _next(self, final: bool) -> str:
        # What was told is decoded along, as the first token of a text may be written differently.
        before = self.tokenizer.decode(self.ids[self.start : self.told])
        now = self.tokenizer.decode(self.ids[self.start :])
        if not final and self._is_open(now):
            return ""
        self.start, self.told = self.told, len(self.ids)
        return now[len(before) :]

    def _is_open(self, text: str) -> bool:
        """Returns whether a later token may change the end of the text."""
        return text.endswith("�")


class _Listed(Tokenizer):
    """What tokenizers with a list of their own share: special tokens are found in the text first."""

    def __init__(self, special: Sequence[str] = ()) -> None:
        self.special = tuple(special)
        if len(set(self.special)) < len(self.special) or "" in self.special:
            raise TextError(f"special tokens must differ and not be empty: {list(self.special)}")
        longest = sorted(self.special, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest)) + ")") if longest else None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        at = 0
        for part in self._cut.split(text) if self._cut else [text]:
            found = self.id(part)
            ids += self._plain(part, at) if found is None else [found]
            at += len(part)
        return ids

    def _checked(self, ids: Iterable[int]) -> list[int]:
        ids = [int(i) for i in ids]
        for n, i in enumerate(ids):
            if not 0 <= i < self.size:
                raise TextError(f"token {i} at position {n}: expected 0 to {self.size - 1}")
        return ids

    @abstractmethod
    def _plain(self, text: str, at: int) -> list[int]:
        """Ids of a text without special tokens, which starts at character `at` of the whole."""


class Characters(_Listed):
    """One token a character, those of a given text; special tokens come first."""

    kind = "characters"

    def __init__(self, characters: Sequence[str], special: Sequence[str] = ()) -> None:
        super().__init__(special)
        self.tokens = [*self.special, *(c for c in characters if c not in self.special)]
        self._ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self._ids) < len(self.tokens) or any(len(c) != 1 for c in self.tokens[len(self.special) :]):
            raise TextError("a character vocabulary lists single characters, each once")

    @classmethod
    def of(cls, text: str, special: Sequence[str] = ()) -> Characters:
        """The characters that occur in a text, in order."""
        return cls(sorted(set(text)), special)

    @property
    def size(self) -> int:
        return len(self.tokens)

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.tokens[i] for i in self._checked(ids))

    def id(self, special: str) -> int | None:
        return self._ids.get(special) if special in self.special else None

    def as_json(self) -> dict[str, Any]:
        characters = "".join(self.tokens[len(self.special) :])
        return {
            "format_version": FORMAT,
            "kind": self.kind,
            "characters": characters,
            "special": list(self.special),
        }

    def _plain(self, text: str, at: int) -> list[int]:
        try:
            return [self._ids[c] for c in text]
        except KeyError:
            unknown = self.role("unknown")
            if unknown is not None:
                return [self._ids.get(c, unknown) for c in text]
        n, c = next((n, c) for n, c in enumerate(text) if c not in self._ids)
        raise TextError(
            f"character {c!r} (U+{ord(c):04X}) at position {at + n} is not among the {self.size} known ones. Leave it "
            "out, build the tokenizer from text that has it, or give it the special token '<unknown>'."
        )


class Bytes(_Listed):
    """One token a byte of UTF-8: 256 of them, then the special tokens. No text is unknown."""

    kind = "bytes"

    @property
    def size(self) -> int:
        return 256 + len(self.special)

    def decode(self, ids: Iterable[int]) -> str:
        decoder = self.pieces()
        return "".join([*(decoder.push(i) for i in self._checked(ids)), decoder.finish()])

    def id(self, special: str) -> int | None:
        return 256 + self.special.index(special) if special in self.special else None

    def pieces(self) -> Pieces:
        return _BytePieces(self)

    def as_json(self) -> dict[str, Any]:
        return {"format_version": FORMAT, "kind": self.kind, "special": list(self.special)}

    def _plain(self, text: str, at: int) -> list[int]:
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise TextError(
                f"character {text[error.start]!r} at position {at + error.start} is half of a surrogate pair and has "
                "no UTF-8. Repair the text where it was read."
            ) from None


class _BytePieces(Pieces):
    def __init__(self, tokenizer: Bytes) -> None:
        super().__init__(tokenizer)
        self.special = tokenizer.special
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token < 256:
            return self.utf8.decode(bytes([token]))
        return self.finish() + self.special[token - 256]

    def finish(self) -> str:
        return self.utf8.decode(b"", final=True)


class BPE(Tokenizer):
    """Byte-pair encoding by the `tokenizers` library. Its tokenizer.json is that library's own, also from elsewhere.

    `ends`: the ids that end a text, where their names do not tell.
    """

    kind = "bpe"

    def __init__(self, document: str, ends: Iterable[int] | None = None) -> None:
        try:
            self._inner = _library().Tokenizer.from_str(document)
        except ExtraMissingError:
            raise
        except Exception as error:  # the library raises nothing more particular
            raise TokenizerFileError(f"not a file of the `tokenizers` library: {error}") from None
        self._inner.no_padding()  # a file may ask for one length for all texts
        self._inner.no_truncation()
        self._ends = None if ends is None else frozenset(ends)
        added = self._inner.get_added_tokens_decoder()
        self.special = tuple(token.content for _, token in sorted(added.items()) if token.special)
        self._misread = self._misread_tokens({i: token.content for i, token in added.items()})

    @classmethod
    def train(cls, texts: Iterable[str], size: int, special: Sequence[str] = ()) -> BPE:
        """Learns `size` tokens from texts, by bytes, so that no text is unknown."""
        library = _library()
        inner = library.Tokenizer(library.models.BPE())
        inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = library.decoders.ByteLevel()
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        if size < len(alphabet) + len(special):
            raise TextError(f"a BPE vocabulary of {size}: expected at least 256 bytes + {len(special)} special tokens")
        inner.train_from_iterator(
            texts,
            library.trainers.BpeTrainer(
                vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
            ),
        )
        return cls(inner.to_str())

    @property
    def size(self) -> int:
        return int(self._inner.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._inner.encode(text).ids
        except Exception as error:  # the library raises nothing more particular
            raise TextError(f"a text that this tokenizer cannot take: {error}") from None
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        ids = [int(i) for i in ids]
        for n, i in enumerate(ids):
            if not 0 <= i < self.size:
                raise TextError(f"token {i} at position {n}: expected 0 to {self.size - 1}")
        text = str(self._inner.decode(ids, skip_special_tokens=False))
        if "�" in text and not self._misread.keys().isdisjoint(ids):
            return self._decode_bytes(ids)
        return text

    def pieces(self) -> Pieces:
        return _BPEPieces(self, frozenset(self._misread))

    def _misread_tokens(self, added: Mapping[int, str]) -> dict[int, str]:
        """Returns the added tokens that the library takes for bytes when it decodes.

        Its byte-level decoder writes the byte 0xE9 as "é", and so reads a special token "é" as that byte.
        """
        if type(self._inner.decoder).__name__ != "ByteLevel":
            return {}
        decoded = {i: self._inner.decode([i], skip_special_tokens=False) for i in added}
        return {i: content for i, content in added.items() if "�" in decoded[i] and "�" not in content}

    def _decode_bytes(self, ids: list[int]) -> str:
        """Returns the text of ids among which are misread tokens.

        One of a single letter has the id of its byte: it is the byte where that completes a character.
        """
        letters = {letter: byte for byte, letter in enumerate(byte_letters())}

        def byte_level(i: int) -> bytes:
            token = self._inner.id_to_token(i)
            if all(letter in letters for letter in token):
                return bytes(letters[letter] for letter in token)
            return str(token).encode()

        out = bytearray()
        for n, i in enumerate(ids):
            content = self._misread.get(i)
            piece = byte_level(i)
            if content is not None:
                after = b"".join(map(byte_level, ids[n + 1 : n + 4]))
                if len(content) > 1 or not _completes_character(bytes(out[-3:]), piece, after):
                    piece = content.encode()
            out += piece
        return out.decode(errors="replace")

    def id(self, special: str) -> int | None:
        return int(self._inner.token_to_id(special)) if special in self.special else None

    @property
    def ends(self) -> frozenset[int]:
        return super().ends if self._ends is None else self._ends

    def as_json(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self._inner.to_str())
        return document if self._ends is None else {**document, "ends": sorted(self._ends)}


class _BPEPieces(Pieces):
    """Waits behind a token that may be a special one or the first byte of a character."""

    def __init__(self, tokenizer: BPE, misread: frozenset[int]) -> None:
        super().__init__(tokenizer)
        self.misread = misread

    def _is_open(self, text: str) -> bool:
        return super()._is_open(text) or self.ids[-1] in self.misread


def byte_letters() -> list[str]:
    """Returns the letter by which byte-level BPE writes each byte: itself where it is printed, else one from 256 on."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]


def _completes_character(before: bytes, byte: bytes, after: bytes) -> bool:
    """Returns whether a byte is part of one UTF-8 character of 2 to 4 bytes, given those before and after it."""
    near = before + byte + after
    place = len(before)
    for length in (2, 3, 4):
        for start in range(max(0, place - length + 1), place + 1):
            try:
                if len(near[start : start + length].decode()) == 1:
                    return True
            except UnicodeDecodeError:
                continue
    return False


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer that a tokenizer.json holds: one of regard's, or one of the `tokenizers` library."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text)
    except FileNotFoundError:
        raise TokenizerFileError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise TokenizerFileError(f"{path} is damaged or no JSON: {error}") from None
    if not isinstance(document, dict):
        raise TokenizerFileError(f"{path}: expected an object with the keys of a tokenizer")
    if "kind" not in document:
        ends = document.pop("ends", None)  # the library knows no such key
        return BPE(text) if ends is None else BPE(json.dumps(document, ensure_ascii=False), ends)
    if document.get("format_version") != FORMAT:
        raise TokenizerFileError(
            f"{path} has format_version {document.get('format_version')!r}, this regard knows {FORMAT}; update regard"
        )
    special = document.get("special", [])
    if not isinstance(special, list) or not all(isinstance(s, str) for s in special):
        raise TokenizerFileError(f"{path}: 'special' must be a list of texts")
    if document["kind"] == Bytes.kind:
        return Bytes(special)
    if document["kind"] != Characters.kind or not isinstance(document.get("characters"), str):
        raise TokenizerFileError(
            f"{path}: kind {document['kind']!r}, expected '{Characters.kind}' (with 'characters') or '{Bytes.kind}'"
        )
    return Characters(document["characters"], special)


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise ExtraMissingError('byte-pair encoding needs `tokenizers`: pip install "regard[text]"') from None
    return tokenizers
