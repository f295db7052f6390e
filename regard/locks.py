"""Locks that end with their process, however it ends.

A lock lies on a folder, or on a file that is never replaced. It may be removed, with a folder that was claimed for
nothing; so a lock counts only if the name still leads to what was locked. Else two processes could each hold "the"
lock, on two files that had the same name one after the other.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from importlib.util import find_spec
from pathlib import Path


class LockState(Enum):
    """What came of an attempt to lock: it is ours, it is another process's, or nobody can lock here."""

    OURS = "ours"
    TAKEN = "taken"
    UNSUPPORTED = "unsupported"


def lock_handle(handle: int, wait: bool = False, shared: bool = False) -> LockState:
    """Locks an open file or folder until the handle is closed; `shared` locks exclude only those that are not."""
    if find_spec("fcntl") is None:
        return LockState.UNSUPPORTED
    import fcntl

    how = fcntl.LOCK_EX
    if shared:
        how = fcntl.LOCK_SH
    if not wait:
        how |= fcntl.LOCK_NB
    try:
        fcntl.flock(handle, how)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return LockState.TAKEN
        return LockState.UNSUPPORTED  # by this file system
    return LockState.OURS


@contextmanager
def lock_file(path: Path, wait: bool = False) -> Iterator[LockState]:
    """Locks a file, which is made where it is missing, and yields what came of it."""
    while True:
        # Opened to write: over a network only such a file can be locked.
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            state = lock_handle(handle, wait)
            if state is LockState.OURS and not _leads_to(path, handle):
                continue  # it was removed between opening and locking: the lock would keep nobody out
            yield state
            return
        finally:
            os.close(handle)


@contextmanager
def lock_folder(path: Path, wait: bool = False, shared: bool = False) -> Iterator[LockState]:
    """Locks a folder that is there, and yields what came of it."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:  # what is in it may be readable all the same
        yield LockState.UNSUPPORTED
        return
    try:
        yield lock_handle(handle, wait, shared)
    finally:
        os.close(handle)


def _leads_to(path: Path, handle: int) -> bool:
    """Returns whether a path still leads to what was opened by it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False
