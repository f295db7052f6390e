"""Watching the attention layers of a model while it runs: what goes into them, and what comes out.

Each function is a context: the hooks that it sets are gone when it ends, also after an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from regard.nn.attention import Attention
from regard.shapes import Mask

# Called with q [B,H,T,K], k [B,G,S,K], v [B,G,S,V] and the mask; None for what a call does not bring.
Callback = Callable[[Tensor | None, Tensor | None, Tensor | None, Mask | None], None]


@contextmanager
def capture_attention(attention: Attention, callback: Callback, *, recurrent: bool = False) -> Iterator[None]:
    """Calls back with the queries, keys, values and mask of every call of one layer's mechanism, before it runs.

    Whole sequences are captured unless `recurrent`, and then the steps from a state: `extend` of self-attention brings
    all three, while cross-attention writes keys and values once and reads with queries.
    """
    mechanism = attention.mechanism
    with ExitStack() as removal:
        if not recurrent:

            def before(_: nn.Module, inputs: tuple[Any, ...]) -> None:
                callback(*inputs)

            removal.callback(mechanism.register_forward_pre_hook(before).remove)
        else:
            for name, method in _recurrent_methods(attention, callback).items():
                # An attribute of the instance hides the method of its class until it is deleted.
                setattr(mechanism, name, method)
                removal.callback(delattr, mechanism, name)
        yield


def _recurrent_methods(attention: Attention, callback: Callback) -> dict[str, Callable[..., Any]]:
    """Returns methods that call back and then do what the mechanism's own do.

    Only the outermost is replaced: `extend` of a linear mechanism writes and reads itself.
    """
    extend, write, read = attention.mechanism.extend, attention.mechanism.write, attention.mechanism.read

    def capture_extend(q: Any, k: Any, v: Tensor, state: Any, visible: Any = None, **gates: Tensor) -> Any:
        callback(q, k, v, attention.rules.but(causal=True))
        return extend(q, k, v, state, visible, **gates)

    def capture_write(state: Any, k: Any, v: Tensor, visible: Any = None) -> Any:
        callback(None, k, v, attention.rules)
        return write(state, k, v, visible)

    def capture_read(q: Tensor, state: Any, *more: Any, **named: Any) -> Any:
        callback(q, None, None, None)
        return read(q, state, *more, **named)

    if attention.source is None:
        return {"extend": capture_extend}
    return {"write": capture_write, "read": capture_read}


@contextmanager
def forward_hooks(
    modules: Iterable[nn.Module], hook: Callable[..., Any], *, with_kwargs: bool = False
) -> Iterator[None]:
    """Registers one forward hook on several modules; what the hook returns, if anything, replaces their output."""
    with ExitStack() as removal:
        for module in modules:
            removal.callback(module.register_forward_hook(hook, with_kwargs=with_kwargs).remove)
        yield
