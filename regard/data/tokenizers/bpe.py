"""Byte-pair encoding by the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from regard.config import SIZE_LIMITS
from regard.data.tokenizers.base import Pieces, TextError, Tokenizer, TokenizerFileError, tokenizer
from regard.errors import RegardError, quote
from regard.reading import fits, parse_json

MAX_VOCABULARY = SIZE_LIMITS["vocabulary"]
ENDS = "ends"  # a key of ours in the library's file


@tokenizer("bpe")
class BPE(Tokenizer):
    """Byte-pair encoding by the `tokenizers` library, also of files that other programs wrote in its format.

    `ends`: the ids that end a text, if they cannot be found by the names of special tokens.
    """

    def __init__(self, document: str, ends: Iterable[int] | None = None) -> None:
        _check_token_ids(parse_json(document, "it", TokenizerFileError))
        library = _library()
        with _explain_errors(TokenizerFileError, "not a file of the `tokenizers` library"):
            self._inner = library.Tokenizer.from_str(document)
        self._inner.no_padding()  # a file may ask for one length for all texts
        self._inner.no_truncation()
        self._ends = None
        if ends is not None:
            self._ends = _check_ends(ends)
        added = self._inner.get_added_tokens_decoder()
        self.special = tuple(token.content for _, token in sorted(added.items()) if token.special)
        self._misread = self._misread_tokens({i: token.content for i, token in added.items()})

    @classmethod
    def train(cls, texts: Iterable[str], size: int, special: Sequence[str] = ()) -> BPE:
        """Returns a tokenizer with `size` tokens learned from texts: of bytes, so that any text can be encoded."""
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
        return cls(inner.to_str())  # read back, so that a new tokenizer is exactly one loaded from its file

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> BPE:
        theirs = {key: value for key, value in document.items() if key != ENDS}  # the library knows no such key
        return cls(json.dumps(theirs), document.get(ENDS))

    @property
    def size(self) -> int:
        return int(self._inner.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        with _explain_errors(TextError, "a text that this tokenizer cannot take"):
            ids: list[int] = self._inner.encode(text).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        ids = self.check_ids(ids)
        with _explain_errors(TextError, "ids that this tokenizer cannot decode"):
            text = str(self._inner.decode(ids, skip_special_tokens=False))
        if "�" in text and not self._misread.keys().isdisjoint(ids):
            return self._decode_bytes(ids)
        return text

    def id(self, special: str) -> int | None:
        if special not in self.special:
            return None
        return int(self._inner.token_to_id(special))

    @property
    def ends(self) -> frozenset[int]:
        if self._ends is None:
            return super().ends
        return self._ends

    def pieces(self) -> Pieces:
        return _BPEPieces(self, frozenset(self._misread))

    def as_json(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self._inner.to_str())
        if self._ends is not None:
            document[ENDS] = sorted(self._ends)
        return document

    def _misread_tokens(self, added: Mapping[int, str]) -> dict[int, str]:
        """Returns the added tokens, by id, that the library decodes as bytes by mistake.

        Its byte-level decoder writes the byte 0xE9 as "é", and so reads a special token "é" as that byte.
        """
        if type(self._inner.decoder).__name__ != "ByteLevel":
            return {}
        with _explain_errors(TokenizerFileError, "tokens that cannot be decoded"):
            decoded = {i: self._inner.decode([i], skip_special_tokens=False) for i in added}
        return {i: content for i, content in added.items() if "�" in decoded[i] and "�" not in content}

    def _decode_bytes(self, ids: list[int]) -> str:
        """Returns the text of ids among which are misread tokens."""
        byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}

        def byte_level(i: int) -> bytes:
            token = self._inner.id_to_token(i)
            if all(letter in byte_of for letter in token):
                return bytes(byte_of[letter] for letter in token)
            return str(token).encode()

        out = bytearray()
        for n, i in enumerate(ids):
            piece = byte_level(i)
            content = self._misread.get(i)
            if content is not None:
                after = b"".join(map(byte_level, ids[n + 1 : n + 4]))
                # A special token of one letter shares the id of a byte: it is that byte if it completes a character.
                is_byte = len(content) == 1 and _completes_character(bytes(out[-3:]), piece, after)
                if not is_byte:
                    piece = content.encode()
            out += piece
        return out.decode(errors="replace")


class _BPEPieces(Pieces):
    """A decoder that also holds back a token that may be a special one or a byte of a character."""

    def __init__(self, tokenizer: BPE, misread: frozenset[int]) -> None:
        super().__init__(tokenizer)
        self.misread = misread

    def _may_change(self, text: str) -> bool:
        return super()._may_change(text) or self.ids[-1] in self.misread


@contextmanager
def _explain_errors(error: type[RegardError], what: str) -> Iterator[None]:
    """Turns the library's errors into `error`: they have no common class, and its panics are not even Exceptions."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, RegardError):
        raise
    except BaseException as cause:
        raise error(f"{what}: {quote(cause)}") from None


def _check_token_ids(document: Any) -> None:
    """Raises a TokenizerFileError for ids that are too large: the library allocates memory up to the highest id."""
    if not isinstance(document, Mapping):
        raise TokenizerFileError("not a file of the `tokenizers` library: expected an object of keys and values")
    model = document.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, Mapping) else []
    added = document.get("added_tokens")
    ids += [token.get("id") for token in added if isinstance(token, Mapping)] if isinstance(added, list) else []
    for number in ids:
        if not isinstance(number, int) or not 0 <= number < MAX_VOCABULARY:
            raise TokenizerFileError(f"the id {quote(number)} of a token: expected 0 to {MAX_VOCABULARY - 1}")


def _check_ends(ends: Any) -> frozenset[int]:
    """Returns the ids that end a text; raises a TokenizerFileError if they are no list of whole numbers."""
    if not isinstance(ends, Iterable) or isinstance(ends, str):
        raise TokenizerFileError(f"{ENDS} = {quote(ends)}: expected a list of ids")
    ids = list(ends)
    if not all(fits(i, int) for i in ids):
        raise TokenizerFileError(f"{ENDS} = {quote(ids)}: expected ids of tokens")
    return frozenset(ids)


def byte_letters() -> list[str]:
    """Returns the letter that byte-level BPE writes for each byte: its own if printable, else one from U+0100 on."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters = []
    following = 256
    for byte in range(256):
        if byte in printed:
            letters.append(chr(byte))
        else:
            letters.append(chr(following))
            following += 1
    return letters


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


def _library() -> Any:
    """Returns the `tokenizers` library with the parts that are used here; importing it takes time."""
    import tokenizers
    import tokenizers.decoders
    import tokenizers.models
    import tokenizers.pre_tokenizers
    import tokenizers.trainers

    return tokenizers
