"""Compiling a training step by torch.compile: when it pays, and one compiled block for all layers.

A whole model would be compiled layer by layer, although its layers differ in their weights alone. Here a block is
compiled once for all layers of its kind, and so are the parts before and after the blocks. Only the training step is
compiled; evaluations, whose shapes differ, run as they are.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.cost.devices import find_stated
from regard.data.batch import Batch
from regard.models import Decoder, Model, Stack
from regard.nn import Block
from regard.train.distributed import Loss, Process
from regard.train.graph import resolve_compile
from regard.train.progress import Progress
from regard.train.run import Run
from regard.train.settings import TrainConfig
from regard.train.tasks.base import Task

# Measured on an H200: compiling took 6 to 7 s, for GPT-2 and for the model of the knowledge experiment; and a step of
# the latter took 1.5 ms less, which is SAVED_BYTES of memory traffic for each token, layer and channel.
COMPILE_SECONDS = 10.0
SAVED_BYTES = 400.0
SLOW_BANDWIDTH = 1e12  # bytes a second of a GPU that is not in the table
# The methods that are compiled, each by itself. A language-model head over many tokens has a kernel of its own instead.
_REGIONS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Embedding: ("forward",),
    Stack: ("_add_positions", "_norm_output"),
    Block: ("forward",),
    Decoder: ("_loss_of_few",),
}
MARGIN = 1.5  # compile only where this many times the seconds of compiling are saved


class CompileDecision(NamedTuple):
    """How steps are compiled ("off", "graph", "inductor" or "both"), and why, in words."""

    mode: str
    reason: str


def choose_compile(
    config: TrainConfig, model: Model[Any], task: Task, run: Run, process: Process, progress: Progress
) -> str:
    """Returns how the steps of a run are compiled: as its config says, or what "auto" means for it.

    That is decided once, at the start of a run, and kept in its config: resuming with other kernels would give other
    bits. It is decided again only if a run is resumed where the saved mode is not possible.
    """
    place = (model.device, task.varies, process.world_size)
    plain = resolve_compile(config.compile, *place)
    if config.compile != "auto" or plain == "off":
        return plain
    if run.compiled is not None:
        return resolve_compile(run.compiled, *place)
    if any(run.checkpoints.glob("step-*")):  # the run began on a device where nothing was decided
        return plain
    steps = config.total(task.rows, task.period)
    tokens = config.batch * (task.length + (task.source or 0))
    # A loss of a task's own may do what cannot be compiled, such as watching the layers of the model.
    decision = CompileDecision(plain, "the task has a loss of its own")
    if type(task).loss is Task.loss:
        decision = decide_compile(steps, steps * seconds_saved(model, tokens))
    if process.is_main:
        run.compiled = decision.mode
        progress.note(f"train.compile = auto is {decision.mode} here: {decision.reason}")
    return decision.mode


def decide_compile(steps: int, saved: float) -> CompileDecision:
    """Decides whether to compile a training of so many steps, which would save so many seconds."""
    terms = f"compiling takes about {COMPILE_SECONDS:.0f} s, and saves about {saved:,.0f} s in {steps:,} steps"
    if saved < MARGIN * COMPILE_SECONDS:
        return CompileDecision("graph", terms)
    missing = _missing_compiler()
    if missing:
        return CompileDecision("graph", f"{terms}, but there is no {missing}")
    return CompileDecision("both", terms)


def seconds_saved(model: Model[Any], tokens: int) -> float:
    """Returns an estimate of the seconds that compiled blocks save in a step of so many tokens.

    They save memory traffic: a compiled block reads and writes its activations less often. Matrix products take as long
    as before.
    """
    stated = find_stated(torch.cuda.get_device_name(model.device))
    bandwidth = SLOW_BANDWIDTH
    if stated is not None:
        bandwidth = stated.bandwidth
    numbers = sum(len(stack.blocks) * stack.config.width for stack in model.modules() if isinstance(stack, Stack))
    return SAVED_BYTES * tokens * numbers / bandwidth


def _missing_compiler() -> str:
    """Returns the name of a program that torch.compile needs on a GPU and this machine lacks; "" if it has all."""
    if find_spec("triton") is None:
        return "triton"
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "C compiler"
    return ""


class CompiledLoss:
    """A loss whose model runs with compiled parts: its blocks, the parts before and after them, and a small head.

    Compiling happens at the first call. A model without blocks is compiled as a whole. `deterministic`: kernels
    are not chosen by their times, since another process could choose others, which give other bits.
    """

    def __init__(self, model: nn.Module, loss: Loss, deterministic: bool = False) -> None:
        self.loss = loss
        self.replaced: list[tuple[nn.Module, str, Callable[..., Any]]] = []
        options = {"deterministic": True} if deterministic else None
        compiled = partial(torch.compile, dynamic=False, options=options)
        if not any(isinstance(part, Block) for part in model.modules()):
            self.loss = compiled(loss)
        methods = {kind: [(name, compiled(getattr(kind, name))) for name in names] for kind, names in _REGIONS.items()}
        for part in model.modules():
            for kind, functions in methods.items():
                if isinstance(part, kind):
                    self.replaced += [(part, *function) for function in functions]

    def __call__(self, batch: Batch) -> Tensor:
        """Returns the loss of a batch. The model has its own methods back afterwards."""
        for part, name, function in self.replaced:
            setattr(part, name, MethodType(function, part))
        try:
            return self.loss(batch)
        finally:
            for part, name, _ in self.replaced:
                delattr(part, name)
