"""What a module with projections hands to its attention, and what its attention hands on.

The outputs of the Linear layers that make queries, keys and values are recorded in a call, and the input of the one
that comes after attention. Layers whose names do not say what they make, as in a list, are told by what they are given.
How heads are laid out in them is not known, so every usual way is returned. Where the weights are parameters of the
module itself, as in nn.MultiheadAttention, queries, keys and values are made from them again, and the module's own
outputs are what is compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.laws.case import Case
from regard.laws.signatures import find_heads
from regard.laws.subjects import Subject

_PARTS = {
    "q": "q", "query": "q", "queries": "q",
    "k": "k", "key": "k", "keys": "k",
    "v": "v", "value": "v", "values": "v",
    "kv": "kv", "keyvalue": "kv",
    "qkv": "qkv", "attn": "qkv", "inproj": "qkv", "queryvaluekey": "qkv", "querykeyvalue": "qkv",
}  # fmt: skip


class Inside(NamedTuple):
    """One reading of a call: q [B,H,T,d], k and v [B,G,S,d], and the output of attention [B,H,T,d].

    `slip` names what is wrong with the reading itself: heads that are cut out of memory without a transpose. `finish`
    makes from an output of attention what is compared with `out`, where that is the output of the whole module.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    slip: str | None = None
    finish: Callable[[Tensor], Tensor] | None = None


class _Recorded(NamedTuple):
    part: str | None  # "q", "k", "v", "kv", "qkv", or None for another Linear
    given: Tensor
    made: Tensor


def look_inside(subject: Subject, case: Case) -> list[Inside]:
    """Returns the readings of one call of a module; none where its layers cannot be told."""
    module = getattr(subject, "f", None)
    if not isinstance(module, nn.Module):
        return []
    calls: list[_Recorded] = []
    whole: list[Inside] = []
    handles = []
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            handles.append(layer.register_forward_hook(_recorder(calls, _part(name))))
        elif _has_own_weights(layer):
            handles.append(layer.register_forward_hook(_weights_recorder(whole), with_kwargs=True))
    inputs = subject.inputs(case)
    try:
        with torch.no_grad():
            result = subject.run(case, inputs)
    finally:
        for handle in handles:
            handle.remove()
    if whole:
        return whole
    if getattr(subject, "sequence_first", False):  # the output is in the laws' own form already
        calls = [call._replace(given=_swap(call.given), made=_swap(call.made)) for call in calls]
    return [reading for named in _name_parts(calls, inputs) for reading in _readings(named, result, find_heads(module))]


def linear_parts(subject: Subject, case: Case, heads: int | None) -> list[tuple[nn.Linear, nn.Linear | None, Tensor]]:
    """Returns the layers that may make a module's values, the layer after attention, and which outputs values are.

    A fused layer makes queries, keys and values one after another, or those of each head side by side.
    """
    module = getattr(subject, "f", None)
    assert isinstance(module, nn.Module)
    called: list[tuple[str | None, nn.Linear]] = []
    hooks = []
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            entry = (_part(name), layer)
            hooks.append(layer.register_forward_hook(lambda *_, entry=entry: called.append(entry)))
    try:
        with torch.no_grad():
            subject.run(case, subject.inputs(case))
    finally:
        for hook in hooks:
            hook.remove()
    makers = [(part, layer) for part, layer in called if part in ("v", "kv", "qkv")]
    if len(makers) != 1:
        return []
    ((part, layer),) = makers
    last = next((other for kind, other in reversed(called) if kind is None), None)
    places = torch.arange(layer.out_features)
    parts = {"v": 1, "kv": 2, "qkv": 3}[str(part)]
    if layer.out_features % parts:
        return []
    found = [places.chunk(parts)[-1]]
    if heads is not None and parts > 1 and layer.out_features % (parts * heads) == 0:
        found.append(places.unflatten(0, (heads, -1)).chunk(parts, -1)[-1].flatten())
    return [(layer, last, columns) for columns in found]


def _recorder(calls: list[_Recorded], part: str | None) -> Any:
    def record(layer: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
        calls.append(_Recorded(part, given[0].detach(), made.detach()))

    return record


def _swap(x: Tensor) -> Tensor:
    """Returns [B,T,D] from [T,B,D]; anything else stays as it is."""
    if x.dim() != 3:
        return x
    return x.transpose(0, 1)


def _has_own_weights(layer: nn.Module) -> bool:
    """Tells whether the weights that make q, k and v are parameters of the layer itself, by torch's names."""
    names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "out_proj")
    appended = [getattr(layer, name, None) for name in ("bias_k", "bias_v")]
    plain = all(x is None for x in appended) and not getattr(layer, "add_zero_attn", False)
    return plain and all(hasattr(layer, name) for name in names) and find_heads(layer) is not None


def _weights_recorder(readings: list[Inside]) -> Any:
    """Returns a hook that makes q, k and v again from a layer's inputs and weights."""

    def record(layer: Any, given: tuple[Tensor, ...], named: dict[str, Any], made: Any) -> None:
        tokens = [*given[:3], *(named[name] for name in ("query", "key", "value") if name in named)]
        out = made
        if isinstance(made, tuple):
            out = made[0]
        if not layer.batch_first:
            tokens = [x.transpose(0, 1) for x in tokens]
            out = out.transpose(0, 1)
        weights = [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
        if layer.in_proj_weight is not None:
            weights = layer.in_proj_weight.chunk(3)
        biases = [None] * 3
        if layer.in_proj_bias is not None:
            biases = layer.in_proj_bias.chunk(3)
        heads = find_heads(layer)
        q, k, v = (
            functional.linear(x, w, b).unflatten(-1, (heads, -1)).transpose(1, 2).detach()
            for x, w, b in zip(tokens, weights, biases, strict=True)
        )
        readings.append(Inside(q, k, v, out.detach(), finish=lambda x: layer.out_proj(x.transpose(1, 2).flatten(2))))

    return record


def _part(name: str) -> str | None:
    """Returns what a Linear of this name makes: q_proj, W_q, to_q, wq, query, c_attn, …"""
    last = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.rpartition(".")[2]).lower()
    words = [w for w in last.split("_") if w not in ("proj", "projection", "to", "w", "c", "lin", "linear", "fc")]
    joined = "".join(words)
    if joined not in _PARTS and joined[:1] == "w":
        joined = joined[1:]
    return _PARTS.get(joined)


def _name_parts(calls: list[_Recorded], inputs: list[Tensor]) -> Iterator[list[_Recorded]]:
    """Yields the calls with what each made: as their layers' names say or, where none says it, as what they were given.

    Layers that are all given the same tokens are taken for those of queries, keys and values in every order: which is
    which is a matter of names only.
    """
    if any(call.part is not None for call in calls):
        yield calls
        return
    fed = [[n for n, call in enumerate(calls) if _is_same(call.given, x)] for x in inputs]
    orders: list[tuple[int, ...]] = []
    if len(inputs) == 3 and all(len(places) == 1 for places in fed):
        orders = [tuple(places[0] for places in fed)]
    elif len(inputs) == 2 and [len(places) for places in fed] == [1, 2]:
        orders = [(fed[0][0], *pair) for pair in permutations(fed[1])]
    elif len(inputs) == 1 and len(fed[0]) == 3:
        orders = list(permutations(fed[0]))
    for order in orders:
        parts = dict(zip(order, "qkv", strict=True))
        yield [call._replace(part=parts.get(n)) for n, call in enumerate(calls)]


def _is_same(given: Tensor, x: Tensor) -> bool:
    return given.shape == x.shape and bool((given == x).all())


def _readings(calls: list[_Recorded], result: Tensor, heads: int | None) -> Iterator[Inside]:
    """Yields queries, keys, values and outputs with every usual layout of heads."""
    made = {call.part: call.made for call in calls if call.part is not None}
    others = [call for call in calls if call.part is None]
    if any(x.dim() != 3 for x in made.values()):
        return
    out = result
    if others:
        out = others[-1].given
    for q, k, v in _projected(made, heads):
        if out.dim() != 3 or out.shape[:2] != q.shape[:2]:
            continue
        for H in _head_counts(q.shape[-1], heads):
            yield from _split(q, k, v, out, q.shape[-1] // H)


def _projected(made: dict[str, Tensor], heads: int | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields q, k and v [B,T,·] from separate, half fused or fused projections."""
    if {"q", "k", "v"} <= set(made):
        yield made["q"], made["k"], made["v"]
    elif {"q", "kv"} <= set(made):
        k, v = made["kv"].chunk(2, -1)
        yield made["q"], k, v
    elif "qkv" in made and made["qkv"].shape[-1] % 3 == 0:
        fused = made["qkv"]
        q, k, v = fused.chunk(3, -1)
        yield q, k, v
        if heads is not None and fused.shape[-1] % (3 * heads) == 0:
            # Each head's q, k and v side by side, as in GPT-NeoX.
            q, k, v = (x.flatten(2) for x in fused.unflatten(-1, (heads, -1)).chunk(3, -1))
            yield q, k, v


def _head_counts(width: int, heads: int | None) -> list[int]:
    if heads is not None:
        return [heads] * (width % heads == 0)
    return [n for n in range(1, width + 1) if width % n == 0 and (width // n > 1 or n == 1)]


def _split(q: Tensor, k: Tensor, v: Tensor, out: Tensor, width: int) -> Iterator[Inside]:
    """Yields tensors with heads of a width, [B,·,T,width]: first as they should be, then as they are often mistaken."""
    if any(x.shape[-1] % width for x in (q, k, v, out)) or out.shape[-1] != q.shape[-1]:
        return
    if q.shape[-1] % k.shape[-1] or k.shape != v.shape:
        return

    def transposed(x: Tensor) -> Tensor:
        split: Tensor = x.unflatten(-1, (-1, width)).transpose(1, 2)
        return split

    def cut(x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[-1] // width, x.shape[1], width)

    right = Inside(transposed(q), transposed(k), transposed(v), transposed(out))
    yield right
    if right.q.shape[1] > 1 and q.shape[1] > 1:
        merged = "{} whose heads are merged by a view: transpose [B,H,T,d] to [B,T,H,d] first"
        both = "{} whose heads are split by a view: split to [B,T,H,d] first, then transpose"
        yield right._replace(out=cut(out), slip=merged)
        yield Inside(cut(q), cut(k), cut(v), cut(out), both)
        yield Inside(cut(q), cut(k), cut(v), transposed(out), both)
        one = "{} whose heads are split by a view in %s alone: split to [B,T,H,d] first, then transpose"
        yield right._replace(q=cut(q), slip=one % "queries")
        yield right._replace(k=cut(k), slip=one % "keys")
        yield right._replace(v=cut(v), slip=one % "values")
        yield right._replace(k=cut(k), v=cut(v), slip=one % "keys and values")
