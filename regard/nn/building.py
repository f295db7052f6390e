"""Checking the options of an attention layer, and building its optional parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from regard.errors import OptionError
from regard.mechanisms import Mechanism, Recurrence, fitted
from regard.mechanisms.foreign import suggest_ours
from regard.nn.convolution import ShortConvolution
from regard.nn.norms import NORMS, UnitLength
from regard.registry import call_with_options
from regard.shapes import Size


def check_direction(causal: bool | None, source: int | None) -> None:
    """Raises an OptionError if self-attention is built without `causal`."""
    if causal is None and source is None:
        raise OptionError(
            "say causal=True, where each token sees itself and those before it, or causal=False, where every token "
            "sees all"
        )


def check_mechanism(mechanism: Mechanism, causal: bool | None, source: int | None) -> None:
    """Raises an OptionError if a mechanism is not defined for cross-attention, or not without `causal`."""
    if source is not None and not mechanism.crosses:
        raise OptionError(
            f"{mechanism.name} has no cross-attention: its scores belong to positions of one sequence. "
            "Use 'softmax' or a linear mechanism there."
        )
    if mechanism.causal_only and not causal:
        raise OptionError(f"{mechanism.name} has no meaning that looks both ways; build it with causal=True")


def check_heads(D: int, H: int, G: int, K: int | None) -> None:
    if min(D, H, G) < 1:
        raise OptionError(f"width {D}, {H} query heads, {G} key/value heads: each must be at least 1")
    if K is None and D % H:
        raise OptionError(f"width {D} does not divide into {H} heads; choose another number of heads, or say K and V")
    if H % G:
        raise OptionError(f"{G} key/value heads do not divide {H} query heads")


def check_key_heads(key_heads: int | None, H: int, G: int, mechanism: Mechanism) -> None:
    """Raises an OptionError unless `key_heads` divides the heads of values, and the mechanism allows it."""
    if key_heads is None:
        return
    if not isinstance(mechanism, Recurrence):
        raise OptionError(
            f"{mechanism.name}: key_heads = {key_heads}, but only mechanisms with a memory for each value head, such "
            "as 'gated-delta', let several of them share queries and keys. Leave it out, or say G"
        )
    if H != G or key_heads < 1 or G % key_heads:
        raise OptionError(
            f"key_heads = {key_heads} with {H} query heads and {G} key/value heads: expected a divisor of the value "
            "heads, and as many heads as groups"
        )


def build_mechanism(mechanism: str | Mechanism, size: Size, options: Mapping[str, Any]) -> Mechanism:
    """Returns the mechanism of a name with its options, made for `size`; one already built is returned unchanged."""
    if isinstance(mechanism, str):
        try:
            return fitted(mechanism, size, **options)
        except OptionError as error:
            raise OptionError(f"{error}{suggest_ours(options, of_layer=True)}") from None
    if options:
        raise OptionError(
            f"options {', '.join(options)} were given beside a mechanism already built; build it with them"
        )
    return mechanism


def build_norm(name: str | None, K: int, eps: float, mechanism: Mechanism) -> nn.Module | None:
    """Returns the norm of each head's queries or keys; None if `name` is None."""
    if name is None:
        return None
    if not {"q", "k"} <= set(mechanism.needs):
        raise OptionError(f"{mechanism.name} has no queries and keys of its own, so qk_norm has nothing to act on")
    if name == "l2":
        return UnitLength()
    norm: nn.Module = NORMS.build(name, {"D": K, "eps": eps})
    return norm


def build_convolution(
    width: int, channels: int, source: int | None, options: Mapping[str, Any]
) -> ShortConvolution | None:
    """Returns the short convolution of a layer with so many channels of queries, keys and values; None for width 0."""
    if width == 0:
        return None
    if source is not None:
        raise OptionError("a short convolution belongs to self-attention: it combines a token with those before it")
    built: ShortConvolution = call_with_options(
        ShortConvolution, "the short convolution", {"channels": channels, "width": width}, options
    )
    return built


def build_skip(H: int, source: int | None) -> nn.Parameter:
    """Returns the factors [H] of each head's own values, which start at 1."""
    if source is not None:
        raise OptionError("skip adds a token's own values to its outputs: it belongs to self-attention")
    return nn.Parameter(torch.ones(H))
