"""Registering kernels and choosing among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from regard.errors import KernelError
from regard.mechanisms import Kernel, Mechanism, Pairwise
from regard.mechanisms.base import MECHANISMS

_F = TypeVar("_F", bound=Callable[..., Any])
_N = TypeVar("_N", bound=nn.Module)


def kernel(
    cls: type[Mechanism], face: str, *, name: str, when: Callable[..., str | None], device: str = "", limits: str = ""
) -> Callable[[_F], _F]:
    """Returns a decorator that registers a function as the fast twin of a face of exactly this class.

    The face is "forward" or "extend". `when` takes the arguments of the kernel and returns None where it can run, or
    the reason why not. `device` is the only kind of device that it is for; `limits` says up to which sizes, for people.
    """

    def register(run: _F) -> _F:
        cls.kernels.add_kernel(face, Kernel(name, run, when, device, limits))
        return run

    return register


def registered(cls: type[Mechanism]) -> dict[str, list[Kernel]]:
    """Returns the kernels of each face, "parallel" and "recurrent".

    A pairwise mechanism decodes with its parallel kernel over the cache where no other is for decoding.
    """
    forward = cls.kernels.for_face("forward")
    recurrent = cls.kernels.for_face("extend")
    if issubclass(cls, Pairwise):
        recurrent += forward
    kernels = {"parallel": forward, "recurrent": recurrent}
    return {face: listed for face, listed in kernels.items() if listed}


def runs_here(kernel: Kernel) -> bool:
    """Returns whether this machine has the device that a kernel is for."""
    return kernel.device != "cuda" or torch.cuda.is_available()


def plain(model: _N) -> _N:
    """Makes every mechanism in the model run its reference in plain PyTorch, and returns the model."""
    return _set_use(model, "plain")


def fast(model: _N, name: str | Mapping[str, str] = "auto") -> _N:
    """Makes every mechanism in the model choose its kernel, or run the named one, and returns the model.

    A named kernel is an error at once where a mechanism does not have it, and at each call that it cannot run. Where
    layers have several mechanisms, kernels are named for each: `{"gated-delta": "fla"}`; the others choose.
    """
    if name == "auto":
        return _set_use(model, name)
    if not isinstance(name, str):
        return _set_use_of_each(model, name)
    for mechanism in _mechanisms(model):
        mechanism.kernels.find(name)
    return _set_use(model, name)


def _set_use(model: _N, use: str) -> _N:
    for mechanism in _mechanisms(model):
        mechanism.use = use
    return model


def _set_use_of_each(model: _N, names: Mapping[str, str]) -> _N:
    """Sets what the mechanisms of each name run; the others choose."""
    found = _mechanisms(model)
    for wanted, kernel in names.items():
        MECHANISMS.find(wanted)
        own = [m for m in found if m.name == wanted]
        if not own:
            there = ", ".join(sorted({m.name for m in found})) or "none"
            raise KernelError(f"no layer has the mechanism {wanted!r} (kernel {kernel!r}); there are: {there}.")
        if kernel not in ("auto", "plain"):
            own[0].kernels.find(kernel)
    for mechanism in found:
        mechanism.use = names.get(mechanism.name, "auto")
    return model


def _mechanisms(model: nn.Module) -> list[Mechanism]:
    return [m for m in model.modules() if isinstance(m, Mechanism)]
