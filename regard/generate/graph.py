"""One decoding step as a CUDA graph, which is replayed without the cost of Python and of separate launches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.generate.fused import FusedStep, refuse_fused_step
from regard.generate.greedy import Greedy, pick_likeliest
from regard.mechanisms import Cache, Mechanism
from regard.models import Decoder
from regard.models.stack import StackState
from regard.nn import mechanism_state, with_mechanism_state

ROOM = 256  # states have room for multiples of this many tokens, so that a graph serves prompts of similar length
_LAST: WeakKeyDictionary[Decoder[Any], DecodingGraph] = WeakKeyDictionary()


def get_graph(model: Decoder[Any], state: StackState, reach: int) -> DecodingGraph:
    """Returns a graph for the rows of `state`: the model's last one if it fits, else a new one.

    `reach` is the most tokens that a row may have.
    """
    state = _fix_shapes(state, min(reach, model.limit or reach))
    last = _LAST.get(model)
    if last is not None and last.signature == _signature(model, state):
        last.load_state(state)
        return last
    _LAST.pop(model, None)  # frees its memory before more is taken
    graph = DecodingGraph(model, state)
    _LAST[model] = graph
    return graph


def round_up(tokens: int) -> int:
    """Returns the number of tokens rounded up to the next step of room."""
    return -(-tokens // ROOM) * ROOM


class DecodingGraph:
    """A captured step of `model` for the rows of `state`, whose buffers it uses: graph(tokens) → logits.

    The shapes of the state are fixed by `_fix_shapes`. `greedy` has the likeliest tokens after each call, in the buffer
    from which the next call reads its tokens, so that greedy decoding copies nothing.
    """

    def __init__(self, model: Decoder[Any], state: StackState) -> None:
        self.state = state
        self.signature = _signature(model, self.state)
        B = state.tokens.shape[0]
        device = state.tokens.device
        self.fused: FusedStep | None = None
        if refuse_fused_step(model, state) is None:
            self.fused = FusedStep(model, B)
        scores = torch.promote_types(model.embedding.weight.dtype, torch.float32)
        self.greedy = Greedy(
            torch.zeros(B, dtype=torch.long, device=device), torch.zeros(B, dtype=scores, device=device)
        )
        # Kernels cannot be compiled during a capture, so one step is run before it, on another stream as PyTorch asks.
        # It writes only the next slot of the state.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(model)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits, after = self._step(model)
            _copy_state(after, self.state)

    def _step(self, model: Decoder[Any]) -> tuple[Float[Tensor, "B 1 N"], StackState]:
        """Returns logits after the tokens in `greedy`, which it replaces by the likeliest ones, and the next state."""
        tokens = self.greedy.tokens[:, None]
        if self.fused is not None:
            logits = self.fused(tokens, self.state)
            after = self.state._replace(tokens=self.state.tokens + 1)
        else:
            logits, after = model.extend(tokens, self.state, last=True)
        pick_likeliest(logits[:, -1], self.greedy)
        return logits, after

    def __call__(self, tokens: Int[Tensor, " B"]) -> Float[Tensor, "B 1 N"]:
        """Returns logits after one more token of each row; valid until the next call."""
        if tokens is not self.greedy.tokens:
            self.greedy.tokens.copy_(tokens)
        self.graph.replay()
        return self.logits

    def load_state(self, state: StackState) -> None:
        """Copies another state of the same fixed shapes into the graph's, from which it then continues."""
        _copy_state(state, self.state)


def _fix_shapes(state: StackState, reach: int) -> StackState:
    """Returns the state with shapes that no longer change, for rows of at most `reach` tokens.

    Each step attends to the whole buffer of a cache, masked to a row's tokens. Rows have at most as many tokens as a
    buffer, except in a ring buffer, which takes any number.
    """
    owns = [mechanism_state(layer.own) for layer in state.layers]
    caches = [own for own in owns if isinstance(own, Cache)]
    reach = min([reach, *(own.v.shape[2] for own in caches if not own.is_ring)])

    # The captured step writes at `tokens`, which is on the device, and masks the places after it.
    def fix(kept: Any) -> Any:
        own = mechanism_state(kept)._replace(tokens=state.tokens)  # one tensor counts for all layers
        if isinstance(own, Cache):
            own = own._replace(used=reach - 1, even=False)
        return with_mechanism_state(kept, own)

    layers = tuple(layer._replace(own=fix(layer.own)) for layer in state.layers)
    return state._replace(layers=layers, used=reach - 1, even=False)


def _leaves(state: StackState) -> Iterator[Any]:
    """Yields all tensors and numbers of a state, always in one order."""
    yield state.tokens
    for layer in state.layers:
        own = mechanism_state(layer.own)
        yield from own
        if layer.own is not own:
            yield layer.own.before  # of a convolution
        yield from layer.other or ()


def _copy_state(source: StackState, target: StackState) -> None:
    """Copies a state into the buffers of another, each buffer once, without those that both states share."""
    done: set[int] = set()
    for new, old in zip(_leaves(source), _leaves(target), strict=True):
        if isinstance(old, Tensor) and old.data_ptr() not in done | {new.data_ptr()}:
            old.copy_(new)
            done.add(old.data_ptr())


def _signature(model: Decoder[Any], state: StackState) -> tuple[Any, ...]:
    """Returns all that a captured graph depends on: shapes, lengths, addresses of weights, and kernels."""
    shapes = (state.used, *(x.shape if isinstance(x, Tensor) else x for x in _leaves(state)))
    weights = (p.data_ptr() for p in model.parameters())
    kernels = (m.use for m in model.modules() if isinstance(m, Mechanism))
    # Tables of positions are no parameters, and are replaced when they grow.
    tables = (x.data_ptr() for x in model.stack.positions.tables)
    return (refuse_fused_step(model, state), *shapes, *weights, *tables, *kernels)
