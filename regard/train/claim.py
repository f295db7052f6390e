"""Locks on folders for results: one process at a time writes, and a folder is removed if nothing came of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from regard.errors import RunError
from regard.locks import LockState, is_locked, lock_file
from regard.storage import made_folder, remove_leftovers

LOCK = ".lock"  # made with the folder, and never replaced


@contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[None]:
    """Locks a folder while the context lasts, and first removes unfinished files of killed processes.

    The lock ends with its process. On a file system without locks it keeps nobody out.
    """
    with ExitStack() as held:
        try:
            state = held.enter_context(lock_file(folder / LOCK, wait))
            if state is LockState.OURS:
                remove_leftovers(folder)
        except OSError as error:
            raise RunError(f"cannot write into {folder}: {error}. Choose another folder with --out") from error
        if state is LockState.TAKEN:
            raise RunError(f"another process is writing into {folder}: wait until it has ended")
        yield


@contextmanager
def claimed(
    path: Path, files: Sequence[str], started: Callable[[], bool], hint: str = "", wait: bool = False
) -> Iterator[None]:
    """Makes and locks a folder for new results; raises RunError if it holds results already, that is, any of `files`.

    If the body fails while `started()` is False, what it made is removed, and the folder too if it was made here.
    """
    with ExitStack() as held:
        try:
            held.enter_context(made_folder(path))
        except OSError as error:
            raise RunError(f"cannot write into {path}: {error}. Choose another folder with --out") from error
        held.enter_context(locked(path, wait))
        for name in files:
            if (path / name).exists():
                raise RunError(f"{path} holds results already ({name}); choose another --out{hint}")
        before = {entry.name for entry in path.iterdir()} - {LOCK}
        try:
            yield
        except BaseException:
            if not started():
                _remove_entries(path, before)
            raise


def is_claimed(folder: Path) -> bool:
    """Returns whether a process has locked a folder and writes into it now."""
    return is_locked(folder / LOCK)


def _remove_entries(folder: Path, kept: set[str]) -> None:
    """Removes the entries of a folder, except those named in `kept`."""
    for entry in folder.iterdir():
        if entry.name in kept:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
