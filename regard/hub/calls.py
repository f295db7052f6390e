"""One attention call of a Hugging Face model, and the mechanism of regard that answers it in place of the layer's own.

Whatever a call brings is honoured or refused by name: masks, biases, a softcap, a scale, dropout, and every keyword
that this file does not know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.errors import HubError
from regard.hub.masks import LazyMask, as_additive, recognise_rule
from regard.mechanisms import Linear, Mechanism, Pairwise, Softmax
from regard.shapes import Mask

if TYPE_CHECKING:
    from regard.hub.cache import StateLayer


@dataclass(eq=False)
class Call:
    """One attention call: q [B,H,T,K], k [B,G,S,K], v [B,G,S,V], the mask, and the other keywords of the function."""

    module: nn.Module
    name: str  # of the module, in its model
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None  # [B|1,1|H,T,S]: True where a key may be seen, or numbers to add to the scores
    scaling: float  # the factor of q·k
    cross: bool  # whether the keys are those of another sequence
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def allowed(self) -> Tensor | None:
        """Which keys each query of the batch's first row may see [T,S]; None without a mask."""
        if self.mask is None:
            return None
        mask = self.mask[0, 0]
        if mask.dtype != torch.bool:
            mask = mask > torch.finfo(mask.dtype).min / 2
        return mask[..., : self.k.shape[2]].expand(self.q.shape[2], -1)


class AttentionReplacement(nn.Module):
    """A mechanism of regard in the place of a layer's own attention.

    It is a submodule of the layer, so that moving, saving and training the model reach what it learns or has drawn.
    `implementations` names the entries in transformers' tables by which the layer finds it.
    """

    live: ClassVar[WeakSet[AttentionReplacement]] = (
        WeakSet()
    )  # all of them: `uninstall` asks which entries are still needed

    def __init__(self, mechanism: Mechanism, name: str, cross: bool) -> None:
        super().__init__()
        self.mechanism = mechanism
        self.name = name
        self.cross = cross
        self.has_own_scale = isinstance(mechanism, Softmax) and mechanism.scale is not None
        self.cache_layer: StateLayer | None = None  # for the next call
        self.was_called = False  # since the layer's forward began
        self.implementations: frozenset[str] = frozenset()
        AttentionReplacement.live.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        AttentionReplacement.live.add(self)  # a copy of a model comes by here and not by __init__

    @property
    def keeps_state(self) -> bool:
        """Whether generating needs less than all past keys and values."""
        return isinstance(self.mechanism, Linear) or self.mechanism.needs != "qkv"

    @property
    def has_scores(self) -> bool:
        """Whether queries are compared with keys by scores, which biases can be added to."""
        return isinstance(self.mechanism, Pairwise) and self.mechanism.needs == "qkv"

    def refuse(self, what: str, why: str) -> HubError:
        """Returns the error for something that the mechanism cannot honour."""
        return HubError(
            f"{self.name}: {self.mechanism.name} cannot honour {what}: {why}. "
            f"Use 'softmax' in this layer, or restore(model)"
        )

    def forward(self, call: Call, dropout: float = 0.0, causal: bool = False) -> tuple[Tensor, Tensor | None]:
        """Returns out [B,T,H,V] and, if the model asks for them, weights [B,H,T,S].

        `causal` says what a call without any mask means.
        """
        mechanism = self.mechanism
        layer = self.cache_layer
        self.cache_layer = None
        mechanism.dropout = dropout
        q = _scale_queries(self, call)
        _check_keywords(self, call)
        if layer is not None:
            return _attend_by_state(self, call, q, layer).transpose(1, 2).contiguous(), None
        mask = _build_mask(self, call, causal)
        k = call.k if "k" in mechanism.needs else None
        out = mechanism(q, k, call.v, mask).transpose(1, 2).contiguous()
        if not call.kwargs.get("output_attentions"):
            return out, None
        if k is None:  # then the mechanism cannot see the number of keys
            mask = mask.but(size_override=(q.shape[2], call.k.shape[2]))
        return out, mechanism.weights(q, k, mask).to(call.q.dtype)


# Keywords that change nothing here: positions are in q and k already, windows in the mask.
_WITHOUT_EFFECT = {
    *("position_ids", "position_embeddings", "cache_position", "sliding_window", "deterministic", "seq_idx"),
    *("use_cache", "return_dict", "logits_to_keep", "num_items_in_batch", "labels", "is_causal", "dropout"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "output_cross_attentions"),
}
_REASONS = {
    "position_bias": "it has no score to add a bias to",
    "softcap": "it has no score to cap",
    "s_aux": "a sink takes a share of every row, and regard's rows sum to one",
    "head_mask": "regard has no mask of heads",
}


def _scale_queries(replacement: AttentionReplacement, call: Call) -> Tensor:
    """Returns q [B,H,T,K] such that q·k/√K, which mechanisms compute, is the score that the model means."""
    mechanism = replacement.mechanism
    if isinstance(mechanism, Softmax):  # it can be told its scale, unless it was built with one
        if not replacement.has_own_scale:
            mechanism.scale = call.scaling
        return call.q
    factor = call.scaling * math.sqrt(call.q.shape[-1])
    if math.isclose(factor, 1, rel_tol=1e-6):  # the model's own scale is 1/√K, too
        return call.q
    return call.q * factor


def _attend_by_state(replacement: AttentionReplacement, call: Call, q: Tensor, layer: StateLayer) -> Tensor:
    """Returns out [B,H,T,V] from the state in the cache, which is extended by the new keys and values."""
    mechanism = replacement.mechanism
    if call.kwargs.get("output_attentions"):
        raise replacement.refuse(
            "'output_attentions' while it keeps a state", "the keys are gone; pass use_cache=False"
        )
    if replacement.cross:
        mask = Mask()
        if layer.state is None:  # the source is written now; its padding is not needed again
            mask = _build_mask(replacement, call, causal=False)
        return layer.cross(mechanism, q, call.k, call.v, mask.visible)
    T = q.shape[2]
    _check_window(replacement, call, layer.length + T, layer.window)
    visible = _visible_new_tokens(replacement, call, layer.length, T)
    out = layer.extend(mechanism, q, call.k, call.v, visible)
    if isinstance(mechanism, Linear):  # its recurrent face leaves dropout to its owner
        out = functional.dropout(out, mechanism.dropout, mechanism.training)
    return out


def _check_window(replacement: AttentionReplacement, call: Call, tokens: int, window: int | None) -> None:
    """Raises an error if a sliding window is narrower than the tokens that a state would sum over."""
    for width in (window, call.kwargs.get("sliding_window"), getattr(call.mask, "window", None)):
        if width is not None and tokens > int(width):
            raise replacement.refuse(
                f"a sliding window of {width} over {tokens} tokens", "its state sums up the past and cannot forget"
            )


def _visible_new_tokens(replacement: AttentionReplacement, call: Call, start: int, T: int) -> Tensor | None:
    """Returns which of the T new tokens are no padding [B,T], or None for all of them.

    A state needs a causal mask: every query must see all tokens before it, padding apart.
    """
    if call.mask is None:
        return None
    rule = call.mask.rule if isinstance(call.mask, LazyMask) else recognise_rule(call.mask)
    if rule is None or not (rule.causal or T == 1):
        raise replacement.refuse("this mask", "its state is causal, and the mask is not just causal with padding")
    if rule.visible is None:
        return None
    new = rule.visible[:, start : start + T]
    if bool(new.all()):
        return None
    return new.expand(call.q.shape[0], T)


def _build_mask(replacement: AttentionReplacement, call: Call, causal: bool) -> Mask:
    """Returns the mask of a call without a state, its biases and its softcap among it."""
    mask = _find_rule(replacement, call, causal)
    if mask is None:
        mask = Mask(bias=_mask_as_bias(replacement, call))
    B = call.q.shape[0]
    if mask.visible is not None and mask.visible.shape[0] != B:
        mask = mask.but(visible=mask.visible.expand(B, -1))
    bias = call.kwargs.get("position_bias")
    if bias is not None and replacement.has_scores:
        mask = mask.but(bias=bias if mask.bias is None else mask.bias + bias)
    return mask.but(softcap=call.kwargs.get("softcap"))


def _find_rule(replacement: AttentionReplacement, call: Call, causal: bool) -> Mask | None:
    """Returns the call's mask as a rule; None if it follows none."""
    S = call.k.shape[2]
    if call.mask is None:
        return Mask(causal=causal and call.q.shape[2] > 1 and not replacement.cross)
    if not isinstance(call.mask, LazyMask):
        return recognise_rule(call.mask[..., :S], replacement.cross)
    if call.mask.shape[-1] != S:
        raise HubError(f"{replacement.name}: a mask over {call.mask.shape[-1]} keys came with {S} keys")
    return call.mask.rule


def _mask_as_bias(replacement: AttentionReplacement, call: Call) -> Tensor:
    """Returns a mask that follows no rule as numbers to add to the scores, for mechanisms that have scores."""
    S = call.k.shape[2]
    if not replacement.has_scores:
        _check_window(replacement, call, S, None)
        raise replacement.refuse("a mask given as a matrix", "it knows causal masks and padding")
    assert call.mask is not None
    # As many columns as there are keys: a ready-made mask may be wider. Slicing a LazyMask computes it.
    return as_additive(call.mask[..., :S], call.q.dtype)


def _check_keywords(replacement: AttentionReplacement, call: Call) -> None:
    """Raises an error for the first keyword that would be dropped."""
    honoured = {"position_bias", "softcap"} if replacement.has_scores else set()
    for name in sorted(set(call.kwargs) - _WITHOUT_EFFECT - honoured):
        if _has_effect(call.kwargs[name]):
            raise replacement.refuse(f"'{name}'", _REASONS.get(name, "regard does not know what it asks for"))


def _has_effect(value: Any) -> bool:
    """Tells whether the value of a keyword asks for anything; None, False and a bias of zeros do not."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool((value != 0).any())
    return value is not None and value is not False
