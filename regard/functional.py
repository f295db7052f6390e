"""Attention in one call, and the attention weights of any function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.devices import memory_error
from regard.errors import OptionError, ShapeError
from regard.mechanisms import Mechanism, Recurrence, fitted
from regard.mechanisms.base import MECHANISMS
from regard.mechanisms.foreign import refuse_foreign, suggest_ours
from regard.mechanisms.gates import share_heads
from regard.mechanisms.reach import warn_if_inaccurate
from regard.shapes import Keys, Mask, Queries, Values, Visible, Weights, check_sizes

_LOWER = "Lower B, H, T or S, set a window, take a linear mechanism, or a shorter dtype"


def attend(
    q: Queries,
    k: Float[Tensor, "B _ S K"],
    v: Values,
    mechanism: str | Mechanism | Callable[[Tensor, Tensor], Tensor] = "softmax",
    causal: bool = False,
    visible: Visible | None = None,
    *,
    window: int | None = None,
    documents: Int[Tensor, "B S"] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    slopes: Float[Tensor, " H"] | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    a: Float[Tensor, "B G S"] | Float[Tensor, "B G S K"] | None = None,
    b: Float[Tensor, "B G S"] | None = None,
    **options: Any,
) -> Float[Tensor, "B _ T V"]:
    """Returns the attention of q [B,H,T,K] over k [B,G,S,K] and v [B,G,S,V], of shape [B,H,T,V].

    `mechanism` is a name (its `options` follow, e.g. features=256), one already built, or a similarity of your own: a
    function of a query [K] and a key [K] that returns one number. `visible` [B,S] says which keys may be seen. The rest
    is as in `regard.Mask`. Mechanisms with learned parameters start from random ones.

    Gated and delta mechanisms take a, the logarithm of each token's decay, one a head [B,G,S] or one a key channel
    [B,G,S,K], and b [B,G,S], how strongly each is written. Their q and k may have fewer heads than v: several value
    heads then share one of them.

    `performer` and `fourier` warn, once each, where q and k are too large for their features to follow softmax. On a
    GPU this waits for the device at the first call of each, and never again; compiled or captured, it never happens.
    """
    refuse_foreign(options, "regard.attend")
    if isinstance(mechanism, (bool, Tensor)):  # a tuple: PyTorch 2.9 cannot compile the union of types
        raise OptionError(
            f"the argument after q, k and v is the mechanism, given a {type(mechanism).__name__}; who may be seen is "
            "said by name: causal=True, visible=…, window=…, or bias=… of softmax"
        )
    mask = Mask(causal, visible, window, documents, bias, slopes, softcap, sinks=sinks)
    gates = {name: x for name, x in (("a", a), ("b", b)) if x is not None}
    _check_gates(mechanism, gates)
    keys = k
    queries = q
    if _is_recurrence(mechanism):
        options = _decays_by_channel(mechanism, a) | options
        if v.dim() == 4:
            queries, keys = share_heads(q, k, v.shape[1])
    size = check_sizes(queries, keys, v, mask)
    if not isinstance(mechanism, Mechanism):
        try:
            mechanism = fitted(mechanism, size, **options).to(device=v.device)
        except OptionError as error:
            raise OptionError(f"{error}{suggest_ours(options, of_memory=_is_recurrence(mechanism))}") from None
    elif options:
        raise OptionError(f"{', '.join(options)}: options go with a name; {mechanism.name} is built already.")
    try:
        out: Tensor = mechanism(q, k, v, mask, **gates)
    except (MemoryError, RuntimeError) as error:
        _check_alike(q, k, v, visible)
        asked = f"attending with q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        explained = memory_error(error, asked, _LOWER)
        if explained is None:
            raise
        raise explained from error
    warn_if_inaccurate(mechanism, q, k, visible)
    return out


def _is_recurrence(mechanism: object) -> bool:
    """Returns whether a mechanism, or the one of a name, is gated or delta attention."""
    if isinstance(mechanism, str) and mechanism in MECHANISMS:
        return issubclass(MECHANISMS[mechanism], Recurrence)
    return isinstance(mechanism, Recurrence)


def _check_gates(mechanism: object, gates: Mapping[str, object]) -> None:
    """Raises an error if decays or write strengths are not tensors, or if the mechanism takes none."""
    if isinstance(mechanism, str):
        MECHANISMS.find(mechanism)  # a misspelt name is reported before its gates
    if gates and not _is_recurrence(mechanism):
        raise OptionError(
            f"{', '.join(gates)}: only gated and delta mechanisms take decays a and write strengths b; "
            f"{_name_of(mechanism)} does not."
        )
    for name, x in gates.items():
        if not isinstance(x, Tensor):
            raise ShapeError(f"{name} is a {type(x).__name__}, expected a tensor: one number a token and head [B,G,S].")


def _decays_by_channel(mechanism: object, a: Tensor | None) -> dict[str, bool]:
    """Returns the option for building a mechanism that takes a [B,G,S,K], one decay for each key channel; else {}."""
    if isinstance(mechanism, str) and a is not None and a.dim() == 4 and "a" in MECHANISMS[mechanism].needs:
        return {"channels": True}
    return {}


def _check_alike(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> None:
    """Raises a ShapeError if the tensors of a call, which has failed, differ in their devices or dtypes."""
    tensors = {"q": q, "k": k, "v": v}
    kinds = {name: str(x.dtype) for name, x in tensors.items()}
    if visible is not None:
        tensors["visible"] = visible
    devices = {name: str(x.device) for name, x in tensors.items()}
    for found, expected in ((devices, "one device"), (kinds, "one dtype")):
        if len(set(found.values())) > 1:
            shown = ", ".join(f"{name} {kind}" for name, kind in found.items())
            raise ShapeError(f"{shown}: expected all of {expected}, as in k.to(q)") from None


def _name_of(mechanism: object) -> str:
    return str(getattr(mechanism, "name", getattr(mechanism, "__name__", mechanism)))


def weights_of(f: Callable[..., Any], q: Queries, k: Keys, *, width: int | None = None, **options: Any) -> Weights:
    """Returns the attention weights [B,H,T,S] of any attention f(q, k, v, **options), even if it does not return them.

    Attention is linear in its values, so one-hot values give back the weights, exactly. `width` is how wide the values
    are that f is called with: by default K, as some implementations take no other.
    """
    B, G, S, K = k.shape
    width = width or K
    columns = [q.new_zeros(*q.shape[:3], 0)]
    for start in range(0, S, width):
        values = torch.zeros(S, width, dtype=k.dtype, device=k.device)
        stop = min(S, start + width)
        values[start:stop, : stop - start] = torch.eye(stop - start, dtype=k.dtype, device=k.device)
        out = f(q, k, values.expand(B, G, S, width), **options)
        if isinstance(out, tuple | list):
            out = out[0]
        if out.shape != (*q.shape[:3], width):
            raise ShapeError(f"f gave {list(out.shape)}, expected [B,H,T,V] = {[*q.shape[:3], width]}")
        columns.append(out[..., : stop - start])
    return torch.cat(columns, -1)
