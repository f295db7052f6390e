"""A stopped run whose newest checkpoint is damaged in any way: an earlier one is taken, and the end is the same."""

from __future__ import annotations

import contextlib
import random
import shutil
import warnings
from pathlib import Path

from campaign import trouble
from training import CTRL_C, Crash, StopAt, bits, trainer

from regard.train import Interrupted

SAVING = {"every": 2, "keep": 2}


def damage(path: Path, dice: random.Random) -> str:
    """Damages one file of a checkpoint, and says how."""
    file = dice.choice(sorted(path.iterdir()))
    raw = bytearray(file.read_bytes())
    how = dice.choice(["flipped", "cut", "emptied", "removed", "zeroed"])
    at = dice.randrange(len(raw))
    if how == "flipped":
        raw[at] ^= 1 << dice.randrange(8)
    elif how == "cut":
        del raw[at:]
    elif how == "emptied":
        raw.clear()
    elif how == "zeroed":
        raw[at : at + 512] = bytes(len(raw[at : at + 512]))
    if how == "removed":
        file.unlink()
    else:
        file.write_bytes(raw)
    return f"{file.name} {how} at {at}"


@trouble(per=1)
def damaged_checkpoints(tries: int, folder: Path, dice: random.Random) -> list[str]:
    trainer(folder / "whole", saving=SAVING).fit()
    whole = bits(folder / "whole")
    with contextlib.suppress(Crash):
        trainer(folder / "stopped", progress=StopAt(7), saving=SAVING).fit()
    wrong = []
    for n in range(tries):
        out = folder / f"run-{n}"
        shutil.copytree(folder / "stopped", out)
        how = damage(out / "checkpoints/step-6", dice)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                # Stopped again where there are fewer complete checkpoints than are kept.
                again = trainer(out, progress=StopAt(5, CTRL_C), saving={"every": 2, "keep": 1})
                again.resume()
                again.fit()
            except Interrupted:
                again = trainer(out, saving=SAVING)
                step = again.resume()
                again.fit()
                if step != 5:
                    wrong.append(f"try {n}, {how}: stopped at step 5, and went on from {step}")
            except Exception as error:
                wrong.append(f"try {n}, {how}: {error!r}")
                continue
        found = bits(out)
        if {k: v for k, v in found.items() if not k.startswith("checkpoints")} != {
            k: v for k, v in whole.items() if not k.startswith("checkpoints")
        }:
            wrong.append(f"try {n}, {how}: other bits")
        shutil.rmtree(out)
    return wrong
