"""A process group of one process, and trainings in it with plain weights and with FSDP2's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from training import CPU, Toy, gpt

from regard.data.batch import Batch
from regard.train import Run, TrainConfig, Trainer
from regard.train.distributed import ShardedModel
from regard.train.progress import Progress

CONFIG: dict[str, Any] = {"steps": 20, "batch": 4, "lr": 0.01, "precision": "float32", "compile": "off"}
CONFIG |= {"saving": {"every": 0}, "evaluation": {"every": 0}, "optimizer": "sgd", "deterministic": True}


@contextmanager
def process_group(backend: str) -> Iterator[None]:
    """Makes this process a group of its own, and ends the group afterwards."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class ToyOn(Toy):
    """The toy task with its batches on a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def batch(self, step: int, size: int) -> Batch:
        return super().batch(step, size).to(self.device)


def trained_weights(folder: Path, shard: bool, device: torch.device = CPU) -> dict[str, Tensor]:
    """Trains the smallest GPT and returns its weights on the CPU. `shard`: by FSDP2, which is checked."""
    config = TrainConfig().but(**CONFIG, shard=shard)
    run = Run.create(folder, {"train": config.as_dict()})
    trainer = Trainer(gpt().to(device), ToyOn(device), config, run, Progress())
    assert isinstance(trainer.parallel, ShardedModel) == shard
    trainer.fit()
    with trainer.parallel.full_model() as model:
        return {name: x.detach().cpu().clone() for name, x in model.state_dict().items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], by: float) -> None:
    """Asserts that all weights are, relative to the largest of each tensor."""
    for name, x in expected.items():
        assert (found[name] - x).abs().max() <= by * x.abs().max().clamp(min=0.01), name
