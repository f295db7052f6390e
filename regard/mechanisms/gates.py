"""The inputs of gated and delta attention: checked, with their heads side by side, and with hidden tokens inert."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.errors import GateError, MaskError, OptionError, ShapeError
from regard.mechanisms.base import can_read
from regard.shapes import Mask, Size, check_sizes, check_state, upcast_half

if TYPE_CHECKING:
    from regard.mechanisms.recurrence import Recurrence

_WHY_REFUSED = {
    "window": "one token cannot be taken out of a memory again; a decay forgets instead",
    "bias": "it has no softmax whose scores a bias could be added to",
    "slopes": "it has no softmax whose scores slopes could be added to; its own decay does what they do",
    "relative": "it has no softmax whose scores a bias of relative positions could be added to",
    "softcap": "it has no softmax whose scores could be capped",
    "sinks": "it has no softmax whose denominator a sink could join",
    "rows": "its queries are the last of its keys",
}


class GatedTokens(NamedTuple):
    """One call's tokens: R query heads side by side for each of G value heads, in the dtype of the memory."""

    q: Float[Tensor, "B G R T K"]
    k: Float[Tensor, "B G S K"]
    v: Float[Tensor, "B G S V"]
    a: Float[Tensor, "B G S X"]  # X is 1, or K for a decay of each channel
    b: Float[Tensor, "B G S 1"] | None  # None: 1 throughout


def share_heads(q: Tensor, k: Tensor, G: int) -> tuple[Tensor, Tensor]:
    """Returns q and k with a head for each of G value heads where they have fewer; more query heads stay."""
    if q.dim() != 4 or k.dim() != 4 or G == 0:
        return q, k
    if q.shape[1] < G:
        q = _repeat_heads("q", q, G)
    return q, _repeat_heads("k", k, G)


def _repeat_heads(name: str, x: Tensor, G: int) -> Tensor:
    if x.shape[1] == G:
        return x
    if x.shape[1] == 0 or G % x.shape[1]:
        raise ShapeError(f"{name} has {x.shape[1]} heads, which do not divide the G = {G} heads of v: {list(x.shape)}.")
    return x.repeat_interleave(G // x.shape[1], 1)


def check_mask(mechanism: Recurrence, mask: Mask) -> None:
    """Raises where the mask asks for what a memory cannot do."""
    if not mask.causal:
        raise MaskError(
            f"{mechanism.name} is causal: what its memory holds depends on the order of the tokens before. Say "
            "causal=True, or use 'softmax' or a linear mechanism to look both ways."
        )
    check_rules(mechanism, mask)


def check_rules(mechanism: Recurrence, mask: Mask) -> None:
    """Raises where the mask has a rule that a memory cannot follow."""
    for field, why in _WHY_REFUSED.items():
        if getattr(mask, field) is not None:
            raise MaskError(f"{mechanism.name} cannot honour '{field}': {why}. Leave it out, or use 'softmax'.")


def prepare(
    mechanism: Recurrence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    dtype: torch.dtype,
) -> GatedTokens:
    """Returns the tokens of a call, whose sizes have been checked: hidden ones have a = 0, b = 0, and no k and v."""
    G = v.shape[1]
    mask = Mask(visible=visible)
    k = mask.zero_hidden(k)
    v = mask.zero_hidden(v)
    a, b = prepare_gates(mechanism, k, v, visible, a, b)
    a = a.to(torch.promote_types(a.dtype, dtype))  # before its exponential, which would have as few digits
    if b is not None:
        b = b.to(dtype)
    return GatedTokens(q.unflatten(1, (G, q.shape[1] // max(G, 1))).to(dtype), k.to(dtype), v.to(dtype), a, b)


def prepare_gates(
    mechanism: Recurrence, k: Tensor, v: Tensor, visible: Tensor | None, a: Tensor | None, b: Tensor | None
) -> tuple[Float[Tensor, "B G S X"], Float[Tensor, "B G S 1"] | None]:
    """Returns a and b of a call, checked, and 0 at hidden tokens; X is 1, or K for a decay of each channel."""
    B, G, S, _ = v.shape
    decays: tuple[int, ...] = (B, G, S)
    if mechanism.channels:
        decays = (B, G, S, k.shape[3])
    _check_given(mechanism, "a", a, decays)
    _check_given(mechanism, "b", b, (B, G, S))
    mask = Mask(visible=visible)
    if b is not None:
        b = mask.zero_hidden(b[..., None])
    own = a is None
    if a is None:
        a = mechanism.log_decay(v).expand(B, G, S, 1)
    elif not mechanism.channels:
        a = a[..., None]
    a = mask.zero_hidden(a)
    if not mechanism.checks:
        return a, b
    # A mechanism's own decays are as good as its code, for which no call on a GPU has to wait.
    a = _check_decays(mechanism, a, can_read(a) and not (own and a.is_cuda))
    if b is not None:
        b = _check_writes(mechanism, b, mask.zero_hidden(k))
    return a, b


def _check_given(mechanism: Recurrence, name: str, x: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raises where an input is missing, is not wanted, or has another shape."""
    letters = "[B,G,S]"
    if len(shape) == 4:
        letters = "[B,G,S,K]"
    if x is None:
        if name in mechanism.needs:
            raise OptionError(
                f"{mechanism.name} needs {name} {letters}: {_MEANING[name]}. Give {name}=… beside q, k, v."
            )
        return
    if name == "a" and "a" not in mechanism.needs:
        raise OptionError(
            f"{mechanism.name} takes no a: its decay is its own. Use 'gated' or 'gated-delta' to give one."
        )
    if tuple(x.shape) != shape:
        hint = ""
        if name == "a" and x.dim() in (3, 4) and x.dim() != len(shape):
            hint = " A decay for each channel needs channels=True, one for each head channels=False."
        elif x.dim() == len(shape) and tuple(x.transpose(1, 2).shape) == shape:
            hint = f" Heads come before tokens: {name}.transpose(1, 2)."
        wanted = f"{letters} = {list(shape)}"
        raise ShapeError(f"{mechanism.name}: {name} has shape {list(x.shape)}, expected {wanted}.{hint}")
    if x.is_complex():
        raise ShapeError(f"{mechanism.name}: {name} is {x.dtype}, expected real numbers.")


_MEANING = {
    "a": "the logarithm of each token's decay, at most 0",
    "b": "how strongly each token is written",
}


def _check_decays(mechanism: Recurrence, a: Tensor, looks: bool) -> Tensor:
    """Returns the decays; where one is above 0, and a memory would grow, raises if it looks, else puts NaN there."""
    fits = a <= 0
    if not looks:
        return a.masked_fill(~fits, float("nan"))
    if not bool(fits.all()):
        raise GateError(
            f"{mechanism.name}: a = {_worst(a, a)}, expected at most 0, the logarithm of a decay: use "
            "-softplus(x) or logsigmoid(x)."
        )
    return a


def _check_writes(mechanism: Recurrence, b: Tensor, k: Tensor) -> Tensor:
    """Returns the write strengths; raises where one is outside its range, or its key so long that erasing overshoots.

    Erasing along k multiplies what k reads by 1 − b‖k‖²; beyond −1 it would grow from token to token. Where nothing can
    be raised, because no number can be read, NaN stands in the place of such a strength, so that it shows.
    """
    if not mechanism.erases:
        if can_read(b) and not bool(b.isfinite().all()):
            raise GateError(f"{mechanism.name}: b = {_worst(b, b.abs())}, expected a finite number.")
        return b
    fits = (b >= 0) & (b <= mechanism.range)
    # A key that is not a number makes the rows that see it NaN, as in all mechanisms: it is no question of its length.
    length = torch.linalg.vector_norm(upcast_half(k.detach()).nan_to_num(0.0, 0.0, 0.0), dim=-1, keepdim=True)
    overshoot = b.detach() * length.square()
    # A key of length one has it but for rounding, perhaps that of single precision before it came here.
    bounded = overshoot <= 2 + 8 * max(torch.finfo(k.dtype).eps, torch.finfo(torch.float32).eps)
    if not (can_read(b) and can_read(k)):
        return b.masked_fill(~(fits & bounded), float("nan"))
    if not bool(fits.all()):
        made = "sigmoid(x)"
        if mechanism.range != 1:
            made = f"{mechanism.range:g}·sigmoid(x)"
        raise GateError(
            f"{mechanism.name}: b = {_worst(b, (b - mechanism.range / 2).abs())}, expected 0 to {mechanism.range:g} "
            f"(range={mechanism.range:g}): use {made}."
        )
    if not bool(bounded.all()):
        raise GateError(
            f"{mechanism.name}: b‖k‖² = {_worst(overshoot, overshoot)}, expected at most 2: beyond, what a key reads "
            "grows each time it is erased. Use keys of length 1: k / ‖k‖."
        )
    return b


def _worst(x: Tensor, badness: Tensor) -> str:
    """Returns the number that is worst, NaN before all others, and its batch, head and token."""
    flat = int(badness.nan_to_num(float("inf"), float("inf")).argmax())
    place = torch.unravel_index(torch.tensor(flat), x.shape)
    row, head, token = (int(i) for i in place[:3])
    return f"{float(x.detach().flatten()[flat]):.7g} (batch {row}, head {head}, token {token})"


def check_tokens(
    mechanism: Recurrence, q: Tensor, k: Tensor, v: Tensor, mask: Mask, new: bool = False
) -> tuple[Tensor, Tensor, Size, Mask]:
    """Returns q and k with the heads of v, the sizes of the call, and its mask without rules that change nothing."""
    if v.dim() == 4:
        q, k = share_heads(q, k, v.shape[1])
    size = check_sizes(q, k, v, mask, new)
    mask = mask.without_idle_rules(size.T, size.S)
    check_mask(mechanism, mask)
    return q, k, size, mask


def check_memory(memory: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises where tokens do not fit a memory [B,G,K,V]."""
    B, G, K, V = memory.shape
    check_state(Size(B=B, G=G, K=K, V=V), k, v)


def same_document(documents: Tensor | None, causal: Bool[Tensor, "T S"]) -> Bool[Tensor, "#B 1 T S"]:
    """Returns which pairs are causal and of one document; `documents` [B,S] are its ids, the rows the last T."""
    allowed = causal[None, None]
    if documents is None:
        return allowed
    rows = documents[:, documents.shape[1] - causal.shape[0] :]
    return allowed & (rows[:, :, None] == documents[:, None, :])[:, None]
