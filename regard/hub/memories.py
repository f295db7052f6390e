"""Recording the gated and delta layers of transformers, which bypass its attention interface.

Such a layer calls one of a few functions of its modeling file, by name: `torch_chunk_gated_delta_rule` over a whole
text and `torch_recurrent_gated_delta_rule` for one more token (Qwen3-Next and similar models), `mamba2_chunk_scan` and
`mamba2_selective_state_update` (Mamba-2 and similar models), `chunk_kimi_delta_attention` and
`recurrent_kimi_delta_attention` (Kimi Linear and similar models, one decay a channel). While the context
`recording_memories` lasts, a wrapper replaces each: it calls the original, and passes its arguments, as q, k, v, a and
b, and its result to a recorder.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from types import FunctionType, ModuleType
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from regard.shapes import default_scale


@dataclass(frozen=True)
class MemoryCall:
    """One call of a gated or delta layer, in the notation of `regard.mechanisms.recurrence`."""

    module: nn.Module
    name: str  # of the module in its model
    mechanism: str  # "gated" or "gated-delta"
    q: Float[Tensor, "B H T K"]
    k: Float[Tensor, "B H T K"]
    v: Float[Tensor, "B H T V"]
    a: Float[Tensor, "B H T X"]  # logarithm of the decay, X is 1, or K for one of each channel
    b: Float[Tensor, "B H T"]  # strength of the write
    scale: float
    skip: Float[Tensor, " H"] | None = None  # skip · v is added to what is read from the memory
    cross: ClassVar[bool] = False


@runtime_checkable
class MemoryRecorder(Protocol):
    """A recorder that also receives the calls of layers with a memory.

    `memory` gets a call and its output [B,T,H,V], and returns the output that the model continues with.
    """

    def memory(self, call: MemoryCall, out: Tensor) -> Tensor: ...


# Turns the arguments of a call, by the names of their parameters, into the fields of a MemoryCall.
Reader = Callable[[Mapping[str, Any]], dict[str, Any]]


def _read_delta_rule(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a call of transformers' gated delta rule, whose tensors are [B,T,H,·] and [B,T,H].

    g is the decay, [B,T,H], or of each channel [B,T,H,K].
    """
    q, k, v = (given[name].transpose(1, 2) for name in ("query", "key", "value"))
    if given.get("use_qk_l2norm_in_kernel"):
        q, k = _unit_length(q), _unit_length(k)
    a = given["g"].transpose(1, 2).float()
    if a.dim() == 3:
        a = a[..., None]
    b = given["beta"].transpose(1, 2)
    return {"mechanism": "gated-delta", "q": q, "k": k, "v": v, "a": a, "b": b, "scale": default_scale(q.shape[-1])}


def _unit_length(x: Tensor) -> Tensor:
    """Returns x / √(‖x‖² + 1e-6) in float32, as transformers' functions normalise queries and keys."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _read_scan(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a call of Mamba-2's scan: x [B,T,H,V] is v, B and C [B,T,G,K] are k and q, Δ is b."""
    low, high = given.get("dt_limit") or (0.0, float("inf"))
    step = _make_step(given, given["dt"], given.get("dt_bias")).clamp(low, high)
    return _scan_fields(given["hidden_states"], step, given["A"], given["B"], given["C"], given.get("D"))


def _read_scan_step(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of one more token of Mamba-2, whose dt, A and D come repeated over V (A also over K)."""
    bias = given.get("dt_bias")
    step = _make_step(given, given["dt"][..., 0], None if bias is None else bias[:, 0])
    skip = given.get("D")
    return _scan_fields(
        given["hidden_states"][:, None],
        step[:, None],
        given["A"][:, 0, 0],
        given["B"][:, None],
        given["C"][:, None],
        None if skip is None else skip[:, 0],
    )


def _make_step(given: Mapping[str, Any], step: Tensor, bias: Tensor | None) -> Tensor:
    """Returns Δ of each token and head: the projection `step`, plus the bias, through softplus if the call asks so."""
    if bias is not None:
        step = step + bias.to(step.dtype)
    return functional.softplus(step) if given.get("dt_softplus") else step


def _scan_fields(x: Tensor, step: Tensor, rate: Tensor, B: Tensor, C: Tensor, skip: Tensor | None) -> dict[str, Any]:
    heads = x.shape[2]
    k, q = (y.transpose(1, 2).repeat_interleave(heads // y.shape[2], 1).float() for y in (B, C))
    b = step.transpose(1, 2).float()
    a = (b * rate.float()[:, None])[..., None]
    return {
        "mechanism": "gated",
        "q": q,
        "k": k,
        "v": x.transpose(1, 2),
        "a": a,
        "b": b,
        "scale": 1.0,
        "skip": skip,
    }


READERS: dict[str, Reader] = {
    "torch_chunk_gated_delta_rule": _read_delta_rule,
    "torch_recurrent_gated_delta_rule": _read_delta_rule,
    "chunk_kimi_delta_attention": _read_delta_rule,
    "recurrent_kimi_delta_attention": _read_delta_rule,
    "mamba2_chunk_scan": _read_scan,
    "mamba2_selective_state_update": _read_scan_step,
}
_MECHANISMS = {
    "torch_chunk_gated_delta_rule": "gated-delta",
    "chunk_kimi_delta_attention": "gated-delta",
    "mamba2_chunk_scan": "gated",
}


def memory_layers(model: nn.Module) -> dict[str, str]:
    """Returns the mechanism, "gated" or "gated-delta", of each gated or delta layer of a model, by module name."""
    found = {}
    for name, module in model.named_modules():
        for function in _functions_called(module):
            if function in _MECHANISMS:
                found[name] = _MECHANISMS[function]
    return found


@contextmanager
def recording_memories(model: nn.Module, recorder: Any) -> Iterator[None]:
    """Shows every call of a layer with a memory to the recorder while the context lasts, if it is a `MemoryRecorder`.

    Calls of other models, and those that no layer of this model makes, are not shown.
    """
    if not isinstance(recorder, MemoryRecorder):
        yield
        return
    running: list[tuple[nn.Module, str]] = []  # the layers whose forward is running, the innermost last
    with ExitStack() as removal:
        files: set[ModuleType] = set()
        for name, module in model.named_modules():
            if _functions_called(module):
                files.add(sys.modules[type(module).__module__])
                _watch(module, name, running, removal)
        for file in files:
            for name, reader in READERS.items():
                function = getattr(file, name, None)
                if function is not None:
                    setattr(file, name, _showing(function, reader, recorder, running))
                    removal.callback(setattr, file, name, function)
        yield


def _watch(module: nn.Module, name: str, running: list[tuple[nn.Module, str]], removal: ExitStack) -> None:
    """Keeps a layer in `running` during its forward."""

    def begin(module: nn.Module, inputs: Any) -> None:
        running.append((module, name))

    def end(module: nn.Module, inputs: Any, out: Any) -> None:
        running.pop()

    removal.callback(module.register_forward_pre_hook(begin).remove)
    removal.callback(module.register_forward_hook(end, always_call=True).remove)


def _showing(
    function: Callable[..., Any], reader: Reader, recorder: MemoryRecorder, running: list[tuple[nn.Module, str]]
) -> Callable[..., Any]:
    """Returns a wrapper of `function` that passes each call and its output to the recorder, and returns its output."""
    signature = inspect.signature(function)

    @wraps(function)
    def shown(*args: Any, **kwargs: Any) -> Any:
        if not running:
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        module, name = running[-1]
        call = MemoryCall(module, name, **reader(bound.arguments))
        gate = bound.arguments.get("z")
        if gate is not None:  # Falcon-H1 lets the function apply a gate; it is applied below, after recording
            bound.arguments["z"] = None
        given = function(*bound.args, **bound.kwargs)
        out = given[0] if isinstance(given, tuple) else given
        # One more token of Mamba-2 is [B,H,V], with no dimension of tokens.
        changed = recorder.memory(call, out.view(call.v.transpose(1, 2).shape)).view(out.shape)
        if gate is not None:
            changed = changed * functional.silu(gate)
        return (changed, *given[1:]) if isinstance(given, tuple) else changed

    return shown


def _functions_called(module: nn.Module) -> list[str]:
    """Returns the names among `READERS` that the methods of a module's class use."""
    used: set[str] = set()
    for value in vars(type(module)).values():
        plain = inspect.unwrap(value) if callable(value) else value
        if isinstance(plain, FunctionType):
            used.update(plain.__code__.co_names)
    return [name for name in READERS if name in used]
