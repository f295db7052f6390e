"""What docstrings and annotations say of the masks of somebody's attention."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import nn

from regard.laws.signatures import callable_of

# What a docstring says of a mask: a value, and what becomes of keys that have it.
_VALUES = re.compile(r"\b(?:(?P<true>True|1s?|ones?)|(?P<false>False|0s?|zeros?))\b")
_HIDES = re.compile(
    r"\b(?:hid(?:e|es|den|ing)|mask(?:s|ed)?(?: out)?|ignored?|excluded?|pad(?:s|ding|ded)?|blocked)\b", re.I
)
_SHOWS = re.compile(r"\b(?:keeps?|kept|visible|seen|see|attend(?:s|ed)?|allowed|valid|real|shown?)\b", re.I)
_BOOLEAN = re.compile(r"\b(?:bool(?:ean)?s?|True|False)\b", re.I)
_OTHER_MASK = re.compile(
    r"\b(?:segments?|documents?|blocks?|dropout|dropped|multipl\w+|soft|gates?|factors?|heads?)\b", re.I
)
_DENIES = re.compile(r"\b(?:not|never|cannot|no|un\w+|dis\w+|in(?:visible|valid))\b|n't\b", re.I)


def says_mask(f: Any, name: str) -> str | None:
    """Returns what True or 1 means in a mask by the docstring: "visible" or "hidden"; None where it is not clear."""
    said = set()
    for told in _told_of(f, name):
        if re.search(r"\binf|1e\d|∞|added to", told):
            return None  # numbers that are added to scores
        for clause in re.split(r"[.;,\n]|\band\b|\bbut\b|\bwhile\b", told):
            said.add(_read_clause(clause))
    said.discard(None)
    if len(said) != 1:
        return None
    return said.pop()


def _told_of(f: Any, name: str) -> list[str]:
    """Returns what docstrings say of a parameter; a module's is read where it quotes the name and no other tells."""
    docs = [inspect.getdoc(f) or ""]
    if isinstance(f, nn.Module):
        docs = [type(f).__doc__ or "", f.forward.__doc__ or ""]
    told = _passages(docs, rf"\b{re.escape(name)}\b(?!\s*=)")
    if not told:
        around = getattr(callable_of(f), "__globals__", {}).get("__doc__") or ""
        told = _passages([around], rf"`{re.escape(name)}`")
    return told


def _passages(docs: list[str], name: str) -> list[str]:
    """Returns what follows a name in docstrings: up to a blank line, or one that begins with another name."""
    found = [(words, re.search(name, words)) for words in docs]
    return [
        re.split(r"\n\s*\n|\n\s*(?:- *)?`?\w+`?\s*(?:\([^)]*\))?:", words[place.end() :])[0]
        for words, place in found
        if place is not None
    ]


def says_boolean(f: Any, name: str) -> bool:
    """Returns whether a docstring or the annotation says that a mask may be boolean."""
    try:
        parameter = inspect.signature(callable_of(f)).parameters.get(name)
    except ValueError:
        return False
    if parameter is not None and re.search(r"\bBool(Tensor)?\b", str(parameter.annotation)):
        return True
    clauses = [clause for told in _told_of(f, name) for clause in re.split(r"[.;,\n]|\bor\b", told)]
    return any(_BOOLEAN.search(clause) and not _DENIES.search(clause) for clause in clauses)


def says_other_mask(f: Any, name: str) -> bool:
    """Returns whether a docstring says that a mask is of another kind: of documents, heads or blocks, or a factor."""
    return any(_OTHER_MASK.search(told) for told in _told_of(f, name))


def says_lengths(f: Any, name: str) -> bool:
    """Returns whether a docstring says that lengths are of what is no padding."""
    return any(re.search(r"\b(?:valid|real|true|actual|unpadded|pad\w*)\b", told, re.I) for told in _told_of(f, name))


def says_rank(f: Any, name: str) -> int | None:
    """Returns how many axes a mask has by its docstring, as two in "(B, S)"; None where it does not say."""
    shapes = [re.search(r"[\[(]\s*(\w+(?:\s*[,x×]\s*\w+)+)\s*[\])]", told) for told in _told_of(f, name)]
    return next((len(re.split(r"[,x×]", shape[1])) for shape in shapes if shape is not None), None)


def _read_clause(clause: str) -> str | None:
    """Returns what a clause says that True or 1 means in a mask, as in "1 for what to keep" or "False hides"."""
    values = {match.lastgroup for match in _VALUES.finditer(clause)}
    hides = bool(_HIDES.search(_VALUES.sub("", clause)))
    shows = bool(_SHOWS.search(clause))
    if len(values) != 1 or hides == shows:
        return None
    if shows and _DENIES.search(clause):
        hides = True
    elif _DENIES.search(clause):
        return None
    if values == {"false"}:
        hides = not hides
    return "hidden" if hides else "visible"
