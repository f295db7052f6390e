"""Trainings that are killed at any moment, also again while they go on, and must end with the same bits."""

from __future__ import annotations

import os
import random
import time
from functools import partial
from pathlib import Path

from campaign import trouble
from children import KILLED, end, start
from training import answering, bits

from regard.train import stage
from regard.train.recipe import Recipe

HARD = [  # all that is random or has a state of its own
    "model.dropout=0.1",
    "model.attention.dropout=0.1",
    "train.micro=4",
    "train.saving.every=2",
    "train.saving.keep=2",
    "train.evaluation.every=3",
]


def recipe() -> Recipe:
    """Returns the training that is killed."""
    return answering(*HARD, "train.steps=16")


@trouble(per=1)
def killed_trainings(tries: int, folder: Path, dice: random.Random) -> list[str]:
    began = time.monotonic()
    whole = bits(stage.train(recipe(), folder / "whole"))
    duration = time.monotonic() - began
    wrong = []
    for n in range(tries):
        out = folder / f"run-{n}"
        kills = 0
        code = KILLED
        while code == KILLED:
            delay = None if kills == 3 else dice.uniform(0, duration)
            # Before its config is there, a run has not begun, and the same command begins it.
            begun = (out / "config.toml").exists()
            work = partial(stage.resume, out) if begun else partial(stage.train, recipe(), out)
            code = end(start(work, folder / "log"), delay)
            kills += code == KILLED
        if code != 0:
            wrong.append(f"try {n}, after {kills} kills: {(folder / 'log').read_text().strip()[-300:]}")
        elif bits(out) != whole:
            wrong.append(f"try {n}, after {kills} kills: other bits")
        elif leftovers := [name for _, _, files in os.walk(out) for name in files if name.endswith(".staged")]:
            wrong.append(f"try {n}, after {kills} kills: {leftovers} are left")
    return wrong
