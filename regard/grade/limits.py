"""Limits of a submission's process: memory, files and time by rlimits, no network by a separate namespace.

They keep mistakes from doing harm. They are no sandbox: the code runs as the user who grades, and can read their files.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
MAX_FILE_BYTES = 1 << 26
MEGABYTE = 1 << 20


def limit_resources(memory_mb: int, seconds: float) -> None:
    """Limits this process: memory in addition to what it has now, the size of files it writes, and CPU seconds."""
    held = _virtual_bytes()
    if held:
        _lower(resource.RLIMIT_AS, held + memory_mb * MEGABYTE)
    _lower(resource.RLIMIT_FSIZE, MAX_FILE_BYTES)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_CPU, int(seconds) + 1)
    # Writing beyond the limit then raises an OSError, which is reported.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def _lower(kind: int, value: int) -> None:
    """Sets a limit, or keeps the hard limit if that is lower."""
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, hard))


def _virtual_bytes() -> int:
    """Returns the address space of this process in bytes; 0 if the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return 0
    return pages * resource.getpagesize()


def leave_network() -> bool:
    """Moves this process into an empty network namespace; returns whether that was allowed."""
    if sys.platform != "linux":
        return False
    uid = os.getuid()
    gid = os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        return False
    try:
        # So that files still belong to the user who grades in this process.
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="ascii")
    except OSError:
        pass  # without the maps the user's files can still be read, and there is no network
    return True


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the one that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
