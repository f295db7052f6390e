"""One attention call of a Hugging Face model, answered by a mechanism of ours.

Everything that the call brings is honoured or refused by name: masks, biases, a softcap, a scale, dropout, and every
keyword that this file does not know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.errors import HubError
from regard.hub.masks import Seen, added, recognised
from regard.mechanisms import Linear, Mechanism, Pairwise, Softmax
from regard.shapes import Mask

if TYPE_CHECKING:
    from regard.hub.cache import StateLayer


@dataclass(eq=False)
class Call:
    """One attention call: q [B,H,T,K], k and v [B,G,S,·], what may be seen, and what else the function was given."""

    module: nn.Module
    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None  # True may be seen, or numbers that are added; [B|1,1|H,T,S]
    scaling: float
    cross: bool
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def allowed(self) -> Tensor | None:
        """[T,S] of the first row of the batch: which cells may be seen."""
        if self.mask is None:
            return None
        hidden = None if self.mask.dtype == torch.bool else torch.finfo(self.mask.dtype).min / 2
        mask = self.mask[0, 0] if hidden is None else self.mask[0, 0] > hidden
        return mask[..., : self.k.shape[2]].expand(self.q.shape[2], -1)


class Replacement(nn.Module):
    """A mechanism in the place of a layer's own attention. It is a part of that layer, so that moving, saving and
    training the model reach its parameters and random features."""

    def __init__(self, mechanism: Mechanism, name: str, cross: bool) -> None:
        super().__init__()
        self.mechanism, self.name, self.cross = mechanism, name, cross
        self.state: StateLayer | None = None  # of the call that is about to come
        self.asked = False  # whether the layer has called since it began
        self.own_scale = isinstance(mechanism, Softmax) and mechanism.scale is not None

    @property
    def keeps_state(self) -> bool:
        """Whether its past is less than all keys and values."""
        return isinstance(self.mechanism, Linear) or self.mechanism.needs != "qkv"

    @property
    def has_scores(self) -> bool:
        """Whether queries are compared with keys by scores, which biases can be added to."""
        return isinstance(self.mechanism, Pairwise) and self.mechanism.needs == "qkv"

    def refuse(self, what: str, why: str) -> HubError:
        return HubError(
            f"{self.name}: {self.mechanism.name} cannot honour {what}: {why}. "
            f"Use 'softmax' in this layer, or restore(model)"
        )


# What a call may bring that changes nothing here: positions are in q and k already, windows in the mask.
_IDLE = {
    *("position_ids", "position_embeddings", "cache_position", "sliding_window", "deterministic", "seq_idx"),
    *("use_cache", "return_dict", "logits_to_keep", "num_items_in_batch", "labels", "is_causal", "dropout"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "output_cross_attentions"),
}
_KNOWN = {
    "position_bias": "it has no score to add a bias to",
    "softcap": "it has no score to cap",
    "s_aux": "a sink takes a share of every row, and regard's rows sum to one",
    "head_mask": "regard has no mask of heads",
}


def attended(used: Replacement, call: Call, dropout: float, causal: bool) -> tuple[Tensor, Tensor | None]:
    """out [B,T,H,V] and, where the model asks for them, weights [B,H,T,S]. `causal`: what no mask at all means."""
    mechanism, layer = used.mechanism, used.state
    used.state = None
    mechanism.dropout = dropout
    q = _scaled(used, call)
    _check_keywords(used, call)
    asked = bool(call.kwargs.get("output_attentions"))
    if layer is not None:
        return _from_state(used, call, q, layer, asked).transpose(1, 2).contiguous(), None
    mask = _mask(used, call, causal)
    k = call.k if "k" in mechanism.needs else None
    out = mechanism(q, k, call.v, mask)
    weights = explicit(mechanism, q, k, mask, call.k.shape[2]).to(call.q.dtype) if asked else None
    return out.transpose(1, 2).contiguous(), weights


def explicit(mechanism: Mechanism, q: Tensor, k: Tensor | None, mask: Mask, S: int) -> Tensor:
    """The weights face, for mechanisms that do without keys too."""
    return mechanism.weights(q, k, mask if k is not None else mask.but(size_override=(q.shape[2], S)))


def _scaled(used: Replacement, call: Call) -> Tensor:
    """q such that q·k/√K is the score that the model means; a softmax is simply told its scale, unless it has one."""
    if isinstance(used.mechanism, Softmax):
        used.mechanism.scale = used.mechanism.scale if used.own_scale else call.scaling
        return call.q
    factor = call.scaling * math.sqrt(call.q.shape[-1])
    return call.q if math.isclose(factor, 1, rel_tol=1e-6) else call.q * factor


def _from_state(used: Replacement, call: Call, q: Tensor, layer: StateLayer, asked: bool) -> Tensor:
    mechanism = used.mechanism
    if asked:
        raise used.refuse("'output_attentions' while it keeps a state", "the keys are gone; pass use_cache=False")
    if used.cross:
        rule = _mask(used, call, False) if layer.state is None else Mask()
        return layer.cross(mechanism, q, call.k, call.v, rule.visible)
    T, start = q.shape[2], layer.seen
    _check_window(used, call, start + T, layer.window)
    visible = _new_visible(used, call, start, T)
    out = layer.extend(mechanism, q, call.k, call.v, visible)
    if isinstance(mechanism, Linear):  # its recurrent face leaves dropout to its owner
        out = functional.dropout(out, mechanism.dropout, mechanism.training)
    return out


def _check_window(used: Replacement, call: Call, tokens: int, window: int | None) -> None:
    for width in (window, call.kwargs.get("sliding_window"), getattr(call.mask, "local", None)):
        if width is not None and tokens > int(width):
            raise used.refuse(
                f"a sliding window of {width} over {tokens} tokens", "its state sums up the past and cannot forget"
            )


def _new_visible(used: Replacement, call: Call, start: int, T: int) -> Tensor | None:
    """Which of the new tokens may be seen, once it is certain that all before them may be, padding apart."""
    if call.mask is None:
        return None
    rule = call.mask.rule if isinstance(call.mask, Seen) else recognised(call.mask)
    if rule is None or not (rule.causal or T == 1):
        raise used.refuse("this mask", "its state is causal, and the mask is not just causal with padding")
    if rule.visible is None:
        return None
    new = rule.visible[:, start : start + T]
    return None if bool(new.all()) else new.expand(call.q.shape[0], T)


def _mask(used: Replacement, call: Call, causal: bool) -> Mask:
    """The mask of a call without a state."""
    given, S = call.mask, call.k.shape[2]
    if given is None:
        rule: Mask | None = Mask(causal=causal and call.q.shape[2] > 1 and not used.cross)
    elif isinstance(given, Seen):
        rule = given.rule
        if given.shape[-1] != S:
            raise HubError(f"{used.name}: a mask over {given.shape[-1]} keys came with {S} keys")
    else:
        given = given[..., :S]
        rule = recognised(given, used.cross)
    if rule is not None and rule.visible is not None and rule.visible.shape[0] != call.q.shape[0]:
        rule = rule.but(visible=rule.visible.expand(call.q.shape[0], -1))
    if rule is None:
        assert given is not None
        if not used.has_scores:
            _check_window(used, call, S, None)
            raise used.refuse("a mask given as a matrix", "it knows causal masks and padding")
        matrix = given.matrix() if isinstance(given, Seen) else given
        rule = Mask(bias=added(matrix, call.q.dtype))
    bias = call.kwargs.get("position_bias")
    if bias is not None and used.has_scores:
        rule = rule.but(bias=bias if rule.bias is None else rule.bias + bias)
    return rule.but(softcap=call.kwargs.get("softcap"))


def _check_keywords(used: Replacement, call: Call) -> None:
    """An error for the first keyword that would be dropped."""
    honoured = {"position_bias", "softcap"} if used.has_scores else set()
    for name in sorted(set(call.kwargs) - _IDLE - honoured):
        if _says_something(call.kwargs[name]):
            raise used.refuse(f"'{name}'", _KNOWN.get(name, "regard does not know what it asks for"))


def _says_something(x: Any) -> bool:
    """Whether a keyword's value asks for anything: None, False and a bias of zeros do not."""
    if isinstance(x, Tensor):
        return not x.is_floating_point() or bool((x != 0).any())
    return x is not None and x is not False
