"""The settings of a conversion, and the data and training of the model's own run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.config import ConfigError, Section
from regard.convert.distil import NAME as DISTIL
from regard.convert.surgery import ConvertError
from regard.errors import did_you_mean
from regard.models import Encoder, Model
from regard.models.locate import model_folder
from regard.reading import check_path
from regard.train import recipe as recipes
from regard.train.run import Run, run_of
from regard.train.settings import resolve_steps
from regard.train.tasks.base import TASKS

TRAINED_STAGES = ("distil", "uptrain", "control")  # prefixes of overrides for one stage alone
MAX_BLOCK = 256  # tokens of a window, unless data.block is set
DEFAULT_TRAINING = {"lr": 1e-4, "batch": 8}  # for a model without a run
UPTRAINED_SHARE = 0.1  # of the steps of the model's run


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(Section):
    """The settings of a conversion.

    `kv_heads`, `mechanism` and `options` as in `converted`; `only`: the layers that get the mechanism. `text`: a UTF-8
    file to train on instead of the data of the model's own run. `steps`: steps of distillation. `uptrain`: steps with
    the ordinary loss; below 1, a share of those of the model's run; by default a tenth. `control`: also train a control
    for the steps of both on the ordinary loss alone.
    """

    place = "convert"

    kv_heads: int | None = None
    mechanism: str | None = None
    only: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    steps: int = 300
    uptrain: float | None = None
    control: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "uptrain"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1 << 40:
                raise ConfigError(f"{self.place}.{name} = {value}: expected 0 or more")


@dataclass(frozen=True)
class SourceTraining:
    """The task, data and training settings for a conversion, which are those of the model's own run.

    `steps` is the number of steps for which the model was trained, 0 if unknown.
    """

    task: str
    data: dict[str, Any]
    train: dict[str, Any]
    steps: int


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the checked tables of overrides such as `data.block=64` or `distil.train.lr=1e-3`."""
    tables = recipes.parse(overrides)
    allowed = ("data", "train", *TRAINED_STAGES)
    for key, table in tables.items():
        if key not in allowed:
            raise ConfigError(f"'{key}': no such section or stage in convert.{did_you_mean(key, allowed)}")
        if key in TRAINED_STAGES and (set(table) != {"train"} or not isinstance(table["train"], Mapping)):
            raise ConfigError(
                f"{key}.{next(iter(table))}: expected {key}.train and a key of it, e.g. {key}.train.lr=1e-4"
            )
    return tables


def find_source_training(
    model: Model[Any], source: str | Path, config: ConvertConfig, overrides: Mapping[str, Any]
) -> SourceTraining:
    """Returns the task, data and training of a conversion: those of the model's run, or the given text as data."""
    run = None
    if model_folder(source).is_dir():
        run = run_of(model_folder(source))
    settings: dict[str, Any] = {}
    if run is not None:
        settings = run.config
    task = settings.get("task", "")
    data = dict(settings.get("data", {}))
    if task == DISTIL:
        # A converted model is converted again: it reads the data of its distillation.
        task = data["task"]
        data = dict(data["data"])
    if config.text:
        limit = getattr(model, "limit", None) or model.config.length
        task = "lm"
        data = {"text": str(Path(config.text).resolve()), "block": data.get("block", min(limit, MAX_BLOCK))}
    if task not in TASKS:
        raise ConvertError(
            f"{source} does not say what the model was trained on; give a text to train and measure on: --text FILE"
        )
    if model.tokenizer is None:
        raise ConvertError(f"{source} has no tokenizer.json, so it cannot read text")
    # The defaults of the task are written out, so that the folder has all settings.
    data = TASKS[task].Config().but(**data).but(**overrides.get("data", {})).as_dict()
    train = dict(settings.get("train", DEFAULT_TRAINING))
    # Each stage sets these itself.
    train.pop("init", None)
    train.pop("epochs", None)
    return SourceTraining(task, data, train, _total_steps(run))


def _total_steps(run: Run | None) -> int:
    """Returns for how many steps a model was trained, including the runs that it started from."""
    total = 0
    seen = set()  # each run counts once, even if two start from each other
    while run is not None and run.path not in seen:
        seen.add(run.path)
        total += max((row["step"] for row in run.metrics()), default=0)
        init = run.config.get("train", {}).get("init")
        if not init or not check_path(init, ConfigError).is_dir():
            break
        run = run_of(model_folder(init))
    return total


def uptraining_steps(model: Model[Any], config: ConvertConfig, source: SourceTraining) -> int:
    """Returns for how many steps the whole model is trained with the ordinary loss."""
    uptrain = config.uptrain
    if isinstance(model, Encoder):
        if uptrain:
            raise ConvertError("--uptrain: an encoder has no loss on plain text here; it is distilled only")
        return 0
    if uptrain is None and source.steps:
        uptrain = UPTRAINED_SHARE
    elif uptrain is None:
        uptrain = config.steps
    if 0 < uptrain < 1 and not source.steps:
        raise ConvertError(
            f"--uptrain {uptrain:g}: a share needs a model with a run; expected a number of steps of 1 or more"
        )
    return resolve_steps(uptrain, source.steps)
