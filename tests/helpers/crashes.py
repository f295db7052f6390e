"""What a disk may hold after a crash: the names and contents that a folder had at any moment, less what was not forced.

A killed process leaves the system's cache behind, so killing cannot show that something was not forced to disk. Here
the calls that change a folder are recorded, with each fsync. At every prefix of the record a crash is played through:
what was forced to disk is there, and of what was not, any part may be missing. A rename is there or not, as a whole.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Names = dict[tuple[int, str], int | None]  # from a folder and a name to what it leads to, None where to nothing
CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate")


class Recorder:
    """Records, while it is entered, what happens to a folder that exists."""

    active: Recorder | None = None

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log: list[tuple[str, Any]] = []
        self.names: Names = {}
        self.contents: dict[int, bytes | None] = {}  # None of a folder
        self.handles: list[int] = []  # kept open, so that the number of a removed file is not used again
        self.start = root.stat().st_ino

    def __enter__(self) -> Recorder:
        self.look()
        # What was there before is on disk.
        self.log = [("sync", number) for number in (*self.contents, self.start)]
        self.first: tuple[Names, dict[int, bytes | None]] = (dict(self.names), dict(self.contents))
        self.fsync = os.fsync
        os.fsync = self.note_sync  # type: ignore[assignment]
        Recorder.active = self
        return self

    def __exit__(self, *error: object) -> None:
        Recorder.active = None
        os.fsync = self.fsync
        self.look()
        for handle in self.handles:
            os.close(handle)

    def note_sync(self, handle: int) -> None:
        """Notes what is forced to disk, and spares the disk."""
        self.look()
        self.log.append(("sync", os.fstat(handle).st_ino))

    def look(self) -> None:
        """Notes how names and contents differ from those that were last seen."""
        running, Recorder.active = Recorder.active, None
        now: Names = {}
        folders = [(self.start, self.root)]
        while folders:
            number, folder = folders.pop()
            for path in folder.iterdir():
                status = path.lstat()
                now[number, path.name] = status.st_ino
                if status.st_ino not in self.contents:
                    self.handles.append(os.open(path, os.O_RDONLY))
                content = None
                if stat.S_ISDIR(status.st_mode):
                    folders.append((status.st_ino, path))
                else:
                    content = path.read_bytes()
                if status.st_ino not in self.contents or self.contents[status.st_ino] != content:
                    self.log.append(("data", (status.st_ino, content)))
                    self.contents[status.st_ino] = content
        for change in _changes(self.names, now):
            self.log.append(("names", change))
        self.names = now
        Recorder.active = running

    def worlds(self) -> Iterator[tuple[bool, Names, dict[int, bytes | None]]]:
        """Yields what a crash after each call may leave, and whether all calls had returned."""
        names, latest = dict(self.first[0]), dict(self.first[1])
        forced = dict(latest)
        pending: list[Names] = []
        for position, (kind, what) in enumerate(self.log):
            if kind == "names":
                pending.append(what)
            elif kind == "data":
                latest[what[0]] = what[1]
            else:
                forced[what] = latest.get(what)
                names |= _merged(change for change in pending if any(folder == what for folder, _ in change))
                pending = [change for change in pending if all(folder != what for folder, _ in change)]
            # What is not forced may be there, or half of it.
            torn = {number: forced.get(number, _half(content)) for number, content in latest.items()}
            for part in _parts(pending):
                for contents in (latest, torn):
                    yield position == len(self.log) - 1, {**names, **_merged(part)}, contents

    def play(self, target: Path, check: Callable[[Path, bool], None]) -> int:
        """Makes each different world in a folder, and asks `check` of it, and whether all calls had returned.

        Returns how many there were.
        """
        seen = set()
        for finished, names, contents in self.worlds():
            files = dict(_files(self.start, Path(), names, contents))
            key = hashlib.sha256(repr((finished, sorted(files.items()))).encode()).digest()
            if key in seen:
                continue
            seen.add(key)
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            for path, content in files.items():
                if content is None:
                    (target / path).mkdir(parents=True, exist_ok=True)
                else:
                    (target / path).parent.mkdir(parents=True, exist_ok=True)
                    (target / path).write_bytes(content)
            check(target, finished)
        return len(seen)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if Recorder.active is not None and event in CHANGES:
        Recorder.active.look()  # what came before this call


sys.addaudithook(_hook)


def _changes(before: Names, after: Names) -> list[Names]:
    """Returns the changes between two looks; a name that went and one that came for the same thing are one rename."""
    gone = {place: number for place, number in before.items() if after.get(place) != number}
    changes = []
    for place, number in after.items():
        if before.get(place) == number:
            continue
        source = next((old for old, other in gone.items() if other == number), None)
        change: Names = {place: number}
        if source is not None:
            change[source] = after.get(source)
            del gone[source]
        gone.pop(place, None)  # written over
        changes.append(change)
    return changes + [{place: None} for place in gone]


def _merged(changes: Any) -> Names:
    merged: Names = {}
    for change in changes:
        merged |= change
    return merged


def _parts(pending: list[Names]) -> Iterator[list[Names]]:
    """Yields which of the changes that were not forced may be on disk: beginnings, each alone, all but each."""
    for n in range(len(pending) + 1):
        yield pending[:n]
    for n in range(len(pending)):
        yield [pending[n]]
        yield pending[:n] + pending[n + 1 :]


def _half(content: bytes | None) -> bytes | None:
    if content is None:
        return None
    return content[: len(content) // 2]


def _files(
    folder: int, path: Path, names: Names, contents: dict[int, bytes | None]
) -> Iterator[tuple[Path, bytes | None]]:
    """Yields the files below a folder with their contents, and folders with None."""
    for (owner, name), number in names.items():
        if owner != folder or number is None:
            continue
        yield path / name, contents[number]
        if contents[number] is None:
            yield from _files(number, path / name, names, contents)
