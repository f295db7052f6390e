"""Registers linear attention in Triton for `elu`, `performer`, `fourier` and `linear`, with the limits of its inputs.

The package's docstring explains the algorithm and the precision of its products. This module does not import Triton.
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
_MAX_FEATURES = 512
_MAX_HEAD_DIM = 256  # K and V
_NARROW_HEAD_DIM = 64  # heads up to this width need little shared memory
_WIDE_HEAD_SMEM_BYTES = 160 << 10  # needed by wider heads; A100, H100 and later have it
_MAPS: dict[type[Linear], str] = {Elu: "elu", Performer: "performer", Fourier: "fourier", AnyFeatures: "precomputed"}
_SIZES = f"F ≤ {_MAX_FEATURES}, K and V ≤ {_MAX_HEAD_DIM}"
_LIMITS: dict[type[Linear], str] = {
    Elu: _SIZES,
    AnyFeatures: _SIZES,
    Performer: f"{_SIZES}; float32 and float16: K ≤ {_MAX_HEAD_DIM // 2}",
    Fourier: f"bfloat16, {_SIZES}",
}
_TRITON = find_spec("triton") is not None  # evaluated at import: torch.compile cannot trace find_spec


def _smem_bytes_per_block(device: torch.device) -> int:
    """Returns the bytes of shared memory that one program can have on a device."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


# This is what torch.compiler.assume_constant_result sets; calling it would import the compiler.
_smem_bytes_per_block._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _runs_triton(x: Tensor) -> bool:
    """Returns whether Triton kernels can run on the device of x."""
    return x.is_cuda and _TRITON


def unsupported_inputs(
    mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, dtypes: tuple[torch.dtype, ...] = _DTYPES
) -> str | None:
    """Returns why the kernels cannot take these inputs, or None. dtypes: those that the kernel takes."""
    if not _runs_triton(q):
        return "it needs a CUDA device and triton"
    if mechanism.strict:
        return "it does not look for rows that sum to zero (strict=True)"
    if 0 in (*q.shape, *v.shape):
        return "there is nothing to attend to"
    if v.dtype not in dtypes or q.dtype != v.dtype or k.dtype != v.dtype:
        return f"it takes {', '.join(str(d).split('.')[1] for d in dtypes)}, one of them for q, k and v"
    return None


def unsupported_rules(q: Tensor, k: Tensor, mask: Mask) -> str | None:
    """Returns which rule of a mask the kernels would leave out, or None; they know padding and causal masks."""
    if mask.documents is not None:
        return "it knows no packed documents"
    if mask.window is not None:
        return "it knows no window"
    if mask.rows is not None or (mask.causal and q.shape[2] != k.shape[2]):
        return "it takes each causal query to stand at the key of the same index"
    return None


def unsupported_widths(K: int, V: int, device: torch.device) -> str | None:
    """Returns why heads of widths K and V need more shared memory than a GPU has, or None."""
    if max(K, V) > _NARROW_HEAD_DIM and _smem_bytes_per_block(device) < _WIDE_HEAD_SMEM_BYTES:
        needed = _WIDE_HEAD_SMEM_BYTES >> 10
        return f"K = {K}, V = {V}: over {_NARROW_HEAD_DIM} it needs {needed} KiB of shared memory, {device} has less"
    return None


def _unsupported_sequence(mechanism: Linear, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Returns why the kernels for whole sequences cannot run, or None."""
    reason = unsupported_inputs(mechanism, q, k, v)
    if reason is not None:
        return reason
    K = k.shape[3]
    V = v.shape[3]
    F = mechanism.feature_count(K)
    # Fourier's sums cancel: to be accurate to float32 or float16 they would need float64 accumulators.
    needs_float64 = isinstance(mechanism, Fourier) and v.dtype != torch.bfloat16
    too_wide = isinstance(mechanism, Performer) and v.dtype != torch.bfloat16 and K > _MAX_HEAD_DIM // 2
    if needs_float64 or too_wide or F > _MAX_FEATURES or max(K, V) > _MAX_HEAD_DIM:
        return f"{v.dtype}, F = {F}, K = {K}, V = {V} exceed its limits: {_LIMITS[type(mechanism)]}"
    return unsupported_widths(K, V, v.device)


def _unsupported_token(mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, state: Sums) -> str | None:
    """Returns why the kernel for a single token cannot run, or None. It has fewer limits than those for sequences: it
    needs little shared memory, and computes in the dtype of the state."""
    reason = unsupported_inputs(mechanism, q, k, v, (*_DTYPES, torch.float64))
    if reason is not None:
        return reason
    differentiable = (q, k, v, state.sums, *mechanism.parameters())
    if torch.is_grad_enabled() and any(x.requires_grad for x in differentiable):
        return "it has no gradient for one token at a time"
    K = k.shape[3]
    V = v.shape[3]
    F = mechanism.feature_count(K)
    if F > _MAX_FEATURES or max(K, V) > _MAX_HEAD_DIM:
        return f"F = {F}, K = {K}, V = {V} exceed its limits: {_LIMITS[type(mechanism)]}"
    return None


def _unsupported_forward(mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> str | None:
    """Returns why `forward` cannot run, or None if it can."""
    return unsupported_rules(q, k, mask) or _unsupported_sequence(mechanism, q, k, v)


def _unsupported_extend(
    mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, state: Sums, visible: Tensor | None = None
) -> str | None:
    """Returns why `extend` cannot run, or None if it can."""
    if q.shape[2] == 1:
        return _unsupported_token(mechanism, q, k, v, state)
    return _unsupported_sequence(mechanism, q, k, v)


def forward(mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Returns the outputs [B,H,T,V] of q [B,H,T,K], k [B,G,T,K], v [B,G,T,V]."""
    return _attend(mechanism, q, k, v, mask.visible, mask.causal, None)[0]


def extend(
    mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, state: Sums, visible: Tensor | None = None
) -> tuple[Tensor, Sums]:
    """Returns the outputs [B,H,T,V] of T more tokens after a state, and the state after these tokens."""
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
    """Returns the outputs [B,H,T,V]; and, if a state was passed, sums [B,G,F,V+1] and peak [B,G] after the last
    token."""
    from regard.kernels.linear.ops import attend

    w = _directions(mechanism, q)
    if isinstance(mechanism, AnyFeatures):
        q, k = _compute_features(mechanism, q, k, v, visible, torch.float32)
        if v.dtype == torch.bfloat16:
            q = q.bfloat16()
            k = k.bfloat16()
    sums = None
    peak = None
    if state is not None:
        sums = state.sums
        peak = state.peak
        if isinstance(mechanism, Elu):  # the kernels keep its sums relative to e⁰
            sums = sums * torch.exp(peak)[..., None, None]
    out, final_sums, final_peak = attend(
        q, k, v, w, visible, sums, peak, _MAPS[type(mechanism)], causal, state is not None
    )  # fmt: skip
    return out.to(v.dtype), final_sums, final_peak


def _attend_token(
    mechanism: Linear, q: Tensor, k: Tensor, v: Tensor, state: Sums, visible: Tensor | None
) -> tuple[Tensor, Sums]:
    """Returns the outputs [B,H,1,V] of one more token after a state, and the state after this token."""
    from regard.kernels.linear.triton_step import decode_step

    w = _directions(mechanism, q)
    if isinstance(mechanism, AnyFeatures):
        q, k = _compute_features(mechanism, q, k, v, visible, state.sums.dtype)
    return decode_step(q, k, v, w, visible, state, _MAPS[type(mechanism)])


def _directions(mechanism: Linear, q: Tensor) -> Tensor | None:
    """Returns the directions [D,K] of random features, or None for other maps. A mechanism that has directions
    already keeps them in a dtype of its own, and they are returned in that. One that was built without a head width K
    draws them on its first call; if this is that call, it draws them in float32."""
    if not isinstance(mechanism, Performer | Fourier):
        return None
    # The argument only says which K, which device and which dtype; its contents are not read.
    return mechanism.directions(q.new_empty(q.shape[3], dtype=torch.float32))


def _compute_features(
    mechanism: AnyFeatures, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns the features of queries [B,H,T,F] and keys [B,G,T,F], computed by PyTorch in `dtype`."""
    with without_autocast(v):
        q_features = mechanism.features(q.to(dtype))[0]
        k_features = mechanism.features(Mask(visible=visible).zero_hidden(k).to(dtype))[0]
    return q_features, k_features


for _cls, _limits in _LIMITS.items():
    kernel(_cls, "forward", name="triton", when=_unsupported_forward, device="cuda", limits=_limits)(forward)
    kernel(_cls, "extend", name="triton", when=_unsupported_extend, device="cuda", limits=_limits)(extend)
