"""One attention call of a Hugging Face model, and the module that computes it with a mechanism of regard.

Every argument of a call that would change the result (mask, bias, softcap, scale, dropout, any other keyword) is
applied, or raises an error that names it. There are two exceptions: a scale that the user chose replaces that of the
call, and no dropout is applied while attention is recorded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.errors import HubError
from regard.hub.masks import LazyMask, as_additive, recognise_structure
from regard.mechanisms import Linear, Mechanism, Pairwise, Recurrence, Softmax
from regard.nn.gates import Gates
from regard.nn.norms import UnitLength
from regard.shapes import Mask

if TYPE_CHECKING:
    from regard.hub.cache import StateLayer


@dataclass(eq=False)
class Call:
    """One attention call: q [B,H,T,K], k [B,G,S,K], v [B,G,S,V], the mask, and the function's other keywords."""

    module: nn.Module
    name: str  # the module's name in its model
    q: Tensor
    k: Tensor
    v: Tensor
    # [B|1,1|H,T|1,≥S]: either boolean, with True where a query may see a key, or numbers that are added to the scores.
    # Without a state, columns after the first S are not used; with a state, the columns are all tokens so far.
    mask: Tensor | None
    scaling: float  # the factor of q·k
    cross: bool  # whether it is cross-attention
    kwargs: dict[str, Any] = field(default_factory=dict)
    replacement: AttentionReplacement | None = None  # what computes it while it is recorded; None: the model's own

    @property
    def allowed(self) -> Tensor | None:
        """The mask [T,S] of the first head of the batch's first example; None if the call has no mask.

        It is True where a query may see a key.
        """
        if self.mask is None:
            return None
        mask = self.mask[0, 0]
        if mask.dtype != torch.bool:
            mask = mask > torch.finfo(mask.dtype).min / 2
        return mask[..., : self.k.shape[2]].expand(self.q.shape[2], -1)


class AttentionReplacement(nn.Module):
    """A mechanism of regard that replaces the attention of one attention module.

    It is a submodule of that module, so that `.to()`, `state_dict()` and training include the mechanism's parameters
    and buffers. Transformers keeps its attention functions in a table by name, and `attention.install` adds an entry
    for each attention implementation of a model. `implementations` holds the names of the entries that the model of
    this replacement uses, and `configs` the configs that name them; both are empty if it is not installed.
    """

    # All replacements that exist: from them `attention.uninstall` finds the entries that are still needed.
    live: ClassVar[WeakSet[AttentionReplacement]] = WeakSet()

    def __init__(self, mechanism: Mechanism, name: str, cross: bool, gates: Gates | None = None) -> None:
        super().__init__()
        self.mechanism = mechanism
        self.gates = gates  # computes decays and write strengths from the module's input
        self.made: dict[str, Tensor] = {}  # those of the module's current input, by name
        self.unit_length: UnitLength | None = None
        if getattr(mechanism, "erases", False):
            self.unit_length = UnitLength()  # with longer keys the delta rule would erase more than the memory holds
        self.name = name
        self.cross = cross
        self.has_own_scale = isinstance(mechanism, Softmax) and mechanism.scale is not None
        self.cache_layer: StateLayer | None = None  # the layer of the cache that the next call extends
        self.instead = "Use 'softmax' in this layer, or restore(model)"  # what an error advises
        self.was_called = False  # whether it was called since the module's forward began
        self.implementations: frozenset[str] = frozenset()
        self.configs: tuple[Any, ...] = ()
        AttentionReplacement.live.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"made": {}}  # tensors of a call that failed belong to a graph, and cannot be copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        AttentionReplacement.live.add(self)  # copying and unpickling a model call __setstate__ and not __init__
        from regard.hub.attention import register_entries  # which imports this module

        register_entries(self.implementations)  # a new process does not have them yet

    @property
    def keeps_state(self) -> bool:
        """Whether generation keeps a state that is smaller than all past keys and values."""
        return isinstance(self.mechanism, Linear | Recurrence) or self.mechanism.needs != "qkv"

    @property
    def has_scores(self) -> bool:
        """Whether the mechanism computes scores q·k, to which a bias can be added."""
        return isinstance(self.mechanism, Pairwise) and self.mechanism.needs == "qkv"

    def refusal(self, what: str, why: str) -> HubError:
        """Returns the error for a feature that the mechanism does not support."""
        return HubError(f"{self.name}: {self.mechanism.name} cannot honour {what}: {why}. {self.instead}")

    def forward(self, call: Call, dropout: float = 0.0, causal: bool = False) -> tuple[Tensor, Tensor | None]:
        """Returns out [B,T,H,V], and weights [B,H,T,S] if the call has `output_attentions`, else None.

        `causal` says whether a call without a mask is causal.
        """
        mechanism = self.mechanism
        layer = self.cache_layer
        self.cache_layer = None
        mechanism.dropout = dropout
        if self.unit_length is not None:
            call = replace(call, q=self.unit_length(call.q), k=self.unit_length(call.k))
        self._check_gates(call, layer is not None)
        q = _scale_queries(self, call)
        _check_keywords(self, call)
        if layer is not None:
            return _attend_by_state(self, call, q, layer).transpose(1, 2).contiguous(), None
        mask = _build_mask(self, call, causal)
        k = call.k if "k" in mechanism.needs else None
        out = mechanism(q, k, call.v, mask, **self.made).transpose(1, 2).contiguous()
        if not call.kwargs.get("output_attentions"):
            return out, None
        if k is None:  # then the mechanism does not get k, and cannot read the number of keys from it
            mask = mask.but(size_override=(q.shape[2], call.k.shape[2]))
        return out, mechanism.weights(q, k, mask, **self.made).to(call.q.dtype)

    def _check_gates(self, call: Call, has_state: bool) -> None:
        """Raises an error if decays and write strengths are not those of the keys of a call."""
        for x in self.made.values():
            if x.shape[1] != call.k.shape[1]:
                raise self.refusal(
                    f"{call.k.shape[1]} heads of keys and values", f"the model's config says {x.shape[1]}"
                )
            if x.shape[2] != call.k.shape[2] and not has_state:
                raise self.refusal(
                    f"{call.k.shape[2]} keys for {x.shape[2]} new tokens",
                    "decays and write strengths of earlier tokens are not kept; begin with a new cache",
                )


# Keywords that `_check_keywords` accepts with any value. Some do not concern attention, such as `labels`. The others
# are applied elsewhere: positions are in q and k already, windows are in the mask, and `forward` applies dropout.
_ACCEPTED_KEYWORDS = {
    *("position_ids", "position_embeddings", "cache_position", "sliding_window", "deterministic", "seq_idx"),
    *("use_cache", "return_dict", "logits_to_keep", "num_items_in_batch", "labels", "is_causal", "dropout"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "output_cross_attentions"),
}
_REASONS = {
    "position_bias": "it has no score to add a bias to",
    "softcap": "it has no score to cap",
    "s_aux": "its weights have no sum of exponentials that a sink could join",
    "head_mask": "regard has no mask of heads",
}


def _scale_queries(replacement: AttentionReplacement, call: Call) -> Tensor:
    """Returns q [B,H,T,K], scaled such that q·k/√K, which mechanisms compute, equals the model's own score.

    For Softmax, q is returned unchanged, and the mechanism's scale is set instead, unless the user chose one.
    """
    mechanism = replacement.mechanism
    if isinstance(mechanism, Softmax):
        if not replacement.has_own_scale:
            mechanism.scale = call.scaling
        return call.q
    factor = call.scaling * math.sqrt(call.q.shape[-1])
    if math.isclose(factor, 1, rel_tol=1e-6):  # the model's own scale is 1/√K, too
        return call.q
    return call.q * factor


def _attend_by_state(replacement: AttentionReplacement, call: Call, q: Tensor, layer: StateLayer) -> Tensor:
    """Returns out [B,H,T,V] from the state in the cache.

    Self-attention first extends the state by the new keys and values. Cross-attention writes the keys and values of the
    source into the state in the first call, and only reads the state in later calls.
    """
    mechanism = replacement.mechanism
    if call.kwargs.get("output_attentions"):
        raise replacement.refusal(
            "'output_attentions' while it keeps a state", "the keys are gone; pass use_cache=False"
        )
    if replacement.cross:
        mask = Mask()
        if layer.state is None:  # the first call writes the source into the state; later calls do not need its padding
            mask = _build_mask(replacement, call, causal=False)
        out = layer.attend_cross(mechanism, q, call.k, call.v, mask.visible)
    else:
        T = q.shape[2]
        window = layer.window or call.kwargs.get("sliding_window")
        visible = _visible_new_tokens(replacement, call, layer.length, T, window)
        _check_documents(replacement, call, visible)
        out = layer.extend(mechanism, q, call.k, call.v, visible, window, replacement.made)
    if isinstance(mechanism, Linear | Recurrence):  # its recurrent form does not apply dropout
        out = functional.dropout(out, mechanism.dropout, mechanism.training)
    return out


def _visible_new_tokens(
    replacement: AttentionReplacement, call: Call, start: int, T: int, window: int | None
) -> Tensor | None:
    """Returns the padding mask [B,T] of the T new tokens, True at tokens; None if there is no padding.

    A state needs a causal mask: every query must see all tokens before it, within its window, except padding.
    """
    if call.mask is None:
        return None
    if call.mask.shape[-1] < start + T:
        raise replacement.refusal(
            f"a mask over {call.mask.shape[-1]} of {start + T} tokens",
            "another layer of the model keeps a window of keys; use the mechanism in all layers with a window",
        )
    if isinstance(call.mask, LazyMask):
        mask = call.mask.structured
    else:
        mask = recognise_structure(_one_row_per_query(call))
    causal = mask is not None and mask.documents is None and (mask.causal or T == 1)
    S = call.mask.shape[-1]
    if mask is None or not causal or not _limits_are_causal(mask, start, T) or not _fits_window(mask, window, S):
        raise replacement.refusal(
            "this mask", "its state is causal, within the model's window, and the mask is not just that with padding"
        )
    if mask.visible is None:
        return None
    new = mask.visible[:, start : start + T]
    if bool(new.all()):
        return None
    return new.expand(call.q.shape[0], T)


def _limits_are_causal(mask: Mask, start: int, T: int) -> bool:
    """Tells whether each of the T queries, the first at column `start`, sees exactly the visible keys up to its own.

    In the mask of a prefix LM, for example, queries see later keys, too.
    """
    if mask.rows is None or T == 1:
        return True
    limit = mask.rows.limit
    if mask.visible is None:
        expected = torch.arange(start + 1, start + T + 1, device=limit.device).expand_as(limit)
    else:
        expected = mask.visible.long().cumsum(1)[:, start : start + T]
    return torch.equal(limit, expected.to(limit.dtype))


def _fits_window(mask: Mask, window: int | None, S: int) -> bool:
    """Tells whether a structured mask hides exactly what a state with this window hides.

    Such a mask may have no `window`: if its S keys all lie within the window, or if it is that of a single query, whose
    keys beyond the window are not visible.
    """
    if window is None or mask.window is not None:
        return mask.window == window
    seen = S
    if mask.visible is not None:
        seen = int(mask.visible.sum(1).max())
    return seen <= window


def _check_documents(replacement: AttentionReplacement, call: Call, visible: Tensor | None) -> None:
    """Raises an error if the positions of the new tokens start again: these are documents packed into one row.

    Transformers itself separates packed documents only in a call without a cache. `visible` [B,T] hides padding, whose
    positions mean nothing.
    """
    positions = call.kwargs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] < 2:
        return
    if visible is not None:
        positions = positions.masked_fill(~visible, -1)
    starts_again = positions[:, 1:] <= positions.cummax(1).values[:, :-1]
    if visible is not None:
        starts_again = starts_again & visible[:, 1:]
    if bool(starts_again.any()):
        raise replacement.refusal(
            "position_ids that start again while it keeps a state",
            "the state of one document would reach the next; pass use_cache=False to keep packed documents apart",
        )


def _build_mask(replacement: AttentionReplacement, call: Call, causal: bool) -> Mask:
    """Returns the regard Mask of a call, including its position bias, softcap and sinks."""
    mask = _find_structured_mask(replacement, call, causal)
    if mask is None:
        mask = Mask(bias=_mask_as_bias(replacement, call))
    B = call.q.shape[0]
    if mask.visible is not None and mask.visible.shape[0] != B:
        mask = mask.but(visible=mask.visible.expand(B, -1))
    bias = call.kwargs.get("position_bias")
    if bias is not None and replacement.has_scores:
        mask = mask.but(bias=bias if mask.bias is None else mask.bias + bias)
    return mask.but(softcap=call.kwargs.get("softcap"), sinks=call.kwargs.get("s_aux"))


def _find_structured_mask(replacement: AttentionReplacement, call: Call, causal: bool) -> Mask | None:
    """Returns the call's mask as a Mask of rules (see `recognise_structure`); None if it has no structured form.

    Raises an error for a LazyMask over another number of keys.
    """
    S = call.k.shape[2]
    if call.mask is None:
        return Mask(causal=causal and call.q.shape[2] > 1 and not replacement.cross)
    if not isinstance(call.mask, LazyMask):
        if replacement.has_scores and torch.compiler.is_compiling():
            return None  # to recognise a structure is to read the mask's values, which a compiled graph cannot do
        return recognise_structure(_one_row_per_query(call)[..., :S], replacement.cross)
    if call.mask.shape[-1] != S:
        raise HubError(f"{replacement.name}: a mask over {call.mask.shape[-1]} keys came with {S} keys")
    return call.mask.structured


def _one_row_per_query(call: Call) -> Tensor:
    """Returns the call's mask, expanded to T rows: a mask with one row is the same for all queries."""
    assert call.mask is not None
    return call.mask.expand(-1, -1, call.q.shape[2], -1)


def _mask_as_bias(replacement: AttentionReplacement, call: Call) -> Tensor:
    """Returns a mask without a structured form as an additive bias; refuses it if the mechanism has no scores."""
    S = call.k.shape[2]
    if not replacement.has_scores:
        raise replacement.refusal(
            "a mask given as a matrix", "it knows causal masks, padding before or after the tokens, and windows"
        )
    assert call.mask is not None
    # The mask may have more columns than there are keys. Slicing a LazyMask computes its matrix.
    return as_additive(call.mask[..., :S], call.q.dtype)


def _check_keywords(replacement: AttentionReplacement, call: Call) -> None:
    """Raises an error for the first keyword that has an effect and is not supported."""
    supported = {"position_bias", "softcap"} if replacement.has_scores else set()
    if isinstance(replacement.mechanism, Softmax):
        supported.add("s_aux")
    for name in sorted(set(call.kwargs) - _ACCEPTED_KEYWORDS - supported):
        if _has_effect(name, call.kwargs[name]):
            raise replacement.refusal(f"'{name}'", _REASONS.get(name, "regard does not know what it asks for"))


def _has_effect(name: str, value: Any) -> bool:
    """Tells whether the value of a keyword has an effect; None, False and a float tensor of zeros have none.

    A sink of zero takes a share of every row, and a mask of heads that is zero switches them off: these have one.
    """
    if isinstance(value, Tensor):
        return name in ("s_aux", "head_mask") or not value.is_floating_point() or bool((value != 0).any())
    return value is not None and value is not False
