"""What every attention mechanism is: three faces that agree, and a declared cost.

    forward            a whole sequence at once
    empty/extend       a state, continued by any number of tokens; write/read for cross-attention
    weights            the explicit matrix [B,H,T,S]

Three families do nearly everything: `Pairwise` asks a mechanism for its weights only, `Linear` for its feature map, and
`Recurrence` for the decay of its memory.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.devices import without_values
from regard.errors import KernelError, MaskError, OptionError, did_you_mean
from regard.mechanisms.foreign import MECHANISMS_ELSEWHERE
from regard.registry import Registry, call_with_options
from regard.shapes import Keys, Mask, Outputs, Queries, Size, Values, Visible, Weights

_LOG = logging.getLogger("regard")
Face = Literal["parallel", "recurrent", "weights"]
State = Any  # a NamedTuple whose tensors have the batch first


@dataclass(frozen=True)
class Cost:
    """What a call costs. Costs add up."""

    matmul: int  # FLOPs of matrix products as executed
    useful: int  # FLOPs of matrix products as needed: of a causal square, half
    elementwise: int  # FLOPs of everything else
    bytes: int  # bytes moved at the least: each input read once, each output written once
    state: int  # bytes of the decoder's state

    @property
    def flops(self) -> int:
        """Returns the FLOPs that a roofline counts: the useful ones."""
        return self.useful

    @property
    def intensity(self) -> float:
        """Returns the useful FLOPs for each byte moved."""
        return self.useful / self.bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Kernel(NamedTuple):
    """A fast twin of one face: it takes the mechanism and the arguments of the face, and gives the same result."""

    name: str
    run: Callable[..., Any]
    refuses: Callable[..., str | None]  # takes what `run` takes; returns why it cannot run, or None
    device: str = ""  # the only kind of device that it is for; "" for any
    limits: str = ""  # the sizes beyond which the reference runs, for people


class KernelRegistry(Registry[dict[str, Kernel]]):
    """The kernels of one mechanism: by name, then by the face ("forward" or "extend") that each one replaces."""

    def __init__(self, mechanism: type[Mechanism]) -> None:
        super().__init__("kernel", error=KernelError)
        self.mechanism = mechanism

    def add_kernel(self, face: str, kernel: Kernel) -> None:
        """Registers the kernel of a face under its name."""
        self.put(kernel.name, self.get(kernel.name, {}) | {face: kernel})

    def for_face(self, face: str) -> list[Kernel]:
        """Returns the kernels of a face in the order in which they are tried."""
        return [faces[face] for faces in self._entries.values() if face in faces]

    def describe_unknown(self, name: object) -> str:
        return f"{self.mechanism.name} has no kernel called {name!r}.{did_you_mean(str(name), [*self, 'auto'])}"


class Mechanism(nn.Module, ABC):
    """Attention as mathematics: no projections, no heads to merge, no positions to add."""

    name: ClassVar[str] = ""
    formula: ClassVar[str] = ""
    order: ClassVar[str] = ""  # time of a whole sequence
    memory: ClassVar[str] = ""  # state of a decoder
    training_memory: ClassVar[str] = ""  # memory of a whole sequence in training, on the plain reference
    # Its inputs: of q, k and v, and a (the logarithm of each token's decay) and b (how strongly it is written), which
    # faces take by keyword.
    needs: ClassVar[str] = "qkv"
    crosses: ClassVar[bool] = True  # can attend to another sequence
    causal_only: ClassVar[bool] = False  # has no meaning that looks both ways
    normalised: ClassVar[bool] = True  # weights of a row sum to one
    signed: ClassVar[bool] = False  # weights may be negative
    length: int | None = None  # the most visible tokens that it has scores for; None: any number
    biases: ClassVar[tuple[str, ...]] = ()  # those of its parameters that are biases, which weight decay leaves alone
    letters: ClassVar[dict[str, str]] = {}  # its own sizes, by the letters that the formulas of its cost call them
    kernels: ClassVar[KernelRegistry]

    def __init__(self) -> None:
        super().__init__()
        _register_kernels()
        self.use = "auto"  # "auto", "plain", or the name of a kernel
        self.dropout = 0.0  # in training: of the weights of a pairwise mechanism, of the output of a linear one

    def extra_repr(self) -> str:
        """Returns the options that it was built with, as far as they are plain values."""
        options = {name: getattr(self, name, None) for name in inspect.signature(type(self)).parameters}
        if self.dropout:
            options["dropout"] = self.dropout
        plain = {name: value for name, value in options.items() if isinstance(value, int | float | str)}
        return ", ".join(f"{name}={value!r}" for name, value in plain.items())

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Kernels belong to exactly one class: a subclass may compute something else.
        super().__init_subclass__(**kwargs)
        cls.kernels = KernelRegistry(cls)

    @abstractmethod
    def forward(self, q: Queries | None, k: Keys | None, v: Values, mask: Mask = ...) -> Outputs:
        """Returns the attention over a whole sequence [B,H,T,V] (face 1)."""

    @abstractmethod
    def empty(self, size: Size, rules: Mask = ...) -> State:
        """Returns a state that has seen nothing (face 2), with room for S tokens; `rules`: window, slopes, softcap."""

    @abstractmethod
    def extend(
        self,
        q: Float[Tensor, "B H T K"] | None,
        k: Float[Tensor, "B G T K"] | None,
        v: Float[Tensor, "B G T V"],
        state: State,
        visible: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Outputs, State]:
        """Returns the causal attention of T new tokens and the state after them.

        The state handed in is used up: fork it first to branch.
        """

    @abstractmethod
    def write(self, state: State, k: Keys | None, v: Values, visible: Visible | None = None) -> State:
        """Returns the state with keys and values of another sequence in it, which `read` then attends to."""

    @abstractmethod
    def read(
        self,
        q: Queries,
        state: State,
        positions: Int[Tensor, "B T"] | None = None,
        bias: Float[Tensor, "..."] | None = None,
    ) -> Outputs:
        """Returns the attention of queries over what was written.

        Columns of `bias` are positions: visible tokens in the order of writing.
        """

    @abstractmethod
    def weights(self, q: Queries | None, k: Keys | None, mask: Mask = ...) -> Weights:
        """Returns the explicit matrix of weights [B,H,T,S] (face 3), in float32 or better."""

    @abstractmethod
    def cost(self, size: Size, face: Face = "parallel") -> Cost:
        """Returns what a face costs on the plain reference; recurrent: T new tokens, S in all."""

    def gradient_cost(self, size: Size) -> Cost:
        """Returns what the gradients of the parallel face cost beside it.

        Unless a mechanism knows better, each product has two for its gradients. Moved are q, k, v and the gradient of
        the output, which are read, and the gradients of q, k, v, which are written.
        """
        forward = self.cost(size)
        return Cost(2 * forward.matmul, 2 * forward.useful, forward.elementwise, gradient_bytes(self, size), 0)

    def check_length(self, n: int) -> None:
        """Raises where n visible tokens are more than the mechanism was built for."""

    def unambiguous_rows(self, q: Queries, k: Keys, mask: Mask) -> Bool[Tensor, "B H T"] | None:
        """Returns the rows where rounding cannot change the output by a jump, or None where that is all of them."""
        return None

    def select_kernel(self, face: str, *args: Any) -> Callable[..., Any] | None:
        """Returns the kernel to run for a call of a face with these arguments, or None for the plain reference."""
        if self.use == "plain":
            return None
        kernels = type(self).kernels  # not self.kernels, which torch.export of PyTorch 2.6 and 2.7 cannot follow
        if self.use != "auto":
            kernels.find(self.use)
        for kernel in kernels.for_face(face):
            if self.use not in ("auto", kernel.name):
                continue
            reason = kernel.refuses(self, *args)
            if reason is None:
                return kernel.run
            if self.use == kernel.name:
                raise KernelError(
                    f"kernel '{kernel.name}' of {self.name}: {reason}. Use fast(model) to let regard choose."
                )
            if kernel.limits and reason.endswith(kernel.limits) and not torch.compiler.is_compiling():
                _log_once(f"{self.name} runs its reference instead of the kernel '{kernel.name}': {reason}")
        return None


def _register_kernels() -> None:
    """Imports the kernels, which register themselves, before the first mechanism is there to be called."""
    # By its name: kernels are a layer above, and mechanisms compute without knowing them.
    if "regard.kernels" not in sys.modules:
        importlib.import_module("regard.kernels")


@lru_cache(256)  # a message that is in the cache has been logged
def _log_once(message: str) -> None:
    _LOG.info(message)


def gradient_bytes(mechanism: Mechanism, size: Size) -> int:
    """Returns the bytes that gradients move at the least.

    Each input is read and its gradient written; the gradient of the output is read.
    """
    q_width, k_width = needed_widths(mechanism, size)
    inputs = size.H * size.T * q_width + size.G * size.S * (k_width + size.V)
    return size.e * size.B * (2 * inputs + size.H * size.T * size.V)


def needed_widths(mechanism: Mechanism, size: Size) -> tuple[int, int]:
    """Returns the widths of q and k that a mechanism reads: K, or 0 for what it does without."""
    q_width, k_width = (size.K if name in mechanism.needs else 0 for name in "qk")
    return q_width, k_width


def fork(state: State, rows: Int[Tensor, " N"] | None = None) -> State:
    """Returns a copy of any state, or of some rows of it in any order (beam search)."""

    def copy(x: Any) -> Any:
        if isinstance(x, tuple) and hasattr(x, "_fields"):  # a state within a state
            return fork(x, rows)
        if not isinstance(x, Tensor):
            return x
        if rows is None:
            return x.clone()
        return x.index_select(0, rows)

    return type(state)(*(copy(x) for x in state))


def refuse(mechanism: Mechanism, mask: Mask, *fields: str) -> None:
    """Raises where the mask sets one of the fields, which the mechanism cannot honour."""
    for field in fields:
        if getattr(mask, field) is not None:
            why = _WHY_REFUSED.get(field, "it has no such notion")
            raise MaskError(f"{mechanism.name} cannot honour '{field}': {why}. Leave it out, or use 'softmax'.")


def refuse_in_state(mechanism: Mechanism, rules: Mask) -> None:
    """Raises where the rules of a state hold what belongs to single calls."""
    for field, why in _NOT_IN_STATE.items():
        if getattr(rules, field) is not None:
            raise MaskError(f"a state of {mechanism.name} cannot hold '{field}': {why}.")


def require_cross(mechanism: Mechanism) -> None:
    """Raises where a mechanism has no cross-attention: its scores belong to positions of one sequence."""
    if not mechanism.crosses:
        raise MaskError(
            f"{mechanism.name} has no cross-attention: its scores belong to positions of one sequence, not to keys of "
            "another. Use 'softmax' or a linear mechanism there."
        )


_WHY_REFUSED = {
    "bias": "it has no score to add a bias to; its similarities are products of features",
    "slopes": "it has no score to add ALiBi's slopes to; its similarities are products of features",
    "relative": "it has no score to add a bias of relative positions to; its similarities are products of features",
    "softcap": "it has no score to cap; its similarities are products of features",
    "sinks": "its weights have no sum of exponentials that a sink could join",
}
_NOT_IN_STATE = {
    "visible": "it belongs to single tokens; give it to extend or write",
    "documents": "a state holds one document; give each its own",
    "bias": "it belongs to single queries; give it to read",
    "rows": "the state counts them itself",
}

MECHANISMS: Registry[type[Mechanism]] = Registry("mechanism", elsewhere=MECHANISMS_ELSEWHERE)
_M = TypeVar("_M", bound=type[Mechanism])


def register(name: str) -> Callable[[_M], _M]:
    """Returns a class decorator that makes a mechanism known by name to everything in regard."""

    def add(cls: _M) -> _M:
        MECHANISMS.put(name, cls)
        cls.name = name
        return cls

    return add


def mechanisms() -> dict[str, type[Mechanism]]:
    """Returns every registered mechanism by name."""
    return dict(MECHANISMS)


MechanismLike = str | type["Mechanism"] | Callable[[Tensor, Tensor], Tensor]  # what a mechanism is built from


def mechanism(name: MechanismLike, **options: Any) -> Mechanism:
    """Builds the mechanism of that name, e.g. `mechanism("performer", features=256)`.

    A function of a query [K] and a key [K] is short for `mechanism("similarity", sim=function)`.
    """
    return _build(name, {}, options)


def fitted(name: MechanismLike, size: Size, /, **options: Any) -> Mechanism:
    """Builds a mechanism whose heads, width and length, where it has such options, are those of `size`."""
    return _build(name, {"heads": size.H, "width": size.K, "length": max(size.T, size.S, 1)}, options)


def _build(name: MechanismLike, offered: dict[str, Any], options: dict[str, Any]) -> Mechanism:
    if callable(name) and not isinstance(name, type):
        options = {"sim": _require_similarity(name), **options}
        name = "similarity"
    cls = lookup(name)
    built: Mechanism = call_with_options(cls, f"mechanism '{cls.name}'", offered, options)
    return built


def _require_similarity(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that can be called with a query and a key; raises for any other."""
    called = getattr(function, "__name__", type(function).__name__)
    if called == "scaled_dot_product_attention":  # it is built in, and has no signature that could tell
        raise OptionError(f"{called} is a whole attention and no similarity: it is the mechanism 'softmax'")
    try:
        inspect.signature(function).bind("q", "k")
    except TypeError as error:
        raise OptionError(
            f"{called} is no similarity of a query and a key: {error} when called with two vectors. Expected the name "
            "of a mechanism, a mechanism, or sim(q, k) of q [K] and k [K] that returns one number. A whole attention "
            "f(q, k, v) is not called by regard but asked: regard.check(f)."
        ) from None
    except ValueError:  # a builtin without a signature: its first call will tell
        pass
    return function


def on_meta(name: str | type[Mechanism], size: Size, /, **options: Any) -> Mechanism:
    """Builds a mechanism as `fitted` does, on the meta device: for what follows from sizes alone.

    Its learned numbers take no memory there, in which they might not fit.
    """
    with without_values():
        return fitted(name, size, **options)


def lookup(name: str | type[Mechanism]) -> type[Mechanism]:
    """Returns the class of a mechanism by its name; a class is returned as it is."""
    if isinstance(name, type):
        return name
    return MECHANISMS.find(name)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype to which autocast, where it is on, turns x before a matrix product; else that of x."""
    castable = not x.is_meta and x.dtype != torch.float64
    if castable and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def can_read(x: Tensor) -> bool:
    """Returns whether numbers can be read from x now, and nobody records what is done with it."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, nn.Parameter) or x.is_meta or x.numel() == 0:
        return False
    if torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack() > 0:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Returns a context without autocast on x's device: sums and states stay in float32 whatever the surroundings."""
    # Autocast does not know the device meta; and where it is off, entering it would take longer than a small product.
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)
