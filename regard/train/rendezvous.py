"""How the processes of one attempt of a torchrun job find each other, and how they know the job after a restart.

After `--max-restarts` torchrun starts new processes with the store of the old ones, in which the addresses of the old
ones are left. Nothing in the environment tells attempts apart: on several machines each torchrun counts restarts for
itself. So rank 0 draws a name for the attempt, and the processes exchange addresses under that name.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from regard.errors import RegardError

TIMEOUT_S = 300.0  # seconds in which all processes must have started


class ProcessError(RegardError, RuntimeError):
    """Raised when a collective fails, most likely because another process has ended."""


def job_id() -> str | None:
    """Returns the name that torchrun gives this job, in all processes and after every restart; None without torchrun.

    `torchrun --rdzv-id` sets it. Where that is left out it is "none" for everybody, and the folder of torchrun's logs,
    whose name is random, stands for it.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id != "none":
        return run_id
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # LOGS/none_RANDOM/attempt_N/LOCAL_RANK/error.json
    if not error_file:
        return None
    return Path(error_file).parents[2].name


def attempt_store(rank: int, world_size: int) -> Store:
    """Returns a store that the processes of this attempt share, and in which no earlier attempt has left anything."""
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=TIMEOUT_S)))
    if rank == 0:
        attempt = secrets.token_hex(8)
        _invite(store, world_size, attempt)
    else:
        attempt = _join(store, rank)
    return PrefixStore(f"regard/{attempt}", store)


def _invite(store: Store, world_size: int, attempt: str) -> None:
    """Tells every other rank the name of the attempt, as rank 0, by answering its greeting in the store.

    The greeting may be one of an earlier attempt, so a rank has joined only when it has confirmed the answer to its
    newest greeting.
    """
    missing = set(range(1, world_size))
    deadline = time.monotonic() + TIMEOUT_S
    while missing:
        for rank in sorted(missing):
            if not store.check([f"regard/greeting/{rank}"]):
                continue
            greeting = store.get(f"regard/greeting/{rank}").decode()
            if store.check([f"regard/confirmed/{greeting}/{attempt}"]):
                missing.remove(rank)
            else:
                store.set(f"regard/answer/{greeting}", attempt)
        if time.monotonic() > deadline:
            raise ProcessError(f"no word of rank {min(missing)} in {TIMEOUT_S:.0f} s, see what it says")
        if missing:
            time.sleep(0.02)


def _join(store: Store, rank: int) -> str:
    """Greets rank 0 by a new random text, and returns the name of the attempt that it answers."""
    greeting = secrets.token_hex(8)
    store.set(f"regard/greeting/{rank}", greeting)
    attempt: str = store.get(f"regard/answer/{greeting}").decode()
    store.set(f"regard/confirmed/{greeting}/{attempt}", "")
    return attempt
