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
_LAST: WeakKeyDictionary[Decoder[Any], GraphStep] = WeakKeyDictionary()


def graph_step(model: Decoder[Any], state: StackState) -> GraphStep:
    """A step for the rows of `state`: the model's last graph where it fits, else a new one."""
    kept = _LAST.get(model)
    if kept is not None and kept.fits == _signature(model, _fixed(state, model.limit)):
        kept.take(state)
        return kept
    _LAST.pop(model, None)  # its memory is free before more is taken
    _LAST[model] = made = GraphStep(model, state)
    return made


def roomy(tokens: int) -> int:
    """Tokens rounded up to the next step of room."""
    return -(-tokens // ROOM) * ROOM


class GraphStep:
    """A step of `model` for the rows of `state`, whose buffers it takes over. Call it with the next tokens."""

    def __init__(self, model: Decoder[Any], state: StackState) -> None:
        self.limit = model.limit
        self.state = _fixed(state, self.limit)
        self.fits = _signature(model, self.state)
        self.tokens = torch.zeros(state.tokens.shape[0], 1, dtype=torch.long, device=state.tokens.device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # builds kernels and sets up libraries; writes only the slot that comes next
            model.extend(self.tokens, self.state, last=True)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits, after = model.extend(self.tokens, self.state, last=True)
            _copy(after, self.state)

    def __call__(self, tokens: Int[Tensor, " B"]) -> Float[Tensor, "B 1 N"]:
        """Logits after one more token of each row; valid until the next call."""
        self.tokens.copy_(tokens[:, None])
        self.graph.replay()
        return self.logits

    def take(self, state: StackState) -> None:
        """Goes on from another state of the same shapes."""
        _copy(_fixed(state, self.limit), self.state)


def _fixed(state: StackState, limit: int | None) -> StackState:
    """The state with shapes that no longer change: all of its room is attended to, as far as each row is filled."""
    rooms = [kept.own.v.shape[2] for kept in state.layers if isinstance(kept.own, Cache)]
    reach = min([*rooms, limit or 1 << 30])

    def fix(own: Any) -> Any:
        own = own._replace(tokens=state.tokens)  # one tensor counts for all layers
        return own._replace(used=reach - 1, even=False) if isinstance(own, Cache) else own

    layers = tuple(kept._replace(own=fix(kept.own)) for kept in state.layers)
    return state._replace(layers=layers, used=reach - 1, even=False)


def _leaves(state: StackState) -> Iterator[Any]:
    yield state.tokens
    for kept in state.layers:
        yield from kept.own
        yield from kept.other or ()


def _copy(new: StackState, old: StackState) -> None:
    """Writes a state into the buffers of another."""
    done: set[int] = set()
    for a, b in zip(_leaves(new), _leaves(old), strict=True):
        if isinstance(b, Tensor) and b.data_ptr() not in done | {a.data_ptr()}:
            b.copy_(a)
            done.add(b.data_ptr())


def _signature(model: Decoder[Any], state: StackState) -> tuple[Any, ...]:
    """All that a graph has built in: shapes and lengths, where the weights are, and which kernels were chosen."""
    shapes = (x.shape if isinstance(x, Tensor) else x for x in _leaves(state))
    chosen = (m.use for m in model.modules() if isinstance(m, Mechanism))
    tables = [x.data_ptr() for x in model.stack.positions.tables]  # replaced when they grow
    return (*shapes, *(p.data_ptr() for p in model.parameters()), *tables, *chosen)
