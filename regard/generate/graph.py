"""One decoding step as a CUDA graph: replayed, it costs neither Python nor launches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.mechanisms import Cache, Mechanism
from regard.models import Decoder
from regard.models.stack import StackState

ROOM = 256  # states are given room in steps of so many tokens, so that a graph serves prompts of similar length
_LAST: WeakKeyDictionary[Decoder[Any], DecodingGraph] = WeakKeyDictionary()


def get_graph(model: Decoder[Any], state: StackState, reach: int) -> DecodingGraph:
    """Returns a graph for the rows of `state`: the model's last one where it fits, else a new one.

    No row will ever have more than `reach` tokens.
    """
    state = _fix_shapes(state, min(reach, model.limit or reach))
    last = _LAST.get(model)
    if last is not None and last.signature == _signature(model, state):
        last.load_state(state)
        return last
    _LAST.pop(model, None)  # its memory is free before more is taken
    graph = DecodingGraph(model, state)
    _LAST[model] = graph
    return graph


def round_up(tokens: int) -> int:
    """Returns the number of tokens rounded up to the next step of room."""
    return -(-tokens // ROOM) * ROOM


class DecodingGraph:
    """A step of `model` for the rows of `state`, whose buffers it takes over. Call it with the next tokens.

    The shapes of the state are fixed: see `_fix_shapes`.
    """

    def __init__(self, model: Decoder[Any], state: StackState) -> None:
        self.state = state
        self.signature = _signature(model, self.state)
        self.tokens = torch.zeros(state.tokens.shape[0], 1, dtype=torch.long, device=state.tokens.device)
        # A capture must not build kernels or set up libraries, so that one step is run before, on another stream as
        # PyTorch asks. It writes only the slot that comes next.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model.extend(self.tokens, self.state, last=True)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits, after = model.extend(self.tokens, self.state, last=True)
            _copy_state(after, self.state)

    def __call__(self, tokens: Int[Tensor, " B"]) -> Float[Tensor, "B 1 N"]:
        """Returns logits after one more token of each row; valid until the next call."""
        self.tokens.copy_(tokens[:, None])
        self.graph.replay()
        return self.logits

    def load_state(self, state: StackState) -> None:
        """Goes on from another state of the same fixed shapes."""
        _copy_state(state, self.state)


def _fix_shapes(state: StackState, reach: int) -> StackState:
    """Returns the state with shapes that no longer change, for rows of at most `reach` tokens.

    All of a room is attended to, as far as a row is full. Rows end where a room does, unless it is a whole ring, which
    takes any number of tokens.
    """
    caches = [layer.own for layer in state.layers if isinstance(layer.own, Cache)]
    reach = min([reach, *(own.v.shape[2] for own in caches if not own.is_ring)])

    # The recorded step writes at `tokens`, which is on the device, and masks what lies beyond it.
    def fix(own: Any) -> Any:
        own = own._replace(tokens=state.tokens)  # one tensor counts for all layers
        if isinstance(own, Cache):
            own = own._replace(used=reach - 1, even=False)
        return own

    layers = tuple(layer._replace(own=fix(layer.own)) for layer in state.layers)
    return state._replace(layers=layers, used=reach - 1, even=False)


def _leaves(state: StackState) -> Iterator[Any]:
    """Yields all tensors and numbers of a state, always in one order."""
    yield state.tokens
    for layer in state.layers:
        yield from layer.own
        yield from layer.other or ()


def _copy_state(source: StackState, target: StackState) -> None:
    """Writes a state into the buffers of another; those that they share, or that occur twice, are left as they are."""
    done: set[int] = set()
    for new, old in zip(_leaves(source), _leaves(target), strict=True):
        if isinstance(old, Tensor) and old.data_ptr() not in done | {new.data_ptr()}:
            old.copy_(new)
            done.add(old.data_ptr())


def _signature(model: Decoder[Any], state: StackState) -> tuple[Any, ...]:
    """Returns all that a graph has built in: shapes and lengths, where the weights are, which kernels were chosen."""
    shapes = (state.used, *(x.shape if isinstance(x, Tensor) else x for x in _leaves(state)))
    weights = (p.data_ptr() for p in model.parameters())
    kernels = (m.use for m in model.modules() if isinstance(m, Mechanism))
    # Tables of positions are no parameters, and are replaced when they grow.
    tables = (x.data_ptr() for x in model.stack.positions.tables)
    return (*shapes, *weights, *tables, *kernels)
