"""Training in several processes that torchrun started, with DDP (`ReplicatedModel`) or FSDP2 (`ShardedModel`).

Every process draws the whole batch of a step, computes the loss of its own rows of it, and takes part in the exchange
of gradients. So the number of processes changes nothing but the order of sums, and which dropout a row gets. Rank 0
alone writes files and prints.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
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
    """A collective that failed because another process has ended."""


@dataclass(frozen=True)
class Process:
    """This process among the `world_size` that train together, with the collectives that training uses.

    Alone, every collective returns its own value at once, and no process group is needed.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> Process:
        """Reads the environment variables that torchrun sets; without them the process is alone."""
        return cls(
            rank=int(os.environ.get("RANK", 0)),
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone writes files and prints."""
        return self.rank == 0

    def device(self, name: str) -> str:
        """Returns the name of the device to use: one of several processes has a GPU of its own."""
        if name == "cuda" and self.world_size > 1:
            return f"cuda:{self.local_rank}"
        return name

    def init_group(self, device: torch.device) -> None:
        """Initialises the process group, unless it is there. It is never destroyed: torchrun's processes cannot meet a
        second time."""
        if self.world_size == 1 or dist.is_initialized():
            return
        backend = "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl"  # flags and measured values are exchanged on the CPU
        try:
            dist.init_process_group(backend)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"{self.world_size} processes cannot meet: {error}. Start them with torchrun") from error

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replaces `x` in place by its sum over all processes, and returns it."""
        if self.world_size > 1:
            with _peer_errors():
                dist.all_reduce(x)
        return x

    def any_rank(self, flag: bool) -> bool:
        """Returns whether the flag is set in any process. All wait for the last of them."""
        if self.world_size == 1:
            return flag
        return bool(self.all_reduce(torch.tensor(float(flag))))

    def barrier(self) -> None:
        """Waits until every process is here."""
        self.any_rank(False)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Runs the body in rank 0 before it runs in the others, which then find the files that rank 0 wrote."""
        # Without try/finally: where rank 0 fails, the others must not go on, and learn of it when its process ends.
        if not self.is_main:
            self.barrier()
        yield
        if self.is_main:
            self.barrier()

    def broadcast(self, x: Tensor) -> Tensor:
        """Replaces `x` in place by rank 0's, and returns it."""
        if self.world_size > 1:
            with _peer_errors():
                dist.broadcast(x, 0)
        return x

    def broadcast_values(self, values: Mapping[str, float]) -> dict[str, float]:
        """Returns the values that rank 0 has under the same names: what is decided by them is the same everywhere."""
        if self.world_size == 1:
            return dict(values)
        main_values = self.broadcast(torch.tensor([*values.values()], dtype=torch.float64))
        return dict(zip(values, main_values.tolist(), strict=True))

    def broadcast_path(self, path: str | Path) -> Path:
        """Returns the path that rank 0 has."""
        encoded = os.fsencode(path)
        size = int(self.broadcast(torch.tensor(len(encoded))))
        # The others receive into a buffer of rank 0's size; what they put into it does not matter.
        buffer = torch.tensor(list(encoded[:size].ljust(size, b"\0")), dtype=torch.uint8)
        return Path(os.fsdecode(bytes(self.broadcast(buffer).tolist())))

    def shard(self, batch: Batch) -> Batch:
        """Returns this process's rows of a batch: every `world_size`-th, beginning with its rank."""
        if self.world_size == 1:
            return batch
        if len(batch.x) < self.world_size:
            raise ConfigError(f"a batch has {len(batch.x)} rows for {self.world_size} processes: raise train.batch")
        rows = slice(self.rank, None, self.world_size)
        return batch._replace(**{name: x[rows] for name, x in batch._asdict().items() if x is not None})


@contextmanager
def _peer_errors() -> Iterator[None]:
    """Turns the error of a collective that waited in vain for another process into one that says so."""
    try:
        yield
    except RuntimeError as error:
        raise ProcessError(f"another process has ended, see what it says: {str(error).splitlines()[0]}") from error


class ParallelModel(ABC):
    """A model that all processes train together. `loss` is what to call instead of the loss that it was built with.

    Gradients are averaged over the processes.
    """

    loss: Loss

    @abstractmethod
    def sync_gradients(self, enabled: bool) -> AbstractContextManager[None]:
        """Returns a context for one micro-batch: its backward pass exchanges gradients, or only accumulates them."""

    @abstractmethod
    def full_model(self, device: str | torch.device = "cpu") -> AbstractContextManager[Model[Any]]:
        """Returns a context with the model whose weights are whole. All processes must enter it.

        `device`: where it is put together, if it has to be.
        """

    @abstractmethod
    def load_weights(self, folder: Path) -> None:
        """Loads the weights of a model folder."""


class ReplicatedModel(ParallelModel):
    """A model of which every process has a copy (DDP); in a single process the model as it is.

    `example` returns a batch of one row: DDP has to know whether its loss depends on every parameter.
    """

    def __init__(self, model: Model[Any], loss: Loss, process: Process, example: Callable[[], Batch]) -> None:
        self.model = model
        self.loss = loss
        self.ddp: DDP | None = None
        if process.world_size > 1:
            # torch 2.13 renames broadcast_buffers. Buffers are the same everywhere: nothing in training writes them.
            renamed = accepts(DDP, "forward_sync_buffers")
            options: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
            options["find_unused_parameters"] = not _uses_all_parameters(model, loss, example())
            self.ddp = DDP(_LossModule(model, loss), **options)
            self.loss = self.ddp

    def sync_gradients(self, enabled: bool) -> AbstractContextManager[None]:
        if enabled or self.ddp is None:
            return nullcontext()
        return self.ddp.no_sync()

    @contextmanager
    def full_model(self, device: str | torch.device = "cpu") -> Iterator[Model[Any]]:
        yield self.model

    def load_weights(self, folder: Path) -> None:
        self.model.restore(folder)


class _LossModule(nn.Module):
    """A loss as a module: DDP hooks into `forward`, and a task may call its model more than once, or in parts."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Batch) -> Tensor:
        return self.loss(batch)


def _uses_all_parameters(model: nn.Module, loss: Loss, batch: Batch) -> bool:
    """Returns whether a loss depends on every parameter that is learned. DDP could look for unused ones in each step,
    which costs time, and waits for ever for their gradients if it does not look."""
    learned = [p for p in model.parameters() if p.requires_grad]
    devices = [p.device for p in learned[:1] if p.device.type == "cuda"]
    with torch.random.fork_rng(devices):  # dropout draws numbers
        gradients = torch.autograd.grad(loss(batch), learned, allow_unused=True)
    return all(gradient is not None for gradient in gradients)


class ShardedModel(ParallelModel):
    """A model of which every process has a shard of each weight, of its gradient and of its optimiser state (FSDP2).

    To evaluate and to save, the weights are gathered into a whole copy of the model, which is kept on the CPU.
    """

    def __init__(self, model: Model[Any], loss: Loss, process: Process, example: Callable[[], Batch]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        self.model = model
        self.loss = loss  # it calls the model, whose hooks do the rest
        self.copy = deepcopy(model).cpu()
        mesh = init_device_mesh(model.device.type, (process.world_size,))
        # Each block is gathered when it is computed. Blocks first: the model then takes the parameters that are left.
        for blocks in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
            for block in blocks:
                fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert isinstance(model, FSDPModule)
        self.fsdp: FSDPModule = model

    def sync_gradients(self, enabled: bool) -> AbstractContextManager[None]:
        self.fsdp.set_requires_gradient_sync(enabled)
        return nullcontext()

    @contextmanager
    def full_model(self, device: str | torch.device = "cpu") -> Iterator[Model[Any]]:
        shards = self.model.state_dict()
        for name, weight in self.copy.state_dict().items():  # one after the other: all of them may not fit
            weight.copy_(full_tensor(shards[name]))
        yield self.copy.train(self.model.training).to(device)
        self.copy.cpu()

    def load_weights(self, folder: Path) -> None:
        self.copy.restore(folder)
        weights = self.copy.state_dict()
        shards = {name: shard_like(weights[name], like) for name, like in self.model.state_dict().items()}
        self.model.load_state_dict(shards)


def is_sharded(x: Tensor) -> bool:
    """Returns whether `x` is a DTensor, of which every process has a part."""
    return hasattr(x, "full_tensor")


def full_tensor(x: Tensor) -> Tensor:
    """Returns the whole of a sharded tensor, which all processes must ask for; a plain tensor as it is."""
    if not is_sharded(x):
        return x
    whole: Tensor = x.full_tensor()  # type: ignore[attr-defined]
    return whole


def shard_like(x: Tensor, like: Tensor) -> Tensor:
    """Returns this process's shard of a whole tensor, laid out as `like`; `x` itself where `like` is not sharded."""
    # Of another shape are what an optimiser keeps besides moments, such as its count of steps.
    if not is_sharded(like) or x.shape != like.shape:
        return x
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(x.to(like.device), like.device_mesh, like.placements)
