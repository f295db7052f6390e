"""What attention may add to a mechanism by choice, and how it is added wrongly: an epsilon, rotary positions, ALiBi."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.laws.case import difference
from regard.laws.slips import Asked, Slip
from regard.mechanisms import Linear, Mechanism, Softmax

SMALL_EPSILON = 1e-3  # up to which an epsilon guards a division, and is no fault


def find_epsilon(
    mechanism: Mechanism | None, asked: Asked, got: Tensor, want: Tensor, tolerance: float
) -> float | None:
    """Returns what, added to each row's sum of weights, makes the mechanism's outputs those that were got, or None."""
    if got.shape != want.shape:
        return None
    for sums in _row_sums(mechanism, asked):
        ratio = (got * want).sum(-1, keepdim=True) / got.square().sum(-1, keepdim=True).clamp(min=1e-30)
        epsilon = float((sums * (ratio - 1)).median())
        if epsilon > 0 and difference(got, want * sums / (sums + epsilon)) <= tolerance:
            return epsilon
    return None


def _row_sums(mechanism: Mechanism | None, asked: Asked) -> Iterator[Tensor]:
    """Yields the sums of each row's weights before they are divided by them, [B,H,T,1], in the usual ways to scale."""
    if isinstance(mechanism, Softmax):
        raw = asked.scores.masked_fill(~asked.allowed, float("-inf"))
        yield (raw - raw.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)
        yield raw.exp().sum(-1, keepdim=True)
    elif isinstance(mechanism, Linear):
        features = []
        for x in (asked.q, asked.k):
            psi, c = mechanism.features(x)
            features.append(psi if c is None else psi * c.exp()[..., None])
        keys = features[1].repeat_interleave(asked.q.shape[1] // asked.k.shape[1], 1)
        yield ((features[0] @ keys.mT) * asked.allowed).sum(-1, keepdim=True)


def rotate(x: Tensor, pairs_are_neighbours: bool, sign: float = 1.0) -> Tensor:
    """Returns x [B,H,T,K] turned by its positions with base 10,000; an odd width leaves its last number as it is."""
    half = x.shape[-1] // 2
    steps = torch.arange(half, dtype=x.dtype, device=x.device) / half
    positions = torch.arange(x.shape[2], dtype=x.dtype, device=x.device)
    angles = sign * positions[:, None] * 10_000.0**-steps
    if pairs_are_neighbours:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
    if pairs_are_neighbours:
        return torch.cat([torch.stack(turned, -1).flatten(-2), x[..., 2 * half :]], -1)
    return torch.cat([*turned, x[..., 2 * half :]], -1)


def _rotary(parts: str, neighbours: bool) -> Slip:
    """Returns softmax attention of which some of q, k and v are turned; a capital letter turns the other way."""

    def attend(a: Asked) -> Tensor:
        turned: dict[str, Any] = {
            p: rotate(getattr(a, p), neighbours, 1.0 if p in parts else -1.0) for p in parts.lower()
        }
        return replace(a, **turned).attend()

    return attend


def _alibi(slopes: Callable[[Tensor, int], Tensor], factor: Callable[[Asked], float] = lambda a: -1.0) -> Slip:
    """Returns softmax attention whose scores change with distance by a slope for each head."""

    def attend(a: Asked) -> Tensor:
        H, T, S = a.q.shape[1], a.q.shape[2], a.k.shape[2]
        heads = torch.arange(1, H + 1, dtype=a.q.dtype, device=a.q.device)
        places = torch.arange(S, dtype=a.q.dtype, device=a.q.device)
        distance = (places[S - T :, None] - places).abs()
        return a.attend(a.scores + factor(a) * slopes(heads, H)[:, None, None] * distance)

    return attend


def paper_slopes(heads: Tensor, H: int) -> Tensor:
    """Returns ALiBi's slope of each head, numbered from 1: 2^(−8h/H)."""
    return 2.0 ** (-8 * heads / H)


_FORMS = {"": False, " of neighbouring numbers": True}
# What is chosen, and no fault, though softmax has it not; {} is the reference's name.
CHOICES: dict[str, Slip] = {
    **{f"{{}} with rotary positions{name}": _rotary("qk", form) for name, form in _FORMS.items()},
    "{} with ALiBi": _alibi(paper_slopes),
}
POSITION_SLIPS: dict[str, Slip] = {
    **{
        f"{{}} with rotary positions{name} on v, too: they belong on q and k": _rotary("qkv", form)
        for name, form in _FORMS.items()
    },
    **{f"{{}} with rotary positions{name} on q and not on k": _rotary("q", form) for name, form in _FORMS.items()},
    **{f"{{}} with rotary positions{name} on k and not on q": _rotary("k", form) for name, form in _FORMS.items()},
    **{
        f"{{}} with rotary positions{name} that turn k the other way than q": _rotary("qK", form)
        for name, form in _FORMS.items()
    },
    "{} with ALiBi whose sign is turned: weights are to fall with distance": _alibi(paper_slopes, lambda a: 1.0),
    "{} with ALiBi whose heads have their slopes in reverse order": _alibi(lambda h, H: paper_slopes(h, H).flip(0)),
    "{} with ALiBi whose first slope is 1: head h of H, counted from 1, has 2^(−8h/H)": _alibi(
        lambda h, H: paper_slopes(h - 1, H)
    ),
    "{} with ALiBi divided by √K: the factor belongs to q·k alone": _alibi(
        paper_slopes, lambda a: -(a.q.shape[-1] ** -0.5)
    ),
    "{} with ALiBi of one slope for all heads: head h of H has 2^(−8h/H)": _alibi(
        lambda h, H: paper_slopes(torch.ones_like(h), H)
    ),
}
