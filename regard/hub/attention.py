"""The one file that talks to transformers' attention interface.

A function of ours takes the place of the model's attention for a while. It hands each call on to the `eager` function
of the model's own file, some queries at a time, so that what is computed is exactly what that file says, and shows what
went in and what weights came out to a listener. Rows of attention do not depend on each other, so cutting them changes
nothing, and no matrix over all tokens is held.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.errors import ExtraMissingError, RegardError

NAME = "regard_listening"
CELLS = 1 << 22  # weights computed together


class HubError(RegardError, RuntimeError):
    """A Hugging Face model that cannot be loaded or listened to."""


@dataclass(eq=False)
class Call:
    """One attention call: q [B,H,T,K], k and v [B,G,S,·], what may be seen, and what else the function was given."""

    module: nn.Module
    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None  # True may be seen, or numbers that are added; [B|1,1|H,T,S]
    scaling: float
    cross: bool
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def seen(self) -> Tensor | None:
        """[T,S] of the first row of the batch: which cells may be seen."""
        if self.mask is None:
            return None
        mask = self.mask[0, 0] if self.mask.dtype == torch.bool else self.mask[0, 0] > _hidden(self.mask.dtype) / 2
        return mask[..., : self.k.shape[2]].expand(self.q.shape[2], -1)


@runtime_checkable
class Ear(Protocol):
    """Who listens. `rows` is given weights [H,R,S] of the first row of the batch, from query `start` on."""

    def begin(self, call: Call) -> None: ...
    def rows(self, call: Call, start: int, weights: Tensor) -> None: ...
    def end(self, call: Call, out: Tensor) -> Tensor: ...


def transformers() -> Any:
    """The library, or an error that says how to get it."""
    try:
        import transformers
    except ImportError:
        raise ExtraMissingError('Hugging Face models need `transformers`: pip install "regard[hf]"') from None
    return transformers


@contextmanager
def listening(model: Any, ear: Ear) -> Iterator[None]:
    """Every attention call of the model is heard, for a while; afterwards the model is as it was."""
    library = transformers()
    from transformers.masking_utils import AttentionMaskInterface

    names = {module: name for name, module in model.named_modules()}

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        scale = _scale(module, query, scaling)
        cross = _crosses(module, names.get(module, ""))
        call = Call(module, names.get(module, ""), query, key, value, attention_mask, scale, cross, more)
        return _heard(call, ear, _eager(module)), None

    before = _implementations(model)
    library.AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _boolean_mask)
    try:
        _set(model, NAME)
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        _forget(library.AttentionInterface)
        _forget(AttentionMaskInterface)


def _heard(call: Call, ear: Ear, eager: Callable[..., Any]) -> Tensor:
    """The output [B,T,H,V] of the model's own function, over some queries at a time."""
    B, H, T, _ = call.q.shape
    S = call.k.shape[2]
    ear.begin(call)
    found = []
    for start in range(0, T, max(1, CELLS // max(1, B * H * S))):
        stop = min(T, start + max(1, CELLS // max(1, B * H * S)))
        more = {name: _cut(x, start, stop, T, S) for name, x in call.more.items()}
        part = _Part(call, eager, _added(call, start, stop), more)
        q = call.q[:, :, start:stop]
        if torch.is_grad_enabled():  # weights are computed again on the way back rather than kept
            out, weights = checkpoint(part, q, call.k, call.v, use_reentrant=False)
        else:
            out, weights = part(q, call.k, call.v)
        ear.rows(call, start, weights[0].detach())
        found.append(out)
    return ear.end(call, found[0] if len(found) == 1 else torch.cat(found, 1))


@dataclass(frozen=True)
class _Part:
    """The model's own function over some queries."""

    call: Call
    eager: Callable[..., Any]
    mask: Tensor | None
    more: dict[str, Any]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        given = {name: x for name, x in self.more.items() if name != "dropout"}
        out, weights = self.eager(self.call.module, q, k, v, self.mask, scaling=self.call.scaling, dropout=0.0, **given)
        if weights is None:
            raise HubError(f"{self.call.name}: the model's own attention function gives no weights")
        return out, weights


def _cut(x: Any, start: int, stop: int, T: int, S: int) -> Any:
    """Rows of something that has one for each query, such as a position bias [B,H,T,S]."""
    if isinstance(x, Tensor) and x.dim() == 4 and x.shape[-2] == T and x.shape[-1] >= S:
        return x[..., start:stop, :]
    return x


def _added(call: Call, start: int, stop: int) -> Tensor | None:
    """The mask of some queries as the eager functions want it: numbers to add."""
    mask, dtype = call.mask, call.q.dtype
    if mask is None:
        return None
    rows = mask[:, :, start:stop] if mask.shape[-2] > 1 else mask
    rows = rows[..., : call.k.shape[2]]
    return torch.where(rows, 0.0, _hidden(dtype)).to(dtype) if rows.dtype == torch.bool else rows


def _hidden(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).min)


def _boolean_mask(*given: Any, **named: Any) -> Tensor | None:
    """What may be seen, as truth values: the rule shows in them. It must be registered, or padding would be ignored."""
    from transformers.masking_utils import sdpa_mask

    found: Tensor | None = sdpa_mask(*given, **named | {"allow_is_causal_skip": False})
    return found


def _eager(module: nn.Module) -> Callable[..., Any]:
    """The eager function of the file that the module's class, or one that it builds on, was written in."""
    for cls in type(module).__mro__:
        found = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    raise HubError(f"{type(module).__name__} comes without an eager attention function to record it by")


def _scale(module: nn.Module, query: Tensor, scaling: float | None) -> float:
    if scaling is not None:
        return float(scaling)
    head_dim = getattr(module, "head_dim", query.shape[-1])
    return 1 / math.sqrt(head_dim if isinstance(head_dim, int) else query.shape[-1])


_CROSS = re.compile(r"cross|encoder_attn|EncDec", re.I)


def _crosses(module: nn.Module, name: str) -> bool:
    """Whether the keys are those of another sequence: what the module is called tells, or says itself."""
    own = getattr(module, "is_cross_attention", None)
    return bool(own) or _CROSS.search(name) is not None


def _configs(model: Any) -> Iterator[Any]:
    seen: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal") and id(config) not in seen:
            seen.add(id(config))
            yield config


def _implementations(model: Any) -> list[tuple[Any, Any]]:
    return [(config, config._attn_implementation_internal) for config in _configs(model)]


def _set(model: Any, name: str) -> None:
    """Chooses an implementation in every config; models that do not ask for one simply never call it."""
    for config in _configs(model):
        config._attn_implementation_internal = name


def _forget(interface: Any) -> None:
    interface._global_mapping.pop(NAME, None)
