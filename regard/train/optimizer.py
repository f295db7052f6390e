"""Optimisers and learning-rate schedules by name, groups of parameters, and optimiser states as plain tensors."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn, optim

from regard.config import ConfigError
from regard.errors import did_you_mean, quote
from regard.mechanisms import Mechanism
from regard.nn import ShortConvolution
from regard.registry import Registry, accepted_options, accepts, parameters_of
from regard.train.distributed import full_tensor, is_sharded, shard_like
from regard.train.muon import Muon
from regard.train.settings import OptimizerConfig, ScheduleConfig, resolve_steps

OPTIMIZERS: Registry[type[optim.Optimizer]] = Registry("optimiser")
# Not among them are those of torch.optim that need more than a gradient (a closure, sparse gradients), and its Muon,
# which takes nothing but matrices and cannot be captured as a CUDA graph.
_EXCLUDED = {"optimizer", "lbfgs", "sparseadam", "muon"}
for _name, _cls in inspect.getmembers(optim, inspect.isclass):
    if issubclass(_cls, optim.Optimizer) and _name.lower() not in _EXCLUDED:
        OPTIMIZERS[_name.lower()] = _cls
OPTIMIZERS["muon"] = Muon

# A fused step of Adagrad on CUDA is newer than the oldest torch that regard runs on.
_FUSED_DEVICES: dict[type[optim.Optimizer], tuple[str, ...]] = {optim.Adagrad: ("cpu",)}
_FUSED_SHARDED = (optim.Adam, optim.AdamW)  # those whose fused step takes DTensors
_UNSHARDED = (optim.Adafactor, optim.Rprop, Muon)  # those that need whole weights


def build_optimizer(config: OptimizerConfig, model: nn.Module, lr: float, capture: bool = False) -> optim.Optimizer:
    """Builds the optimiser over a model's parameters, in groups that decay and groups that do not.

    `capture`: such that its steps can be captured as a CUDA graph, if it can be.
    """
    name = config.name.lower()
    if name not in OPTIMIZERS:
        hint = did_you_mean(name, OPTIMIZERS)
        raise ConfigError(f"train.optimizer.name = {quote(config.name)}: no such optimiser in torch.optim.{hint}")
    cls = OPTIMIZERS[name]
    weight = next(model.parameters())
    if is_sharded(weight) and cls in _UNSHARDED:
        raise ConfigError(
            f"train.optimizer.name = {quote(config.name)} and train.shard do not go together: expected another"
        )
    _check_options(config, cls)
    options = {"lr": lr, **config.options}
    parameters = parameters_of(cls)
    if _can_fuse(cls, weight) and not {"fused", "foreach"} & set(options):
        options["fused"] = True
    if capture and "capturable" in parameters:
        # A graph reads the learning rate from the device; a Python number would be captured as a constant.
        options |= {"capturable": True, "lr": torch.tensor(lr, device=weight.device)}
    # An optimiser is told of its groups what it has options for.
    groups = [
        {"params": group["params"], **accepted_options(cls, group)} for group in _parameter_groups(model, config.decay)
    ]
    try:
        return cls(groups, **options)
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        raise ConfigError(f"train.optimizer: {config.name} refuses {quote(options)}: {quote(error)}") from None


def _check_options(config: OptimizerConfig, cls: type[optim.Optimizer]) -> None:
    """Raises ConfigError if an option has a key of its own in the config, or if the optimiser has no such option."""
    for name, instead in {"lr": "train.lr", "weight_decay": "train.optimizer.decay"}.items():
        if name in config.options:
            raise ConfigError(f"train.optimizer.options.{name}: say {instead} instead")
    parameters = set(parameters_of(cls)) - {"matrices"}  # that is what a group is, and not asked for
    unknown = sorted(set(config.options) - parameters)
    if unknown:
        hint = did_you_mean(unknown[0], parameters - {"params"})
        raise ConfigError(f"train.optimizer.options: {config.name} has no {quote(unknown[0])}.{hint}")


def _can_fuse(cls: type[optim.Optimizer], weight: Tensor) -> bool:
    """Returns whether an optimiser has a fused step for weights like this one."""
    if "fused" not in parameters_of(cls):
        return False
    if is_sharded(weight) and cls not in _FUSED_SHARDED:
        return False
    return weight.device.type in _FUSED_DEVICES.get(cls, ("cpu", "cuda"))


def is_capturable(optimizer: optim.Optimizer) -> bool:
    """Returns whether an optimiser's steps can be captured as a CUDA graph."""
    return all(group.get("capturable", False) for group in optimizer.param_groups)


def set_lr(optimizer: optim.Optimizer, lr: float) -> None:
    """Sets the learning rate, in place where it is a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def split_by_decay(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the parameters that decay (matrices of layers) and the others (norms, biases, embeddings, vectors)."""
    biases = {id(getattr(m, name)) for m in model.modules() if isinstance(m, Mechanism) for name in m.biases}
    vectors = biases | {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decayed: list[nn.Parameter] = []
    other: list[nn.Parameter] = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.dim() >= 2 and id(parameter) not in vectors:
            decayed.append(parameter)
        else:
            other.append(parameter)
    return decayed, other


def _parameter_groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Returns parameter groups for torch.optim, each of consecutive parameters with the same weight decay.

    `matrices` says of a group whether its parameters are matrices within the model, whose rows belong together.
    Parameters stay in the order in which checkpoints number them, so several groups may have the same decay.
    """
    decayed = {id(p) for p in split_by_decay(model)[0]}
    matrices = decayed - _rows_apart(model)
    groups: list[dict[str, Any]] = []
    for kind, parameters in groupby(_number_parameters(model), lambda p: (id(p) in decayed, id(p) in matrices)):
        decays, within = kind
        groups.append({"params": list(parameters), "weight_decay": decay * decays, "matrices": within})
    return groups


def _rows_apart(model: nn.Module) -> set[int]:
    """Returns the ids of weights whose rows have nothing to do with each other: the head has one for each token or
    class, a short convolution one for each channel."""
    parts: list[nn.Module | None] = [m for m in model.modules() if isinstance(m, ShortConvolution)]
    parts.append(getattr(model, "head", None))
    return {id(p) for part in parts if part is not None for p in part.parameters()}


def _number_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the trained parameters in the order of saved states: matrices but embeddings, then all others."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    trained = [p for p in model.parameters() if p.requires_grad]
    return sorted(trained, key=lambda p: p.dim() < 2 or id(p) in embeddings)


# A schedule maps the share of the steps after warmup that is done, from 0 to 1, to a rate between the floor (0) and the
# highest rate (1). One that also takes `warmups`, the number of steps divided by that of the warmup, returns a share of
# the highest rate, of at least the floor.
SCHEDULES: Registry[Callable[..., float]] = Registry("schedule")


@SCHEDULES.add("cosine")
def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


@SCHEDULES.add("linear")
def _linear(done: float) -> float:
    return 1 - done


@SCHEDULES.add("constant")
def _constant(done: float) -> float:
    return 1.0


@SCHEDULES.add("root")
def _root(done: float) -> float:
    return math.sqrt(1 - done)


@SCHEDULES.add("trapezoid")
def _trapezoid(done: float) -> float:
    return min(1.0, 5 * (1 - done))  # constant, then linear over the last fifth


@SCHEDULES.add("noam")
def _noam(done: float, warmups: float) -> float:
    return 1 / math.sqrt(warmups)  # of "Attention is all you need", whose highest rate is (width·warmup)^−½


def lr_factor(config: ScheduleConfig, step: int, total: int) -> float:
    """Returns the learning rate at step n as a share of the highest: (n+1)/warmup, then floor + (1−floor)·f(done).

    f is the schedule of the config's name: cosine, linear, constant, root (√(1−done)) or trapezoid. For noam the share
    after warmup is max(floor, √(warmup/(n+1))), which does not depend on the total.
    """
    if config.name not in SCHEDULES:
        raise ConfigError(f"train.schedule.name = {quote(config.name)}: unknown.{did_you_mean(config.name, SCHEDULES)}")
    warmup = resolve_steps(config.warmup, total)
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    schedule = SCHEDULES[config.name]
    if accepts(schedule, "warmups"):
        return max(config.floor, schedule(done, (step + 1) / max(1, warmup)))
    return config.floor + (1 - config.floor) * schedule(done)


def export_state(optimizer: optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns an optimiser's state by `number.name`, number a parameter's: unsharded tensors, and plain numbers."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for number, entry in optimizer.state_dict()["state"].items():
        for name, value in entry.items():
            key = f"{number}.{name}"
            if not isinstance(value, Tensor):
                if value is not None:
                    plain[key] = value
            elif is_sharded(value):
                tensors[key] = full_tensor(value).cpu()  # one after the other: all of them may not fit
            else:
                tensors[key] = value
    return tensors, plain


def import_state(optimizer: optim.Optimizer, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    """Loads a state that `export_state` returned into an optimiser, sharded where its weights are."""
    # As parameters are numbered: each, and the group that it is in.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    groups = [group for group in optimizer.param_groups for _ in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for key, value in (*tensors.items(), *plain.items()):
        match = re.fullmatch(r"([0-9]{1,9})\.(\w+)", key)
        if match is None or int(match[1]) >= len(parameters):
            raise ConfigError(
                f"the optimiser's state has {quote(key)}; expected a parameter from 0 to {len(parameters) - 1}"
            )
        state.setdefault(int(match[1]), {})[match[2]] = value
    if not state and _state_layout(optimizer, groups[0], parameters[0]):
        raise ConfigError("the optimiser's state is empty; expected one for each parameter")
    layouts: dict[tuple[int, int], dict[str, Any]] = {}
    for number, entry in state.items():
        parameter, group = parameters[number], groups[number]
        kind = (id(group), parameter.dim())
        if kind not in layouts:
            layouts[kind] = _state_layout(optimizer, group, parameter)
        _check_state(f"the optimiser's state of parameter {number}", parameter, layouts[kind], entry)
        for name, value in entry.items():
            if isinstance(value, Tensor):
                entry[name] = shard_like(value, parameter)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _state_layout(optimizer: optim.Optimizer, group: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
    """Returns the state of a parameter of size 2×3×…, of the rank of `like` and in `group`, after one step."""
    scratch = torch.zeros([2 + n for n in range(like.dim())], device=like.device, requires_grad=True)
    scratch.grad = torch.zeros_like(scratch)
    options = {name: value for name, value in group.items() if name != "params"}
    one = type(optimizer)([scratch], **accepted_options(type(optimizer), options))
    one.step()
    return {name: value for name, value in one.state[scratch].items() if value is not None}


def _check_state(source: str, parameter: Tensor, layout: Mapping[str, Any], entry: Mapping[str, Any]) -> None:
    """Raises ConfigError if the state of a parameter has other names or shapes than the optimiser gives it."""
    if set(layout) != set(entry):
        raise ConfigError(f"{source} has {quote(sorted(entry))}, expected {sorted(layout)}")
    for name, expected in layout.items():
        found = entry[name]
        if not isinstance(expected, Tensor):
            if not isinstance(found, int | float) or not math.isfinite(found):
                raise ConfigError(f"{source}: {name} = {quote(found)}, expected a finite number")
            continue
        # A dimension that is not the parameter's, such as the 1 of a factored moment, is the same for all of them.
        shape = list(expected.shape)
        for d, size in enumerate(shape):
            if size == 2 + d:
                shape[d] = parameter.shape[d]
        if not isinstance(found, Tensor) or list(found.shape) != shape:
            raise ConfigError(f"{source}: {name} does not fit its parameter, expected a tensor of shape {shape}")
        if found.dtype.is_floating_point != expected.dtype.is_floating_point:
            raise ConfigError(f"{source}: {name} is {found.dtype}, expected {expected.dtype}")


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Scales all gradients down to a joint norm of `limit` if it is larger (0: never); returns the norm before, []."""
    return full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), limit or math.inf))
