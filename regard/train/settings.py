"""How something is trained: the section `train` of a recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from regard.config import ConfigError, Section
from regard.errors import quote

LARGEST_BATCH = 1 << 20
HIGHEST_DECAY = 1 - 1e-6  # of an average of weights; with 1 it would never change
MOST_ROWS = 1 << 53  # a float holds whole numbers exactly up to here
PRECISIONS = ("auto", "float32", "bfloat16", "float16")
COMPILES = ("auto", "off", "graph", "inductor", "both")


def resolve_steps(every: float, total: int) -> int:
    """Returns a number of steps: `every` itself, or that share of the total where it is below 1; 0 stays 0."""
    if every >= 1:
        return int(every)
    if every > 0:
        return max(1, round(every * total))
    return 0


def _check_range(section: Section, least: float, most: float, *names: str) -> None:
    """Raises ConfigError if one of these settings is not from `least` to `most`."""
    for name in names:
        value = getattr(section, name)
        if not least <= value <= most or value == math.inf:
            expected = f"{least} to {most}"
            if most == math.inf:
                expected = f"{least} or more"
            raise ConfigError(f"{section.place}.{name} = {quote(value)}: expected {expected}")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """An optimiser of torch.optim by its name, or "muon". `decay` acts on matrices of layers, not on norms, biases and
    embeddings."""

    place = "train.optimizer"

    name: str = "adamw"
    decay: float = 0.1
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self, 0, math.inf, "decay")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """The learning rate: a linear rise over `warmup`, then the schedule `name` down to `floor` times the highest."""

    place = "train.schedule"

    name: str = "cosine"
    warmup: float = 0.02
    floor: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self, 0, math.inf, "warmup")
        _check_range(self, 0, 1, "floor")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Section):
    """When to evaluate, and when to stop for what was found.

    The best checkpoint is chosen by `metric`; "" means the task's own. Training stops after `patience` evaluations
    without a better value of it, or as soon as it reaches `target`; 0 means never.
    """

    place = "train.evaluation"

    every: float = 0.1
    metric: str = ""
    patience: int = 0
    target: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self, 0, math.inf, "every", "patience")


@dataclass(frozen=True, kw_only=True)
class SavingConfig(Section):
    """When to write a checkpoint, how many of the latest to keep, and where else to send metrics.

    `keep` 0: one until the training has ended, then none. The model stays in any case.
    """

    place = "train.saving"

    every: float = 0.1
    keep: int = 2
    log: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self, 0, math.inf, "every")
        _check_range(self, 0, math.inf, "keep")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """One training. A number of steps below 1 (`warmup`, `every`) is a share of the whole; 0 means never.

    `epochs` or `steps` says how long (steps win); `micro` is how many rows of a batch are computed at a time (0: all),
    which changes memory and the order of sums, and with dropout its random numbers, since each part draws its own.
    `smoothing`: the share of a target's probability that the loss spreads over all tokens; what is measured has none.
    `average`: the decay of a moving average of the weights, which is measured and saved in their place (0: the weights
    themselves). `precision`: "auto" is bfloat16 on a GPU that has it, float32 elsewhere. `compile`: "graph" captures a
    step as one CUDA graph, "inductor" is torch.compile, "both" does both; "auto" is "off" on a CPU, which gains nothing
    from either, and on a GPU "both" where the run is long enough to win back the seconds that compiling takes, else
    "graph". `deterministic`: the same bits each time on a GPU too. `shard`: several processes share the weights
    (FSDP2), where each would have a copy. `init`: a run or model folder to start from.
    """

    place = "train"

    epochs: float = 0.0
    steps: int = 0
    batch: int = 64
    micro: int = 0
    lr: float = 1e-3
    clip: float = 1.0
    smoothing: float = 0.0
    average: float = 0.0
    precision: str = "auto"
    compile: str = "auto"
    deterministic: bool = False
    shard: bool = False
    seed: int = 0
    init: str = ""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    saving: SavingConfig = field(default_factory=SavingConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self, 0, math.inf, "epochs", "lr", "clip")
        _check_range(self, 0, MOST_ROWS, "steps", "micro")
        _check_range(self, 1, LARGEST_BATCH, "batch")
        _check_range(self, 0, 1, "smoothing")
        _check_range(self, 0, HIGHEST_DECAY, "average")
        if self.micro and self.batch % self.micro:
            raise ConfigError(f"train.micro = {self.micro} does not divide train.batch = {self.batch}")
        for name, known in {"precision": PRECISIONS, "compile": COMPILES}.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"train.{name} = {quote(getattr(self, name))}: expected {', '.join(known)}")

    def total(self, rows: int, period: int = 1) -> int:
        """Returns how many steps to train, over a data set of so many rows whose batches come in groups of `period`."""
        if not self.steps and not self.epochs:
            raise ConfigError("train.epochs and train.steps are both 0: say how long to train, e.g. train.steps=1000")
        if self.steps:
            return self.steps
        if self.epochs * rows > MOST_ROWS:
            raise ConfigError(f"train.epochs = {self.epochs}: {rows:,} rows so often are more than {MOST_ROWS:,}")
        steps = max(1, -(-round(self.epochs * rows) // self.batch))  # rounded up
        if steps < period:
            return steps
        return round(steps / period) * period  # whole groups
