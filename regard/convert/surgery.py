"""Rebuilding a trained model with fewer key/value heads or another mechanism, with its old weights where they fit.

Pooling: key/value head g of the new model is the mean of the old ones that served the same queries,
    W'_g = mean of W_h over h // (G/G') = g, biases alike.
Another mechanism takes the projections of queries, keys and values unchanged. The quadratic kernel (q·k + 1)² has no
factor 1/√K: for it, q and k are each divided by (2√K)^½, since e^s = (1 + s/2)² to first order.
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

# The factors of queries and keys of a softmax model when another mechanism takes them, for key width K.
QUERY_KEY_SCALES: dict[str, Callable[[int], float]] = {"quadratic": lambda K: (2 * math.sqrt(K)) ** -0.5}


class ConvertError(OptionError):
    """A conversion that is not possible."""


def converted(
    model: Model[Any],
    *,
    kv_heads: int | None = None,
    mechanism: str | None = None,
    layers: Sequence[int] | None = None,
    options: Mapping[str, Any] | None = None,
) -> GPT | Encoder:
    """Returns a new model with `kv_heads` key/value heads, and with another `mechanism` in some `layers` (default all).

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
        _check_kv_heads(config, kv_heads)
        changes["attention"] = {"groups": kv_heads}
    chosen = _choose_layers(config, mechanism, layers, options or {})
    if mechanism is not None:
        changes |= _change_mechanism(config, mechanism, chosen, options or {})
    # Building a model draws random weights, which must not change the caller's random state.
    with torch.random.fork_rng([]):
        student: GPT | Encoder = type(model)(config.but(**changes))  # type: ignore[arg-type]
    like = next(model.parameters())
    student.to(like.device, like.dtype).load_state_dict(_convert_weights(model, student, chosen))
    student.tokenizer = model.tokenizer
    return student.eval()


def changed_layers(before: Model[Any], after: Model[Any]) -> list[int]:
    """Returns the numbers of the layers whose attention a conversion changed."""
    pairs = zip(attention_layers(before), attention_layers(after), strict=True)
    return [n for n, (old, new) in enumerate(pairs) if _signature(old) != _signature(new)]


def attention_layers(model: Model[Any]) -> list[Attention]:
    """Returns the attention module of each layer."""
    assert isinstance(model, GPT | Encoder)
    return [block.attention for block in model.stack.layers]


def _signature(attention: Attention) -> tuple[Any, ...]:
    """Returns what a conversion may change in a layer: its mechanism, its key/value heads, and the mechanism's shapes.

    Shapes differ for one mechanism with different options, e.g. numbers of random features.
    """
    shapes = [(name, tuple(x.shape)) for name, x in attention.mechanism.state_dict().items()]
    return attention.mechanism.name, attention.size.G, shapes


def pool_heads(rows: Tensor, before: int, after: int) -> Tensor:
    """Returns `after` heads, each the mean of neighbouring ones: [before·K,…] → [after·K,…]."""
    pooled: Tensor = rows.unflatten(0, (after, before // after, -1)).mean(1).flatten(0, 1)
    return pooled


def _check_kv_heads(config: StackConfig, kv_heads: int) -> None:
    """Raises a ConvertError unless `kv_heads` is less than the model's number of key/value heads and divides it."""
    present = config.attention.groups or config.attention.heads
    divisors = [n for n in range(1, present) if present % n == 0]
    if not divisors:
        raise ConvertError("--kv-heads: the model has one key/value head already, so there cannot be fewer")
    if kv_heads not in divisors:
        raise ConvertError(
            f"--kv-heads {kv_heads}: expected one of {', '.join(map(str, divisors))}, which divide the model's "
            f"{present} key/value heads"
        )


def _choose_layers(
    config: StackConfig, mechanism: str | None, layers: Sequence[int] | None, options: Mapping[str, Any]
) -> list[int]:
    """Returns the layers that get the mechanism, in order."""
    if mechanism is None:
        for value, name in ((layers, "--layers"), (options, "--option")):
            if value:
                raise ConvertError(f"{name} belongs to a --mechanism; key/value heads are pooled in every layer")
        return []
    if layers is None:
        return list(range(config.layers))
    wrong = [n for n in layers if not 0 <= n < config.layers]
    if wrong:
        raise ConvertError(f"--layers: no layer {wrong[0]}; the model has layers 0 to {config.layers - 1}")
    return sorted(set(layers))


def _change_mechanism(
    config: StackConfig, name: str, chosen: Sequence[int], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the changes to a config that put a mechanism into some layers.

    Its options are added to those that mechanisms of other layers still take.
    """
    if not chosen:
        raise ConvertError("--layers names no layer; expected numbers such as 2,3")
    _require_qkv(name, "has no queries and keys to inherit: its scores are learned, not products. Train a new model")
    for n in chosen:
        problem = "it has no queries and keys that another mechanism could inherit"
        _require_qkv(config.per_layer[n], f"is what layer {n} has: {problem}")
    names = list(config.per_layer)
    for n in chosen:
        names[n] = name
    # An option that no mechanism of the new model takes would raise an error.
    kept = {key: value for key, value in config.options.items() if any(accepts(lookup(one), key) for one in names)}
    _check_shared_options(config, chosen, options)
    if tuple(names) == config.per_layer and {**kept, **options} == config.options:
        raise ConvertError(f"nothing to convert: these layers have '{name}' already")
    mechanism: Any = names
    if len(set(names)) == 1:
        mechanism = names[0]
    return {"mechanism": mechanism, "options": {**kept, **options}}


def _check_shared_options(config: StackConfig, chosen: Sequence[int], options: Mapping[str, Any]) -> None:
    """Raises a ConvertError if an option would also change the mechanism of a layer that is not converted."""
    staying = {name for n, name in enumerate(config.per_layer) if n not in chosen}
    for option, value in options.items():
        sharing = [name for name in staying if accepts(lookup(name), option) and config.options.get(option) != value]
        if sharing:
            raise ConvertError(
                f"--option {option}={value}: '{sharing[0]}' of a layer that stays has that option too, and a model "
                "has one value of it; convert that layer as well, or leave the option out"
            )


def _require_qkv(name: str, why: str) -> None:
    """Raises a ConvertError unless a mechanism computes its scores from queries and keys."""
    if lookup(name).needs != "qkv":
        raise ConvertError(f"'{name}' {why}")


def _convert_weights(model: GPT | Encoder, student: GPT | Encoder, chosen: Sequence[int]) -> dict[str, Tensor]:
    """Returns the state of the new model: that of the old one, with heads pooled and queries and keys scaled."""
    state = {name: x.detach().clone() for name, x in model.state_dict().items()}
    fresh = student.state_dict()
    for n, (old, new) in enumerate(zip(attention_layers(model), attention_layers(student), strict=True)):
        prefix = f"stack.blocks.{n}.attention."
        if n in chosen:
            # The mechanism's own tensors, such as random directions, are those of the new one.
            own = f"{prefix}mechanism."
            state = {key: x for key, x in state.items() if not key.startswith(own)}
            state |= {key: x for key, x in fresh.items() if key.startswith(own)}
        for kind in ("weight", "bias"):
            key = f"{prefix}project.{kind}"
            if key in state:
                state[key] = _pool_projection(old, new, state[key])
        if n in chosen and old.mechanism.name == "softmax" and new.mechanism.name in QUERY_KEY_SCALES:
            _scale_queries_and_keys(state, prefix, new, QUERY_KEY_SCALES[new.mechanism.name](new.size.K))
    return state


def _pool_projection(old: Attention, new: Attention, rows: Tensor) -> Tensor:
    """Returns the weights or biases of the fused q, k, v projection with the heads of keys and values pooled."""
    parts = dict(zip(old.needs, rows.split_with_sizes(old.widths), strict=True))
    pooled = {name: pool_heads(part, old.size.G, new.size.G) for name, part in parts.items() if name != "q"}
    return torch.cat([pooled.get(name, part) for name, part in parts.items()])


def _scale_queries_and_keys(state: dict[str, Tensor], prefix: str, new: Attention, scale: float) -> None:
    """Multiplies the projections of queries and keys by a number, in place."""
    if new.query_norm is not None:
        # A norm would undo a scale of its input, so its own weights are scaled.
        for name in ("query_norm", "key_norm"):
            for kind in ("weight", "bias"):
                if f"{prefix}{name}.{kind}" in state:
                    state[f"{prefix}{name}.{kind}"] *= scale
        return
    for kind in ("weight", "bias"):
        if f"{prefix}project.{kind}" in state:
            state[f"{prefix}project.{kind}"][: sum(new.widths[:2])] *= scale
