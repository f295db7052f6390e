"""The training loop: one step after the other, from a state that a checkpoint holds completely."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from regard.config import ConfigError
from regard.data.batch import Batch
from regard.data.seeds import derive, seed_default
from regard.devices import autocast_dtype
from regard.errors import RegardError, RunError
from regard.models import Model
from regard.models.locate import MODEL
from regard.train import checkpoint, optimizer
from regard.train.distributed import Process, ReplicatedModel, ShardedModel, full_tensor
from regard.train.graph import GraphStep
from regard.train.progress import Meter, Progress
from regard.train.run import Run
from regard.train.settings import TrainConfig, resolve_steps
from regard.train.tasks.base import Task


class TrainingError(RegardError, ArithmeticError):
    """A training that cannot go on."""


class Interrupted(RegardError):
    """A training that was asked to stop, and saved."""


@dataclass
class State:
    """What a checkpoint keeps besides model and optimiser."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_step: int | None = None
    stale: int = 0  # evaluations since the best
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])


class Trainer:
    """Trains a model on a task into a run's folder, from the beginning or from its newest checkpoint."""

    def __init__(
        self,
        model: Model[Any],
        task: Task,
        config: TrainConfig,
        run: Run,
        progress: Progress,
        process: Process = Process(),  # noqa: B008
    ) -> None:
        self.model, self.task, self.config, self.run = model, task, config, run
        self.progress, self.process = progress, process
        self.device = model.device
        self.total = config.total(task.rows, task.period)
        optimizer.schedule(config.schedule, 0, self.total)  # an error about it comes before the first step
        self.dtype = autocast_dtype(config.precision, self.device)
        how = resolve_compile(config.compile, self.device, task.varies, process.world_size)
        graphs = how in ("graph", "both") and self.dtype is not torch.float16  # its scaler decides on the host
        if config.shard and self.dtype is torch.float16:
            raise ConfigError("train.shard and train.precision = 'float16' do not go together: expected bfloat16")
        kind = ShardedModel if config.shard and process.world_size > 1 else ReplicatedModel
        self.parallel = kind(model, self._loss, process, lambda: task.batch(0, config.batch).rows(0, 1))
        self.optimizer = optimizer.build(config.optimizer, model, config.lr, graphs)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype is torch.float16)
        self.state = State()
        # The sum of losses and of their weights since the last line of metrics, and the last norm of the gradient.
        self.sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        self.metric = config.evaluation.metric or task.metric
        loss = self.parallel.loss
        self.loss = torch.compile(loss, dynamic=False) if how in ("inductor", "both") else loss
        self.update = GraphStep(self._update) if graphs and optimizer.captured(self.optimizer) else self._update

    def resume(self) -> int:
        """Goes back to the newest complete checkpoint; its step, 0 where there is none."""
        step = checkpoint.newest(self.run.checkpoints)
        if step is not None:
            place = self.run.checkpoints / f"step-{step}"
            saved = checkpoint.read(place)
            self._take_weights(place)
            optimizer.restore(self.optimizer, saved.tensors, saved.state["optimizer"])
            self.scaler.load_state_dict(saved.state["scaler"])
            self.state = State(**saved.state["state"])
            self.sums = torch.tensor(self.state.sums, dtype=self.sums.dtype, device=self.device)
        if self.process.is_main:
            self.run.truncate_metrics(after=self.state.step)
            self.run.best = self.state.best_step
        return self.state.step

    def fit(self) -> None:
        """Trains to the end, or until it is interrupted, which saves."""
        every = resolve_steps(self.config.evaluation.every, self.total)
        saving = resolve_steps(self.config.saving.every, self.total)
        line = max(1, self.total // 200)
        if 2 * line > self.task.period:
            line = -(-line // self.task.period) * self.task.period
        meter = Meter(self.model, self.task, self.device, self.dtype, self.process.world_size)
        self.model.train()
        with _asked_to_stop(self.process.world_size > 1) as asked, self._own_randomness(), self.progress:
            while self.state.step < self.total and not self._stale:
                began = time.perf_counter()
                self._step()
                step = self.state.step
                if step % line == 0 or step == self.total:
                    self._line(meter, began)
                else:
                    self.state.seconds += time.perf_counter() - began
                if (every and step % every == 0) or step == self.total:
                    self._evaluate()
                if (saving and step % saving == 0) or step == self.total or self._stale:
                    self._save()
                if self.process.any_rank(bool(asked)) and step < self.total and not self._stale:
                    self._save()
                    raise Interrupted(
                        f"stopped at step {step} of {self.total}; all of it is saved. "
                        f"Go on with: regard train --resume {self.run.path}"
                    )
            self._finish()

    @contextlib.contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Seeds and determinism of this training; those of the caller are put back."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), deterministic(self.config.deterministic):
            yield

    @property
    def _stale(self) -> bool:
        patience = self.config.evaluation.patience
        return bool(patience) and self.state.stale >= patience

    def _step(self) -> None:
        """One step: its learning rate, its batch, its randomness, and the update."""
        state, config = self.state, self.config
        optimizer.set_rate(self.optimizer, config.lr * optimizer.schedule(config.schedule, state.step, self.total))
        batch = self.task.batch(state.step, config.batch)
        seed_default(self.device, derive(config.seed, "dropout", state.step, self.process.rank))
        self.update(batch)
        state.step += 1
        state.tokens += batch.tokens

    def _update(self, batch: Batch) -> None:
        """Gradients of a batch, in parts where `micro` says so, weighted by their targets as one batch would be."""
        weight, own = self.task.targets(batch).clamp(min=1), self.process.shard(batch)
        rows, count = len(own.x), self.process.world_size
        micro = self.config.micro or rows
        if self.config.micro and len(batch.x) % count:
            raise ConfigError(f"train.micro needs batches that {count} processes share evenly, not {len(batch.x)} rows")
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros_like(self.sums[0])
        for start in range(0, rows, micro):
            with self.parallel.sync_gradients(start + micro >= rows):
                with self._autocast():
                    loss = self.loss(own.rows(start, start + micro))
                self.scaler.scale(loss * count / weight).backward()  # gradients are averaged
            total += loss.detach()
        self.sums[0] += self.process.all_reduce(total)
        self.sums[1] += weight
        self.scaler.unscale_(self.optimizer)
        self.sums[2] = optimizer.gradient_norm(self.model, self.config.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype or torch.bfloat16, enabled=self.dtype is not None)

    def _loss(self, batch: Batch) -> Tensor:
        return self.task.loss(self.model, batch, self.config.smoothing)

    def _line(self, meter: Meter, began: float) -> None:
        """A line of metrics; the only place where a step waits for the device."""
        total, weight, norm = self.sums.tolist()
        self.sums.zero_()
        state = self.state
        state.seconds += time.perf_counter() - began
        loss = total / max(weight, 1.0)
        if not math.isfinite(loss):
            raise self._diverged(f"the loss is {loss}")
        row: dict[str, Any] = {"loss": loss, "lr": float(self.optimizer.param_groups[0]["lr"])}
        row["norm"] = norm if math.isfinite(norm) else None  # float16 skips such a step
        row |= {"tokens": state.tokens, "seconds": round(state.seconds, 3), **meter.read(state.tokens, state.seconds)}
        self._tell(row)

    def _tell(self, values: Mapping[str, Any]) -> None:
        if self.process.is_main:
            self.run.log({"step": self.state.step, **values})
            self.progress.show(self.state.step, self.total, values)

    def _diverged(self, what: str) -> TrainingError:
        newest = checkpoint.newest(self.run.checkpoints)
        kept = "no checkpoint was written" if newest is None else f"the checkpoint of step {newest} is as it was"
        return TrainingError(
            f"{what} at step {self.state.step}. Lower train.lr (now {self.config.lr}), lengthen "
            f"train.schedule.warmup, or use another train.precision; {kept} in {self.run.checkpoints}"
        )

    def _check_finite(self) -> None:
        """An error where the loss or a weight is not a finite number: such a model is neither measured nor saved."""
        if not self.sums[0].isfinite():
            raise self._diverged(f"the loss is {self.sums[0].item()}")
        own = [full_tensor(p.detach().isfinite().all()) for p in self.model.parameters()]
        if not torch.stack(own).all():
            raise self._diverged("weights are no longer finite numbers")

    def _evaluate(self) -> None:
        """Measures, and remembers the best."""
        self._check_finite()
        began, state = time.perf_counter(), self.state
        self.model.eval()
        with torch.no_grad(), self.parallel.full_model(self.device) as model, self._autocast():
            measured = self.process.broadcast_values(self.task.evaluate(model))
        self.model.train()
        if self.config.evaluation.metric and self.metric not in measured:
            raise ConfigError(
                f"train.evaluation.metric = {self.metric!r} is not measured here; there is {', '.join(measured)}"
            )
        value = measured.get(self.metric)
        if value is not None:
            more = self.task.more_is_better(self.metric)
            better = state.best is None or (value > state.best if more else value < state.best)
            state.best, state.stale = (value, 0) if better else (state.best, state.stale + 1)
        else:
            better = True  # without a measure the last is the best
        if measured:
            self._tell(measured)
        state.seconds += time.perf_counter() - began
        if better:
            state.best_step = state.step
            self._save()

    def _save(self) -> None:
        """The one place that saves. What is no longer needed goes last, so that `best` always names what is there."""
        self._check_finite()
        self.state.sums = self.sums.tolist()
        tensors, plain = optimizer.state_tensors(self.optimizer)
        document = {"state": vars(self.state), "optimizer": plain, "scaler": self.scaler.state_dict()}
        with self.parallel.full_model() as model:
            if not self.process.is_main:
                return
            checkpoint.write(self.run.checkpoints, self.state.step, model, tensors, document)
        if self.state.best_step != self.run.best:
            self.run.best = self.state.best_step
        checkpoint.prune(self.run.checkpoints, self.config.saving.keep, self.state.best_step)

    def _finish(self) -> None:
        """The model of the best checkpoint becomes the run's."""
        best = self.run.checkpoints / f"step-{self.state.best_step}"
        wrong = checkpoint.fault(best) if self.process.is_main else None
        if wrong is not None:
            warnings.warn(f"the best checkpoint is damaged, the last one is taken: {wrong}", stacklevel=2)
            self.run.best = self.state.step
        if not self.process.any_rank(wrong is not None):
            self._take_weights(best)
        self.model.eval()
        with self.parallel.full_model() as model:
            if self.process.is_main:
                self._publish(model)
        self.process.barrier()  # all end when it is there

    def _publish(self, model: Model[Any]) -> None:
        try:
            model.save(self.run.path / MODEL)
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"cannot write {self.run.path / MODEL}: {error}. The checkpoints are as they were"
            ) from error

    def _take_weights(self, place: Path) -> None:
        with torch.random.fork_rng([]):  # building a model draws numbers
            self.parallel.load_weights(place)


def resolve_compile(name: str, device: torch.device, varies: bool = False, processes: int = 1) -> str:
    """How steps are compiled; "auto": on a GPU as one graph; on a CPU, where batches vary in shape, or where several
    processes wait for each other not at all."""
    graphs = device.type == "cuda" and not varies and processes == 1
    if name in ("graph", "both") and not graphs:
        several = "a single process" if processes > 1 else "a CUDA device"
        needs = "batches of one shape, and this task's vary" if varies else several
        raise ConfigError(f"train.compile = {name!r} needs {needs}; expected auto, off or inductor here")
    return name if name != "auto" else "graph" if graphs else "off"


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Only algorithms that give the same bits each time, while it lasts."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


@contextlib.contextmanager
def _asked_to_stop(several: bool) -> Iterator[list[int]]:
    """A list that is no longer empty once the user pressed Ctrl-C or the system asked; a second time stops at once, but
    not one of several processes, which hears of it from the terminal and from torchrun."""
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        if asked and not several:
            raise KeyboardInterrupt
        asked.append(number)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, which alone hears signals
        before = {}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
