"""English text that needs no download: the prose of Python's own documentation, which `help()` shows."""

from __future__ import annotations

from importlib import import_module

from regard.data.files import DataError

SHORTEST = 80  # characters; paragraphs that are not longer are headings and labels
PLAIN = 0.93  # in prose, more than this share of the characters are letters, spaces, commas and full stops


def python_prose() -> list[str]:
    """Returns the paragraphs of the reference that comes with Python, each once, without code, tables and signatures.

    Each version of Python has its own, so results on it are comparable within one version only.
    """
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError:
        raise DataError(
            "this Python comes without its documentation (pydoc_data); name a text of your own: data.text=FILE"
        ) from None
    blocks = (block for name in sorted(topics) for block in topics[name].split("\n\n"))
    # Code and tables are indented by three spaces or more.
    plain = (block for block in blocks if not any(line[:3].isspace() for line in block.split("\n")))
    paragraphs = (" ".join(block.split()) for block in plain)
    return list(dict.fromkeys(text for text in paragraphs if _is_prose(text)))


def _is_prose(text: str) -> bool:
    plain = sum(c.isalpha() or c in " ,." for c in text)
    return len(text) > SHORTEST and plain > PLAIN * len(text)
