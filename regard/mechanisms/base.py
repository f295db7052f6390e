"""What every attention mechanism is: three faces that agree, and a declared cost.

    forward            a whole sequence at once
    empty/extend       a state, continued by any number of tokens; write/read for cross-attention
    weights            the explicit matrix [B,H,T,S]

Two families do nearly everything: `Pairwise` asks a mechanism for its weights only, `Linear` for its feature map only.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.errors import KernelError, MaskError, did_you_mean
from regard.registry import Registry, call_with_options
from regard.shapes import Keys, Mask, Outputs, Queries, Size, Values, Visible, Weights

_LOG = logging.getLogger("regard")
Face = Literal["parallel", "recurrent", "weights"]
State = Any  # a NamedTuple whose tensors have the batch first


@dataclass(frozen=True)
class Cost:
    """FLOPs of matrix products as executed (`matmul`), as needed (`useful`: the causal half counts half), of the
    rest (`elementwise`); bytes moved at the least; bytes of the state."""

    matmul: int
    useful: int
    elementwise: int
    bytes: int
    state: int

    @property
    def flops(self) -> int:
        """What a roofline counts: the useful FLOPs."""
        return self.useful

    @property
    def intensity(self) -> float:
        """Useful FLOPs for each byte moved."""
        return self.useful / self.bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Kernel(NamedTuple):
    """A fast twin of one face: same arguments, same result. `refuses` says why it cannot, or None; `device` is the kind
    of device that it is for, "" for any; `limits` are the sizes beyond which the reference runs."""

    name: str
    run: Callable[..., Any]
    refuses: Callable[..., str | None]
    device: str = ""
    limits: str = ""


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
    needs: ClassVar[str] = "qkv"
    crosses: ClassVar[bool] = True  # can attend to another sequence
    signed: ClassVar[bool] = False  # weights may be negative
    letters: ClassVar[dict[str, str]] = {}  # its own sizes, by the letters that the formulas of its cost call them
    kernels: ClassVar[KernelRegistry]

    def __init__(self) -> None:
        super().__init__()
        self.use = "auto"  # "auto", "plain", or the name of a kernel
        self.dropout = 0.0  # in training: of the weights of a pairwise mechanism, of the output of a linear one

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Kernels belong to exactly one class: a subclass may compute something else.
        super().__init_subclass__(**kwargs)
        cls.kernels = KernelRegistry(cls)

    @abstractmethod
    def forward(self, q: Queries | None, k: Keys | None, v: Values, mask: Mask = ...) -> Outputs:
        """Face 1: a whole sequence."""

    @abstractmethod
    def empty(self, size: Size, rules: Mask = ...) -> State:
        """Face 2: a state that has seen nothing; S is the room to make; `rules`: window, slopes, softcap."""

    @abstractmethod
    def extend(
        self,
        q: Float[Tensor, "B H T K"] | None,
        k: Float[Tensor, "B G T K"] | None,
        v: Float[Tensor, "B G T V"],
        state: State,
        visible: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Outputs, State]:
        """Causal continuation by T tokens. The state handed in is used up: fork it first to branch."""

    @abstractmethod
    def write(self, state: State, k: Keys | None, v: Values, visible: Visible | None = None) -> State:
        """Cross-attention: write keys and values once …"""

    @abstractmethod
    def read(
        self,
        q: Queries,
        state: State,
        positions: Int[Tensor, "B T"] | None = None,
        bias: Float[Tensor, "..."] | None = None,
    ) -> Outputs:
        """… and read them many times. Columns of `bias` are positions: visible tokens as written."""

    @abstractmethod
    def weights(self, q: Queries | None, k: Keys | None, mask: Mask = ...) -> Weights:
        """Face 3: the explicit matrix, in float32 or better."""

    @abstractmethod
    def cost(self, size: Size, face: Face = "parallel") -> Cost:
        """What a face costs on the plain reference; recurrent: T new tokens, S in all."""

    def gradient_cost(self, size: Size) -> Cost:
        """What the gradients of the parallel face cost beside it: two products for each of its own, unless a mechanism
        knows better; q, k, v and the gradient of the output read, the gradients of q, k, v written."""
        whole = self.cost(size)
        return Cost(2 * whole.matmul, 2 * whole.useful, whole.elementwise, gradient_bytes(self, size), 0)

    def unambiguous_rows(self, q: Queries, k: Keys, mask: Mask) -> Bool[Tensor, "B H T"] | None:
        """Rows where rounding cannot change the answer by a jump; None: all."""
        return None

    def select_kernel(self, face: str, *args: Any) -> Callable[..., Any] | None:
        """The fast twin to run for this call, or None for the plain reference."""
        if self.use == "plain":
            return None
        if self.use != "auto":
            self.kernels.find(self.use)
        for kernel in self.kernels.for_face(face):
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
                _say_once(f"{self.name} runs its reference instead of the kernel '{kernel.name}': {reason}")
        return None


@lru_cache(256)
def _say_once(message: str) -> None:
    _LOG.info(message)


def gradient_bytes(mechanism: Mechanism, size: Size) -> int:
    """Bytes that gradients move at the least: two for each of the inputs, one for the output."""
    q, k = (size.K if n in mechanism.needs else 0 for n in "qk")
    inputs = size.H * size.T * q + size.G * size.S * (k + size.V)
    return size.e * size.B * (2 * inputs + size.H * size.T * size.V)


def fork(state: State, rows: Int[Tensor, " N"] | None = None) -> State:
    """A copy of any state, or of some rows of it in any order (beam search)."""

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.clone() if rows is None else x.index_select(0, rows)

    return type(state)(*(copy(x) for x in state))


def refuse(mechanism: Mechanism, mask: Mask, *fields: str) -> None:
    """An error where the mask asks for something that the mechanism cannot honour."""
    for field in fields:
        if getattr(mask, field) is not None:
            raise MaskError(
                f"{mechanism.name} cannot honour '{field}': {_WHY.get(field, 'it has no such notion')}. "
                "Leave it out, or use 'softmax'."
            )


def refuse_in_state(mechanism: Mechanism, rules: Mask) -> None:
    """An error where the rules of a state hold what belongs to single calls."""
    for field, why in _NOT_IN_STATE.items():
        if getattr(rules, field) is not None:
            raise MaskError(f"a state of {mechanism.name} cannot hold '{field}': {why}.")


def require_cross(mechanism: Mechanism) -> None:
    """An error where a mechanism's scores belong to positions of one sequence."""
    if not mechanism.crosses:
        raise MaskError(
            f"{mechanism.name} has no cross-attention: its scores belong to positions of one sequence, not to keys of "
            "another. Use 'softmax' or a linear mechanism there."
        )


_WHY = {
    "bias": "it has no score to add a bias to; its similarities are products of features",
    "slopes": "it has no score to add ALiBi's slopes to; its similarities are products of features",
    "relative": "it has no score to add a bias of relative positions to; its similarities are products of features",
    "softcap": "it has no score to cap; its similarities are products of features",
}
_NOT_IN_STATE = {
    "visible": "it belongs to single tokens; give it to extend or write",
    "documents": "a state holds one document; give each its own",
    "bias": "it belongs to single queries; give it to read",
    "rows": "the state counts them itself",
}

MECHANISMS: Registry[type[Mechanism]] = Registry("mechanism")
_M = TypeVar("_M", bound=type[Mechanism])


def register(name: str) -> Callable[[_M], _M]:
    """Class decorator: makes a mechanism known by name to everything in regard."""

    def add(cls: _M) -> _M:
        MECHANISMS.put(name, cls)
        cls.name = name
        return cls

    return add


def mechanisms() -> dict[str, type[Mechanism]]:
    """Returns every registered mechanism by name."""
    return dict(MECHANISMS)


def mechanism(name: str | type[Mechanism], **options: Any) -> Mechanism:
    """Builds the mechanism of that name, e.g. `mechanism("performer", features=256)`."""
    return _build(name, {}, options)


def fitted(name: str | type[Mechanism], size: Size, **options: Any) -> Mechanism:
    """Builds a mechanism whose heads, width and length, where it has such options, are those of `size`."""
    return _build(name, {"heads": size.H, "width": size.K, "length": max(size.T, size.S)}, options)


def _build(name: str | type[Mechanism], offered: dict[str, Any], options: dict[str, Any]) -> Mechanism:
    cls = lookup(name)
    built: Mechanism = call_with_options(cls, f"mechanism '{cls.name}'", offered, options)
    return built


def on_meta(name: str | type[Mechanism], size: Size, **options: Any) -> Mechanism:
    """The same without the numbers it would learn, which may not fit into memory: for what follows from sizes alone."""
    with torch.device("meta"):
        return fitted(name, size, **options)


def lookup(name: str | type[Mechanism]) -> type[Mechanism]:
    """Returns the class of a mechanism by its name; a class is returned as it is."""
    return name if isinstance(name, type) else MECHANISMS.find(name)


def without_autocast(x: Tensor) -> torch.autocast:
    """Switches autocast off: sums and states stay in float32 whatever the surroundings."""
    return torch.autocast(x.device.type, enabled=False)
