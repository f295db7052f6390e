"""Long texts as files of token ids, for language models.

A folder holds train.npy and dev.npy (ids as uint16, or uint32 for a vocabulary of more than 65,536; memory-mapped,
never read as a whole), the tokenizer.json that made them, and the hashes of the three; they are replaced together.
If a file has fewer tokens than a window needs, windows are shorter, so that a short text can be trained on, too.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from jaxtyping import Int
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from regard.data.batch import IGNORE, Batch
from regard.data.files import PIECE, DataError, read_pieces
from regard.data.tokenizers import TOKENIZERS, Tokenizer, load_tokenizer
from regard.errors import quote
from regard.reading import check_file, check_path
from regard.storage import MANIFEST, find_damage, read_files, read_manifest, replace_files

TRAIN = "train.npy"
DEV = "dev.npy"
TOKENIZER = "tokenizer.json"
FEWEST = 4  # tokens of a text: two to train on, two to evaluate
Ids = NDArray[Any]


@dataclass(frozen=True)
class TokenFile:
    """Token ids on disk, and their tokenizer."""

    path: Path
    tokens: Ids
    tokenizer: Tokenizer

    @classmethod
    def open(cls, path: str | Path) -> TokenFile:
        """Opens a .npy file with the tokenizer.json beside it, both as they were last written together."""
        path = Path(path)
        if not check_path(path.parent, DataError).is_dir():
            check_file(path, DataError)
        with read_files(path.parent) as locate:
            hashes = read_manifest(locate(MANIFEST)) or {}  # folders of earlier versions have none
            if TOKENIZER in hashes:  # tokens are not checked: hashing them would read them all
                damage = find_damage(locate(TOKENIZER), hashes[TOKENIZER])
                if damage is not None:
                    raise DataError(f"{damage}: it was changed since it was written; write the tokens again")
            return cls(path, _map_tokens(locate(path.name)), load_tokenizer(locate(TOKENIZER)))

    def __len__(self) -> int:
        return len(self.tokens)


def _map_tokens(path: Path) -> Ids:
    """Returns the ids of a .npy file, memory-mapped."""
    check_file(path, DataError)
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # NumPy parses its header as Python text, which fails in many ways
        raise DataError(f"{path} cannot be read: {quote(error)}; expected what `regard data tokens` writes") from None
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
        content = type(tokens).__name__
        if isinstance(tokens, np.ndarray):
            content = f"{tokens.dtype} {list(tokens.shape)}"
        raise DataError(f"{path} holds {content}; expected one row of uint16 or uint32")
    return tokens


def write_tokens(
    text: str | Path,
    folder: str | Path,
    tokenizer: str | Tokenizer = "characters",
    vocabulary: int = 8192,
    share: float = 0.9,
    piece: int = PIECE,
) -> tuple[TokenFile, TokenFile]:
    """Turns a UTF-8 text file into train.npy (the first `share` of its tokens), dev.npy (the rest) and tokenizer.json.

    `tokenizer`: an existing one, or the kind of a new one, made from the text; `vocabulary` is the size of a new BPE.
    The text is read in pieces of `piece` bytes, cut between words, and never held as a whole.
    """
    if not 0 < share < 1:
        raise DataError(f"share = {share}: expected more than 0 and less than 1 of the tokens for training")
    text = Path(text)
    folder = Path(folder)
    if isinstance(tokenizer, str):
        kind = TOKENIZERS.find(tokenizer)
        tokenizer = kind.train(_cut_between_words(read_pieces(text, piece)), vocabulary)
    # Little-endian on every machine, so that a file can be mapped elsewhere as it is.
    dtype = np.dtype("<u2" if tokenizer.size <= 1 << 16 else "<u4")
    try:
        # How many tokens there are is known only at the end, so they are divided in a second pass.
        with replace_files(folder) as stage, tempfile.TemporaryFile(dir=stage) as ids:
            for part in _cut_between_words(read_pieces(text, piece)):
                ids.write(np.array(tokenizer.encode(part), dtype).tobytes())
            n = ids.tell() // dtype.itemsize
            if n < FEWEST:
                fault = f"has {n} tokens" if n else "is empty"
                raise DataError(f"{text} {fault}; expected text of at least {FEWEST} tokens")
            train = min(max(round(share * n), FEWEST // 2), n - FEWEST // 2)
            ids.seek(0)
            for name, number in ((TRAIN, train), (DEV, n - train)):
                _write_part(ids, stage / name, number, dtype)
            tokenizer.save(stage / TOKENIZER)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror}; earlier files are as they were") from error
    return TokenFile.open(folder / TRAIN), TokenFile.open(folder / DEV)


# Where byte-pair encoding never joins two sides: before a single space, and after a single line break.
_BETWEEN_WORDS = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")


def _cut_between_words(pieces: Iterator[str]) -> Iterator[str]:
    """Yields the text in parts, cut where no token could cross; a piece without such a place joins the next."""
    rest = ""
    for piece in pieces:
        rest += piece
        # Only the end is searched, as any place will do; a text that has none is cut anywhere at last.
        cut = max((m.start() for m in _BETWEEN_WORDS.finditer(rest, max(len(rest) - 1000, 0))), default=0)
        if cut or len(rest) > 4 * PIECE:
            cut = cut or len(rest)
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def _write_part(source: BinaryIO, path: Path, number: int, dtype: np.dtype[Any]) -> None:
    """Writes the next `number` ids of a source into a .npy file."""
    with path.open("wb") as target:
        # The header is written by hand, as np.save would want all tokens in memory.
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (number,)}
        np.lib.format.write_array_header_1_0(target, header)
        left = number * dtype.itemsize
        while left:
            left -= target.write(source.read(min(left, PIECE)))


def windows(tokens: Ids, length: int, starts: NDArray[Any] | Int[Tensor, "B"]) -> Batch:
    """Returns x [B,length] = tokens[start : start + length] for each start, and y, the same one token further on."""
    length = window_length(tokens, length)
    starts = np.asarray(starts)
    last = len(tokens) - 1 - length
    if starts.size and (starts.min() < 0 or starts.max() > last):
        raise DataError(
            f"starts from {starts.min()} to {starts.max()}: expected 0 to {last} for windows of {length} tokens"
        )
    # One window is one token longer than x; fancy indexing copies only the windows out of the mapped file.
    rows = torch.from_numpy(sliding_window_view(tokens, length + 1)[starts].astype(np.int64))
    return Batch(rows[:, :-1], rows[:, 1:])


def random_windows(tokens: Ids, batch: int, length: int, generator: torch.Generator) -> Batch:
    """Returns `batch` windows with random starts, all equally likely."""
    starts = len(tokens) - window_length(tokens, length)
    return windows(tokens, length, torch.randint(starts, (batch,), generator=generator))


def all_windows(tokens: Ids, length: int, batch: int = 32) -> Iterator[Batch]:
    """Yields windows side by side, `batch` at a time: each token but the first is a target exactly once.

    The last window ends in zeros whose targets are IGNORE.
    """
    length = window_length(tokens, length)
    for start in range(0, len(tokens) - 1, batch * length):
        part = torch.from_numpy(tokens[start : start + batch * length + 1].astype(np.int64))
        missing = -(len(part) - 1) % length
        yield Batch(
            torch.nn.functional.pad(part[:-1], (0, missing)).view(-1, length),
            torch.nn.functional.pad(part[1:], (0, missing), value=IGNORE).view(-1, length),
        )


def window_length(tokens: Ids, length: int) -> int:
    """Returns the length of windows over these tokens: `length`, or less if there are fewer tokens."""
    if length < 1 or len(tokens) < 2:
        raise DataError(f"windows of {length} over {len(tokens)} tokens: expected at least 1 over at least 2")
    return min(length, len(tokens) - 1)
