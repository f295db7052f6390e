"""The only file that changes the tables of transformers' attention interface.

Transformers keeps a table of attention functions and a table of mask functions, both by name; the config of a model
names the entry that its layers call. The functions here add entries and change that name, in two ways:

- `install`: layers with an `AttentionReplacement` call it, and every other layer calls the same function as before, or
  the `eager` one if weights are asked for.
- `recording_attention`: while the context lasts, each call goes to the layer's replacement, or else to the `eager`
  function of the model's modeling file, and a recorder gets its inputs and its weights. No dropout is applied to
  the weights meanwhile. So the recorded weights of a layer without a replacement are exactly those that the modeling
  file computes without dropout.
"""

from __future__ import annotations

import inspect
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ExtraMissingError
from regard.errors import HubError as HubError
from regard.hub.calls import AttentionReplacement
from regard.hub.calls import Call as Call
from regard.hub.masks import LazyMask, boolean_mask, lazy_mask
from regard.hub.memories import recording_memories
from regard.hub.recording import AttentionRecorder as AttentionRecorder
from regard.hub.recording import mask_for_eager, record_call
from regard.shapes import default_scale

RECORDING = "regard_recording"
# "regard_over_sdpa" is the entry of a model whose layers without a replacement use sdpa.
PREFIX = "regard_over_"
SUBMODULE = "regard"  # the name of a replacement in its attention module, and so in the model's state dict


class MechanismEntry(ABC):
    """An entry of transformers' tables that runs a mechanism in every layer of a model that names it."""

    @abstractmethod
    def replacement(self, module: nn.Module, q: Tensor) -> AttentionReplacement:
        """Returns what computes the attention of a module, for queries like q [B,H,T,K]."""

    @abstractmethod
    def mask(self, **arguments: Any) -> Tensor:
        """Returns the mask of a forward pass, as transformers' mask functions do."""


MECHANISM_ENTRIES: dict[str, MechanismEntry] = {}  # by the values of attn_implementation


def add_entry(name: str, entry: MechanismEntry) -> None:
    """Adds an entry to transformers' tables, or replaces the one of that name."""
    MECHANISM_ENTRIES[name] = entry
    _register(name, partial(_attention_forward, original=name), entry.mask)


def import_transformers() -> Any:
    """Returns the module `transformers`; if it is not installed, the error says how to install it."""
    try:
        import transformers
    except ImportError:
        raise ExtraMissingError('Hugging Face models need `transformers`: pip install "regard[hf]"') from None
    return transformers


@contextmanager
def recording_attention(model: Any, recorder: AttentionRecorder) -> Iterator[None]:
    """Shows every attention call of the model to the recorder while the context lasts.

    A recorder that is a `MemoryRecorder` is shown those of gated and delta layers too.

    No dropout is applied to the attention weights while they are recorded, not even in training mode.
    """
    names = {module: name for name, module in model.named_modules()}
    # The private field: the public setter would also overwrite the implementation in the sub-configs.
    before = [(config, config._attn_implementation_internal) for config in _configs(model)]
    originals = {id(config): name for config, name in before}

    def record(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        name = names.get(module, "")
        cross = is_cross_attention(module, name)
        own = _find_replacement(module, query, originals.get(id(getattr(module, "config", None))))
        scale = _scale(module, query, scaling)
        call = Call(module, name, query, key, value, attention_mask, scale, cross, kwargs, own)
        return record_call(call, recorder, _recorded_function(module, own)), None

    # Booleans and not a LazyMask: a recorder reads the mask of every call anyway.
    _register(RECORDING, record, boolean_mask)
    try:
        for config, _ in before:
            config._attn_implementation_internal = RECORDING
        with recording_memories(model, recorder):
            yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        _unregister(RECORDING)
        if not any(replacement_in(module) for module in model.modules()):
            # If `restore` was called inside the context, the loop above has undone it: the configs name the entries of
            # `install` again, and `uninstall` corrects that. If the model never had a replacement, no config names such
            # an entry, and `uninstall` leaves the configs as they are.
            uninstall(model)


def install(model: Any) -> None:
    """Makes the layers with a replacement call it.

    The other layers call the same function as before, or the eager one if weights are asked for.
    """
    configs = tuple(_configs(model))
    for config in configs:
        original = config._attn_implementation_internal or "eager"
        if not original.startswith(PREFIX):
            config._attn_implementation_internal = PREFIX + original
    names = frozenset(config._attn_implementation_internal for config in configs)
    register_entries(names)
    # Each replacement knows the configs and entries of its model, so that `uninstall` keeps those that others need.
    for module in model.modules():
        replacement = replacement_in(module)
        if replacement is not None:
            replacement.configs = configs
            replacement.implementations = names


def register_entries(names: Iterable[str]) -> None:
    """Adds the entries of `install` with these names to transformers' tables."""
    for name in names:
        _register(name, partial(_attention_forward, original=name.removeprefix(PREFIX)), lazy_mask)


def uninstall(model: Any) -> None:
    """Undoes `install`: every layer calls its own function again, and entries that no other model needs are removed.

    If another model shares a config with this one and has replacements, the config keeps naming their entry. That
    changes nothing for this model: the entry calls the original function for layers without a replacement.
    """
    shared = {id(config) for replacement in AttentionReplacement.live for config in replacement.configs}
    for config in _configs(model):
        name = config._attn_implementation_internal
        if name is not None and name.startswith(PREFIX) and id(config) not in shared:
            config._attn_implementation_internal = name.removeprefix(PREFIX)
    needed = {name for replacement in AttentionReplacement.live for name in replacement.implementations}
    for name in _registered_names() - needed:
        _unregister(name)


def is_installed(module: nn.Module) -> bool:
    """Tells whether a layer's config names an entry of `install` now; False while it names the entry for recording.

    Raises an error if the layer has a replacement and its config names any other entry: the config was changed after
    `install`, and the replacement would be ignored without a word.
    """
    config = getattr(module, "config", None)
    name = str(getattr(config, "_attn_implementation", RECORDING))
    replacement = replacement_in(module)
    if replacement is not None and name != RECORDING and not name.startswith(PREFIX):
        raise HubError(
            f"{replacement.name}: the attention implementation was set to '{name}' after use(), so that "
            f"{replacement.mechanism.name} would not be called any more. Call use() again to run it over '{name}', or "
            "restore(model) to do without it"
        )
    return name.startswith(PREFIX)


def replacement_in(module: nn.Module) -> AttentionReplacement | None:
    """Returns the replacement in an attention module, or None."""
    submodule = module._modules.get(SUBMODULE)
    return submodule if isinstance(submodule, AttentionReplacement) else None


def _find_replacement(module: nn.Module, q: Tensor, implementation: str | None) -> AttentionReplacement | None:
    """Returns the replacement in an attention module, or that of the entry which its config names, or None."""
    own = replacement_in(module)
    entry = MECHANISM_ENTRIES.get((implementation or "").removeprefix(PREFIX))
    if own is not None or entry is None:
        return own
    return entry.replacement(module, q)


def calls_interface(module: nn.Module) -> bool:
    """Tells whether a module looks its attention function up in transformers' table: its forward names the table."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


_CROSS = re.compile(r"cross|encoder_attn|EncDec", re.I)


def is_cross_attention(module: nn.Module, name: str) -> bool:
    """Tells whether a module is cross-attention, by its attribute `is_cross_attention` or by its name."""
    return bool(getattr(module, "is_cross_attention", None)) or _CROSS.search(name) is not None


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    *,
    original: str,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Returns out [B,T,H,V], and weights or None, from the layer's replacement, or else from the entry `original`."""
    replacement = _find_replacement(module, query, original)
    kwargs["output_attentions"] = kwargs.get("output_attentions") or _model_collects_weights()
    if replacement is None:
        if is_causal is not None:
            kwargs["is_causal"] = is_causal
        kwargs |= {"scaling": scaling, "dropout": dropout}
        return _call_original(original, module, query, key, value, attention_mask, kwargs)
    replacement.was_called = True
    scale = _scale(module, query, scaling)
    call = Call(module, replacement.name, query, key, value, attention_mask, scale, replacement.cross, dict(kwargs))
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    # Without a mask, eager functions let every query see every key; fused functions read the module's `is_causal`.
    output: tuple[Tensor, Tensor | None] = replacement(call, float(dropout or 0.0), is_causal and original != "eager")
    return output


def _call_original(
    name: str, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Returns out and weights of the layer's own attention function, or of the eager one if weights are asked for.

    The function gets the mask in the form that it expects.
    """
    if kwargs.get("output_attentions"):
        name = "eager"  # fused functions return no weights
    if isinstance(mask, LazyMask):
        mask = mask.for_implementation(name)
    elif mask is not None and mask.dtype == torch.bool and name == "eager":
        mask = mask_for_eager(mask, q.dtype)
    if name == "eager":
        function = _eager_function(module)
        kwargs["scaling"] = _scale(module, q, kwargs["scaling"])
    else:
        function = import_transformers().AttentionInterface()[name]
    out, weights = function(module, q, k, v, mask, **kwargs)
    return out, weights


def _model_collects_weights() -> bool:
    """Tells whether transformers collects attention weights in this forward pass.

    Its collector is asked, because some layers do not pass `output_attentions` on to their attention function.
    """
    from transformers.utils import output_capturing

    collector: Any = output_capturing._active_collector
    return any(name.endswith("attentions") for name in collector.get() or ())


def _recorded_function(module: nn.Module, replacement: AttentionReplacement | None) -> Callable[..., Any]:
    """Returns the function that computes a layer's output and weights: its replacement, or else its eager function."""
    if replacement is None:
        return _eager_function(module)

    def attend(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scaling: float, **kwargs: Any
    ) -> Any:
        kwargs["output_attentions"] = True
        return replacement(Call(module, replacement.name, q, k, v, mask, scaling, replacement.cross, kwargs))

    return attend


def _eager_function(module: nn.Module) -> Callable[..., Any]:
    """Returns the eager function of the modeling file that defines the module's class, or one of its base classes."""
    # Modeling files of transformers define it under this name.
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function  # type: ignore[no-any-return]
    raise HubError(
        f"{type(module).__name__} comes without an eager attention function, from which weights are recorded; expected "
        "a class whose modeling file defines eager_attention_forward"
    )


def _scale(module: nn.Module, query: Tensor, scaling: float | None) -> float:
    """Returns the factor of q·k: `scaling`, or if it is None, 1/√d, where d is the module's `head_dim` or else K."""
    if scaling is not None:
        return float(scaling)
    head_dim = getattr(module, "head_dim", None)
    if not isinstance(head_dim, int):
        head_dim = query.shape[-1]
    return default_scale(head_dim)


def _configs(model: Any) -> Iterator[Any]:
    """Yields each config in a model once: the submodels of a composite model have configs of their own."""
    seen: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal") and id(config) not in seen:
            seen.add(id(config))
            yield config


def _interfaces() -> tuple[Any, Any]:
    """Returns transformers' tables of attention functions and of mask functions."""
    from transformers.masking_utils import AttentionMaskInterface

    return import_transformers().AttentionInterface, AttentionMaskInterface


def _register(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Adds an attention function and its mask function; without a mask function transformers would pass no mask."""
    attention_functions, mask_functions = _interfaces()
    attention_functions.register(name, attention)
    mask_functions.register(name, mask)


def _unregister(name: str) -> None:
    """Removes an entry from both tables; transformers has no public function for this."""
    for interface in _interfaces():
        interface._global_mapping.pop(name, None)


def _registered_names() -> set[str]:
    """Returns the names of the entries in the tables that `install` made."""
    return {name for interface in _interfaces() for name in interface._global_mapping if name.startswith(PREFIX)}
