"""Several processes, as torchrun starts them: each computes its rows of every batch, and only the first writes.

The batch of a step is the same everywhere, and its gradient is the sum of what the processes computed of it. So the
number of processes changes nothing but the order of sums, and which dropout a row gets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from regard.config import ConfigError
from regard.data.batch import Batch
from regard.errors import RegardError
from regard.models import Model
from regard.registry import accepts

Loss = Callable[[Batch], Tensor]


class ProcessError(RegardError, RuntimeError):
    """A process that waited for another in vain."""


@dataclass(frozen=True)
class Process:
    """Which of several processes this is, and which of those on its machine. A batch's rows are dealt out in turn."""

    rank: int = 0
    count: int = 1
    local: int = 0

    @classmethod
    def here(cls) -> Process:
        """As torchrun says."""
        rank, count, local = (int(os.environ.get(n, d)) for n, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
        return cls(rank, count, local)

    @property
    def first(self) -> bool:
        """Whether it is the one that writes and shows."""
        return self.rank == 0

    def device(self, name: str) -> str:
        """Its own GPU, where `cuda` is asked for."""
        return f"cuda:{self.local}" if self.count > 1 and name == "cuda" else name

    def join(self, device: torch.device) -> None:
        """Meets the others, unless it has. They stay together for as long as they run: torchrun's do not meet twice."""
        if self.count == 1 or dist.is_initialized():
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"{self.count} processes cannot meet: {error}. Start them with torchrun") from error

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """The first does it before the others do."""
        if not self.first:
            self.any(False)
        yield
        if self.first:
            self.any(False)

    def any(self, mine: bool) -> bool:
        """Whether any of them says so. All wait for the last."""
        return mine if self.count == 1 else bool(self.total(torch.tensor(float(mine))))

    def total(self, x: Tensor) -> Tensor:
        """The sum over the processes, in place."""
        if self.count > 1:
            with _others():
                dist.all_reduce(x)
        return x

    def firsts(self, x: Tensor) -> Tensor:
        """The tensor of the first process, in place."""
        if self.count > 1:
            with _others():
                dist.broadcast(x, 0)
        return x

    def agreed(self, values: Mapping[str, float]) -> dict[str, float]:
        """What the first measured: decisions that follow from it have to be the same everywhere."""
        if self.count == 1:
            return dict(values)
        firsts = self.firsts(torch.tensor([*values.values()], dtype=torch.float64))
        return dict(zip(values, firsts.tolist(), strict=True))

    def path(self, own: str | Path) -> Path:
        """The first one's."""
        text = os.fsencode(own)
        size = int(self.firsts(torch.tensor(len(text))))
        padded = text[:size].ljust(size, b"\0")
        return Path(os.fsdecode(bytes(self.firsts(torch.tensor(list(padded), dtype=torch.uint8)).tolist())))

    def rows(self, batch: Batch) -> Batch:
        """Its share of a batch."""
        if self.count == 1:
            return batch
        if len(batch.x) < self.count:
            raise ConfigError(f"a batch has {len(batch.x)} rows for {self.count} processes: raise train.batch")
        return Batch(*(None if t is None else t[self.rank :: self.count] for t in batch))  # type: ignore[arg-type]


@contextmanager
def _others() -> Iterator[None]:
    """Around a meeting, to which somebody may not come."""
    try:
        yield
    except RuntimeError as error:
        raise ProcessError(f"another process has ended, see what it says: {str(error).splitlines()[0]}") from error


class _Computed(nn.Module):
    """A loss as a module: what DDP wraps, so that a task may call the model as it likes."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Batch) -> Tensor:
        return self.loss(batch)


def _all_learn(model: nn.Module, loss: Loss, row: Batch) -> bool:
    """Whether a loss depends on every weight that is learned. DDP wants to know: to look each time costs time."""
    own = [p for p in model.parameters() if p.requires_grad]
    with torch.random.fork_rng([own[0].device] if own[0].device.type == "cuda" else []):
        return all(grad is not None for grad in torch.autograd.grad(loss(row), own, allow_unused=True))


class Replicated:
    """Every process has the whole model; gradients are averaged (DDP). `row`: an example of what is computed."""

    def __init__(self, model: Model[Any], loss: Loss, process: Process, row: Callable[[], Batch]) -> None:
        self.model, self.loss = model, loss
        self.shared: DDP | None = None
        if process.count > 1:
            newer = accepts(DDP, "forward_sync_buffers")  # what torch 2.13 calls it
            options: dict[str, Any] = {"forward_sync_buffers" if newer else "broadcast_buffers": False}
            options["find_unused_parameters"] = not _all_learn(model, loss, row())
            self.loss = self.shared = DDP(_Computed(model, loss), **options)

    def part(self, last: bool) -> AbstractContextManager[None]:
        """Around a part of a batch: gradients are exchanged with the last."""
        return nullcontext() if last or self.shared is None else self.shared.no_sync()

    @contextmanager
    def whole(self, device: str | torch.device = "cpu") -> Iterator[Model[Any]]:
        """The model as one process would have it; where it has to be put together, on a device."""
        yield self.model

    def restore(self, place: Path) -> None:
        """Takes the weights of a model folder."""
        self.model.restore(place)


class Sharded:
    """Every process has a part of each weight, of its gradient and of the optimiser's state (FSDP2). To evaluate and to
    save, a copy of the model is put together."""

    def __init__(self, model: Model[Any], loss: Loss, process: Process, row: Callable[[], Batch]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        self.model, self.loss = model, loss
        self.copy = deepcopy(model).cpu()
        mesh = init_device_mesh(model.device.type, (process.count,))
        for blocks in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
            for block in blocks:
                fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert isinstance(model, FSDPModule)
        self.sharded: FSDPModule = model

    def part(self, last: bool) -> AbstractContextManager[None]:
        """Around a part of a batch: gradients are exchanged with the last."""
        self.sharded.set_requires_gradient_sync(last)
        return nullcontext()

    @contextmanager
    def whole(self, device: str | torch.device = "cpu") -> Iterator[Model[Any]]:
        """The model as one process would have it; where it has to be put together, on a device."""
        parts = self.model.state_dict()
        for name, own in self.copy.state_dict().items():  # one after the other: all of them may not fit
            own.copy_(gathered(parts[name]))
        yield self.copy.train(self.model.training).to(device)
        self.copy.cpu()

    def restore(self, place: Path) -> None:
        """Takes the weights of a model folder."""
        self.copy.restore(place)
        whole = self.copy.state_dict()
        self.model.load_state_dict({name: dealt(whole[name], own) for name, own in self.model.state_dict().items()})


def parted(x: Tensor) -> bool:
    """Whether every process has a part of it only."""
    return hasattr(x, "full_tensor")


def gathered(x: Tensor) -> Tensor:
    """A whole tensor of one that is parted."""
    whole: Tensor = x.full_tensor() if parted(x) else x  # type: ignore[attr-defined]
    return whole


def dealt(x: Tensor, like: Tensor) -> Tensor:
    """A whole tensor as a part of it, where `like` is parted."""
    if not parted(like) or x.shape != like.shape:
        return x
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(x.to(like.device), like.device_mesh, like.placements)
