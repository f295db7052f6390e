"""A trained model with fewer key/value heads or another mechanism, and the old weights wherever they have a place.

Pooling: key/value head g of the new model is the mean of the old ones that served the same queries,
    W'_g = mean of W_h over h // (G/G') = g, biases alike.
Another mechanism inherits queries, keys and values as they are. The quadratic kernel (q·k + 1)² has no 1/√K of its own:
there q and k are each divided by (2√K)^½, since e^s = (1 + s/2)² to the first order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.errors import OptionError
from regard.mechanisms import lookup
from regard.models import GPT, Encoder, Model
from regard.models.config import StackConfig
from regard.nn import Attention
from regard.registry import accepts

# What queries and keys of softmax are multiplied by before another mechanism takes them, for key width K.
SCALES: dict[str, Callable[[int], float]] = {"quadratic": lambda K: (2 * math.sqrt(K)) ** -0.5}


class ConvertError(OptionError):
    """A conversion that cannot be."""


def converted(
    model: Model[Any],
    *,
    kv_heads: int | None = None,
    mechanism: str | None = None,
    layers: Sequence[int] | None = None,
    options: Mapping[str, Any] | None = None,
) -> GPT | Encoder:
    """A new model with `kv_heads` key/value heads, and with another `mechanism` in some `layers` (all unless said).

    The model given stays as it is. `options` are those of the mechanism.
    """
    if not isinstance(model, GPT | Encoder):
        raise ConvertError(
            f"a {type(model).__name__} cannot be converted: expected a GPT or an Encoder; an encoder-decoder has "
            "attention between two sequences, which is not covered"
        )
    if kv_heads is None and mechanism is None:
        raise ConvertError("nothing to convert: say how many key/value heads (--kv-heads), or a --mechanism, or both")
    config = model.config
    changes: dict[str, Any] = {}
    if kv_heads is not None:
        _check_heads(config, kv_heads)
        changes["attention"] = {"groups": kv_heads}
    chosen = _chosen(config, mechanism, layers, options or {})
    if mechanism is not None:
        changes |= _mechanisms(config, mechanism, chosen, options or {})
    with torch.random.fork_rng([]):  # building a model draws numbers
        made: GPT | Encoder = type(model)(config.but(**changes))  # type: ignore[arg-type]
    like = next(model.parameters())
    made.to(like.device, like.dtype).load_state_dict(_weights(model, made, chosen))
    made.tokenizer = model.tokenizer
    return made.eval()


def changed_layers(before: Model[Any], after: Model[Any]) -> list[int]:
    """The layers whose attention a conversion changed."""
    pairs = zip(layers_of(before), layers_of(after), strict=True)
    return [n for n, (a, b) in enumerate(pairs) if _kind(a) != _kind(b)]


def layers_of(model: Model[Any]) -> list[Attention]:
    """The attention of each layer."""
    assert isinstance(model, GPT | Encoder)
    return [block.attention for block in model.stack.layers]


def _kind(attention: Attention) -> tuple[Any, ...]:
    buffers = [(n, tuple(x.shape)) for n, x in attention.mechanism.state_dict().items()]
    return attention.mechanism.name, attention.size.G, buffers


def pooled(rows: Tensor, before: int, after: int) -> Tensor:
    """Rows of `before` heads as the means of neighbours, `after` heads."""
    made: Tensor = rows.unflatten(0, (after, before // after, -1)).mean(1).flatten(0, 1)
    return made


def _check_heads(config: StackConfig, asked: int) -> None:
    own = config.attention.groups or config.attention.heads
    fitting = [n for n in range(1, own) if own % n == 0]
    if not fitting:
        raise ConvertError("--kv-heads: the model has one key/value head already, and fewer cannot be")
    if asked not in fitting:
        raise ConvertError(
            f"--kv-heads {asked}: expected one of {', '.join(map(str, fitting))}, which divide the model's {own} "
            "key/value heads"
        )


def _chosen(
    config: StackConfig, mechanism: str | None, layers: Sequence[int] | None, options: Mapping[str, Any]
) -> list[int]:
    """The layers that get the mechanism."""
    if mechanism is None:
        for given, name in ((layers, "--layers"), (options, "--option")):
            if given:
                raise ConvertError(f"{name} belongs to a --mechanism; key/value heads are pooled in every layer")
        return []
    wrong = [n for n in layers or () if not 0 <= n < config.layers]
    if wrong:
        raise ConvertError(f"--layers: no layer {wrong[0]}; the model has layers 0 to {config.layers - 1}")
    return sorted(set(layers)) if layers is not None else list(range(config.layers))


def _mechanisms(config: StackConfig, name: str, chosen: Sequence[int], options: Mapping[str, Any]) -> dict[str, Any]:
    """The changes to a config: a mechanism in some layers, its options beside those that others still take."""
    if not chosen:
        raise ConvertError("--layers names no layer; expected numbers such as 2,3")
    _check_needs(name, "has no queries and keys to inherit: its scores are learned, not products. Train a new model")
    for n in chosen:
        what = "it has no queries and keys that another mechanism could inherit"
        _check_needs(config.per_layer[n], f"is what layer {n} has: {what}")
    names = [name if n in chosen else old for n, old in enumerate(config.per_layer)]
    kept = {n: x for n, x in config.options.items() if any(accepts(lookup(old), n) for old in names)}
    others = {old for n, old in enumerate(config.per_layer) if n not in chosen}
    for option, value in options.items():
        shared = [old for old in others if accepts(lookup(old), option) and config.options.get(option) != value]
        if shared:
            raise ConvertError(
                f"--option {option}={value}: '{shared[0]}' of a layer that stays has that option too, and a model "
                "has one value of it; convert that layer as well, or leave the option out"
            )
    if tuple(names) == config.per_layer and {**kept, **options} == config.options:
        raise ConvertError(f"nothing to convert: these layers have '{name}' already")
    made: Any = names[0] if len(set(names)) == 1 else names
    return {"mechanism": made, "options": {**kept, **options}}


def _check_needs(name: str, why: str) -> None:
    if lookup(name).needs != "qkv":
        raise ConvertError(f"'{name}' {why}")


def _weights(model: GPT | Encoder, made: GPT | Encoder, chosen: Sequence[int]) -> dict[str, Tensor]:
    """The weights of the new model: those of the old one, with heads pooled and queries and keys scaled."""
    state = {n: x.detach().clone() for n, x in model.state_dict().items()}
    fresh = made.state_dict()
    for n, (old, new) in enumerate(zip(layers_of(model), layers_of(made), strict=True)):
        place = f"stack.blocks.{n}.attention."
        if n in chosen:  # directions of random features and the like are the new mechanism's own
            own = f"{place}mechanism."
            state = {key: x for key, x in state.items() if not key.startswith(own)}
            state |= {key: x for key, x in fresh.items() if key.startswith(own)}
        for kind in ("weight", "bias"):
            if f"{place}project.{kind}" in state:
                state[f"{place}project.{kind}"] = _pooled_rows(old, new, state[f"{place}project.{kind}"])
        if n in chosen and old.mechanism.name == "softmax" and new.mechanism.name in SCALES:
            _scale(state, place, new, SCALES[new.mechanism.name](new.size.K))
    return state


def _pooled_rows(old: Attention, new: Attention, rows: Tensor) -> Tensor:
    """Weights or biases of the fused projection, keys and values with their heads pooled."""
    parts = dict(zip(old.needs, rows.split_with_sizes(old.widths), strict=True))
    pool = {name: pooled(part, old.size.G, new.size.G) for name, part in parts.items() if name != "q"}
    return torch.cat([pool.get(name, part) for name, part in parts.items()])


def _scale(state: dict[str, Tensor], place: str, new: Attention, scale: float) -> None:
    """Queries and keys times a number: in their norms where they have such, which would undo it before."""
    if new.query_norm is not None:
        for name in ("query_norm", "key_norm"):
            for kind in ("weight", "bias"):
                if f"{place}{name}.{kind}" in state:
                    state[f"{place}{name}.{kind}"] *= scale
        return
    for kind in ("weight", "bias"):
        if f"{place}project.{kind}" in state:
            state[f"{place}project.{kind}"][: sum(new.widths[:2])] *= scale
