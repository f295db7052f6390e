"""The tokens of a Hugging Face model's sequences, with their characters in the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regard.data.tokenizers import Pieces
from regard.lens.recording.hub_inputs import CharacterSpans, Places
from regard.lens.trace.tokens import Tokens

_NO_PLACES = Places()


def hub_tokens(tokenizer: Any, ids: Sequence[int], places: Places = _NO_PLACES, name: str = "text") -> Tokens:
    """Returns the tokens of ids with their character spans: from `places`, or else by decoding the ids one by one.

    Without a tokenizer, ids are shown as numbers. Tokens beyond the segments of `places` were generated.
    """
    ids = list(ids)
    text = places.text
    offsets = places.offsets
    segment = places.segment
    if tokenizer is None:
        return Tokens(name, "", [str(i) for i in ids], ids)
    special = {int(i) for i in tokenizer.all_special_ids} - {
        tokenizer.unk_token_id
    }  # an unknown word is still a word of the text
    names = [str(x) for x in tokenizer.convert_ids_to_tokens(ids)]
    if text is None or offsets is None:
        text, offsets = _decode_spans(tokenizer, ids, special)
    spans = [(-1, -1)] * len(ids)
    for n, (start, end) in enumerate(offsets):
        if end > start and ids[n] not in special:
            spans[n] = (start, end)
            names[n] = text[start:end]
    return Tokens(
        name,
        text,
        names,
        ids,
        [start for start, _ in spans],
        [end for _, end in spans],
        special=[int(i in special) for i in ids],
        segment=None if segment is None else segment + [-1] * (len(ids) - len(segment)),
    )


def numbered_tokens(length: int) -> Tokens:
    """Returns placeholder tokens "0", "1", …, for a sequence that has no ids."""
    return Tokens("tokens", "", [str(i) for i in range(length)])


def image_tokens(model: Any, inputs: dict[str, Any], length: int) -> Tokens:
    """Returns one token per image patch, named "row,column", after special tokens such as [CLS].

    If the patch grid is not known, returns numbered tokens.
    """
    image = inputs.get("pixel_values")
    size = getattr(model.config, "patch_size", None)
    if image is None or not isinstance(size, int):
        return numbered_tokens(length)
    rows = image.shape[-2] // size
    columns = image.shape[-1] // size
    before = length - rows * columns
    if before < 0:
        return numbered_tokens(length)
    names = [f"[{n}]" for n in range(before)]
    if names:
        names[0] = "[CLS]"
    names += [f"{r},{c}" for r in range(rows) for c in range(columns)]
    return Tokens("image", "", names, special=[1] * before + [0] * (rows * columns), grid=[rows, columns])


def make_detokenizer(tokenizer: Any) -> Pieces:
    """Returns an incremental decoder for a Hugging Face tokenizer; without a tokenizer ids are shown as numbers."""
    return Pieces(_DecodeOnly(tokenizer))  # type: ignore[arg-type]


class _DecodeOnly:
    """Adapts a Hugging Face tokenizer (or None) to `Pieces`, which only calls `decode`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids, special tokens included."""
        if self.tokenizer is None:
            return "".join(f" {i}" for i in ids)
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _decode_spans(tokenizer: Any, ids: list[int], special: set[int]) -> tuple[str, CharacterSpans]:
    """Returns the decoded text without special tokens, and the character span of each token.

    Tokens that together make one character, such as its bytes, all get its span.
    """
    detokenizer = make_detokenizer(tokenizer)
    text = ""
    spans: CharacterSpans = []
    waiting = 0  # tokens whose span is not known yet, because their character is incomplete
    for i in ids:
        if i in special:
            spans += [(len(text), len(text))] * (waiting + 1)
            waiting = 0
            continue
        piece = detokenizer.push(i)
        waiting += 1
        if piece:
            spans += [(len(text), len(text) + len(piece))] * waiting
            text += piece
            waiting = 0
    rest = detokenizer.finish()
    return text + rest, spans + [(len(text), len(text) + len(rest))] * waiting
