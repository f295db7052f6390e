"""The tokens that a Hugging Face model read and wrote, with the characters that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regard.data.tokenizers import Pieces
from regard.lens.recording.hub_inputs import Offsets
from regard.lens.trace.tokens import Tokens


def hub_tokens(
    tokenizer: Any, ids: Sequence[int], text: str | None = None, offsets: Offsets | None = None, name: str = "text"
) -> Tokens:
    """Returns tokens with their characters: as the tokenizer says, or by decoding them one by one."""
    ids = list(ids)
    if tokenizer is None:
        return Tokens(name, "", [str(i) for i in ids], ids)
    special = {int(i) for i in tokenizer.all_special_ids} - {tokenizer.unk_token_id}  # an unknown word is text
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
    )


def numbered_tokens(length: int) -> Tokens:
    """Returns tokens that nothing is known of but their places."""
    return Tokens("tokens", "", [str(i) for i in range(length)])


def image_tokens(model: Any, inputs: dict[str, Any], length: int) -> Tokens:
    """Returns the patches of an image by row and column, behind tokens such as [CLS]; else numbered tokens."""
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


def pieces_of(tokenizer: Any) -> Pieces:
    """Returns what decodes the tokens of a Hugging Face tokenizer one at a time; without one, as numbers."""
    return Pieces(_DecodeOnly(tokenizer))  # type: ignore[arg-type]


class _DecodeOnly:
    """The one method of a tokenizer that `Pieces` needs."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids, special tokens included."""
        if self.tokenizer is None:
            return "".join(f" {i}" for i in ids)
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _decode_spans(tokenizer: Any, ids: list[int], special: set[int]) -> tuple[str, Offsets]:
    """Returns the text of ids without special tokens, and the characters of each.

    Tokens that share a character, such as the bytes of one, all stand for it.
    """
    pieces = pieces_of(tokenizer)
    text = ""
    spans: Offsets = []
    waiting = 0  # tokens whose characters are not known yet
    for i in ids:
        if i in special:
            spans += [(len(text), len(text))] * (waiting + 1)
            waiting = 0
            continue
        piece = pieces.push(i)
        waiting += 1
        if piece:
            spans += [(len(text), len(text) + len(piece))] * waiting
            text += piece
            waiting = 0
    rest = pieces.finish()
    return text + rest, spans + [(len(text), len(text) + len(rest))] * waiting
