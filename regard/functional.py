"""Attention in one call, and the weights of anybody's attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.devices import memory_error
from regard.errors import OptionError, ShapeError
from regard.mechanisms import Mechanism, fitted
from regard.mechanisms.foreign import refuse_foreign
from regard.mechanisms.reach import warn_if_inaccurate
from regard.shapes import Keys, Mask, Outputs, Queries, Values, Visible, Weights, check_sizes

_LOWER = "Lower B, H, T or S, set a window, take a linear mechanism, or a shorter dtype"


def attend(
    q: Queries,
    k: Keys,
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
    **options: Any,
) -> Outputs:
    """Returns the attention of q [B,H,T,K] over k [B,G,S,K] and v [B,G,S,V], of shape [B,H,T,V].

    `mechanism` is a name (its `options` follow, e.g. features=256), one already built, or a similarity of your own: a
    function of a query [K] and a key [K] that returns one number. `visible` [B,S] says which keys may be seen. The rest
    is as in `regard.Mask`. Mechanisms with learned parameters start from random ones.

    `performer` and `fourier` warn, once each, where q and k are too large for their features to follow softmax. On a
    GPU this waits for the device at the first call of each, and never again; compiled or captured, it never happens.
    """
    refuse_foreign(options, "regard.attend")
    mask = Mask(causal, visible, window, documents, bias, slopes, softcap)
    size = check_sizes(q, k, v, mask)
    if not isinstance(mechanism, Mechanism):
        mechanism = fitted(mechanism, size, **options).to(device=v.device)
    elif options:
        raise OptionError(f"{', '.join(options)}: options go with a name; {mechanism.name} is built already.")
    try:
        out: Tensor = mechanism(q, k, v, mask)
    except (MemoryError, RuntimeError) as error:
        asked = f"attending with q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        explained = memory_error(error, asked, _LOWER)
        if explained is None:
            raise
        raise explained from error
    warn_if_inaccurate(mechanism, q, k, visible)
    return out


def weights_of(f: Callable[..., Any], q: Queries, k: Keys, *, width: int | None = None, **options: Any) -> Weights:
    """Returns the attention weights [B,H,T,S] of anybody's f(q, k, v, **options), which need not show them.

    Attention is linear in its values, so one-hot values give back the weights, exactly. `width` is how many columns a
    value may have; as many as a key has unless said, since not all implementations take others.
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
