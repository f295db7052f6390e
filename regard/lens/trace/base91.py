"""Base91: encodes 13 bits as two of 91 printable characters, 1.23 characters per byte (base64: 1.33).

The alphabet is printable ASCII without `"`, `&`, `<` and the backslash, so the encoded text needs no escaping in a
script element, in an attribute or in the JSON of a notebook. 13 bytes become 16 characters.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

ALIGN = 13  # every 13 bytes the encoding falls on a character boundary
ALPHABET = bytes(c for c in range(32, 127) if chr(c) not in '"&<\\')
_CHUNK = ALIGN << 16  # bytes that are encoded at a time

_CHARACTERS = np.frombuffer(ALPHABET, "u1")
# The two characters of every number of 13 bits, the lower digit first.
_PAIRS = np.stack([_CHARACTERS[np.arange(1 << 13) % 91], _CHARACTERS[np.arange(1 << 13) // 91]], 1).view("<u2")[:, 0]


def encode_base91(raw: bytes) -> str:
    """Returns the base91 text of bytes, which are zero-padded to a multiple of 13."""
    return "".join(_encode_parts(raw))


def encoded_length(size: int) -> int:
    """Returns the number of characters that encode `size` bytes."""
    return -(-size // ALIGN) * 16


def _encode_parts(raw: bytes) -> Iterator[str]:
    for at in range(0, len(raw), _CHUNK):
        part = raw[at : at + _CHUNK]
        rows = np.frombuffer(part + bytes(-len(part) % ALIGN), "u1").reshape(-1, ALIGN)
        # columns[i] holds byte i of every group of 13, so that each operation below runs over adjacent numbers. The two
        # columns of zeros are for the last pair, which reads three bytes as all do.
        columns = np.zeros((ALIGN + 2, len(rows)), "<u4")
        columns[:ALIGN] = rows.T
        pairs = np.empty((len(rows), 8), "<u2")
        for n in range(8):
            first, shift = divmod(13 * n, 8)
            bits = columns[first] | columns[first + 1] << 8 | columns[first + 2] << 16
            pairs[:, n] = _PAIRS[bits >> shift & 0x1FFF]
        yield pairs.tobytes().decode("ascii")
