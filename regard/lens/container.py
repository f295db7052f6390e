"""The bytes of a trace file in memory, for homes of the lens that write no file."""

from __future__ import annotations

from regard.lens.format import MAGIC, Encoded


def to_bytes(encoded: Encoded) -> bytes:
    """What `Encoded.write` writes."""
    document = encoded.document
    return b"".join([MAGIC, len(document).to_bytes(8, "little"), document, *encoded.blocks])
