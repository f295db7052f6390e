"""Sweeps that are killed, most of them in their first second: the same command goes on, and ends as if nothing was."""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path

import optuna
from campaign import trouble
from children import KILLED, end, start
from sqlalchemy import event
from sqlalchemy.engine import Engine

from regard.sweep.run import Sweep
from regard.sweep.settings import asked
from regard.train import Run

TINY = ["data.block=8", "model.width=8", "model.layers=1", "model.attention.heads=2", "train.steps=2", "train.batch=2"]


@event.listens_for(Engine, "connect")
def hurry(connection: object, record: object) -> None:
    """Lets databases not wait for the disk: processes are killed here, not machines."""
    connection.execute("PRAGMA synchronous = OFF")  # type: ignore[attr-defined]


@trouble(per=0.3)
def killed_sweeps(tries: int, folder: Path, dice: random.Random) -> list[str]:
    assert optuna  # imported before the fork
    text = folder / "a.txt"
    text.write_text("to be, or not to be: that is the question. " * 20, encoding="utf-8")
    config = asked("lm", [f"data.text={text}", *TINY], grid=["train.lr=1e-3,1e-2"])

    def sweep(out: Path) -> None:
        Sweep.create(out, config).run()

    began = time.monotonic()
    if end(start(lambda: sweep(folder / "whole"), folder / "log")):
        return [(folder / "log").read_text()[-300:]]
    duration = time.monotonic() - began
    whole = [row["value"] for row in Sweep.open(folder / "whole").results()["trials"]]
    wrong = []
    for n in range(tries):
        out = folder / f"sweep-{n}"
        kills = 0
        code = KILLED
        while code == KILLED:
            # Most come while the folder and the study are being made.
            delay = None if kills == 2 else duration * dice.random() ** 2
            code = end(start(partial(sweep, out), folder / "log"), delay)
            kills += code == KILLED
        if code != 0:
            wrong.append(f"try {n}, after {kills} kills: {(folder / 'log').read_text().strip()[-300:]}")
            continue
        found = Sweep.open(out).results()["trials"]
        steps = [[row["step"] for row in Run(out / row["folder"]).metrics() if "lr" in row] for row in found]
        if [row["value"] for row in found] != whole or steps != [[1, 2]] * 2:
            wrong.append(f"try {n}, after {kills} kills: {[row['value'] for row in found]}, steps {steps}")
    return wrong
