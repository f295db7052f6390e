"""Data divided into train, dev and test by what it says, so that the same text is never on two sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple, TypeVar

from regard.data.files import DataError

R = TypeVar("R", bound=NamedTuple)


def cut(rows: Sequence[R], share: float, parts: Sequence[str]) -> dict[str, list[R]]:
    """Rows divided into those that are kept ("train") and `share` of them for each of `parts`.

    Where a row goes depends on its first field, a text, alone: whatever the file's order, and whatever else it says.
    """
    made: dict[str, list[R]] = {"train": [], **{name: [] for name in parts}}
    for row in rows:
        place = int.from_bytes(blake2b(row[0].encode(), digest_size=8).digest(), "big") / 2**64
        name = parts[int(place / share)] if share > 0 and place / share < len(parts) else "train"
        made[name].append(row)
    return made


def completed(sets: Mapping[str, list[R]], share: float, path: str, what: str) -> dict[str, list[R]]:
    """The sets with dev and test, where they are missing, cut off train; `path` and `what` name the data in errors."""
    missing = [name for name in ("dev", "test") if name not in sets]
    if not missing:
        return dict(sets)
    found = dict(sets) | cut(sets["train"], share, missing)
    empty = next((name for name in ("train", *missing) if not found[name]), None)
    if empty is not None:
        raise DataError(
            f"{path} has {len(sets['train'])} {what}: too few to cut {share:.0%} off for {empty}; "
            f"give data.{missing[0]}=FILE, or raise data.held_out"
        )
    return found
