"""Mechanisms of regard in Hugging Face models: `use` puts one in the place of the attention of some layers, `restore`
takes all of them out again. Nothing of the model's own is changed or copied.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import nn

from regard.errors import HubError, OptionError
from regard.hub.attention import PART, answers, calls_interface, crosses, replacement_in, unused, using
from regard.hub.calls import Replacement
from regard.mechanisms import Mechanism, lookup
from regard.mechanisms import mechanism as build
from regard.registry import accepted_options, parameters_of

Part = Literal["encoder", "decoder", "cross"]
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class Place:
    """An attention module of a model: its name, the number of its layer, and the part that it belongs to."""

    name: str
    module: nn.Module
    layer: int
    part: Part


def places(model: nn.Module) -> list[Place]:
    """Every attention module that a mechanism can be put into."""
    found: list[Place] = []
    for name, module in model.named_modules():
        if calls_interface(module):
            number = re.search(r"\.(\d+)\.", f".{name}.")
            found.append(Place(name, module, int(number[1]) if number else len(found), _part(model, module, name)))
    return found


def use(
    model: M,
    mechanism: str | Mechanism,
    layers: Sequence[int] | None = None,
    *,
    parts: Sequence[Part] | None = None,
    **options: Any,
) -> M:
    """The same Hugging Face model, running a mechanism of regard in some layers, or in all.

    `mechanism` is a name with its `options` (features=256), or one already built, of which each layer gets a copy.
    `parts` names the sides of an encoder-decoder: "encoder", "decoder", "cross". Forward, backward and `generate()`
    work as before; linear mechanisms keep a state of constant size in the place of keys and values. What the mechanism
    learns or has drawn belongs to the model. What a layer asks for that the mechanism cannot honour is an error that
    names it. Several calls for different layers add up; `restore` undoes them all.
    """
    if isinstance(mechanism, Mechanism) and options:
        raise OptionError(f"{', '.join(options)}: options go with a name; {mechanism.name} is built already")
    chosen = _chosen(model, layers, parts)
    made = [_made(mechanism, place, model, options) for place in chosen]  # all of them before anything changes
    for place, used in zip(chosen, made, strict=True):
        _take_out(place.module)
        place.module.add_module(PART, used)
        place.module.register_forward_pre_hook(_before, with_kwargs=True)
        place.module.register_forward_hook(_after)
    using(model)
    return model


def restore(model: M) -> M:
    """The same model with the attention that it came with; a cache that was filled before is of no use any more."""
    for module in model.modules():
        _take_out(module)
    unused(model)
    return model


def _chosen(model: nn.Module, layers: Sequence[int] | None, parts: Sequence[Part] | None) -> list[Place]:
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
    for layer in layers if layers is not None else ():
        if layer not in numbers:
            raise OptionError(f"layers: {type(model).__name__} has no layer {layer}; expected {_spans(numbers)}")
    return [p for p in known if layers is None or p.layer in layers]


def _made(mechanism: str | Mechanism, place: Place, model: nn.Module, options: Mapping[str, Any]) -> Replacement:
    """The mechanism for one place, as wide as its heads, where its parameters are."""
    like = next((p for p in place.module.parameters() if p.is_floating_point()), None)
    built = copy.deepcopy(mechanism) if isinstance(mechanism, Mechanism) else _fitted(mechanism, place, model, options)
    if place.part == "cross" and not built.crosses:
        raise OptionError(
            f"{place.name}: {built.name} has no cross-attention, as its scores belong to positions of one sequence. "
            'Leave these layers out: parts=["encoder", "decoder"]'
        )
    if like is not None:
        built.to(like.device)
        for p in built.parameters():
            p.data = p.data.to(like.dtype)
    return Replacement(built, place.name, place.part == "cross").train(place.module.training)


def _fitted(name: str, place: Place, model: nn.Module, options: Mapping[str, Any]) -> Mechanism:
    module = place.module
    config: Any = getattr(module, "config", None) or model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = _number(module, config, "num_heads", "num_attention_heads", "n_heads")
    hidden = _number(module, config, "hidden_size", "d_model", "embed_dim")
    width = _number(module, config, "head_dim", "attention_head_size", "key_value_proj_dim", "qk_head_dim", "d_kv")
    if width is None and heads and hidden:
        width = hidden // heads
    length = _number(module, config, "max_position_embeddings", "n_positions", "max_source_positions")
    known = {"heads": heads, "width": width, "length": length}
    for key, p in parameters_of(lookup(name)).items():
        if key in known and known[key] is None and key not in options and p.default is p.empty:
            raise OptionError(f"{place.name}: its {key} is not in the model's config; give {key}= to use '{name}'")
    offered = {n: x for n, x in known.items() if x is not None}
    return build(name, **accepted_options(lookup(name), offered) | dict(options))


def _number(module: nn.Module, config: Any, *names: str) -> int | None:
    for owner in (module, config):
        for name in names:
            found = getattr(owner, name, None)
            if isinstance(found, int) and not isinstance(found, bool) and found > 0:
                return found
    return None


def _part(model: Any, module: nn.Module, name: str) -> Part:
    if crosses(module, name):
        return "cross"
    if getattr(model.config, "is_encoder_decoder", False):
        parts = name.split(".")
        return "encoder" if "encoder" in parts and "decoder" not in parts else "decoder"
    return "decoder" if getattr(module, "is_causal", True) else "encoder"


def _take_out(module: nn.Module) -> None:
    if replacement_in(module) is None:
        return
    del module._modules[PART]
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number in [n for n, hook in hooks.items() if hook in (_before, _after)]:
            del hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)


def _before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Makes the layer's part of the cache ours, where the mechanism keeps a state."""
    used = replacement_in(module)
    if used is None or not answers(module):
        return
    used.asked, used.state = False, None
    if used.keeps_state:
        from regard.hub.cache import state_layer

        used.state = state_layer(module, used.mechanism, used.cross, args, kwargs)


def _after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    used = replacement_in(module)
    if used is not None and answers(module) and not used.asked:
        raise HubError(
            f"{used.name}: {type(module).__name__} did not call transformers' attention interface, so "
            f"{used.mechanism.name} was never asked. Leave this layer out, or restore(model)"
        )


def _spans(numbers: Sequence[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
