"""Linear attention in Triton: `elu`, `performer` and `fourier` with their features made inside, `linear` with yours.

Sums, totals and peaks are kept in float32. Products are of bfloat16 where the inputs are and nothing cancels (`elu`,
`performer`, `linear`), of float16 in fit units for `fourier`, of split bfloat16 (16 bits) for float16, and of split
tf32 (21 bits) for float32.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from regard.kernels.registry import kernel
from regard.mechanisms import AnyFeatures, Elu, Fourier, Linear, Performer, Sums
from regard.mechanisms.base import without_autocast
from regard.shapes import Mask

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_FEATURES, _WIDEST = 512, 256
_NARROW, _SHARED = 64, 160 << 10  # A100, H100 and later have that much; without it there is room for narrow heads
_MAPS: dict[type[Linear], str] = {Elu: "elu", Performer: "performer", Fourier: "fourier", AnyFeatures: "given"}
_SIZES = f"F ≤ {_MOST_FEATURES}, K and V ≤ {_WIDEST}"
_LIMITS: dict[type[Linear], str] = {
    Elu: _SIZES,
    AnyFeatures: _SIZES,
    Performer: f"{_SIZES}; float32 and float16: K ≤ {_WIDEST // 2}",
    Fourier: f"bfloat16, {_SIZES}",
}
_TRITON = find_spec("triton") is not None  # found now: a compiled model cannot look


def _shared_memory(device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


# What torch.compiler.assume_constant_result does, without importing the compiler with regard.
_shared_memory._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _device(x: Tensor) -> bool:
    return x.is_cuda and _TRITON


def unfit(mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, dtypes: tuple[torch.dtype, ...] = _DTYPES) -> str | None:
    """Why no program can take these, or None; those for whole sequences take some dtypes only."""
    if not _device(q):
        return "it needs a CUDA device and triton"
    if mechanism.strict:
        return "it does not look for rows that sum to zero (strict=True)"
    if 0 in (*q.shape, *v.shape):
        return "there is nothing to attend to"
    if v.dtype not in dtypes or q.dtype != v.dtype or k.dtype != v.dtype:
        return f"it takes {', '.join(str(d).split('.')[1] for d in dtypes)}, one of them for q, k and v"
    return None


def cramped(K: int, V: int, device: torch.device) -> str | None:
    """Why heads so wide do not fit a GPU, or None."""
    if max(K, V) > _NARROW and _shared_memory(device) < _SHARED:
        return f"K = {K}, V = {V}: over {_NARROW} it needs {_SHARED >> 10} KiB of shared memory, {device} has less"
    return None


def _refuses(mechanism: Linear, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why it cannot run, or None."""
    refusal = unfit(mechanism, q, k, v)
    if refusal is not None:
        return refusal
    K, V, F = k.shape[3], v.shape[3], mechanism.feature_count(k.shape[3])
    too_precise = isinstance(mechanism, Fourier) and v.dtype != torch.bfloat16  # features cancel: sums need float64
    too_wide = isinstance(mechanism, Performer) and v.dtype != torch.bfloat16 and K > _WIDEST // 2
    if too_precise or too_wide or F > _MOST_FEATURES or max(K, V) > _WIDEST:
        return f"{v.dtype}, F = {F}, K = {K}, V = {V} exceed its limits: {_LIMITS[type(mechanism)]}"
    return cramped(K, V, v.device)


def _when(mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> str | None:
    if mask.documents is not None:
        return "it knows no packed documents"
    return _refuses(mechanism, q, k, v)


def _when_extending(
    mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, state: Sums, visible: Tensor | None = None
) -> str | None:
    return _refuses(mechanism, q, k, v) if q.shape[2] > 1 else _refuses_one(mechanism, q, k, v, state)


def _refuses_one(mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, state: Sums) -> str | None:
    """Why it cannot take a single token, or None: it needs little room, and is as precise as the sums."""
    refusal = unfit(mechanism, q, k, v, (*_DTYPES, torch.float64))
    if refusal is not None:
        return refusal
    learns = (q, k, v, state.sums, *mechanism.parameters())
    if torch.is_grad_enabled() and any(x.requires_grad for x in learns):
        return "it has no gradient for one token at a time"
    K, V, F = k.shape[3], v.shape[3], mechanism.feature_count(k.shape[3])
    if F > _MOST_FEATURES or max(K, V) > _WIDEST:
        return f"F = {F}, K = {K}, V = {V} exceed its limits: {_LIMITS[type(mechanism)]}"
    return None


def forward(mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return _attended(mechanism, q, k, v, mask.visible, mask.causal, None)[0]


def extend(
    mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, state: Sums, visible: Tensor | None = None
) -> tuple[Tensor, Sums]:
    if q.shape[2] == 1:
        return _stepped(mechanism, q, k, v, state, visible)
    out, sums, peak = _attended(mechanism, q, k, v, visible, True, state)
    tokens = q.shape[2] if visible is None else visible.sum(1)
    return out, Sums(sums.to(state.sums.dtype), peak.to(state.peak.dtype), state.tokens + tokens)


def _attended(
    mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool, state: Sums | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The output; and sums and peak after the last token, where there is a state to go on from."""
    from regard.kernels.linear.ops import attended

    name, w = _MAPS[type(mechanism)], _directions(mechanism, q)
    if isinstance(mechanism, AnyFeatures):
        with without_autocast(v):
            q, k = (mechanism.features(x.float())[0] for x in (q, Mask(visible=visible).zero_hidden(k)))
            q, k = (x.bfloat16() if v.dtype == torch.bfloat16 else x for x in (q, k))
    before: tuple[Any, ...] = (None, None) if state is None else (state.sums, state.peak)
    out, sums, peak = attended(q, k, v, w, visible, *before, name, causal, state is not None)
    return out.to(v.dtype), sums, peak


def _directions(mechanism: Linear, q: Tensor) -> Tensor | None:
    if not isinstance(mechanism, Performer | Fourier):
        return None
    return mechanism.directions(q.new_empty(q.shape[3], dtype=torch.float32))  # in float32 where it draws them now


def _stepped(
    mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, state: Sums, visible: Tensor | None
) -> tuple[Tensor, Sums]:
    from regard.kernels.linear.triton_step import step

    w = _directions(mechanism, q)
    if isinstance(mechanism, AnyFeatures):
        with without_autocast(v):
            q, k = (mechanism.features(x.to(state.sums.dtype))[0] for x in (q, Mask(visible=visible).zero_hidden(k)))
    out, *after = step(q, k, v, w, visible, *state, _MAPS[type(mechanism)])
    return out, Sums(*after)


for _cls, _limits in _LIMITS.items():
    kernel(_cls, "forward", name="triton", when=_when, device="cuda", limits=_limits)(forward)
    kernel(_cls, "extend", name="triton", when=_when_extending, device="cuda", limits=_limits)(extend)
