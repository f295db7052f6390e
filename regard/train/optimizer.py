"""Optimisers by name, what is decayed, how the learning rate goes, and optimiser states as plain tensors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from regard.config import ConfigError
from regard.errors import did_you_mean
from regard.registry import parameters_of
from regard.train.distributed import full_tensor, is_sharded, shard_like
from regard.train.settings import OptimizerConfig, ScheduleConfig, resolve_steps

# Those that need more than a gradient: a closure, sparse gradients, matrices only.
_OTHERS = {"lbfgs", "sparseadam", "muon"}
OPTIMIZERS: dict[str, type[optim.Optimizer]] = {
    name.lower(): cls
    for name, cls in inspect.getmembers(optim, inspect.isclass)
    if issubclass(cls, optim.Optimizer) and cls is not optim.Optimizer and name.lower() not in _OTHERS
}
# A fused step of Adagrad on CUDA is newer than the oldest torch that regard runs on.
_FUSED: dict[type[optim.Optimizer], tuple[str, ...]] = {optim.Adagrad: ("cpu",)}
_WHOLE = (optim.Adafactor, optim.Rprop)  # those that need whole weights
_FUSED_PARTS = (optim.Adam, optim.AdamW)  # those whose fused step takes weights that several processes share


def build(config: OptimizerConfig, model: nn.Module, lr: float, graph: bool = False) -> optim.Optimizer:
    """The optimiser over a model's parameters, in two groups: those that decay and those that do not.

    `graph`: such that its steps can be captured as a CUDA graph, where it knows how to.
    """
    cls = OPTIMIZERS.get(config.name.lower())
    if cls is None:
        raise ConfigError(
            f"train.optimizer.name = {config.name!r}: no such optimiser in torch.optim."
            f"{did_you_mean(config.name.lower(), OPTIMIZERS)}"
        )
    takes = parameters_of(cls)
    for name, instead in {"lr": "train.lr", "weight_decay": "train.optimizer.decay"}.items():
        if name in config.options:
            raise ConfigError(f"train.optimizer.options.{name}: say {instead} instead")
    options = {"lr": lr, **config.options}
    one = next(model.parameters())
    if is_sharded(one) and cls in _WHOLE:
        raise ConfigError(
            f"train.optimizer.name = {config.name!r} and train.shard do not go together: expected another"
        )
    fused = one.device.type in _FUSED.get(cls, ("cpu", "cuda")) and (not is_sharded(one) or cls in _FUSED_PARTS)
    if fused and "fused" in takes and not {"fused", "foreach"} & set(options):
        options["fused"] = True
    if graph and "capturable" in takes:
        options |= {"capturable": True, "lr": torch.tensor(lr, device=one.device)}
    groups: list[dict[str, Any]] = [{"params": p} for p in decayed(model)]
    for group, decay in zip(groups, (config.decay, 0.0), strict=True):
        if "weight_decay" in takes:
            group["weight_decay"] = decay
    unknown = sorted(set(options) - set(takes))
    if unknown:
        raise ConfigError(
            f"train.optimizer.options: {config.name} has no '{unknown[0]}'."
            f"{did_you_mean(unknown[0], set(takes) - {'params'})}"
        )
    try:
        return cls([g for g in groups if g["params"]], **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"train.optimizer: {config.name} refuses {options}: {error}") from None


def captured(optimizer: optim.Optimizer) -> bool:
    """Whether its steps can be captured as a CUDA graph."""
    return all(group.get("capturable", False) for group in optimizer.param_groups)


def set_rate(optimizer: optim.Optimizer, lr: float) -> None:
    """Sets the learning rate, in place where it is a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def decayed(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters that decay (matrices of layers) and those that do not (norms, biases, embeddings, single vectors)."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    own = [p for p in model.parameters() if p.requires_grad]
    yes = [p for p in own if p.dim() >= 2 and id(p) not in tables]
    return yes, [p for p in own if p.dim() < 2 or id(p) in tables]


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": _cosine,
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1.0,
    "root": lambda done: math.sqrt(1 - done),
    "trapezoid": lambda done: min(1.0, 5 * (1 - done)),
}


def schedule(config: ScheduleConfig, step: int, total: int) -> float:
    """The learning rate at a step, in parts of the highest: (n+1)/warmup at first, then floor + (1−floor)·f(done).

    f is cosine, linear, constant, root (√(1−done)) or trapezoid (constant, then linear over the last fifth).
    """
    shape = SCHEDULES.get(config.name)
    if shape is None:
        raise ConfigError(f"train.schedule.name = {config.name!r}: unknown.{did_you_mean(config.name, SCHEDULES)}")
    warmup = resolve_steps(config.warmup, total)
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return config.floor + (1 - config.floor) * shape(done)


def state_tensors(optimizer: optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimiser's state as named tensors, and what of it is not a tensor."""
    tensors, plain = {}, {}
    for number, entry in optimizer.state_dict()["state"].items():
        for name, value in entry.items():
            if isinstance(value, Tensor):
                tensors[f"{number}.{name}"] = full_tensor(value).cpu() if is_sharded(value) else value
            elif value is not None:
                plain[f"{number}.{name}"] = value
    return tensors, plain


def restore(optimizer: optim.Optimizer, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    """Puts such a state back."""
    state: dict[int, dict[str, Any]] = {}
    for key, value in (*tensors.items(), *plain.items()):
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = value
    document = optimizer.state_dict()
    own = [p for group in optimizer.param_groups for p in group["params"]]  # as they are numbered
    for place, entry in state.items():
        entry |= {name: shard_like(value, own[place]) for name, value in entry.items() if isinstance(value, Tensor)}
    optimizer.load_state_dict({"state": state, "param_groups": document["param_groups"]})


def gradient_norm(model: nn.Module, clip: float) -> Tensor:
    """The norm of all gradients, which are scaled down to `clip` where it is above (0: never)."""
    return full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf))
