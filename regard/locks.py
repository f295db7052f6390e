"""Locks on files and folders, which end with the process that holds them, however it ends.

What is locked is a folder, or a file that is never replaced. Either may be removed while another process waits for the
lock, so a lock of a file counts only if its path still leads to the file that was locked. Else two processes could each
hold "the" lock, on two files that had the same path one after the other.
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
    """The result of an attempt to lock: we hold the lock, another process does, or locks are not supported here."""

    OURS = "ours"
    TAKEN = "taken"
    UNSUPPORTED = "unsupported"


def lock_handle(handle: int, wait: bool = False, shared: bool = False) -> LockState:
    """Locks an open file or folder until the handle is closed; `shared`: several shared locks may be held at once."""
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
    """Locks a file, which is created if it is missing, and yields the result."""
    while True:
        # Opened for writing, as network file systems lock only such files.
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
    """Locks an existing folder and yields the result."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:  # the files in it may still be readable
        yield LockState.UNSUPPORTED
        return
    try:
        yield lock_handle(handle, wait, shared)
    finally:
        os.close(handle)


def is_locked(path: Path) -> bool:
    """Returns whether a process holds the lock of a file; False if the file is missing or locks are not supported."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        # Shared, so that two who ask at the same time do not see each other.
        return lock_handle(handle, shared=True) is LockState.TAKEN
    finally:
        os.close(handle)


def _leads_to(path: Path, handle: int) -> bool:
    """Returns whether a path still leads to the file that is open."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False
