"""Splitting data into train, dev and test by a hash of its text, so that no text is in two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple, TypeVar

from regard.data.files import DataError

R = TypeVar("R", bound=NamedTuple)


def split_by_hash(rows: Sequence[R], share: float, parts: Sequence[str]) -> dict[str, list[R]]:
    """Returns the rows of each part: about `share` of them for each of `parts`, and the rest for "train".

    The part of a row depends on its first field, a text, alone, and not on the order of rows.
    """
    split: dict[str, list[R]] = {"train": [], **{name: [] for name in parts}}
    for row in rows:
        # By a hash, not by a random draw: a row stays in its part when others are added.
        place = int.from_bytes(blake2b(row[0].encode(), digest_size=8).digest(), "big") / 2**64  # uniform in [0, 1)
        name = "train"
        if share > 0 and place / share < len(parts):
            name = parts[int(place / share)]
        split[name].append(row)
    return split


def add_held_out(sets: Mapping[str, list[R]], share: float, path: str, what: str) -> dict[str, list[R]]:
    """Returns the sets; those of dev and test that are missing are split off train, `share` of it for each.

    `path` and `what` name the data in errors.
    """
    missing = [name for name in ("dev", "test") if name not in sets]
    if not missing:
        return dict(sets)
    completed = dict(sets) | split_by_hash(sets["train"], share, missing)
    empty = next((name for name in ("train", *missing) if not completed[name]), None)
    if empty is not None:
        raise DataError(
            f"{path} has {len(sets['train'])} {what}: too few to cut {share:.0%} off for {empty}; "
            f"give data.{missing[0]}=FILE, or raise data.held_out"
        )
    return completed
