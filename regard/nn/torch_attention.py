"""Conversion between `torch.nn.MultiheadAttention` and regard's layer, and calls with separate queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.errors import OptionError, ShapeError
from regard.mechanisms import Softmax
from regard.nn.merges import MERGES
from regard.shapes import Mask

if TYPE_CHECKING:
    from regard.nn.attention import Attention


def from_torch(cls: type[Attention], theirs: nn.MultiheadAttention, causal: bool) -> Attention:
    """Returns a layer with a copy of PyTorch's weights; see `Attention.from_torch`."""
    if not isinstance(theirs, nn.MultiheadAttention):
        raise OptionError(f"expected a torch.nn.MultiheadAttention, given a {type(theirs).__name__}")
    if theirs.bias_k is not None:
        raise OptionError("add_bias_kv=True: a learned key that belongs to no token has no equivalent here")
    if theirs.add_zero_attn:
        raise OptionError("add_zero_attn=True: a key of zeros that belongs to no token has no equivalent here")
    if theirs.kdim != theirs.vdim:
        raise OptionError(
            f"kdim = {theirs.kdim}, vdim = {theirs.vdim}: keys and values come from one sequence here, of one width"
        )
    source = None
    if not theirs._qkv_same_embed_dim:
        source = theirs.kdim
    layer = cls(
        theirs.embed_dim,
        theirs.num_heads,
        causal=causal,
        source=source,
        bias=theirs.in_proj_bias is not None,
        dropout=theirs.dropout,
    )
    like = theirs.out_proj.weight
    layer.to(device=like.device, dtype=like.dtype).train(theirs.training)
    with torch.no_grad():
        for ours, weight in _pairs(layer, theirs):
            ours.copy_(weight)
    return layer


def to_torch(layer: Attention, batch_first: bool) -> nn.MultiheadAttention:
    """Returns PyTorch's layer with a copy of these weights; see `Attention.to_torch`."""
    faults = list(_without_equivalent(layer))
    if faults:
        raise OptionError(f"torch.nn.MultiheadAttention has no equivalent of {', '.join(faults)}")
    weight = layer.out.weight
    biased = layer.project.bias is not None or layer.out.bias is not None
    theirs = nn.MultiheadAttention(
        layer.width,
        layer.size.H,
        dropout=layer.mechanism.dropout,
        bias=biased,
        kdim=layer.source,
        vdim=layer.source,
        batch_first=batch_first,
        device=weight.device,
        dtype=weight.dtype,
    )
    theirs.train(layer.training)
    with torch.no_grad():
        # PyTorch's layer has all biases or none: those that are missing here become zeros.
        for bias in (theirs.in_proj_bias, theirs.out_proj.bias):
            if bias is not None:
                bias.zero_()
        for ours, copied in _pairs(layer, theirs):
            copied.copy_(ours)
    return theirs


def _pairs(layer: Attention, theirs: nn.MultiheadAttention) -> list[tuple[Tensor, Tensor]]:
    """Returns the parameters of a layer, each with the parameter, or part of one, of PyTorch's layer that it equals."""
    D = layer.width
    pairs: list[tuple[Tensor | None, Tensor | None]] = [
        (layer.out.weight, theirs.out_proj.weight),
        (layer.out.bias, theirs.out_proj.bias),
    ]
    if layer.project_source is None:
        pairs += [(layer.project.weight, theirs.in_proj_weight), (layer.project.bias, theirs.in_proj_bias)]
        return [(ours, weight) for ours, weight in pairs if ours is not None and weight is not None]
    other = layer.project_source
    if theirs._qkv_same_embed_dim:  # as wide as the tokens themselves
        q, k, v = theirs.in_proj_weight.split(D)
    else:
        q, k, v = theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight
    pairs += [(layer.project.weight, q), (other.weight[:D], k), (other.weight[D:], v)]
    if theirs.in_proj_bias is not None and layer.project.bias is not None:
        pairs += [(layer.project.bias, theirs.in_proj_bias[:D]), (other.bias, theirs.in_proj_bias[D:])]
    return [(ours, weight) for ours, weight in pairs if ours is not None and weight is not None]


def _without_equivalent(layer: Attention) -> list[str]:
    """Returns in words the features of a layer that PyTorch's has no equivalent of."""
    size = layer.size
    rules = layer.rules
    named = {
        f"the mechanism {layer.mechanism.name}": type(layer.mechanism) is not Softmax,
        "another scale than 1/√K": getattr(layer.mechanism, "scale", None) is not None,
        f"{size.G} key/value heads for {size.H} query heads": size.G != size.H,
        f"heads of width {size.K} and {size.V} in a layer of width {layer.width}": {size.K, size.V}
        != {layer.width // size.H},
        "qk_norm": layer.query_norm is not None,
        "this merge of heads": type(layer.merge) is not MERGES["concatenate"],
        "window, slopes or softcap": any(x is not None for x in (rules.window, rules.slopes, rules.softcap)),
        "residual_dropout": layer.residual_dropout > 0,
        "a short convolution": layer.convolution is not None,
        "a norm of outputs": layer.head_norm is not None,
        "gates": layer.gates is not None or layer.gate is not None,
        "skip": layer.skip is not None,
    }
    return [fault for fault, is_there in named.items() if is_there]


def project_separately(
    layer: Attention, query: Tensor, key: Tensor, value: Tensor | None, visible: Tensor | None
) -> tuple[Any, Any, Tensor, Mask]:
    """Returns q, k and v of separate sequences, and the mask; if `value` is None, `key` takes its place."""
    if layer.convolution is not None or layer.gates is not None or layer.skip is not None:
        raise OptionError(
            "a short convolution, decays, write strengths and skip are made of one sequence: call layer(x)"
        )
    if value is None:
        value = key
    _check_tokens(query, key, value)
    q, k, v = _project(layer, query, key, value)
    return q, k, v, layer.rules.but(visible=visible, causal=layer.size.causal)


def _project(layer: Attention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, Any, Tensor]:
    """Returns q, k and v of three sequences; one that is passed twice is projected once."""
    if layer.source is not None:
        k, v = layer._project_source(key)
        if value is not key:
            v = layer._project_source(value)[1]
        return layer._project_queries(query), k, v
    of_query = layer._project_tokens(query, None)
    of_key = of_query
    if key is not query:
        of_key = layer._project_tokens(key, None)
    of_value = of_key
    if value is not key:
        of_value = layer._project_tokens(value, None)
    return of_query[0], of_key[1], of_value[2]


def _check_tokens(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises a ShapeError unless these are sequences of one batch, with as many keys as values."""
    shapes = [tuple(x.shape) for x in (query, key, value)]
    if any(len(shape) != 3 for shape in shapes):
        raise ShapeError(f"query, key and value are {shapes}: expected [B,T,D], [B,S,E] and [B,S,E]")
    if not shapes[0][0] == shapes[1][0] == shapes[2][0] or shapes[1][1] != shapes[2][1]:
        raise ShapeError(f"query, key and value are {shapes}: expected one batch, and as many keys as values")
