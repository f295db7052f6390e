"""Common slips, tried on softmax attention: one that reproduces somebody's outputs to rounding names the fault.

Each slip is a function of an `Asked`: scaled scores, who may see whom, and the values, from which right attention would
be softmax(scores where allowed) @ v.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from regard.mechanisms import mix, scores
from regard.shapes import Mask, default_scale


@dataclass(frozen=True)
class Asked:
    """The inputs of one call: q [B,H,T,K], k [B,G,S,K], v [B,G,S,V], who may see whom [#B,1,#T,S], visible keys.

    `width` is that of the tokens, where a module made q, k and v from them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    visible: Tensor | None
    width: int | None = None

    @property
    def scores(self) -> Tensor:
        """Returns q·k/√K, [B,H,T,S]."""
        return scores(self.q * default_scale(self.q.shape[-1]), self.k, Mask())

    @property
    def allowed(self) -> Tensor:
        """Returns the mask of right attention, True where a query may see a key, [#B,1,T,S]."""
        return self.allowed_up_to(0)

    def allowed_up_to(self, offset: int) -> Tensor:
        """Returns the mask under which a causal query sees `offset` tokens more than itself and those before it."""
        T = self.q.shape[2]
        S = self.k.shape[2]
        allowed = torch.ones(1, 1, T, S, dtype=torch.bool, device=self.q.device)
        if self.causal:
            allowed = allowed.tril(S - T + offset)
        if self.visible is not None:
            allowed = allowed & self.visible[:, None, None]
        return allowed

    def attend(self, raw: Tensor | None = None, allowed: Tensor | None = None, axis: int = -1) -> Tensor:
        """Returns softmax attention with other scores, another mask or along another axis."""
        return mix(self.attend_weights(raw, allowed, axis), self.v)

    def attend_weights(self, raw: Tensor | None = None, allowed: Tensor | None = None, axis: int = -1) -> Tensor:
        """Returns the weights of softmax attention with other scores, another mask or along another axis."""
        if raw is None:
            raw = self.scores
        if allowed is None:
            allowed = self.allowed
        return raw.masked_fill(~allowed, float("-inf")).softmax(axis).nan_to_num(0.0)


Slip = Callable[[Asked], Tensor]


def _scaled(factor: Callable[[Asked], float]) -> Slip:
    """Returns the slip of scores that are some factor too large."""
    return lambda a: a.attend(a.scores * factor(a))


def _capped(cap: float) -> Slip:
    """Returns the slip of a softcap, which Gemma 2 has and softmax attention has not."""
    return lambda a: a.attend(cap * torch.tanh(a.scores / cap))


def _tile(x: Tensor, a: Asked) -> Tensor:
    return x.repeat(1, a.q.shape[1] // x.shape[1], 1, 1)


def _repeat(x: Tensor, a: Asked) -> Tensor:
    return x.repeat_interleave(a.q.shape[1] // x.shape[1], 1)


def _columns(a: Asked) -> Tensor:
    assert a.visible is not None
    return a.visible[:, None, None].to(a.scores.dtype)


def _softmax_twice(a: Asked) -> Tensor:
    return a.attend(a.attend_weights())


def _without_itself(a: Asked) -> Tensor:
    allowed = a.allowed_up_to(-1)
    blind = ~allowed.any(-1, keepdim=True)
    return a.attend(allowed=allowed | (blind & a.allowed))


def _blind_row_over_all(a: Asked) -> Tensor:
    """Returns softmax in which no query sees itself; −1e9 hides, so a row without keys is the mean of all values."""
    raw = a.scores.masked_fill(~a.allowed_up_to(-1), -1e9)
    return mix(raw.softmax(-1), a.v)


def _with_one_more(a: Asked) -> Tensor:
    """Returns softmax with a score of zero that has no value: exp(s) / (1 + Σ exp(s))."""
    raw = a.scores.masked_fill(~a.allowed, float("-inf"))
    weights = torch.cat([raw, torch.zeros_like(raw[..., :1])], -1).softmax(-1)
    return mix(weights[..., :-1], a.v)


def _hidden_queries(a: Asked) -> Tensor:
    assert a.visible is not None
    rows = a.visible[:, None, :, None]
    return a.attend(raw=a.scores.masked_fill(~rows, 0.0), allowed=replace(a, visible=None).allowed)


def _weights_times_mask(a: Asked) -> Tensor:
    return mix(a.scores.softmax(-1) * a.allowed, a.v)


def _mean_of_heads(a: Asked) -> Tensor:
    out = a.attend()
    return out.mean(1, keepdim=True).expand_as(out)


def _over_heads(a: Asked) -> Tensor:
    """Returns softmax attention in which the heads of a token attend to one another, and tokens do not."""
    swapped = replace(a, q=a.q.transpose(1, 2), k=a.k.transpose(1, 2), v=a.v.transpose(1, 2), visible=None)
    allowed = swapped.allowed_up_to(a.q.shape[1] - a.k.shape[1])  # nobody aligns heads at the last one
    return swapped.attend(allowed=allowed).transpose(1, 2)


# Words, with {} for the reference's name, and what they do to softmax attention.
SOFTMAX_SLIPS: dict[str, Slip] = {
    "{} with q multiplied by √K: is the factor 1/√K missing?": _scaled(lambda a: a.q.shape[-1] ** 0.5),
    "{} with q divided by √K: are scores divided by K instead of √K?": _scaled(lambda a: a.q.shape[-1] ** -0.5),
    "{} with q multiplied by K: are scores multiplied by √K instead of divided?": _scaled(lambda a: a.q.shape[-1]),
    "{} with scores divided by √T: the factor is 1/√K, of the width and not of the length": _scaled(
        lambda a: (a.q.shape[-1] / a.q.shape[-2]) ** 0.5
    ),
    "{} with scores divided by √S: the factor is 1/√K, of the width and not of the length": _scaled(
        lambda a: (a.q.shape[-1] / a.k.shape[-2]) ** 0.5
    ),
    "{} with scores divided by √V: the factor is 1/√K, of the keys' width": _scaled(
        lambda a: (a.q.shape[-1] / a.v.shape[-1]) ** 0.5
    ),
    "{} with scores divided by √(H·K), the width of all heads: each head's own K belongs there": _scaled(
        lambda a: a.q.shape[1] ** -0.5
    ),
    "{} with scores divided by the root of the tokens' width: the width K of a head belongs there": _scaled(
        lambda a: (a.q.shape[-1] / (a.width or a.q.shape[-1])) ** 0.5
    ),
    "{} with scores divided by √H: the width K of a head belongs there, not their number": _scaled(
        lambda a: (a.q.shape[-1] / a.q.shape[1]) ** 0.5
    ),
    "{} over all keys: is causal=True ignored?": lambda a: replace(a, causal=False).attend(),
    "{} with weights divided by √K: the factor belongs to the scores, before the softmax": lambda a: (
        a.attend(a.scores * a.q.shape[-1] ** 0.5) * a.q.shape[-1] ** -0.5
    ),
    "{} in which every query also sees the next token: is it triu(2) instead of triu(1)?": lambda a: a.attend(
        allowed=a.allowed_up_to(1)
    ),
    "{} in which no query sees itself: is it triu(0) instead of triu(1)?": _without_itself,
    "{} in which no query sees itself, and the first one sees all: is it triu(0) instead of triu(1)?": (
        _blind_row_over_all
    ),
    "{} with hidden scores set to 0, which softmax does not hide: −∞ belongs there": lambda a: replace(
        a, causal=False, visible=None
    ).attend(a.scores * a.allowed),
    "{} with weights masked after the softmax: rows no longer sum to one; mask the scores": _weights_times_mask,
    "{} with the mask added as 1: what is hidden needs −∞": lambda a: replace(a, causal=False, visible=None).attend(
        a.scores + a.allowed.to(a.scores.dtype)
    ),
    "{} with 1 added to what is hidden: what is hidden needs −∞": lambda a: replace(
        a, causal=False, visible=None
    ).attend(a.scores + (~a.allowed).to(a.scores.dtype)),
    "{} of what is hidden instead of what may be seen: is the mask inverted?": lambda a: a.attend(allowed=~a.allowed),
    "{} with each query seeing itself and what comes after: is the mask transposed?": lambda a: a.attend(
        allowed=a.allowed.mT
    ),
    "{} with key/value heads in the order a b a b: query head h needs head h // (H/G), a a b b": lambda a: replace(
        a, k=_tile(a.k, a), v=_tile(a.v, a)
    ).attend(),
    "{} with key heads in the order a b a b: query head h needs head h // (H/G), a a b b": lambda a: replace(
        a, k=_tile(a.k, a), v=_repeat(a.v, a)
    ).attend(),
    "{} with value heads in the order a b a b: query head h needs head h // (H/G), a a b b": lambda a: replace(
        a, k=_repeat(a.k, a), v=_tile(a.v, a)
    ).attend(),
    "{} in which every query head reads the first key/value head": lambda a: replace(
        a, k=a.k[:, :1], v=a.v[:, :1]
    ).attend(),
    "{} with query heads in reverse order": lambda a: replace(a, q=a.q.flip(1)).attend(),
    "{} with its heads averaged": _mean_of_heads,
    "{} with the first head's weights for all heads: do they share one?": lambda a: mix(
        a.attend_weights()[:, :1].expand(-1, a.q.shape[1], -1, -1), a.v
    ),
    "{} normalised over the queries: the softmax belongs over the keys, the last axis": lambda a: a.attend(axis=-2),
    "{} over the heads of each token: transpose to [B,H,T,K] first": _over_heads,
    "{} normalised over the heads: the softmax belongs over the keys, the last axis": lambda a: mix(
        a.scores.softmax(1) * a.allowed, a.v
    ),
    "{} normalised over the batch: the softmax belongs over the keys, the last axis": lambda a: mix(
        a.scores.softmax(0) * a.allowed, a.v
    ),
    "{} with weights transposed: a sum over the queries, where it belongs over the keys": lambda a: mix(
        a.attend_weights().mT, a.v
    ),
    "{} twice over: is a softmax applied to weights?": _softmax_twice,
    "{} of the absolute scores |q·k|": lambda a: a.attend(a.scores.abs()),
    "{} of −q·k: is the sign of the scores turned?": lambda a: a.attend(-a.scores),
    "{} of scores of normalised q and k (cosines)": lambda a: replace(
        a, q=normalize(a.q, dim=-1), k=normalize(a.k, dim=-1)
    ).attend(),
    "{} of cosines times √K: are q and k normalised, and not scaled?": lambda a: replace(
        a, q=normalize(a.q, dim=-1) * a.q.shape[-1] ** 0.5, k=normalize(a.k, dim=-1)
    ).attend(),
    **{
        f"{{}} with scores capped: {cap:g}·tanh(scores/{cap:g})": _capped(cap) for cap in (10.0, 15.0, 20.0, 30.0, 50.0)
    },
    "{} with 1 added to each row's sum, so that rows sum to less than one": _with_one_more,
    "exp(scores) @ v: rows are not divided by their sums": lambda a: mix(a.scores.exp() * a.allowed, a.v),
    "scores @ v: is the softmax missing?": lambda a: mix(a.scores * a.allowed, a.v),
    "scores @ v without 1/√K: is the softmax missing?": lambda a: mix(a.scores * a.allowed * a.q.shape[-1] ** 0.5, a.v),
    "relu(scores) in place of exp, divided by its sum": lambda a: mix(
        normalize(a.scores.relu() * a.allowed, p=1.0, dim=-1), a.v
    ),
    "sigmoid(scores) in place of a softmax over the keys": lambda a: mix(a.scores.sigmoid() * a.allowed, a.v),
    "the mean of all values that may be seen: scores do not matter": lambda a: a.attend(torch.zeros_like(a.scores)),
    "the values themselves: no other token is looked at": lambda a: _repeat(a.v, a),
    "{} with the keys for values": lambda a: replace(a, v=a.k).attend(),
    "{} of q·q: are the queries used for keys?": lambda a: replace(a, k=a.q, v=_repeat(a.v, a)).attend(),
    "{} of k·q: are queries and keys exchanged?": lambda a: replace(
        a, q=_repeat(a.k, a), k=a.q, v=_repeat(a.v, a)
    ).attend(),
}


def find_factor(asked: Asked, got: Tensor, tolerance: float) -> float | None:
    """Returns the factor of all scores with which softmax attention gives the output `got`, or None."""
    scores_asked = asked.scores

    def gap(power: float) -> float:
        return float((asked.attend(scores_asked * 2.0**power) - got).abs().max())

    powers = [n / 8 for n in range(-64, 65)]
    best = min(powers, key=gap)
    low = best - 1 / 8
    high = best + 1 / 8
    for _ in range(60):  # the gap falls and rises again: the third where it is larger goes
        left = low + (high - low) / 3
        right = high - (high - low) / 3
        if gap(left) < gap(right):
            high = right
        else:
            low = left
    if got.shape != asked.attend().shape or gap(low) > tolerance * float(got.abs().max()):
        return None
    return float(2.0**low)


# What becomes of hidden keys, tried where only outputs with padding differ.
PADDING_SLIPS: dict[str, Slip] = {
    "{} that sees hidden keys, too: is the mask of visible keys ignored?": lambda a: replace(a, visible=None).attend(),
    "{} of the hidden keys instead of the visible ones: is the mask inverted?": lambda a: replace(
        a, visible=None if a.visible is None else ~a.visible
    ).attend(),
    "{} with hidden keys and values set to zero, whose scores are then 0: −∞ belongs there": lambda a: mix(
        replace(a, visible=None).attend_weights(a.scores * _columns(a)) * _columns(a), a.v
    ),
    "{} with the mask of keys laid over the queries: it belongs along the last axis of the scores": _hidden_queries,
    "{} with the mask of the batch's first row for all rows": lambda a: replace(
        a, visible=None if a.visible is None else a.visible[:1].expand_as(a.visible)
    ).attend(),
}
