"""Several processes that start into the same folder at the same moment: one does, the others are told."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from campaign import trouble
from children import REFUSED, end, start
from training import pretraining

import regard.lab.argmax.run  # imported before the fork
from regard.convert.run import start_conversion
from regard.convert.settings import ConvertConfig
from regard.lab.base import RunOptions, Shown, find_experiment
from regard.train import Run, stage

AT_ONCE = 4
SMALL = ["steps=4", "every=2", "runs=2", "symbols=6", "tokens=3", "batch=4"]
FEW = ["train.steps=3", "train.saving.every=1"]


def together(work: Callable[[], Any], folder: Path) -> tuple[list[int], str]:
    """Does the same work in several processes that begin together; returns their exit codes and what one was told."""
    moment = time.monotonic() + 0.1

    def wait_and_work() -> None:
        while time.monotonic() < moment:
            pass
        work()

    children = [start(wait_and_work, folder / f"told-{n}") for n in range(AT_ONCE)]
    codes = [end(child) for child in children]
    told = [path.read_text() for path in sorted(folder.glob("told-*"))]
    for path in folder.glob("told-*"):
        path.unlink()
    return codes, " | ".join(told)[-400:]


@trouble(per=1)
def simultaneous_trainings(tries: int, folder: Path, dice: random.Random) -> list[str]:
    wrong = []
    for n in range(tries):
        out = folder / "run"
        codes, told = together(partial(stage.train, pretraining(*FEW), out), folder)
        steps = [row["step"] for row in Run(out).metrics() if "lr" in row]
        if sorted(codes) != [0] + [REFUSED] * (AT_ONCE - 1) or steps != [1, 2, 3]:
            wrong.append(f"try {n}: exit codes {codes}, steps {steps}: {told}")
        shutil.rmtree(out, ignore_errors=True)
    return wrong


@trouble(per=0.1)
def simultaneous_measurements(tries: int, folder: Path, dice: random.Random) -> list[str]:
    wrong = []
    for n in range(tries):
        out = folder / "lab"
        measure = find_experiment("argmax").run
        codes, told = together(partial(measure, out, SMALL, RunOptions(), Shown()), folder)
        if sorted(codes) != [0] + [REFUSED] * (AT_ONCE - 1):
            wrong.append(f"try {n}: exit codes {codes}: {told}")
        shutil.rmtree(out, ignore_errors=True)
    return wrong


@trouble(per=0.2)
def simultaneous_conversions(tries: int, folder: Path, dice: random.Random) -> list[str]:
    source = stage.train(pretraining(*FEW), folder / "source").path
    model = regard.load(source)
    wrong = []
    for n in range(tries):
        out = folder / "convert"
        config = ConvertConfig(kv_heads=1, steps=2, uptrain=2)
        codes, told = together(partial(start_conversion, model, source, out, config), folder)
        if sorted(codes) != [0] + [REFUSED] * (AT_ONCE - 1) or not (out / "convert.json").is_file():
            wrong.append(f"try {n}: exit codes {codes}: {told}")
        shutil.rmtree(out, ignore_errors=True)
    return wrong
