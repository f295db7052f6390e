"""Watching the attention layers of a model while it runs: what goes into them, and what comes out.

Each function is a context: the hooks that it sets are gone when it ends, also after an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from regard.nn.attention import Attention

# Called with q [B,H,T,K], k [B,G,S,K], v [B,G,S,V] and the mask, None for those that a call does not have; and with a
# and b by name, if the mechanism takes them.
Callback = Callable[..., None]
# Called with the outputs of the mechanism, [B,H,T,V].
OutputCallback = Callable[[Tensor], None]


@contextmanager
def capture_attention(
    attention: Attention, callback: Callback, *, recurrent: bool = False, given: OutputCallback | None = None
) -> Iterator[None]:
    """Calls back with the queries, keys, values, mask and gates of every call of one layer's mechanism, before it runs.

    Calls with whole sequences are captured, or, with `recurrent`, decoding steps: `extend` of self-attention has
    queries, keys and values, while cross-attention writes keys and values once and reads with queries. `given` is
    called with the heads' outputs of self-attention, after the mechanism has run.
    """
    mechanism = attention.mechanism
    with ExitStack() as removal:
        if not recurrent:

            def before(_: nn.Module, inputs: tuple[Any, ...], gates: dict[str, Tensor]) -> None:
                callback(*inputs, **gates)

            def after(_: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> None:
                if given is not None:
                    given(out)

            removal.callback(mechanism.register_forward_pre_hook(before, with_kwargs=True).remove)
            removal.callback(mechanism.register_forward_hook(after).remove)
        else:
            for name, method in _recurrent_methods(attention, callback, given).items():
                # An attribute of the instance hides the method of its class until it is deleted.
                setattr(mechanism, name, method)
                removal.callback(delattr, mechanism, name)
        yield


def _recurrent_methods(
    attention: Attention, callback: Callback, given: OutputCallback | None
) -> dict[str, Callable[..., Any]]:
    """Returns, by name, methods that call back and then call the mechanism's own methods.

    For self-attention only `extend` is replaced, as it may call `write` and `read` itself.
    """
    extend, write, read = attention.mechanism.extend, attention.mechanism.write, attention.mechanism.read

    def capture_extend(q: Any, k: Any, v: Tensor, state: Any, visible: Any = None, **gates: Tensor) -> Any:
        callback(q, k, v, attention.rules.but(causal=True), **gates)
        out, state = extend(q, k, v, state, visible, **gates)
        if given is not None:
            given(out)
        return out, state

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
