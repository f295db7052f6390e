"""The stages of a conversion: their names, which are those of their folders, and the recipe of each training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.convert.distil import NAME as DISTIL
from regard.convert.settings import ConvertConfig, SourceTraining
from regard.models import Model
from regard.train import recipe as recipes
from regard.train.recipe import merge_tables
from regard.train.tasks.lm import TOKENS, LMData, token_files

ORIGINAL = "original"
SURGERY = "surgery"
DISTILLATION = "distillation"
UPTRAINING = "uptraining"
CONTROL = "control"
DISTILLATION_LR = 1e-3  # for a model without a run


@dataclass(frozen=True)
class TrainedStage:
    """One training of a conversion, in the folder `name`; `key` is its prefix in overrides.

    `init` is the model to start from. `defaults` are settings of training that overrides may change.
    """

    key: str
    name: str
    task: str
    data: Mapping[str, Any]
    steps: int
    init: str
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def recipe(self, source: SourceTraining, seed: int, overrides: Mapping[str, Any]) -> recipes.Recipe:
        """Returns the recipe: the settings of the model's own run, changed by the stage's, then by overrides."""
        train = merge_tables(merge_tables(source.train, self.defaults), overrides.get("train", {}))
        train = merge_tables(train, overrides.get(self.key, {}).get("train", {}))
        train |= {"epochs": 0.0, "steps": self.steps, "init": self.init, "seed": seed}
        tables = {"task": self.task, "data": self.data, "model": {}, "train": train}
        return recipes.resolve(f"convert/{self.key}", tables)


def trained_stages(
    config: ConvertConfig, source: SourceTraining, document: Mapping[str, Any], path: Path, data: Mapping[str, Any]
) -> list[TrainedStage]:
    """Returns the trainings that have any steps, in order."""
    surgery = str((path / SURGERY).resolve())
    latest = surgery
    uptrain = int(config.uptrain or 0)
    stages = []
    if config.steps:
        teaching = {"teacher": document["original"], "task": source.task, "data": data}
        defaults = _distillation_defaults(source)
        stages.append(TrainedStage("distil", DISTILLATION, DISTIL, teaching, config.steps, surgery, defaults))
        latest = str((path / DISTILLATION).resolve())
    if uptrain:
        stages.append(TrainedStage("uptrain", UPTRAINING, source.task, data, uptrain, latest))
    # Without distillation the control would equal uptraining; an encoder has no ordinary loss.
    if config.control and config.steps and document["class"] != "Encoder":
        stages.append(TrainedStage("control", CONTROL, source.task, data, config.steps + uptrain, surgery))
    return stages


def _distillation_defaults(source: SourceTraining) -> dict[str, Any]:
    """Returns the default settings of distillation's training."""
    # Projections of values that stay unchanged get no gradient, and must get no weight decay either.
    defaults: dict[str, Any] = {
        "optimizer": {"name": "adamw", "decay": 0.0, "options": {}},
        "evaluation": {"metric": ""},
    }
    if not source.steps:
        defaults["lr"] = DISTILLATION_LR
    return defaults


def tokenize_once(source: SourceTraining, path: Path, model: Model[Any]) -> dict[str, Any]:
    """Returns the data of all stages; the first call turns a text into token files in the folder."""
    if not source.data.get("text"):
        return source.data
    if not (path / TOKENS).is_dir():
        text = {key: source.data[key] for key in ("text", "share")}
        token_files(LMData().but(**text), path, model.tokenizer)
    return {**source.data, "text": "", "tokens": str((path / TOKENS).resolve())}
