"""Mechanisms under names of their own in transformers' table: `attn_implementation="regard_elu"`.

Transformers then builds, loads and runs a model as it does with sdpa, and knows nothing of regard. So nothing is added
to the model: neither parameters nor hooks, and its cache keeps keys and values. Only mechanisms without learned
parameters can run like that, as there is no place where such parameters would be trained or saved.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from regard.errors import HubError, OptionError
from regard.hub.attention import MechanismEntry, add_entry, import_transformers, is_cross_attention
from regard.hub.calls import AttentionReplacement
from regard.hub.masks import lazy_mask
from regard.mechanisms import Mechanism, lookup, mechanisms
from regard.mechanisms.base import fitted, on_meta
from regard.shapes import Size

NAME_PREFIX = "regard_"  # without a slash, which transformers takes for a repository of kernels


def register(mechanism: str | None = None, **options: Any) -> list[str]:
    """Makes mechanisms known to transformers, and returns the values of `attn_implementation` that name them.

    Without a name all mechanisms are registered that have no learned parameters, those of plugins among them. With a
    name it is that one, with its `options`: `register("performer", features=64)`. Every new process, and every worker
    of a data loader or a launcher, has to call it again. Mechanisms with learned parameters get a name as well, under
    which the first forward pass of a model raises a HubError that says what to do.
    """
    import_transformers()
    if mechanism is not None:
        reason = find_reason_against(mechanism, options)
        if reason is not None:
            raise OptionError(f"{mechanism} cannot be registered: {reason}")
        return [_add(mechanism, options, None)]
    if options:
        raise OptionError(f'{", ".join(options)}: options go with a name, as in register("performer", features=64)')
    reasons = {name: find_reason_against(name, {}) for name in mechanisms()}
    added = [_add(name, {}, reason) for name, reason in reasons.items()]
    return [entry for entry, reason in zip(added, reasons.values(), strict=True) if reason is None]


def find_reason_against(name: str, options: dict[str, Any]) -> str | None:
    """Returns why a mechanism cannot run without being a submodule of the model; None if it can."""
    cls = lookup(name)
    use = f'regard.hub.use(model, "{name}") gives each layer its own'
    if not set(cls.needs) <= set("qkv"):
        return f"it needs decays or write strengths, which a layer of transformers does not compute; {use}"
    if cls.needs != "qkv":
        return f"its scores are parameters of a layer and do not come from q and k; {use}"
    if any(True for _ in on_meta(name, Size(), **options).parameters()):
        return f"it has learned parameters, which have to belong to the model; {use}"
    return None


class RegisteredMechanism(MechanismEntry):
    """One entry: the mechanism of each attention module that has called it, or the reason why there is none."""

    def __init__(self, mechanism: str, options: dict[str, Any], reason: str | None) -> None:
        self.mechanism = mechanism
        self.options = options
        self.reason = reason
        self._replacements: WeakKeyDictionary[nn.Module, AttentionReplacement] = WeakKeyDictionary()

    def replacement(self, module: nn.Module, q: Tensor) -> AttentionReplacement:
        """Returns what computes the attention of a module, for queries like q [B,H,T,K]."""
        self._require()
        found = self._replacements.get(module)
        if found is None or not _is_built_for(found.mechanism, q):
            size = Size(H=q.shape[1], K=q.shape[3], V=q.shape[3])
            # Only the device is set: random projections and the like keep the dtype in which they were drawn.
            built = fitted(self.mechanism, size, **self.options).to(q.device)
            name = _describe(module)
            found = AttentionReplacement(built, name, is_cross_attention(module, name))
            found.instead = f'Use attn_implementation="{NAME_PREFIX}softmax" or "sdpa"'
            self._replacements[module] = found
        return found.train(module.training)

    def mask(self, **arguments: Any) -> Tensor:
        """Returns the mask of a forward pass, as transformers asks for it before the first layer."""
        self._require()
        _require_interface(arguments.get("config"), self.mechanism)
        return lazy_mask(**arguments)

    def _require(self) -> None:
        """Raises HubError if the mechanism cannot run without being a submodule of the model."""
        if self.reason is not None:
            raise HubError(f'attn_implementation="{NAME_PREFIX}{self.mechanism}": {self.reason}')


def _add(mechanism: str, options: dict[str, Any], reason: str | None) -> str:
    name = NAME_PREFIX + mechanism
    add_entry(name, RegisteredMechanism(mechanism, options, reason))
    return name


def _is_built_for(mechanism: Mechanism, q: Tensor) -> bool:
    """Tells whether a mechanism's buffers are on q's device: they are not the model's, so they do not move with it."""
    return all(buffer.device == q.device for buffer in mechanism.buffers())


def _describe(module: nn.Module) -> str:
    """Returns what an attention module is called in errors; its name in the model is not known here."""
    layer = getattr(module, "layer_idx", None)
    return type(module).__name__ if layer is None else f"{type(module).__name__} of layer {layer}"


def _require_interface(config: Any, mechanism: str) -> None:
    """Raises HubError for models that bypass transformers' attention interface, which would ignore the entry."""
    modelling = type(config).__module__.replace(".configuration_", ".modeling_")
    module = sys.modules.get(modelling)
    if module is not None and not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        raise HubError(
            f"models of type {config.model_type} make their attention themselves and not through transformers' "
            f"interface, so that {mechanism} would never be called. Load the model without {NAME_PREFIX}{mechanism}"
        )
