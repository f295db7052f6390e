"""What the heads of a model do over its training: their scores at each checkpoint that was kept."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regard.errors import OptionError, RunError
from regard.hub.fetching import is_hub_folder
from regard.lens.heads.examine import label_model
from regard.lens.heads.labels import HeadLabel
from regard.lens.heads.scores import SCORE_DESCRIPTIONS
from regard.lens.models import Sample, open_recordable
from regard.models.locate import CHECKPOINTS, checkpoint_steps, find_fault, run_folder
from regard.reading import check_path

KEEP_MORE = "train with train.saving.every=0.05 train.saving.keep=1000, so that twenty stay"
_HUB_STEP = re.compile(r"checkpoint-([0-9]{1,18})")
Progress = Callable[[str, int, int], None]  # called with the phase, the index of a part of it, and the number of parts


@dataclass(frozen=True)
class Checkpoint:
    """A model folder that a training wrote after so many steps."""

    step: int
    folder: Path


def find_checkpoints(path: str | Path) -> list[Checkpoint]:
    """Returns the checkpoints of a training in the order of their steps, those of a run or of transformers' Trainer.

    A checkpoint of a run that is not complete is passed over with a warning. Raises RunError if fewer than two are
    left.
    """
    path = run_folder(check_path(path, RunError))
    found = []
    for step in checkpoint_steps(path / CHECKPOINTS):
        folder = path / CHECKPOINTS / f"step-{step}"
        fault = find_fault(folder)
        if fault is None:
            found.append(Checkpoint(step, folder))
        else:
            warnings.warn(f"checkpoint passed over: {fault}", stacklevel=2)
    matches = ((folder, _HUB_STEP.fullmatch(folder.name)) for folder in path.glob("checkpoint-*"))
    found += [Checkpoint(int(match[1]), folder) for folder, match in matches if match and is_hub_folder(folder)]
    if len(found) < 2:
        raise RunError(
            f"{path} has {_count(found)}; expected two at least, in the folder {CHECKPOINTS} of a run or as "
            f"checkpoint-N of transformers' Trainer. Most trainings keep the last two alone: {KEEP_MORE}"
        )
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def examine_checkpoints(
    path: str | Path,
    texts: Sequence[str | Sample] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Returns the labels and scores of all heads at each checkpoint of a training, measured on the same texts.

    "steps" are those of the checkpoints, and all lists inside "heads" have an element for each of them. "appeared" says
    for each score from which step on some head stands out by it at every checkpoint; see `appearances`.
    """
    checkpoints = find_checkpoints(path)
    history: list[list[HeadLabel]] = []
    for n, checkpoint in enumerate(checkpoints):

        def report(work: str, at: int, of: int, name: str = f"checkpoint {n + 1} of {len(checkpoints)}") -> None:
            if progress is not None:
                progress(f"{name}: {work}", at, of)

        subject = open_recordable(checkpoint.folder, device, seed=seed)
        labels, recordings = label_model(subject, texts, seed, report)
        history.append(labels)
        if len(labels) != len(history[0]):
            raise OptionError(
                f"{checkpoint.folder} has {len(labels)} heads, {checkpoints[0].folder} has {len(history[0])}; expected "
                "checkpoints of one model"
            )
    steps = [checkpoint.step for checkpoint in checkpoints]
    return {
        "run": str(path),
        "model": subject.card.as_dict(),
        "texts": len(recordings),
        "steps": steps,
        "heads": [_describe(over_steps) for over_steps in zip(*history, strict=True)],
        "appeared": appearances(steps, history),
    }


def appearances(steps: Sequence[int], history: Sequence[Sequence[HeadLabel]]) -> list[dict[str, Any]]:
    """Returns for each score by which a head stands out at the last checkpoint since which step, and which head.

    The earliest come first.

    `history` has the labels of all heads at each step. A score has appeared at "step" if some head stands out by it
    there and at every later checkpoint; "before" is the last step at which none did, or None. "layer", "side" and
    "head" name the head with the largest effect at the last checkpoint, and "heads" counts those that stand out there.
    """
    found = []
    for name in SCORE_DESCRIPTIONS:
        doing = [sum(_does(label, name) for label in labels) for labels in history]
        if not doing[-1]:
            continue
        absent = max((n for n, heads in enumerate(doing) if not heads), default=-1)
        most = max((label for label in history[-1] if _does(label, name)), key=lambda label: label.scores[name].effect)
        found.append(
            {
                "score": name,
                "step": steps[absent + 1],
                "before": None if absent < 0 else steps[absent],
                "heads": doing[-1],
                "layer": most.layer,
                "side": most.side,
                "head": most.head,
                "effect": round(most.scores[name].effect, 5),
            }
        )
    return sorted(found, key=lambda row: row["step"])


def _does(label: HeadLabel, name: str) -> bool:
    """Returns whether a head stands out by this score: it is its label, or one of those in `also`."""
    return name == label.label or name in label.also


def _describe(over_steps: Sequence[HeadLabel]) -> dict[str, Any]:
    """Returns a dict about one head: its label at each step, and the effect of each score at each step, with bounds."""
    first = over_steps[0]
    scores: dict[str, dict[str, list[float | None]]] = {}
    for name in SCORE_DESCRIPTIONS:
        entries = [label.scores[name].as_dict() if name in label.scores else {} for label in over_steps]
        if any(entries):
            scores[name] = {key: [entry.get(key) for entry in entries] for key in ("effect", "low", "high")}
    return {
        "layer": first.layer,
        "side": first.side,
        "head": first.head,
        "labels": [label.label for label in over_steps],
        "does": [[name for name in SCORE_DESCRIPTIONS if _does(label, name)] for label in over_steps],
        "scores": scores,
    }


def _count(found: Sequence[Checkpoint]) -> str:
    """Returns how many checkpoints were found, in words."""
    if not found:
        return "no checkpoint"
    return f"one checkpoint, of step {found[0].step}"
