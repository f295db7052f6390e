"""Writing files and folders so that each is complete or not there at all, whatever stops the process or the machine.

What is written is staged beside its place under a name that nothing reads, forced to disk and renamed; then the folder
that holds the name is forced to disk too. A writer locks what it stages. What nobody locks was left behind by a process
that was killed, and the next writer removes it.

Several files take their places together (`replace_files`): all are staged, then a file `.commit` that names them is put
in place. From that moment the new set is the one that counts: if this process stops, the next to open the folder moves
the rest.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from regard.errors import DataError, RegardError, quote
from regard.locks import LockState, lock_folder, lock_handle
from regard.reading import check_path, open_file, read_json_object

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"  # the hash of each file of a set
COMMIT = ".commit"  # the staged names of the files of a committed set, until all have moved
STAGED = re.compile(r"\.(?P<place>[^/]+)\.[0-9a-f]{8}\.staged")

Locate = Callable[[str], Path]  # from the name of a file of a set to its path


def sync(path: str | Path) -> None:
    """Forces a file or a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Makes a folder and those above it, and forces their names to disk; an existing folder stays as it is."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


@contextmanager
def made_folder(path: Path) -> Iterator[None]:
    """Makes a folder and those above it; removes them again if the block raises and has left them empty."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    make_folder(path)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # somebody has written into it
            for folder in made:
                folder.rmdir()
        raise


@contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """Yields a new file beside `path` to write to, which at the end is flushed, forced to disk and renamed to `path`.

    If anything fails, it is removed, and an earlier file stays as it was.
    """
    place = Path(path).resolve()
    stage = _stage_path(place)
    try:
        if place.exists() and not place.is_file():
            raise DataError(f"{path} cannot be written: it is no regular file")
        make_folder(place.parent)
        remove_leftovers(place.parent, place.name)
        with stage.open("xb") as file:
            lock_handle(file.fileno())
            yield file
            # Forced to disk before the rename: else a crash could leave the new name with no content.
            file.flush()
            os.fsync(file.fileno())
            stage.replace(place)
        sync(place.parent)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}; an earlier file is as it was") from error
    finally:
        with suppress(OSError):  # it was renamed, or an error was raised above
            stage.unlink()


def write_text(path: Path, text: str) -> None:
    """Writes a small file whole or not at all."""
    with atomic_write(path) as file:
        file.write(text.encode())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file with the permissions of any new file; safetensors itself makes it private."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file({name: x.detach().contiguous() for name, x in tensors.items()}, path, metadata=metadata)
    path.chmod(mode)


@contextmanager
def staged_folder(place: Path) -> Iterator[Path]:
    """Yields an empty folder beside `place` to write into, which at the end is forced to disk and renamed to `place`.

    A folder that then stands in the place must be empty: nothing is written over.
    """
    make_folder(place.parent)
    remove_leftovers(place.parent, place.name)
    with _locked_stage(_stage_path(place)) as stage:
        yield stage
        _sync_files(stage)
        stage.rename(place)
        sync(place.parent)


def check_new_folder(path: str | Path, error: type[RegardError]) -> Path:
    """Returns the absolute path of a folder to write; raises `error` if anything but an empty folder is there."""
    place = check_path(path, error).absolute()  # else the path "." has no name
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise error(f"{path} is there already and not empty; nothing was written. Choose another folder")
    return place


@contextmanager
def new_folder(path: str | Path, error: type[RegardError]) -> Iterator[Path]:
    """Yields an empty folder to write into, which at the end is renamed to `path`; raises `error` if anything but an
    empty folder is there, or if it cannot be written."""
    from safetensors import SafetensorError

    place = check_new_folder(path, error)
    try:
        with staged_folder(place) as stage:
            yield stage
    except (OSError, SafetensorError) as cause:
        if isinstance(cause, RegardError):
            raise
        reason = getattr(cause, "strerror", None) or quote(cause)
        raise error(f"{path} cannot be written: {reason}; choose another folder, or make room") from cause


@contextmanager
def replace_files(folder: Path, owned: Sequence[str] = ()) -> Iterator[Path]:
    """Yields an empty folder to write files into; at the end they all replace those of `folder` at once.

    A manifest of their hashes is added. Files named in `owned` that have not been written again are removed. Whenever
    this is stopped, either the old or the new set is complete: `read_files` finds it.
    """
    with made_folder(folder), _locked_stage(_stage_path(folder / "files")) as stage:
        yield stage
        write_manifest(stage)
        _sync_files(stage)
        with lock_folder(folder, wait=True):
            _move_committed(folder)  # a set that was committed and not moved would take the places back later
            remove_leftovers(folder)
            moves = _commit(stage, folder)
            _move_committed(folder)
            for name in set(owned) - set(moves):
                (folder / name).unlink(missing_ok=True)
            sync(folder)


def _commit(stage: Path, folder: Path) -> dict[str, str]:
    """Commits the files of a stage as the set that counts in `folder`, and returns the staged name of each."""
    moves: dict[str, str] = {}
    with ExitStack() as undo:
        for file in sorted(stage.iterdir()):
            staged = file.rename(_stage_path(folder / file.name))
            undo.callback(staged.unlink, missing_ok=True)
            moves[file.name] = staged.name
        sync(folder)  # the staged names are on disk before the marker that lists them
        undo.callback((folder / COMMIT).unlink, missing_ok=True)  # undone first
        write_text(folder / COMMIT, json.dumps(moves))
        undo.pop_all()
    return moves


def finish_replacing(folder: Path) -> None:
    """Moves the files of a set that was committed, but not moved; a read-only folder stays as it is."""
    if not (folder / COMMIT).is_file():
        return
    try:
        with lock_folder(folder, wait=True):
            _move_committed(folder)
    except OSError as error:
        # `read_files` then finds the files where they were staged.
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise


@contextmanager
def read_files(folder: Path) -> Iterator[Locate]:
    """Yields a function that returns the path of each file of the newest set; a lock keeps writers out meanwhile."""
    finish_replacing(folder)
    with lock_folder(folder, wait=True, shared=True):
        moves = _read_commit(folder)

        def locate(name: str) -> Path:
            staged = folder / moves.get(name, name)
            if staged.exists():
                return staged
            return folder / name

        yield locate


def _read_commit(folder: Path) -> dict[str, str]:
    """Returns the staged name of each file of a set that was committed; {} where there is none."""
    path = folder / COMMIT
    try:
        moves = read_json_object(path, DataError)
    except DataError as error:
        if path.exists():
            raise DataError(f"{error}; remove it to go on without it") from None
        return {}  # there is none, or another process has just moved its files
    for place, staged in moves.items():
        if Path(place).name != place or not isinstance(staged, str) or not STAGED.fullmatch(staged):
            named = f"{quote(place)}, {quote(staged)}"
            raise DataError(f"{path} names {named}; expected files of this folder. Remove it to go on without it")
    return moves


def _move_committed(folder: Path) -> None:
    """Moves those files of a committed set that are not yet in their places, and ends the commit."""
    moves = _read_commit(folder)
    if not moves:
        return
    for place, staged in moves.items():
        with suppress(FileNotFoundError):  # it moved before
            (folder / staged).rename(folder / place)
    sync(folder)  # on disk before the marker goes: without it, staged files are leftovers
    (folder / COMMIT).unlink()


# Hashes


def hash_file(path: Path, from_disk: bool = False) -> str:
    """Returns the SHA-256 of a file in hexadecimal digits; `from_disk`: of what is on disk, not of what is cached."""
    with open_file(path, DataError) as file:
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, name: str = MANIFEST) -> None:
    """Writes the hashes of all files of a folder into its manifest."""
    hashes = {file.name: hash_file(file) for file in sorted(folder.iterdir()) if file.name != name}
    (folder / name).write_text(json.dumps(hashes, indent=2), encoding="utf-8")


def read_manifest(path: Path) -> dict[str, str] | None:
    """Returns the hash of each file that a manifest names, or None where there is no manifest."""
    if not path.exists():
        return None
    return read_json_object(path, DataError)


def find_damage(path: Path, want: Any, from_disk: bool = False) -> str | None:
    """Returns in words what is wrong with a file whose hash should be `want`; None if nothing is."""
    if not os.path.exists(path):  # unlike Path.exists, it raises no error for a name that no file can have
        return f"{quote(str(path), marks=False)} is missing"
    try:
        found = hash_file(path, from_disk)
    except DataError as error:
        return str(error)
    if found != want:
        return f"{path} does not match its hash"
    return None


# Stages


def remove_leftovers(folder: Path, place: str | None = None) -> None:
    """Removes what killed writers staged in a folder, for one place or for all; what is being written stays."""
    found: dict[str, bool] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            match = STAGED.fullmatch(entry.name)
            if match and place in (None, match["place"]):
                found[entry.name] = entry.is_dir(follow_symlinks=False)
    if not found:
        return
    committed = set(_read_commit(folder).values())
    for name, is_folder in found.items():
        if name not in committed:
            with suppress(FileNotFoundError):  # another process was first
                _remove_abandoned(folder / name, is_folder)


def _remove_abandoned(path: Path, is_folder: bool) -> None:
    """Removes a staged file or folder that no process locks."""
    handle = os.open(path, os.O_RDONLY)
    try:
        if lock_handle(handle) is not LockState.OURS:
            return
        if is_folder:
            shutil.rmtree(path)
        else:
            path.unlink()
    finally:
        os.close(handle)


def _stage_path(place: Path) -> Path:
    """Returns a new path beside a place, with a name that `remove_leftovers` recognises."""
    return place.with_name(f".{place.name}.{secrets.token_hex(4)}.staged")


@contextmanager
def _locked_stage(stage: Path) -> Iterator[Path]:
    """Makes a folder to stage files in, holds its lock meanwhile, and removes what is left of it at the end."""
    stage.mkdir()
    try:
        with lock_folder(stage):
            yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _sync_files(folder: Path) -> None:
    """Forces the files of a folder to disk, and then the folder."""
    for path in (*folder.iterdir(), folder):
        sync(path)
