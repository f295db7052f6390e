"""Folders for results: one process at a time writes into one, and one that was claimed for nothing goes again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from regard.errors import RunError
from regard.locks import LockState, lock_file
from regard.storage import made_folder, remove_leftovers

LOCK = ".lock"  # made with the folder, and never replaced


@contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[None]:
    """Keeps other processes from writing into a folder meanwhile, and removes what killed ones were writing.

    A process that dies gives its lock up. Where a file system knows no locks, nobody is kept out.
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
    """Makes and locks a folder for new results; an error where it holds any of the `files` that tell of results.

    Where the caller fails before `started()`, all that was made is removed, the folder too if it was made here.
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


def _remove_entries(folder: Path, kept: set[str]) -> None:
    """Removes what is in a folder but for the names that are kept."""
    for entry in folder.iterdir():
        if entry.name in kept:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
