"""Registers linear attention in Triton beside `elu`, `performer`, `fourier` and `linear`, and says what it takes.

The package's docstring explains the algorithm and the precision of its products. This module imports no Triton.
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
_MOST_FEATURES = 512
_WIDEST = 256  # K and V
_NARROW = 64  # heads as wide need little shared memory
_SHARED_MEMORY = 160 << 10  # bytes that wider ones need: A100, H100 and later have as much
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
    """Returns the bytes of shared memory that a program may have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


# What torch.compiler.assume_constant_result does, without importing the compiler with regard.
_shared_memory._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _runs_triton(x: Tensor) -> bool:
    """Returns whether Triton's programs can run where x is."""
    return x.is_cuda and _TRITON


def refuse_inputs(
    mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, dtypes: tuple[torch.dtype, ...] = _DTYPES
) -> str | None:
    """Returns why no program can take these inputs, or None. dtypes: those that the program takes."""
    if not _runs_triton(q):
        return "it needs a CUDA device and triton"
    if mechanism.strict:
        return "it does not look for rows that sum to zero (strict=True)"
    if 0 in (*q.shape, *v.shape):
        return "there is nothing to attend to"
    if v.dtype not in dtypes or q.dtype != v.dtype or k.dtype != v.dtype:
        return f"it takes {', '.join(str(d).split('.')[1] for d in dtypes)}, one of them for q, k and v"
    return None


def refuse_wide_heads(K: int, V: int, device: torch.device) -> str | None:
    """Returns why heads of width K and V do not fit a GPU, or None."""
    if max(K, V) > _NARROW and _shared_memory(device) < _SHARED_MEMORY:
        needed = _SHARED_MEMORY >> 10
        return f"K = {K}, V = {V}: over {_NARROW} it needs {needed} KiB of shared memory, {device} has less"
    return None


def _refuse_sequence(mechanism: Linear, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Returns why the programs for whole sequences cannot run, or None."""
    reason = refuse_inputs(mechanism, q, k, v)
    if reason is not None:
        return reason
    K = k.shape[3]
    V = v.shape[3]
    F = mechanism.feature_count(K)
    too_precise = isinstance(mechanism, Fourier) and v.dtype != torch.bfloat16  # features cancel: sums need float64
    too_wide = isinstance(mechanism, Performer) and v.dtype != torch.bfloat16 and K > _WIDEST // 2
    if too_precise or too_wide or F > _MOST_FEATURES or max(K, V) > _WIDEST:
        return f"{v.dtype}, F = {F}, K = {K}, V = {V} exceed its limits: {_LIMITS[type(mechanism)]}"
    return refuse_wide_heads(K, V, v.device)


def _refuse_token(mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, state: Sums) -> str | None:
    """Returns why the program for a single token cannot run, or None: it needs little room, and is as precise as the
    sums."""
    reason = refuse_inputs(mechanism, q, k, v, (*_DTYPES, torch.float64))
    if reason is not None:
        return reason
    differentiable = (q, k, v, state.sums, *mechanism.parameters())
    if torch.is_grad_enabled() and any(x.requires_grad for x in differentiable):
        return "it has no gradient for one token at a time"
    K = k.shape[3]
    V = v.shape[3]
    F = mechanism.feature_count(K)
    if F > _MOST_FEATURES or max(K, V) > _WIDEST:
        return f"F = {F}, K = {K}, V = {V} exceed its limits: {_LIMITS[type(mechanism)]}"
    return None


def _when_forward(mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> str | None:
    """Returns why `forward` cannot run, or None."""
    if mask.documents is not None:
        return "it knows no packed documents"
    return _refuse_sequence(mechanism, q, k, v)


def _when_extend(
    mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, state: Sums, visible: Tensor | None = None
) -> str | None:
    """Returns why `extend` cannot run, or None."""
    if q.shape[2] == 1:
        return _refuse_token(mechanism, q, k, v, state)
    return _refuse_sequence(mechanism, q, k, v)


def forward(mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Returns the outputs [B,H,T,V] of q [B,H,T,K], k [B,G,T,K], v [B,G,T,V]."""
    return _attend(mechanism, q, k, v, mask.visible, mask.causal, None)[0]


def extend(
    mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, state: Sums, visible: Tensor | None = None
) -> tuple[Tensor, Sums]:
    """Returns the outputs [B,H,T,V] of T more tokens after a state, and the state after them."""
    if q.shape[2] == 1:
        return _attend_token(mechanism, q, k, v, state, visible)
    out, sums, peak = _attend(mechanism, q, k, v, visible, True, state)
    tokens: Any = q.shape[2]
    if visible is not None:
        tokens = visible.sum(1)
    return out, Sums(sums.to(state.sums.dtype), peak.to(state.peak.dtype), state.tokens + tokens)


def _attend(
    mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool, state: Sums | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the outputs [B,H,T,V]; and sums [B,G,F,V+1] and peak [B,G] after the last token, where there is a state
    to go on from."""
    from regard.kernels.linear.ops import attend

    w = _directions(mechanism, q)
    if isinstance(mechanism, AnyFeatures):
        q, k = _given_features(mechanism, q, k, v, visible, torch.float32)
        if v.dtype == torch.bfloat16:
            q = q.bfloat16()
            k = k.bfloat16()
    sums = None
    peak = None
    if state is not None:
        sums = state.sums
        peak = state.peak
    out, final_sums, final_peak = attend(
        q, k, v, w, visible, sums, peak, _MAPS[type(mechanism)], causal, state is not None
    )  # fmt: skip
    return out.to(v.dtype), final_sums, final_peak


def _attend_token(
    mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, state: Sums, visible: Tensor | None
) -> tuple[Tensor, Sums]:
    """Returns the outputs [B,H,1,V] of one more token after a state, and the state after it."""
    from regard.kernels.linear.triton_step import decode_step

    w = _directions(mechanism, q)
    if isinstance(mechanism, AnyFeatures):
        q, k = _given_features(mechanism, q, k, v, visible, state.sums.dtype)
    return decode_step(q, k, v, w, visible, state, _MAPS[type(mechanism)])


def _directions(mechanism: Linear, q: Tensor) -> Tensor | None:
    """Returns the directions [D,K] of random features, or None for other maps; in float32 where they are drawn now."""
    if not isinstance(mechanism, Performer | Fourier):
        return None
    return mechanism.directions(q.new_empty(q.shape[3], dtype=torch.float32))


def _given_features(
    mechanism: AnyFeatures, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns the features of queries [B,H,T,F] and keys [B,G,T,F] in a dtype, as PyTorch makes them."""
    with without_autocast(v):
        q_features = mechanism.features(q.to(dtype))[0]
        k_features = mechanism.features(Mask(visible=visible).zero_hidden(k).to(dtype))[0]
    return q_features, k_features


for _cls, _limits in _LIMITS.items():
    kernel(_cls, "forward", name="triton", when=_when_forward, device="cuda", limits=_limits)(forward)
    kernel(_cls, "extend", name="triton", when=_when_extend, device="cuda", limits=_limits)(extend)
