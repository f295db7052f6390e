"""A layer of transformers' cache that keeps the state of a mechanism of ours: constant in size where the mechanism is
linear, values alone for a synthesizer.

The cache hands new keys and values through; the attention function extends the state by them. Imported only when it is
needed, because it builds on a class of transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from regard.errors import HubError
from regard.mechanisms import Mechanism, State, fork
from regard.shapes import Size


class StateLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The state of one layer, in the place of the keys and values that `instead` would have kept."""

    is_compileable = False
    is_croppable = False

    def __init__(self, mechanism: Mechanism, instead: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mechanism = mechanism.name
        self.state: State | None = None
        self.seen = 0  # tokens so far, padding among them
        self.expected = False
        self.is_sliding = bool(getattr(instead, "is_sliding", False))
        self.room: int | None = getattr(instead, "max_cache_len", None)
        window = getattr(instead, "sliding_window", self.room if self.is_sliding else None)
        self.window: int | None = None if window is None else int(window)

    def __repr__(self) -> str:
        return f"StateLayer({self.mechanism}, {self.seen} tokens, {self.bytes} bytes)"

    @property
    def bytes(self) -> int:
        """Bytes of the state."""
        return sum(x.nbytes for x in (() if self.state is None else self.state) if isinstance(x, Tensor))

    def expect(self, mechanism: Mechanism) -> None:
        """Says that the next tokens go to this mechanism; without it, whoever updates the cache would lose the past."""
        if mechanism.name != self.mechanism:
            raise HubError(
                f"the cache holds a state of {self.mechanism}, not of {mechanism.name}: begin with a new cache"
            )
        self.expected = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = value_states.dtype, value_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hands the new keys and values on, to the attention function."""
        if not self.expected:
            raise HubError(
                f"the cache holds a state of {self.mechanism}, which a model without that mechanism cannot read: "
                "begin with a new cache"
            )
        self.expected = False
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def extend(
        self,
        mechanism: Mechanism,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G T K"],
        v: Float[Tensor, "B G T V"],
        visible: Bool[Tensor, "B T"] | None,
    ) -> Float[Tensor, "B H T V"]:
        """Causal attention of the next T tokens."""
        if self.state is None:
            self.state = mechanism.empty(Size.of(q, k, v))
        keys = k if "k" in mechanism.needs else None
        out, self.state = mechanism.extend(q, keys, v, self.state, visible)
        self.seen += q.shape[2]
        return out

    def cross(
        self,
        mechanism: Mechanism,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        v: Float[Tensor, "B G S V"],
        visible: Bool[Tensor, "B S"] | None,
    ) -> Float[Tensor, "B H T V"]:
        """Attention to another sequence, which is written once; later calls only read it."""
        if self.state is None:
            self.state = mechanism.write(mechanism.empty(Size.of(q, k, v, causal=False)), k, v, visible)
            self.seen = k.shape[2]
            # The model hands these back at every later step.
            self.keys, self.values = k.new_empty(*k.shape[:2], 0, k.shape[3]), v.new_empty(*v.shape[:2], 0, v.shape[3])
        return mechanism.read(q, self.state)

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.seen + query_length if self.room is None else self.room), 0

    def get_max_length(self) -> int:
        return -1 if self.room is None else self.room

    def reset(self) -> None:
        self.state, self.keys, self.values = None, None, None
        self.seen, self.is_initialized = 0, False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise HubError(
                f"a state of {self.mechanism} cannot be cropped: it is a sum over the past and cannot forget. Decode "
                "without an assistant model and without prompt lookup, or use 'softmax'"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._pick(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._pick(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self._pick(torch.arange(self.state.tokens.shape[0]).repeat_interleave(repeats))

    def offload(self) -> None:
        self._move("cpu")

    def prefetch(self) -> None:
        if self.is_initialized:
            self._move(self.device)

    def _pick(self, rows: Tensor) -> None:
        if self.state is None:
            return
        rows = rows.to(self.state.tokens.device)
        self.state = fork(self.state, rows)
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]

    def _move(self, device: torch.device | str) -> None:
        if self.state is not None:
            parts = (x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for x in self.state)
            state: State = type(self.state)(*parts)
            self.state = state


def state_layer(
    module: nn.Module, mechanism: Mechanism, cross: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> StateLayer | None:
    """The layer of the cache that an attention module is about to use, made ours where it is still empty."""
    caches = [x for x in (*kwargs.values(), *args) if isinstance(x, Cache)]
    if not caches:
        return None
    cache: Any = caches[0]
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.cross_attention_cache if cross else cache.self_attention_cache
    index: Any = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        return None
    while cache.layer_class_to_replicate is not None and len(cache.layers) <= index:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if not isinstance(layer, StateLayer):
        if layer.is_initialized or getattr(layer, "state", None) is not None:
            return None  # it has keys already: all of them will come
        layer = cache.layers[index] = StateLayer(mechanism, layer)
    layer.expect(mechanism)
    return layer
