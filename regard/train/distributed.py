"""Training in several processes that torchrun started, with DDP (`ReplicatedModel`) or FSDP2 (`ShardedModel`).

Every process draws the whole batch of a step, computes the loss of its own rows of it, and takes part in the reduction
of gradients. Results do not depend on the number of processes, except for the order of sums and for dropout masks. The
loss of a process is a sum over the targets in its rows. The training loop divides it by the number of targets in the
whole batch, so that processes with different numbers of targets count correctly, and multiplies it by `world_size`,
because DDP and FSDP2 average gradients over the processes, whereas training needs their sum. Only rank 0 writes
checkpoints, metrics and progress; the others print their errors.
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
from regard.models import Model
from regard.registry import accepts
from regard.train.rendezvous import ProcessError, attempt_store

Loss = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Process:
    """This process among the `world_size` that train together, with the collectives that training uses.

    With `world_size` 1 every collective returns its input unchanged and needs no process group.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> Process:
        """Returns the process that torchrun's environment variables describe; without them `world_size` is 1."""
        return cls(
            rank=int(os.environ.get("RANK", 0)),
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only one that writes checkpoints, metrics and progress."""
        return self.rank == 0

    def device(self, name: str) -> str:
        """Returns the device for this process: with several processes, `cuda` becomes `cuda:<local_rank>`, one GPU
        each."""
        if name == "cuda" and self.world_size > 1:
            return f"cuda:{self.local_rank}"
        return name

    def init_group(self, device: torch.device) -> None:
        """Initialises the process group and makes a CUDA `device` the current one. Does nothing if the group exists
        already, or if there is only one process. The group is never destroyed: processes that torchrun started cannot
        rendezvous a second time."""
        if self.world_size == 1 or dist.is_initialized():
            return
        backend = "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl"  # gloo reduces and broadcasts flags and metrics on the CPU
        try:
            store = attempt_store(self.rank, self.world_size)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size)
        except ProcessError:
            raise
        except (ValueError, RuntimeError) as error:
            reason = f"{self.world_size} processes cannot rendezvous: {error}. Start them with torchrun"
            raise ConfigError(reason) from error

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replaces `x` in place by its sum over all processes, and returns it."""
        if self.world_size > 1:
            dist.all_reduce(x)
        return x

    def any_rank(self, flag: bool) -> bool:
        """Returns whether the flag is set in any process. Every process waits until all have called this."""
        if self.world_size == 1:
            return flag
        return bool(self.all_reduce(torch.tensor(float(flag))))

    def barrier(self) -> None:
        """Waits until every process has called this."""
        self.any_rank(False)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Runs the body in rank 0 before it runs in the others, so that they find the files that rank 0 wrote."""
        # No try/finally: if rank 0 fails, the others must not go on. Their barrier fails when rank 0's process ends.
        if not self.is_main:
            self.barrier()
        yield
        if self.is_main:
            self.barrier()

    def broadcast(self, x: Tensor) -> Tensor:
        """Replaces the contents of `x` in place by those of rank 0's `x`, and returns it."""
        if self.world_size > 1:
            dist.broadcast(x, 0)
        return x

    def broadcast_values(self, values: Mapping[str, float]) -> dict[str, float]:
        """Returns rank 0's values for these names, so that decisions based on them agree on all ranks."""
        if self.world_size == 1:
            return dict(values)
        main_values = self.broadcast(torch.tensor([*values.values()], dtype=torch.float64))
        return dict(zip(values, main_values.tolist(), strict=True))

    def broadcast_path(self, path: str | Path) -> Path:
        """Returns rank 0's path."""
        encoded = os.fsencode(path)
        size = int(self.broadcast(torch.tensor(len(encoded))))
        # The others receive into a buffer of rank 0's size; its contents before that do not matter.
        buffer = torch.tensor(list(encoded[:size].ljust(size, b"\0")), dtype=torch.uint8)
        return Path(os.fsdecode(bytes(self.broadcast(buffer).tolist())))

    def shard(self, batch: Batch) -> Batch:
        """Returns this process's rows of a batch: every `world_size`-th row, beginning with row `rank`."""
        if self.world_size == 1:
            return batch
        if len(batch.x) < self.world_size:
            raise ConfigError(f"a batch has {len(batch.x)} rows for {self.world_size} processes: raise train.batch")
        rows = slice(self.rank, None, self.world_size)
        return batch._replace(**{name: x[rows] for name, x in batch._asdict().items() if x is not None})


@contextmanager
def peer_errors() -> Iterator[None]:
    """Turns the error that a collective raises when another process is lost into a `ProcessError` of one line; other
    errors pass unchanged. DDP and FSDP2 run collectives, and so raise such errors, anywhere in a step."""
    try:
        yield
    except RuntimeError as error:
        if not _lost_peer(error):
            raise
        first_line = str(error).splitlines()[0]
        reason = first_line.partition("] ")[2].partition(". ")[0] or first_line  # without a source file and advice
        raise ProcessError(f"another process has ended, see what it says ({reason})") from error


def _lost_peer(error: RuntimeError) -> bool:
    """Returns whether an error says that another process cannot be reached. gloo raises plain RuntimeErrors, which name
    a file of its transport."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


class ParallelModel(ABC):
    """A model that all processes train together. Gradients are averaged over the processes; the training loop
    multiplies the loss by `world_size`, so that the average is the sum that training needs.

    The constructor of a subclass takes the task's loss. `loss` is what training calls in its place: the same function,
    or for DDP its wrapper.
    """

    loss: Loss

    @abstractmethod
    def sync_gradients(self, enabled: bool) -> AbstractContextManager[None]:
        """Returns a context manager for one micro-batch. If `enabled`, its backward pass reduces gradients over the
        processes; otherwise it only accumulates them in this process."""

    @abstractmethod
    def full_model(self, device: str | torch.device = "cpu") -> AbstractContextManager[Model[Any]]:
        """Returns a context manager that yields the model with full (unsharded) weights. All ranks must enter it.

        `device`: where the gathered copy of a sharded model is moved; ignored if nothing is sharded.
        """

    @abstractmethod
    def load_weights(self, folder: Path) -> None:
        """Loads the weights of a model folder into this process's copy or shards. All ranks must call it."""


class ReplicatedModel(ParallelModel):
    """A model of which every process has a copy (DDP); in a single process, the model without a wrapper.

    `example` returns a batch of one row, for finding out whether the loss depends on every parameter: DDP has to know.
    """

    def __init__(self, model: Model[Any], loss: Loss, process: Process, example: Callable[[], Batch]) -> None:
        self.model = model
        self.loss = loss
        self.ddp: DDP | None = None
        if process.world_size > 1:
            # torch 2.13 renames broadcast_buffers. Buffers need no sync: nothing in training writes them.
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
    """A loss as a module. DDP hooks into `forward`, and a task's loss may call its model more than once, or only parts
    of it; so DDP wraps the loss instead of the model."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Batch) -> Tensor:
        return self.loss(batch)


def _uses_all_parameters(model: nn.Module, loss: Loss, batch: Batch) -> bool:
    """Returns whether the loss depends on every trainable parameter. If it does not, DDP needs
    find_unused_parameters=True, which traverses the graph in each step; without that option the reduction would wait
    for gradients that never come."""
    learned = [p for p in model.parameters() if p.requires_grad]
    devices = [p.device for p in learned[:1] if p.device.type == "cuda"]
    with torch.random.fork_rng(devices):  # so that dropout here does not change the masks of training
        gradients = torch.autograd.grad(loss(batch), learned, allow_unused=True)
    return all(gradient is not None for gradient in gradients)


class ShardedModel(ParallelModel):
    """A model of which every process has a shard of each weight, its gradient and its optimiser state (FSDP2).

    To evaluate and to save, the weights are gathered into a full copy of the model, which is kept on the CPU. `example`
    is not used: FSDP2 need not know which parameters the loss depends on.
    """

    def __init__(self, model: Model[Any], loss: Loss, process: Process, example: Callable[[], Batch]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

        self.model = model
        self.loss = loss  # it calls the model, whose FSDP hooks gather and reduce
        self.full_copy = deepcopy(model).cpu()
        mesh = init_device_mesh(model.device.type, (process.world_size,))
        # Each block is gathered when it is computed. Blocks come first: the model then shards the rest.
        for blocks in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
            for block in blocks:
                fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if hasattr(model, "loss"):  # which a task may call in place of `forward`
            register_fsdp_forward_method(model, "loss")
        assert isinstance(model, FSDPModule)
        self.fsdp: FSDPModule = model

    def sync_gradients(self, enabled: bool) -> AbstractContextManager[None]:
        # FSDP2 keeps this setting until the next call, so there is nothing to do when the context is left.
        self.fsdp.set_requires_gradient_sync(enabled)
        return nullcontext()

    @contextmanager
    def full_model(self, device: str | torch.device = "cpu") -> Iterator[Model[Any]]:
        shards = self.model.state_dict()
        for name, weight in self.full_copy.state_dict().items():  # one at a time: all may not fit on the GPU
            weight.copy_(full_tensor(shards[name]))
        yield self.full_copy.train(self.model.training).to(device)
        self.full_copy.cpu()

    def load_weights(self, folder: Path) -> None:
        self.full_copy.restore(folder)
        weights = self.full_copy.state_dict()
        shards = {name: shard_like(weights[name], current) for name, current in self.model.state_dict().items()}
        self.model.load_state_dict(shards)


def is_sharded(x: Tensor) -> bool:
    """Returns whether `x` is a DTensor, which means that every process has a part of it."""
    return hasattr(x, "full_tensor")


def full_tensor(x: Tensor) -> Tensor:
    """Returns a sharded tensor gathered from all processes, which must all call this; a plain tensor unchanged."""
    if not is_sharded(x):
        return x
    whole: Tensor = x.full_tensor()  # type: ignore[attr-defined]
    return whole


def shard_like(x: Tensor, like: Tensor) -> Tensor:
    """Returns rank 0's full tensor `x` as a DTensor with the device mesh and placements of `like`. All processes must
    call this, because rank 0 sends each its part; the contents of their own `x` are ignored. Where `like` is not
    sharded or has another shape, `x` itself is returned."""
    # `import_state` in `regard.train.optimizer` passes optimiser state too. Moments have the shape of their parameter
    # `like` and are sharded as it is; the step count has another shape and stays whole.
    if not is_sharded(like) or x.shape != like.shape:
        return x
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(x.to(like.device), like.device_mesh, like.placements)
