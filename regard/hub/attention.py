"""The one file that talks to transformers' attention interface.

A function of ours takes the place of the model's attention. Where mechanisms of ours are in use (`using`), it computes
them, and hands every other layer on to the function that it had. While someone listens (`listening`), it hands each
call on to the `eager` function of the model's own file, some queries at a time, so that what is computed is exactly
what that file says, and shows what went in and what weights came out. Rows of attention do not depend on each other, so
cutting them changes nothing, and no matrix over all tokens is held.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.errors import ExtraMissingError
from regard.errors import HubError as HubError
from regard.hub.calls import Call as Call
from regard.hub.calls import Replacement, attended
from regard.hub.masks import Seen, answered, truth_values
from regard.shapes import default_scale

NAME = "regard_listening"
OVER = "regard_over_"  # and behind it the implementation of the layers that stay as they are
PART = "regard"  # what a used mechanism is called in its layer
CELLS = 1 << 22  # weights computed together


@runtime_checkable
class AttentionRecorder(Protocol):
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
def recording_attention(model: Any, ear: AttentionRecorder) -> Iterator[None]:
    """Every attention call of the model is heard, for a while; afterwards the model is as it was."""
    library = transformers()
    masks = _mask_interface()
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
        cross = crosses(module, names.get(module, ""))
        call = Call(module, names.get(module, ""), query, key, value, attention_mask, scale, cross, more)
        used = replacement_in(module)
        return _heard(call, ear, _eager(module) if used is None else partial(_with_weights, used)), None

    before = _implementations(model)
    library.AttentionInterface.register(NAME, attention)
    masks.register(NAME, truth_values)
    try:
        _set(model, NAME)
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        _forget(library.AttentionInterface)
        _forget(masks)


def using(model: Any) -> None:
    """From now on the layers with a mechanism of ours in them run it, and the others what they ran before."""
    library, masks = transformers(), _mask_interface()
    for config in _configs(model):
        base = config._attn_implementation_internal or "eager"
        if not base.startswith(OVER):
            library.AttentionInterface.register(OVER + base, partial(_answer, base=base))
            masks.register(OVER + base, answered)
            config._attn_implementation_internal = OVER + base


def unused(model: Any) -> None:
    """The opposite of `using`."""
    for config in _configs(model):
        name = config._attn_implementation_internal
        if name is not None and name.startswith(OVER):
            config._attn_implementation_internal = name.removeprefix(OVER)


def answers(module: nn.Module) -> bool:
    """Whether the module's attention comes to regard now, and not to a listener or to what it had before."""
    return str(getattr(getattr(module, "config", None), "_attn_implementation", "")).startswith(OVER)


def calls_interface(module: nn.Module) -> bool:
    """Whether a module is attention that asks the interface which function to call: its code names it."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def replacement_in(module: nn.Module) -> Replacement | None:
    """The mechanism of ours in a layer, if there is one."""
    found = module._modules.get(PART)
    return found if isinstance(found, Replacement) else None


def _answer(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    *,
    base: str,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention by the layer's mechanism of ours, or by the function `base` where it has none."""
    used = replacement_in(module)
    more["output_attentions"] = more.get("output_attentions") or _weights_wanted()
    if used is None:
        causal = {} if is_causal is None else {"is_causal": is_causal}
        return _own(base, module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **causal, **more)
    used.asked = True
    call = Call(
        module, used.name, query, key, value, attention_mask, _scale(module, query, scaling), used.cross, dict(more)
    )
    # Without any mask the eager functions show everything; the fused one asks the module.
    causal_by_default = base != "eager" and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    return attended(used, call, float(dropout or 0.0), causal_by_default)


def _own(
    base: str, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any
) -> tuple[Tensor, Tensor | None]:
    """The layer's own attention, with the mask that it would have had."""
    if more.get("output_attentions"):
        base = "eager"  # the others give no weights
    if isinstance(mask, Seen):
        mask = mask.made(base)
    elif mask is not None and mask.dtype == torch.bool and base == "eager":
        mask = _lowered(mask, q.dtype)
    if base == "eager":
        more["scaling"] = _scale(module, q, more["scaling"])
    function = _eager(module) if base == "eager" else transformers().AttentionInterface()[base]
    out, weights = function(module, q, k, v, mask, **more)
    return out, weights


def _weights_wanted() -> bool:
    """Whether the model collects weights in this pass: not every layer hands on that it was asked for them."""
    from transformers.utils import output_capturing

    collector: Any = output_capturing._active_collector
    return any(name.endswith("attentions") for name in collector.get() or ())


def _with_weights(
    used: Replacement, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any
) -> tuple[Tensor, Tensor | None]:
    """A mechanism of ours, as the listener wants it: with its weights."""
    scaling = more.pop("scaling")
    call = Call(module, used.name, q, k, v, mask, scaling, used.cross, more | {"output_attentions": True})
    return attended(used, call, 0.0, False)


def _mask_interface() -> Any:
    from transformers.masking_utils import AttentionMaskInterface

    return AttentionMaskInterface


def _heard(call: Call, ear: AttentionRecorder, eager: Callable[..., Any]) -> Tensor:
    """The output [B,T,H,V] of the model's own function, over some queries at a time."""
    B, H, T, _ = call.q.shape
    S = call.k.shape[2]
    ear.begin(call)
    found = []
    for start in range(0, T, max(1, CELLS // max(1, B * H * S))):
        stop = min(T, start + max(1, CELLS // max(1, B * H * S)))
        more = {name: _cut(x, start, stop, T, S) for name, x in call.kwargs.items()}
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
    return _lowered(rows, dtype) if rows.dtype == torch.bool else rows


def _lowered(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Truth values as numbers to add: as low as can be where nothing may be seen."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


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
    return default_scale(head_dim if isinstance(head_dim, int) else query.shape[-1])


_CROSS = re.compile(r"cross|encoder_attn|EncDec", re.I)


def crosses(module: nn.Module, name: str) -> bool:
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
