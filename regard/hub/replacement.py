"""Mechanisms of regard in Hugging Face models.

`use` replaces the attention of some layers by a mechanism, and `restore` removes all replacements again. The model's
own parameters and code are neither changed nor copied.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import nn

from regard.errors import HubError, OptionError
from regard.hub.attention import (
    SUBMODULE,
    calls_interface,
    install,
    is_cross_attention,
    is_installed,
    replacement_in,
    uninstall,
)
from regard.hub.calls import AttentionReplacement
from regard.mechanisms import Mechanism, lookup
from regard.mechanisms import mechanism as build_mechanism
from regard.nn.gates import Gates
from regard.registry import accepted_options, parameters_of

Part = Literal["encoder", "decoder", "cross"]
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class Place:
    """An attention module whose attention can be replaced: its name, its layer's number, and its part.

    `part` is "cross" for cross-attention, and "encoder" or "decoder" for self-attention. In a model that is no
    encoder-decoder, causal self-attention counts as "decoder", any other as "encoder".
    """

    name: str
    module: nn.Module
    layer: int
    part: Part


def places(model: nn.Module) -> list[Place]:
    """Returns the attention modules of a model that `use` can give a mechanism to."""
    found: list[Place] = []
    for name, module in model.named_modules():
        if calls_interface(module):
            # The first number in a name is that of the layer: "model.layers.3.self_attn".
            number = re.search(r"\.(\d+)\.", f".{name}.")
            layer = int(number[1]) if number else len(found)
            found.append(Place(name, module, layer, _part_of(model, module, name)))
    return found


def use(
    model: M,
    mechanism: str | Mechanism,
    layers: Sequence[int] | None = None,
    *,
    parts: Sequence[Part] | None = None,
    decay: str = "softplus",
    **options: Any,
) -> M:
    """Replaces the attention of a Hugging Face model by a mechanism of regard, in some layers or in all.

    `mechanism` is a name with its `options` (features=256), or a Mechanism, of which each layer gets a copy. `parts`
    selects kinds of attention in an encoder-decoder: "encoder", "decoder", "cross". The model is changed in place and
    returned. Forward, backward and `generate()` work as before; linear mechanisms and those with a memory keep a state
    of constant size in the cache, instead of keys and values. The mechanism's parameters and buffers become part of the
    model. Mechanisms that take decays and write strengths get a projection of the layer's input that makes them;
    `decay` says how (see `regard.nn.gates`). The forward pass raises an error if a layer uses a feature that the
    mechanism does not support. Calls for different layers add up; `restore` undoes them all.
    """
    if callable(mechanism) and not isinstance(mechanism, type | Mechanism):
        mechanism = build_mechanism(mechanism, **options)  # a function of a query and a key; anything else raises
        options = {}
    if isinstance(mechanism, Mechanism) and options:
        raise OptionError(f"{', '.join(options)}: options go with a name; {mechanism.name} is built already")
    chosen = _choose_places(model, layers, parts)
    # All replacements are built before anything changes, so that an error leaves the model as it was.
    replacements = [_build_replacement(mechanism, place, model, options, decay) for place in chosen]
    for place, replacement in zip(chosen, replacements, strict=True):
        _remove_replacement(place.module)
        place.module.add_module(SUBMODULE, replacement)
        place.module.register_forward_pre_hook(_before_forward, with_kwargs=True)
        place.module.register_forward_hook(_after_forward)
    install(model)
    return model


def restore(model: M) -> M:
    """Restores the model's own attention in all layers, and returns the model.

    A cache that holds the state of a mechanism cannot be used afterwards.
    """
    for module in model.modules():
        _remove_replacement(module)
    uninstall(model)
    return model


def _choose_places(model: nn.Module, layers: Sequence[int] | None, parts: Sequence[Part] | None) -> list[Place]:
    """Returns the attention modules of the given layers and parts; None stands for all layers, or all parts."""
    if getattr(model, "config", None) is None:
        raise OptionError(f"expected a model of transformers, with a config; given a {type(model).__name__}")
    known = places(model)
    if not known:
        raise HubError(
            f"{type(model).__name__} makes its attention itself and not through transformers' interface, so no "
            "mechanism can take its place; expected a model such as GPT-2, Llama, Mistral, Qwen, BERT, BART or T5"
        )
    for part in parts or ():
        if part not in {p.part for p in known}:
            have = ", ".join(sorted({p.part for p in known}))
            raise OptionError(f"parts: {type(model).__name__} has no attention '{part}'; it has {have}")
    known = [p for p in known if parts is None or p.part in parts]
    numbers = sorted({p.layer for p in known})
    for layer in layers or ():
        if layer not in numbers:
            raise OptionError(f"layers: {type(model).__name__} has no layer {layer}; expected {_span(numbers)}")
    return [p for p in known if layers is None or p.layer in layers]


def _build_replacement(
    mechanism: str | Mechanism, place: Place, model: nn.Module, options: Mapping[str, Any], decay: str
) -> AttentionReplacement:
    """Returns the replacement for an attention module, on the device and in the dtype of that module's parameters."""
    if isinstance(mechanism, Mechanism):
        built = copy.deepcopy(mechanism)
    else:
        built = _build_for_place(mechanism, place, model, options)
    if place.part == "cross" and not built.crosses:
        raise OptionError(
            f"{place.name}: {built.name} has no cross-attention, as its scores belong to positions of one sequence. "
            'Leave these layers out: parts=["encoder", "decoder"]'
        )
    if place.part == "encoder" and built.causal_only:
        raise OptionError(
            f"{place.name}: {built.name} is causal, and an encoder looks both ways. Use 'softmax' or a linear mechanism"
        )
    gates = _build_gates(built, place, model, decay)
    if gates is not None and gates.keeps_ranges and isinstance(mechanism, str) and "checks" not in options:
        setattr(built, "checks", False)  # noqa: B010  # a check of values would make the CPU wait for the GPU
    replacement = AttentionReplacement(built, place.name, place.part == "cross", gates)
    like = next((p for p in place.module.parameters() if p.is_floating_point()), None)
    if like is not None:
        replacement.to(like.device)
        # Buffers, such as the random projections of random features, keep their dtype.
        for p in replacement.parameters():
            p.data = p.data.to(like.dtype)
    return replacement.train(place.module.training)


def _build_gates(mechanism: Mechanism, place: Place, model: nn.Module, decay: str) -> Gates | None:
    """Returns the module that computes a and b from an attention module's input, initialised as in regard's models.

    Returns None if the mechanism takes neither.
    """
    if not {"a", "b"} & set(mechanism.needs):
        return None
    config = _config_of(place.module, model)
    heads, width, head_dim = _find_sizes(place.module, config)
    groups = _find_number(place.module, config, "num_key_value_heads") or heads
    if groups is None or head_dim is None or width is None:
        raise OptionError(
            f"{place.name}: its heads and width are not in the model's config, so that {mechanism.name} could not be "
            "given decays and write strengths"
        )
    gates = Gates(width, groups, head_dim, mechanism, decay)
    if gates.project is not None:
        nn.init.normal_(gates.project.weight, std=0.02)
    return gates


def _build_for_place(name: str, place: Place, model: nn.Module, options: Mapping[str, Any]) -> Mechanism:
    """Builds a mechanism by its name; the sizes that its constructor needs are read from the module or its config."""
    module = place.module
    config = _config_of(module, model)
    heads, _, head_dim = _find_sizes(module, config)
    length = _find_number(module, config, "max_position_embeddings", "n_positions", "max_source_positions")
    # The option `width` of a mechanism is the width of one head, not the hidden size.
    sizes = {"heads": heads, "width": head_dim, "length": length}
    for key, parameter in parameters_of(lookup(name)).items():
        required = parameter.default is parameter.empty
        if key in sizes and sizes[key] is None and key not in options and required:
            raise OptionError(f"{place.name}: its {key} is not in the model's config; give {key}= to use '{name}'")
    known = {key: size for key, size in sizes.items() if size is not None}
    return build_mechanism(name, **accepted_options(lookup(name), known) | dict(options))


def _config_of(module: nn.Module, model: Any) -> Any:
    """Returns the config that says how an attention module is built."""
    config: Any = getattr(module, "config", None) or model.config
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    return config


def _find_sizes(module: nn.Module, config: Any) -> tuple[int | None, int | None, int | None]:
    """Returns an attention module's query heads, its input's width, and the width of a head, where they are known."""
    heads = _find_number(module, config, "num_heads", "num_attention_heads", "n_heads")
    width = _find_number(module, config, "hidden_size", "d_model", "embed_dim")
    head_dim = _find_number(
        module, config, "head_dim", "attention_head_size", "key_value_proj_dim", "qk_head_dim", "d_kv"
    )
    if head_dim is None and heads and width:
        head_dim = width // heads
    return heads, width, head_dim


def _find_number(module: nn.Module, config: Any, *names: str) -> int | None:
    """Returns the first positive whole number that the module, or else its config, has under one of the names."""
    for owner in (module, config):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _part_of(model: Any, module: nn.Module, name: str) -> Part:
    """Returns the part of an attention module, as `Place` describes it."""
    if is_cross_attention(module, name):
        return "cross"
    if getattr(model.config, "is_encoder_decoder", False):
        path = name.split(".")
        is_encoder = "encoder" in path and "decoder" not in path
    else:
        is_encoder = not getattr(module, "is_causal", True)
    return "encoder" if is_encoder else "decoder"


def _remove_replacement(module: nn.Module) -> None:
    """Removes the replacement and its hooks from a module, if it has one."""
    replacement = replacement_in(module)
    if replacement is None:
        return
    replacement.implementations = frozenset()
    replacement.configs = ()
    del module._modules[SUBMODULE]
    # Hooks are found by their functions: a deep copy of a model has the hooks, but nobody holds handles to them.
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number in [n for n, hook in hooks.items() if hook in (_before_forward, _after_forward)]:
            del hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)


def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Puts a `StateLayer` into the cache before the module writes to the cache, if the mechanism keeps a state.

    Before that it makes decays and write strengths from the module's input, if the mechanism takes them. Also resets
    `was_called`, which `_after_forward` reads.
    """
    replacement = replacement_in(module)
    if replacement is None:
        return
    if replacement.gates is not None:
        replacement.made = replacement.gates(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])
    if not is_installed(module):
        return
    replacement.was_called = False
    replacement.cache_layer = None
    if replacement.keeps_state:
        from regard.hub.cache import prepare_state_layer

        replacement.cache_layer = prepare_state_layer(module, replacement.mechanism, replacement.cross, args, kwargs)


def _after_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Raises an error if the module did not call its replacement, which would then have no effect."""
    replacement = replacement_in(module)
    if replacement is not None:
        replacement.made = {}
    if replacement is not None and is_installed(module) and not replacement.was_called:
        raise HubError(
            f"{replacement.name}: {type(module).__name__} did not call transformers' attention interface, so "
            f"{replacement.mechanism.name} was never asked. Leave this layer out, or restore(model)"
        )


def _span(numbers: Sequence[int]) -> str:
    """Returns a range of numbers in words, such as "0 to 11"."""
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
