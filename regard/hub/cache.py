"""A layer of transformers' cache that keeps the state of a mechanism instead of keys and values.

The state of a linear mechanism has a constant size; the state of a synthesizer consists of its values alone. When the
model writes new keys and values to this layer, the layer returns them unchanged, and the attention function extends the
state by them. This module is imported only when it is needed, because it imports transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from regard.errors import HubError
from regard.hub.masks import find_structure
from regard.mechanisms import Mechanism, State, fork
from regard.shapes import Mask, Size

# This stands here and not beside `find_structure`, because `torch.compiler.disable` imports PyTorch's compiler.
find_structure_uncompiled: Any = torch.compiler.disable(find_structure)


class StateLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The state of one attention layer; it replaces an empty layer of the cache, `original`.

    `length` counts the tokens so far, including padding. `max_length` is the size of a static cache, or None. `window`
    is the window of a sliding cache, or None.
    """

    # generate() reads these two flags.
    is_compileable = False  # the state is allocated in the first call
    is_croppable = False  # `crop` raises an error: no tokens can be removed from a state

    def __init__(self, mechanism: Mechanism, original: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mechanism_name = mechanism.name
        self.state: State | None = None
        self.length = 0
        self.update_announced = False  # whether `announce_update` was called since the last update
        self.is_sliding = bool(getattr(original, "is_sliding", False))
        self.max_length: int | None = getattr(original, "max_cache_len", None)
        self.window: int | None = getattr(original, "sliding_window", None)
        if self.window is None and self.is_sliding:
            self.window = self.max_length  # the size of a static sliding layer is its window

    def __repr__(self) -> str:
        return f"StateLayer({self.mechanism_name}, {self.length} tokens, {self.bytes} bytes)"

    @property
    def bytes(self) -> int:
        """The size of the state in bytes."""
        if self.state is None:
            return 0
        return sum(x.nbytes for x in self.state if isinstance(x, Tensor))

    def announce_update(self, mechanism: Mechanism) -> None:
        """Announces that the next `update` comes from a layer with this mechanism.

        An update without an announcement comes from a layer that expects past keys in the cache, and is refused.
        """
        if mechanism.name != self.mechanism_name:
            raise HubError(
                f"the cache holds a state of {self.mechanism_name}, not of {mechanism.name}: begin with a new cache"
            )
        self.update_announced = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype = value_states.dtype
        self.device = value_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Returns the new keys and values unchanged: the attention function extends the state by them."""
        if not self.update_announced:
            raise HubError(
                f"the cache holds a state of {self.mechanism_name}, which a model without that mechanism cannot read: "
                "begin with a new cache"
            )
        self.update_announced = False
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
        window: int | None = None,
        gates: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Float[Tensor, "B H T V"]:
        """Extends the state by the next T tokens, and returns their causal attention within the window.

        With a window the state is a ring of as many keys and values, whatever the mechanism. `gates` are the decays and
        write strengths of these tokens, by name.
        """
        if self.state is None:
            self.state = mechanism.empty(Size.of(q, k, v), Mask(window=window))
        keys = k if "k" in mechanism.needs else None
        out, self.state = mechanism.extend(q, keys, v, self.state, visible, **gates)
        self.length += q.shape[2]
        return out

    def attend_cross(
        self,
        mechanism: Mechanism,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        v: Float[Tensor, "B G S V"],
        visible: Bool[Tensor, "B S"] | None,
    ) -> Float[Tensor, "B H T V"]:
        """Returns cross-attention to a source; the first call writes its state, later calls only read the state."""
        if self.state is None:
            self.state = mechanism.write(mechanism.empty(Size.of(q, k, v, causal=False)), k, v, visible)
            self.length = k.shape[2]
            # At later steps the model takes the keys and values of the source from this layer, and passes them to the
            # attention function. That function reads only the state, so tensors with zero tokens are enough here.
            self.keys = k.new_empty(*k.shape[:2], 0, k.shape[3])
            self.values = v.new_empty(*v.shape[:2], 0, v.shape[3])
        return mechanism.read(q, self.state)

    # From here on: the methods that transformers calls on every layer of a cache.

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the number of keys that a mask covers, and the position of the first key."""
        if self.window is not None:  # the mask covers all tokens, also those that have left the window
            return self.length + query_length, 0
        return self.max_length or self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1 if self.max_length is None else self.max_length

    def reset(self) -> None:
        self.state = self.keys = self.values = None
        self.length = 0
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise HubError(
                f"a state of {self.mechanism_name} cannot be cropped: it is a sum over the past and cannot forget. "
                "Decode without an assistant model and without prompt lookup, or use 'softmax'"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select_examples(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select_examples(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self._select_examples(torch.arange(self.state.tokens.shape[0]).repeat_interleave(repeats))

    # An offloaded cache keeps its layers on the CPU while others are computed.
    def offload(self) -> None:
        self._move("cpu")

    def prefetch(self) -> None:
        if self.is_initialized:
            self._move(self.device)

    def _select_examples(self, indices: Tensor) -> None:
        """Keeps the examples of the batch at these indices, in this order; an index may occur several times."""
        if self.state is None:
            return
        indices = indices.to(self.state.tokens.device)
        self.state = fork(self.state, indices)
        if self.keys is not None and self.values is not None:
            self.keys = self.keys[indices]
            self.values = self.values[indices]

    def _move(self, device: torch.device | str) -> None:
        """Moves the state to a device."""
        if self.state is not None:
            # A state is a named tuple of tensors; fields that the mechanism does not use are None.
            fields = (x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for x in self.state)
            state: State = type(self.state)(*fields)
            self.state = state


def prepare_state_layer(
    module: nn.Module, mechanism: Mechanism, cross: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> StateLayer | None:
    """Returns the `StateLayer` of an attention module in the cache, and announces an update to it.

    If the module's layer of the cache is empty, a new `StateLayer` replaces it. The cache is found among the arguments
    of the module's forward. Returns None if there is no cache, if the module does not know its `layer_idx`, or if its
    layer of the cache is not a `StateLayer` and is in use already; attention is then computed from the call's keys and
    values. Raises an error if the layer holds the state of another mechanism.
    """
    caches = [x for x in (*kwargs.values(), *args) if isinstance(x, Cache)]
    if not caches:
        return None
    cache: Any = caches[0]
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.cross_attention_cache if cross else cache.self_attention_cache
    index: Any = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        return None
    # A dynamic cache makes a layer at its first update, which is too late to replace it.
    while cache.layer_class_to_replicate is not None and len(cache.layers) <= index:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if not isinstance(layer, StateLayer):
        # A layer with keys was filled before `use` was called; it goes on returning all keys.
        if layer.is_initialized or getattr(layer, "state", None) is not None:
            return None
        layer = cache.layers[index] = StateLayer(mechanism, layer)
    layer.announce_update(mechanism)
    return layer
