"""What a submission's process may use: memory, files and time by rlimits, no network by a namespace of its own.

This keeps mistakes from doing harm. It is no sandbox: the code runs as the user who grades, and can read their files.
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
    """Limits this process: memory beside what it has now, the size of files it writes, seconds of computing."""
    held = _virtual_bytes()
    if held:
        _lower(resource.RLIMIT_AS, held + memory_mb * MEGABYTE)
    _lower(resource.RLIMIT_FSIZE, MAX_FILE_BYTES)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_CPU, int(seconds) + 1)
    # Writing beyond the limit is then an OSError that a submission can be told of.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def _lower(kind: int, value: int) -> None:
    """Sets a limit unless a lower one holds already."""
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, hard))


def _virtual_bytes() -> int:
    """Returns the address space of this process in bytes, 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return 0
    return pages * resource.getpagesize()


def leave_network() -> bool:
    """Moves this process into a network of its own, in which there is nothing; returns whether that was allowed."""
    if sys.platform != "linux":
        return False
    uid = os.getuid()
    gid = os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        return False
    try:
        # Files then still belong to the user who grades, for this process too.
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="ascii")
    except OSError:
        pass  # without the maps the files of the user can still be read, and the network is gone
    return True


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the one that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
