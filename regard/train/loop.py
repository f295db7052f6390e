"""The training loop: one step after the other, from a state that a checkpoint holds completely.

`Trainer.fit` is the loop; below it stand a step, its line of metrics, evaluation, checkpoints and the end.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from regard import plugins
from regard.config import ConfigError
from regard.data.batch import Batch
from regard.data.seeds import derive, seed_default
from regard.devices import autocast_dtype
from regard.errors import DataError, Interrupted, RegardError, RunError, quote
from regard.models import Model
from regard.models.locate import MODEL
from regard.train import checkpoint
from regard.train.averaging import WeightAverage
from regard.train.compiling import CompiledLoss, choose_compile
from regard.train.contexts import catch_signals, deterministic
from regard.train.distributed import Loss, ParallelModel, Process, ReplicatedModel, ShardedModel, full_tensor
from regard.train.graph import CapturedStep
from regard.train.optimizer import (
    build_optimizer,
    clip_gradients,
    export_state,
    import_state,
    is_capturable,
    lr_factor,
    set_lr,
)
from regard.train.progress import Progress, SpeedMeter
from regard.train.run import Run
from regard.train.settings import TrainConfig, resolve_steps
from regard.train.tasks.base import Task
from regard.train.watch import watch_peers

LINES = 200  # lines of metrics that a training writes, about
LOSS = "dev/loss"  # it decides among checkpoints with equal values of the metric


class TrainingError(RegardError, ArithmeticError):
    """A training cannot go on, because its loss or its weights are no longer finite."""


@dataclass
class State:
    """What a checkpoint keeps of a training besides model and optimiser.

    `best` is the value of the metric at `best_step`, `best_loss` the dev loss there (None: not known), and `stale` the
    number of evaluations since that value was first reached; `sums` are the numbers in `Trainer.sums`.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_loss: float | None = None
    best_step: int | None = None
    stale: int = 0
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
        self.model = model
        self.task = task
        self.config = config
        self.run = run
        self.progress = progress
        self.process = process
        self.device = model.device
        self.total = config.total(task.rows, task.period)
        self.metric = config.evaluation.metric or task.metric
        lr_factor(config.schedule, 0, self.total)  # a wrong schedule is an error before the first step
        self.dtype = autocast_dtype(config.precision, self.device)
        self.state = State()
        # Sum of losses and sum of weights since the last line of metrics, and the last gradient norm. They stay on the
        # device, so that a step does not wait for it.
        self.sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        compiled = choose_compile(config, model, task, run, process, progress)
        # float16's gradient scaler decides on the host whether to step, which a CUDA graph cannot.
        capture = compiled in ("graph", "both") and self.dtype is not torch.float16
        self.parallel = self._parallelize()
        self.optimizer = build_optimizer(config.optimizer, model, config.lr, capture)
        self.average = WeightAverage(model, config.average)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype is torch.float16)
        self.loss: Loss = self.parallel.loss
        if compiled in ("inductor", "both"):
            self.loss = CompiledLoss(model, self.parallel.loss, config.deterministic)
        self.update: Callable[[Batch], None] = self._update
        if capture and is_capturable(self.optimizer):
            self.update = CapturedStep(self._update)

    def _parallelize(self) -> ParallelModel:
        """Wraps the model for the processes that train it. The optimiser is built afterwards, over its shards."""
        if self.config.shard and self.dtype is torch.float16:
            raise ConfigError("train.shard and train.precision = 'float16' do not go together: expected bfloat16")
        kind: type[ReplicatedModel] | type[ShardedModel] = ReplicatedModel
        if self.config.shard and dist.is_initialized():  # `Process.init_group` does so for several processes
            kind = ShardedModel

        def example() -> Batch:
            return self.task.batch(0, self.config.batch).rows(0, 1)

        return kind(self.model, self._task_loss, self.process, example)

    def _task_loss(self, batch: Batch) -> Tensor:
        return self.task.loss(self.model, batch, self.config.smoothing)

    def resume(self) -> int:
        """Loads the newest complete checkpoint, and returns its step, or 0 if there is none."""
        step = checkpoint.newest(self.run.checkpoints)
        if step is not None:
            folder = self.run.checkpoints / f"step-{step}"
            saved = checkpoint.read(folder)
            progress = checkpoint.check_progress(folder, saved.state)
            with checkpoint.explain_misfit(folder):
                self._load_weights(folder)
                tensors = self.average.import_weights(saved.tensors)
                import_state(self.optimizer, tensors, saved.state["optimizer"])
                self.scaler.load_state_dict(saved.state["scaler"])
            self.state = State(**progress)
            self.sums = torch.tensor(self.state.sums, dtype=self.sums.dtype, device=self.device)
        if self.process.is_main:
            self.run.truncate_metrics(after=self.state.step)
            self.run.best = self.state.best_step
        return self.state.step

    def fit(self) -> None:
        """Trains to the end. A signal to stop saves a checkpoint and raises Interrupted."""
        evaluate_every = resolve_steps(self.config.evaluation.every, self.total)
        save_every = resolve_steps(self.config.saving.every, self.total)
        log_every = self._log_interval()
        meter = SpeedMeter(self.model, self.task, self.device, self.dtype, self.process.world_size)
        meter.last = (self.state.tokens, self.state.seconds)
        self.model.train()
        stopping = catch_signals(self.process.world_size > 1)
        with stopping as signals, self._private_rng(), self.progress, watch_peers(self.process):
            while self.state.step < self.total and not self._ends_early:
                started = time.perf_counter()
                self._step()
                step = self.state.step
                is_last = step == self.total
                if is_last or step % log_every == 0:
                    self._log_step(meter, started)
                else:
                    self.state.seconds += time.perf_counter() - started
                if is_last or _is_due(step, evaluate_every):
                    meter.leave_out(self._evaluate())
                if is_last or _is_due(step, save_every) or self._ends_early:
                    self._save()
                # Every process asks in every step: a signal that one of them got stops all at the same step.
                stop = self.process.any_rank(bool(signals))
                if stop and not is_last and not self._ends_early:
                    self._save()
                    self.process.barrier()  # torchrun ends all processes soon after the first has ended
                    again = " ".join([str(self.run.path), *plugins.words(self.run.config.get(plugins.KEY, ()))])
                    raise Interrupted(
                        f"stopped at step {step} of {self.total}; all of it is saved. "
                        f"Go on with: regard train --resume {again}"
                    )
            self._finish()

    def _log_interval(self) -> int:
        """Returns the steps between two lines of metrics: whole periods of the task, unless they are much longer."""
        interval = max(1, self.total // LINES)
        period = self.task.period
        if 2 * interval > period:
            interval = math.ceil(interval / period) * period
        return interval

    @contextlib.contextmanager
    def _private_rng(self) -> Iterator[None]:
        """Restores the caller's random state and setting of determinism when the training ends."""
        devices = []
        if self.device.type == "cuda":
            devices.append(self.device)
        with torch.random.fork_rng(devices), deterministic(self.config.deterministic):
            yield

    @property
    def _ends_early(self) -> bool:
        """Whether the metric has reached its target, or has not improved in `patience` evaluations in a row."""
        patience = self.config.evaluation.patience
        target = self.config.evaluation.target
        best = self.state.best
        reached = False
        if target and best is not None:
            reached = not is_better(target, best, self.task.more_is_better(self.metric))
        return reached or (bool(patience) and self.state.stale >= patience)

    def _step(self) -> None:
        """Trains one step: sets its learning rate and its random seed, draws its batch, updates the weights."""
        state = self.state
        config = self.config
        set_lr(self.optimizer, config.lr * lr_factor(config.schedule, state.step, self.total))
        batch = self.task.batch(state.step, config.batch)
        # A seed for each step: dropout is the same after a resume, and differs between processes.
        seed_default(self.device, derive(config.seed, "dropout", state.step, self.process.rank))
        self.update(batch)
        state.step += 1
        self.average.update(state.step)
        state.tokens += batch.tokens

    def _update(self, batch: Batch) -> None:
        """Computes the gradients of this process's rows, in micro-batches where `micro` says so, and steps.

        Every loss is a sum over targets, divided by the targets of the whole batch: however the rows are divided, the
        gradient is that of one batch in one process.
        """
        world_size = self.process.world_size
        weight = self.task.targets(batch).clamp(min=1)
        shard = self.process.shard(batch)
        if self.config.micro and len(batch.x) % world_size:
            raise ConfigError(
                f"train.micro needs batches that {world_size} processes share evenly, not {len(batch.x)} rows"
            )
        rows = len(shard.x)
        micro = self.config.micro or rows
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros_like(self.sums[0])
        for start in range(0, rows, micro):
            with self.parallel.sync_gradients(start + micro >= rows):
                with self._autocast():
                    loss = self.loss(shard.rows(start, start + micro))
                # DDP and FSDP average gradients over processes; times world_size, that is their sum.
                self.scaler.scale(loss * world_size / weight).backward()
            total += loss.detach()
        self.sums[0] += self.process.all_reduce(total)
        self.sums[1] += weight
        self.scaler.unscale_(self.optimizer)
        self.sums[2] = clip_gradients(self.model, self.config.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype or torch.bfloat16, enabled=self.dtype is not None)

    def _log_step(self, meter: SpeedMeter, started: float) -> None:
        """Writes a line of metrics: the only place where a step waits for the device."""
        total, weight, norm = self.sums.tolist()
        self.sums.zero_()
        state = self.state
        state.seconds += time.perf_counter() - started
        loss = total / max(weight, 1.0)
        if not math.isfinite(loss):
            raise self._divergence(f"the loss is {loss}")
        row: dict[str, Any] = {"loss": loss, "lr": float(self.optimizer.param_groups[0]["lr"]), "norm": None}
        if math.isfinite(norm):  # float16 skips a step whose gradients are not
            row["norm"] = norm
        row |= {"tokens": state.tokens, "seconds": round(state.seconds, 3)}
        row |= meter.read(state.tokens, state.seconds)
        self._log(row)

    def _log(self, values: Mapping[str, Any]) -> None:
        """Writes and shows values of the current step, in rank 0."""
        if self.process.is_main:
            self.run.log({"step": self.state.step, **values})
            self.progress.show(self.state.step, self.total, values)

    def _evaluate(self) -> float:
        """Measures the model, saves it where it is the best so far, and returns the seconds that measuring took."""
        self._check_finite()
        started = time.perf_counter()
        self.model.eval()
        with torch.no_grad(), self.average.in_place(), self.parallel.full_model(self.device) as model, self._autocast():
            measured = self.process.broadcast_values(self.task.evaluate(model))
        self.model.train()
        if self.config.evaluation.metric and self.metric not in measured:
            raise ConfigError(
                f"train.evaluation.metric = {quote(self.metric)} is not measured here; there is {', '.join(measured)}"
            )
        is_best = self._update_best(measured.get(self.metric), measured.get(LOSS))
        if measured:
            self._log(measured)
        seconds = time.perf_counter() - started
        self.state.seconds += seconds
        if is_best:
            self.state.best_step = self.state.step
            self._save()
        return seconds

    def _update_best(self, value: float | None, loss: float | None) -> bool:
        """Takes in a value of the metric and the dev loss beside it, and returns whether this is the best checkpoint.

        Of equal values, which the accuracy on a few questions often has, that with the lower loss is the best, and the
        latest where no loss tells. An equal value is no better one, though: patience goes on counting.
        """
        if value is None:
            return True  # without a metric the last checkpoint is the best
        state = self.state
        is_best = state.best is None or is_better(value, state.best, self.task.more_is_better(self.metric))
        if is_best:
            state.best = value
            state.stale = 0
        else:
            state.stale += 1
            known = state.best_loss
            is_best = value == state.best and (known is None or (loss is not None and loss <= known))
        if is_best:
            state.best_loss = loss if loss is not None and math.isfinite(loss) else None
        return is_best

    def _check_finite(self) -> None:
        """Raises TrainingError if the loss or a weight is not finite: such a model is neither measured nor saved."""
        if not self.sums[0].isfinite():
            raise self._divergence(f"the loss is {self.sums[0].item()}")
        finite = [full_tensor(p.detach().isfinite().all()) for p in self.model.parameters()]
        if not torch.stack(finite).all():
            raise self._divergence("weights are no longer finite numbers")

    def _divergence(self, what: str) -> TrainingError:
        """Returns an error that says what is no longer finite, what to try, and which checkpoint is left."""
        newest = checkpoint.newest(self.run.checkpoints)
        kept = "no checkpoint was written"
        if newest is not None:
            kept = f"the checkpoint of step {newest} is as it was"
        return TrainingError(
            f"{what} at step {self.state.step}. Lower train.lr (now {self.config.lr}), lengthen "
            f"train.schedule.warmup, or use another train.precision; {kept} in {self.run.checkpoints}"
        )

    def _save(self) -> None:
        """Writes the checkpoint of this step, and removes old ones; nothing else in the loop writes one."""
        self._check_finite()
        self.state.sums = self.sums.tolist()
        # Both gather shards: all processes take part, and rank 0 writes.
        tensors, plain = export_state(self.optimizer)
        tensors |= self.average.export_weights()
        document = {"state": vars(self.state), "optimizer": plain, "scaler": self.scaler.state_dict()}
        with self.average.in_place(), self.parallel.full_model() as model:
            if not self.process.is_main:
                return
            self.run.sync_metrics()  # a checkpoint on disk has all lines of metrics up to its step
            checkpoint.write(self.run.checkpoints, self.state.step, model, tensors, document)
        if self.state.best_step != self.run.best:
            self.run.best = self.state.best_step
        # Last, so that the file `best` always names a checkpoint that is there.
        checkpoint.prune(self.run.checkpoints, self.config.saving.keep, self.state.best_step, self.state.step)

    def _finish(self) -> None:
        """Writes the model of the best checkpoint as that of the run."""
        best = self.run.checkpoints / f"step-{self.state.best_step}"
        damage: str | None = None
        if self.process.is_main:
            damage = checkpoint.fault(best)
        if damage is not None:
            warnings.warn(f"the best checkpoint is damaged, the last one is taken: {damage}", stacklevel=2)
            self.run.best = self.state.step
        if not self.process.any_rank(damage is not None):
            self._load_weights(best)
        self.model.eval()
        with self.parallel.full_model() as model:
            if self.process.is_main:
                self._save_model(model)
        self.process.barrier()  # no process ends before the model is there

    def _save_model(self, model: Model[Any]) -> None:
        folder = self.run.path / MODEL
        try:
            model.save(folder)
        except (OSError, SafetensorError, DataError) as error:
            raise RunError(f"cannot write {folder}: {error}. The checkpoints are as they were") from error
        if not self.config.saving.keep:
            checkpoint.remove_all(self.run.checkpoints)

    def _load_weights(self, folder: Path) -> None:
        with torch.random.fork_rng([]):  # building a model draws numbers
            self.parallel.load_weights(folder)


def _is_due(step: int, every: int) -> bool:
    """Returns whether `step` is a multiple of `every`; False if `every` is 0, which means never."""
    return every > 0 and step % every == 0


def is_better(value: float, best: float, higher: bool) -> bool:
    """Returns whether a value of a metric is better than the best so far.

    A value that is not finite never is, and any finite one is better than it: NaN compares as False with everything,
    and would stay the best for ever.
    """
    if not math.isfinite(value):
        return False
    if not math.isfinite(best):
        return True
    if higher:
        return value > best
    return value < best
