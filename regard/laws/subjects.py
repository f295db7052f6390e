"""What a law is put to: a mechanism, a function f(q, k, v, causal=True), or a module over tokens x [B,T,D]."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from regard.devices import DTYPES
from regard.errors import OptionError, PluginError
from regard.laws.case import Case, spread
from regard.mechanisms import Mechanism, fitted, lookup
from regard.shapes import Mask, Size


class Subject:
    """The few questions that laws ask. `source` is a Python expression that makes it again."""

    token_axis = 2
    causal = True
    takes_visible = False

    def __init__(self, label: str, source: str) -> None:
        self.label, self.source = label, source

    def fit(self, case: Case) -> Case:
        """The case with sizes that the subject can take."""
        return case

    def mechanism(self, case: Case) -> Mechanism | None:
        return None

    def inputs(self, case: Case) -> list[Tensor]:
        return list(case.qkv())

    def run(self, case: Case, inputs: list[Tensor], visible: Tensor | None = None) -> Tensor:
        """The output."""
        raise NotImplementedError

    def certain(self, case: Case, inputs: list[Tensor]) -> Tensor | None:
        return None

    def spread(self, case: Case, inputs: list[Tensor]) -> Tensor | None:
        return None


class MechanismSubject(Subject):
    """A registered name, a class, or an instance."""

    takes_visible = True

    def __init__(self, thing: str | type[Mechanism] | Mechanism, source: str | None = None, **options: Any) -> None:
        if isinstance(thing, str):
            lookup(thing)
        label = thing if isinstance(thing, str) else thing.name or getattr(thing, "__name__", type(thing).__name__)
        given = "".join(f", {n}={x!r}" for n, x in options.items())
        super().__init__(label + (f"({given[2:]})" if given else ""), source or f"regard.subject({label!r}{given})")
        self.thing, self.options = thing, options
        self.kept: dict[tuple[object, ...], Mechanism] = {}

    def fit(self, case: Case) -> Case:
        if not isinstance(self.thing, Mechanism):
            return case
        heads, width, length = (getattr(self.thing, n, None) for n in ("heads", "width", "length"))
        directions = getattr(self.thing, "w", None)
        width = directions.shape[1] if directions is not None else width
        T = min(case.T, max(1, length // 2)) if length else case.T
        if heads:
            case = case.but(H=heads, G=heads if heads % case.G else case.G)
        return case.but(T=T, K=width or case.K)

    def mechanism(self, case: Case) -> Mechanism:
        sizes = (case.T, case.H, case.G, case.K, case.V, case.seed, case.dtype, case.rounded, case.device)
        if sizes not in self.kept:
            if len(self.kept) >= 4:
                self.kept.clear()
            self.kept[sizes] = self._built(case).eval()
        built = self.kept[sizes]
        built.use = "auto"
        return built

    def _built(self, case: Case) -> Mechanism:
        if isinstance(self.thing, Mechanism):
            built = deepcopy(self.thing)
        else:
            # Mechanisms with parameters or random features: the same ones for the same case.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(case.seed)
                longest = Size(T=2 * case.T + 8, S=2 * case.T + 8, H=case.H, G=case.G, K=case.K, V=case.V)
                built = fitted(self.thing, longest, **self.options)
        if case.rounded is not None:
            built = built.to(DTYPES[case.rounded])
        return built.to(case.device, case.type)

    def run(self, case: Case, inputs: list[Tensor], visible: Tensor | None = None) -> Tensor:
        mask = Mask(case.causal, visible, case.window)
        out: Tensor = self.mechanism(case)(*inputs, mask)
        return out

    def certain(self, case: Case, inputs: list[Tensor]) -> Tensor | None:
        q, k, _ = inputs
        return self.mechanism(case).unambiguous_rows(q, k, Mask(case.causal, window=case.window))

    def spread(self, case: Case, inputs: list[Tensor]) -> Tensor | None:
        built = self.mechanism(case)
        if not built.signed:
            return None
        q, k, v = inputs
        return spread(built, built.weights(q, k, Mask(case.causal, window=case.window)), v)


# How strangers call the mask of keys that may be seen, and whether True means hidden there.
_VISIBLE = {"visible": False, "attention_mask": False, "mask": False, "key_padding_mask": True}
_WIDTHS = ("embed_dim", "d_model", "hidden_size", "n_embd", "width", "dim")


class FunctionSubject(Subject):
    """f(q, k, v, causal=True), or a module called that way; a mask of visible keys [B,S] where it takes one."""

    def __init__(self, f: Callable[..., Any], label: str, source: str, causal: bool = True) -> None:
        super().__init__(label, source)
        self.f, self.causal = (
            deepcopy(f).eval() if isinstance(f, nn.Module) else f,
            causal,
        )  # it is cast to other dtypes
        takes = _parameters(f)
        self.causal_name = next((n for n in ("causal", "is_causal") if n in takes), None)
        self.visible_name = next((n for n in _VISIBLE if n in takes), None)
        self.takes_visible = self.visible_name is not None
        self.grouped: bool | None = None

    def fit(self, case: Case) -> Case:
        if self.grouped is None:
            self.grouped = self._runs(case.but(G=2, H=4, T=3, B=1))
        case = case if self.grouped else case.but(G=case.H)
        return case if self.causal else case.but(causal=False)

    def _runs(self, case: Case) -> bool:
        """Whether it takes fewer key/value heads than query heads; if not, it is not asked to."""
        try:
            self.run(case, self.inputs(case))
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
            return False
        return True

    def run(self, case: Case, inputs: list[Tensor], visible: Tensor | None = None) -> Tensor:
        options: dict[str, Any] = {}
        if self.causal_name is not None:
            options[self.causal_name] = case.causal
        if visible is not None and self.visible_name is not None:
            options[self.visible_name] = ~visible if _VISIBLE[self.visible_name] else visible
        if isinstance(self.f, nn.Module):
            self.f.to(case.device, case.type)
        out = self.f(*inputs, **options)
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first


class ModuleSubject(FunctionSubject):
    """A module over tokens x [B,T,D]."""

    token_axis = 1

    def __init__(self, module: nn.Module, label: str, source: str, causal: bool = True) -> None:
        super().__init__(module, label, source, causal)
        self.grouped = True
        widths = [getattr(module, n, None) for n in _WIDTHS]
        widths += [m.in_features for m in module.modules() if isinstance(m, nn.Linear)]
        self.width = next((w for w in widths if isinstance(w, int)), None)
        if self.width is None:
            raise PluginError(f"{label}: cannot tell the width of its input; give the module an attribute `width`")

    def inputs(self, case: Case) -> list[Tensor]:
        return [case.draw(case.B, case.T, self.width or 1, stream=1)]


def subject(
    thing: Any, *, label: str | None = None, source: str | None = None, causal: bool = True, **options: Any
) -> Subject:
    """Anything that can be checked, made ready for the laws."""
    if options and not isinstance(thing, str) and not (isinstance(thing, type) and issubclass(thing, Mechanism)):
        raise OptionError(
            f"{', '.join(options)}: only a mechanism by its name or class is built here and takes options; "
            f"a {type(thing).__name__} is checked as it is"
        )
    if isinstance(thing, Subject):
        return thing
    if isinstance(thing, str | Mechanism) or (isinstance(thing, type) and issubclass(thing, Mechanism)):
        return MechanismSubject(thing, source, **options)
    if isinstance(thing, type) and issubclass(thing, nn.Module):
        thing = _built(thing)
    label = str(label or getattr(thing, "__name__", type(thing).__name__))
    source = source or f"regard.subject({label})"
    if not callable(thing):
        raise PluginError(
            f"{label} is a {type(thing).__name__}; expected a mechanism, f(q, k, v, causal=True) or an nn.Module"
        )
    if isinstance(thing, nn.Module) and _required(thing.forward) == 1:
        return ModuleSubject(thing, label, source, causal)
    if _required(thing) > 3:
        raise PluginError(
            f"{label} needs {_required(thing)} arguments; expected f(q, k, v, causal=True) or a module over x"
        )
    return FunctionSubject(thing, label, source, causal)


def _built(cls: type[nn.Module]) -> nn.Module:
    needed = _required(cls)
    if needed:
        raise PluginError(f"{cls.__name__} needs {needed} arguments to be built; name an instance of it instead")
    return cls()


def _parameters(f: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(f.forward if isinstance(f, nn.Module) else f).parameters)


def _required(f: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in inspect.signature(f).parameters.values())
