"""Registering kernels and choosing among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from regard.mechanisms import Kernel, Mechanism, Pairwise

_F = TypeVar("_F", bound=Callable[..., Any])
_N = TypeVar("_N", bound=nn.Module)


def kernel(
    cls: type[Mechanism], face: str, *, name: str, when: Callable[..., str | None], device: str = "", limits: str = ""
) -> Callable[[_F], _F]:
    """Registers a function as the fast twin of a face ("forward" or "extend") of exactly this class.

    `when` takes the arguments of the kernel and returns None where it can run, or the reason why not. `device` is the
    only kind of device that it is for; `limits` says up to which sizes, for people.
    """

    def add(run: _F) -> _F:
        cls.kernels.add_kernel(face, Kernel(name, run, when, device, limits))
        return run

    return add


def registered(cls: type[Mechanism]) -> dict[str, list[Kernel]]:
    """The kernels of each face, "parallel" and "recurrent". A pairwise mechanism decodes with its parallel kernel over
    the cache where no other is for decoding."""
    forward = cls.kernels.for_face("forward")
    recurrent = cls.kernels.for_face("extend")
    if issubclass(cls, Pairwise):
        recurrent += forward
    kernels = {"parallel": forward, "recurrent": recurrent}
    return {face: listed for face, listed in kernels.items() if listed}


def runs_here(kernel: Kernel) -> bool:
    """Whether this machine has the device that a kernel is for."""
    return kernel.device != "cuda" or torch.cuda.is_available()


def plain(model: _N) -> _N:
    """Every mechanism in the model runs its reference in plain PyTorch."""
    return _choose(model, "plain")


def fast(model: _N, name: str = "auto") -> _N:
    """Every mechanism picks its kernel, or the named one, which is then an error where it cannot run."""
    if name == "auto":
        return _choose(model, name)
    for mechanism in _mechanisms(model):
        mechanism.kernels.find(name)
    return _choose(model, name)


def _choose(model: _N, use: str) -> _N:
    for mechanism in _mechanisms(model):
        mechanism.use = use
    return model


def _mechanisms(model: nn.Module) -> list[Mechanism]:
    return [m for m in model.modules() if isinstance(m, Mechanism)]
