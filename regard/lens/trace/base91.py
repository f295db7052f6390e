"""Bytes as letters of a page: 13 bits in two of 91 letters, which is 1.23 letters a byte where base64 has 1.33.

The letters are those of ASCII that can be printed, less `"`, `&`, `<` and the backslash: they can stand in a script
element, in an attribute and in the JSON of a notebook as they are. 13 bytes make 16 letters.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

ALIGN = 13  # bytes that begin a new letter
LETTERS = bytes(c for c in range(32, 127) if chr(c) not in '"&<\\')
_TOGETHER = ALIGN << 16


def encode_base91(raw: bytes) -> str:
    """Returns the letters of some bytes, which zeros fill up to a multiple of 13."""
    return "".join(_encode_parts(raw))


def length(size: int) -> int:
    """Returns how many letters so many bytes take."""
    return -(-size // ALIGN) * 16


def _encode_parts(raw: bytes) -> Iterator[str]:
    letters = np.frombuffer(LETTERS, "u1")
    for at in range(0, len(raw), _TOGETHER):
        part = raw[at : at + _TOGETHER]
        bits = np.unpackbits(np.frombuffer(part + bytes(-len(part) % ALIGN), "u1"), bitorder="little")
        pairs = np.zeros((len(bits) // 13, 16), "u1")
        pairs[:, :13] = bits.reshape(-1, 13)
        number = np.packbits(pairs, axis=-1, bitorder="little").view("<u2")
        yield letters[np.concatenate([number % 91, number // 91], 1)].tobytes().decode("ascii")
