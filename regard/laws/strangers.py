"""Attention that somebody else wrote: how to call it, and what its masks mean.

People write attention in a few ways, and nothing in a signature says which. So the layout of the inputs is found by
trying, and the meaning of a mask by hiding one key and seeing whether it still matters:

    heads     q [B,H,T,K], k [B,G,S,K], v [B,G,S,V]     a function, or a module without projections
    flat      q [B,T,K],   k [B,S,K],   v [B,S,V]       a function over [n,T,d]
    tokens    query, key, value [B,T,D]                 a module with projections, such as nn.MultiheadAttention
    x         tokens x [B,T,D]                          a module for self-attention
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import PluginError
from regard.laws.case import Case, CouldNotBeAsked, difference
from regard.laws.subjects import Subject, explain_exception

_CAUSAL_NAMES = ("causal", "is_causal")
# Masks of keys, and whether True means hidden there by custom.
_KEY_MASKS = {"visible": False, "key_padding_mask": True, "padding_mask": True, "src_key_padding_mask": True}
_ANY_MASKS = ("mask", "attention_mask", "attn_mask", "src_mask")
_WIDTH_NAMES = ("embed_dim", "d_model", "hidden_size", "n_embd", "width", "dim", "emb_dim", "embed_size", "d_in")
_LENGTH_NAMES = ("block_size", "context_length", "max_seq_len", "max_length", "max_len", "length", "T")
# Builtins have no signature to read: these are the names of torch.nn.functional.scaled_dot_product_attention.
_BUILTIN_PARAMETERS = ("query", "key", "value", "attn_mask", "is_causal")


class MaskForm(NamedTuple):
    """How a mask is handed over: the parameter's name, its shape, and how hidden keys are marked in it."""

    name: str
    shape: str  # "keys" [B,S], "pairs" [T,S], "batch pairs" [B,T,S], "head pairs" [B,1,T,S]
    marks: str  # "visible": True may be seen; "hidden": True may not; "ones": 1 and 0; "added": 0 and −∞

    def build(self, allowed: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the mask from what each query may see, [B,T,S]."""
        if self.shape == "keys":
            allowed = allowed.any(1)
        elif self.shape == "pairs":
            allowed = allowed[0]
        elif self.shape == "head pairs":
            allowed = allowed[:, None]
        if self.marks == "visible":
            return allowed
        if self.marks == "hidden":
            return ~allowed
        if self.marks == "ones":
            return allowed.to(dtype)
        return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, float("-inf"))

    @property
    def has_pairs(self) -> bool:
        """Whether it can say that a query sees a key and another does not."""
        return self.shape != "keys"

    @property
    def has_batch(self) -> bool:
        """Whether it can hide other keys in each row of a batch."""
        return self.shape != "pairs"


@dataclass(frozen=True)
class Layout:
    """What the inputs look like. `projects`: the width is the module's own, and heads are its own affair."""

    name: str
    token_axis: int
    inputs: int
    projects: bool = False


HEADS = Layout("heads", 2, 3)
FLAT = Layout("flat", 1, 3)
TOKENS = Layout("tokens", 1, 3, projects=True)
X = Layout("x", 1, 1, projects=True)


class Stranger(Subject):
    """A function or module that somebody else wrote. How it is called is found out when a law first needs it."""

    def __init__(
        self,
        f: Callable[..., Any],
        label: str,
        source: str,
        causal: bool | None = None,
        length: int | None = None,
        width: int | None = None,
    ) -> None:
        super().__init__(label, source)
        if isinstance(f, nn.Module):
            f = deepcopy(f).eval()  # it is cast to other dtypes
        self.f = f
        self.parameters = _parameter_names(f)
        self.required = _required_names(f)
        self.width = width or _find_width(f)
        self.length = length or _find_length(f)
        self.layout = self._guess_layouts()[0]
        self.causal_name: str | None = None
        self.key_mask: MaskForm | None = None
        self.pair_mask: MaskForm | None = None
        # What a mask that must be given is filled with until its meaning is known; None where None will do.
        self.filler: MaskForm | None = None
        self.takes_groups = False
        self.takes_other_lengths = False
        self.same_widths = False
        self.exact_length: int | None = None
        self.dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16", "float16")
        self.precision: str | None = None
        self._claims = causal
        self._found_out = False

    @property
    def token_axis(self) -> int:  # type: ignore[override]
        self.find_out()
        return self.layout.token_axis

    @property
    def takes_visible(self) -> bool:  # type: ignore[override]
        self.find_out()
        return self.key_mask is not None

    @property
    def takes_fewer_queries(self) -> bool:  # type: ignore[override]
        self.find_out()
        return self.takes_other_lengths

    @property
    def causal(self) -> bool:  # type: ignore[override]
        self.find_out()
        return bool(self._claims)

    @property
    def can_be_told(self) -> bool:
        """Whether a parameter says if it is to be causal: a flag, or a mask of pairs."""
        self.find_out()
        return self.causal_name is not None or self.pair_mask is not None

    def fit(self, case: Case) -> Case:
        self.find_out()
        case = self._fit_layout(case)
        if not self.takes_groups:
            case = case.but(G=case.H)
        if self.same_widths:
            case = case.but(V=case.K)
        if not self.causal:
            case = case.but(causal=False)
        if self.exact_length is not None:
            case = case.but(T=self.exact_length)
        elif self.length is not None:
            case = case.but(T=min(case.T, self.length))
        if case.dtype not in self.dtypes:
            case = case.but(dtype="float32")
        if self.precision is not None and case.dtype == "float64":
            case = case.but(precision=self.precision)
        return case.but(window=None, documents=False)

    def can_be(self, causal: bool) -> bool:
        return self.can_be_told or causal == self.causal

    def takes_length(self, T: int) -> bool:
        self.find_out()
        if self.exact_length is not None:
            return self.exact_length == T
        return self.length is None or self.length >= T

    def inputs(self, case: Case, S: int | None = None) -> list[Tensor]:
        T = case.T
        S = S or T
        if self.layout is X:
            return [case.draw(case.B, T, case.K, stream=1)]
        if self.layout is HEADS:
            return list(case.qkv(S=S))
        widths = (case.K, case.K, case.V)
        lengths = (T, S, S)
        return [
            case.draw(case.B, n, width, stream=1 + i) for i, (n, width) in enumerate(zip(lengths, widths, strict=True))
        ]

    def run(self, case: Case, inputs: list[Tensor], visible: Tensor | None = None) -> Tensor:
        self.find_out()
        return self._call(case, inputs, visible)

    def find_out(self) -> None:
        """Finds out how it wants to be called; raises `CouldNotBeAsked` where no way works."""
        if self._found_out:
            return
        self._found_out = True  # what follows asks `run` and `fit`, which would come here again
        try:
            self._find_layout()
            self._find_causal_flag()
            self._find_mask()
            self._find_sizes()
            self._find_precision()
            self._find_claim()
        except CouldNotBeAsked:
            self._found_out = False
            raise

    def _fit_layout(self, case: Case) -> Case:
        if self.layout is HEADS:
            return case
        case = case.but(H=1, G=1)
        if self.layout.projects and self.width is not None:
            case = case.but(K=self.width, V=self.width)
        return case

    def _call(self, case: Case, inputs: list[Tensor], visible: Tensor | None = None) -> Tensor:
        """Calls it, and returns its output; an exception of its own becomes `CouldNotBeAsked` with the call."""
        options: dict[str, Any] = {}
        if self.causal_name is not None:
            options[self.causal_name] = case.causal
        options |= self._filled_masks(case, inputs)
        options |= self._mask_options(case, inputs, visible)
        if isinstance(self.f, nn.Module):
            self.f.to(case.device, case.type)
        sequence_first = getattr(self.f, "batch_first", None) is False and self.layout.projects
        given = inputs
        if sequence_first:
            given = [x.transpose(0, 1) for x in inputs]
        try:
            out = self.f(*given, **options)
        except Exception as error:  # whatever a stranger raises is to be told, not to be judged
            raise explain_exception(error, self._describe_call(given, options)) from error
        if isinstance(out, tuple | list):
            out = out[0]
        if not isinstance(out, Tensor):
            call = self._describe_call(given, options)
            raise CouldNotBeAsked(
                f"{call} returned a {type(out).__name__}; expected a tensor, or a tuple with it first"
            )
        if sequence_first:
            out = out.transpose(0, 1)
        return out

    def _filled_masks(self, case: Case, inputs: list[Tensor]) -> dict[str, Any]:
        """Returns the masks that must be given, with nothing hidden."""
        names = [name for name in self.required if name in _ANY_MASKS or name in _KEY_MASKS]
        if self.filler is None:
            return dict.fromkeys(names)
        return {name: self.filler.build(self._everything(case, inputs), case.type) for name in names}

    def _everything(self, case: Case, inputs: list[Tensor]) -> Tensor:
        """Returns a mask under which every query sees every key, [B,T,S]."""
        B = inputs[0].shape[0]
        T = inputs[0].shape[self.layout.token_axis]
        S = inputs[-1].shape[self.layout.token_axis]
        return torch.ones(B, T, S, dtype=torch.bool, device=case.device)

    def _mask_options(self, case: Case, inputs: list[Tensor], visible: Tensor | None) -> dict[str, Any]:
        """Returns the masks to hand over: one of pairs for causality where no flag says it, one of visible keys."""
        everything = self._everything(case, inputs)
        T, S = everything.shape[1:]
        allowed: dict[MaskForm, Tensor] = {}
        if self.pair_mask is not None and self.causal_name is None and case.causal:
            allowed[self.pair_mask] = everything & (case.range(S) <= case.range(T)[:, None] + (S - T))
        if self.key_mask is not None and visible is not None:
            allowed[self.key_mask] = allowed.get(self.key_mask, everything) & visible[:, None, :]
        for form in (self.pair_mask, self.key_mask):
            if form is not None and form.name in self.required and not allowed:
                allowed[form] = everything
        return {form.name: form.build(see, case.type) for form, see in allowed.items()}

    def _describe_call(self, inputs: list[Tensor], options: dict[str, Any]) -> str:
        names: tuple[str, ...] = ("x",)
        if len(inputs) == 3:
            names = ("q", "k", "v")
        parts = [f"{n} {list(x.shape)}" for n, x in zip(names, inputs, strict=True)]
        for name, value in options.items():
            shown = value
            if isinstance(value, Tensor):
                shown = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            parts.append(f"{name}={shown}")
        return f"{self.label}({', '.join(parts)})"

    def _probe(self, **changes: Any) -> Case:
        """Returns a small case, no two of whose sizes are alike, that fits what is known so far."""
        case = Case(B=7, T=5, H=3, G=3, K=6, V=4, causal=False).but(**changes)
        case = self._fit_layout(case)
        if self.same_widths:
            case = case.but(V=case.K)
        if self.exact_length is not None:
            case = case.but(T=self.exact_length)
        elif self.length is not None:
            case = case.but(T=min(case.T, self.length))
        if case.dtype not in self.dtypes:
            case = case.but(dtype="float32")
        return case

    def _guess_layouts(self) -> list[Layout]:
        data = [n for n in self.required if n not in _CAUSAL_NAMES and n not in _ANY_MASKS and n not in _KEY_MASKS]
        is_module = isinstance(self.f, nn.Module)
        if len(data) == 1 and is_module:
            return [X]
        if is_module and self.width is not None:
            return [TOKENS, HEADS, FLAT]
        return [HEADS, FLAT]

    def _find_layout(self) -> None:
        """Takes the first layout that gives an output of the right shape, else the first that gives any."""
        fillers: list[MaskForm | None] = [None]
        for name in self.required:
            if name in _ANY_MASKS or name in _KEY_MASKS:
                fillers += [MaskForm(name, shape, "visible") for shape in ("head pairs", "pairs", "keys")]
        ways = product((self.dtypes, ("float32",)), fillers, self._guess_layouts(), (False, True))
        fallback = None
        failures: list[CouldNotBeAsked] = []
        for way in ways:
            self.dtypes, self.filler, self.layout, self.same_widths = way
            self.exact_length = None
            try:
                fits = self._try_lengths()
            except CouldNotBeAsked as failure:
                failures.append(failure)
                continue
            if fits:
                return
            fallback = fallback or way
        if fallback is None:
            raise CouldNotBeAsked(f"{failures[0]}. {_what_to_pass(self)}")
        self.dtypes, self.filler, self.layout, self.same_widths = fallback

    def _try_lengths(self) -> bool:
        """Returns whether outputs have the right shape at 5 tokens or, where it takes no other, at `length`."""
        try:
            case = self._probe()
            out = self._call(case, self.inputs(case))
        except CouldNotBeAsked:
            if self.length is None:
                raise
            self.exact_length = self.length
            case = self._probe()
            out = self._call(case, self.inputs(case))
        inputs = self.inputs(case)
        if self.layout is HEADS:
            return out.shape == (*inputs[0].shape[:3], inputs[2].shape[3])
        return out.shape[:2] == inputs[0].shape[:2]

    def _find_causal_flag(self) -> None:
        for name in _CAUSAL_NAMES:
            if name not in self.parameters:
                continue
            self.causal_name = name
            try:
                case = self._probe(causal=True)
                self._call(case, self.inputs(case))
                return
            except CouldNotBeAsked:
                self.causal_name = None  # as nn.MultiheadAttention, whose flag is a hint beside a mask

    def _find_mask(self) -> None:
        """Finds out what its masks mean: one of keys, and one of pairs of query and key."""
        named = [self._find_form(name) for name in self.parameters if name in _KEY_MASKS or name in _ANY_MASKS]
        forms = [form for form in named if form is not None]
        self.key_mask = next((form for form in forms if form.has_batch), None)
        self.pair_mask = next((form for form in forms if form.has_pairs), None)

    def _find_form(self, name: str) -> MaskForm | None:
        """Returns the first form of a mask under which a hidden key does not matter, else the first that runs."""
        fallback = None
        for form in _possible_forms(name, self.causal_name is not None):
            self.key_mask = form
            self.pair_mask = None
            try:
                if self._hides_a_key():
                    return form
            except CouldNotBeAsked:
                continue
            fallback = fallback or form
        return fallback

    def _hides_a_key(self) -> bool:
        case = self._probe()
        inputs = self.inputs(case)
        T = case.T
        hidden = T - 2
        visible = torch.ones(case.B, T, dtype=torch.bool)
        visible[:, hidden] = False
        before = self._call(case, inputs, visible)
        changed = [x.clone() for x in inputs]
        keys = changed
        if len(changed) == 3:
            keys = changed[1:]
        for n, x in enumerate(keys):
            row = x.select(self.layout.token_axis, hidden)
            row.copy_(case.draw(*row.shape, stream=40 + n))
        after = self._call(case, changed, visible)
        if len(changed) == 1:  # the hidden token asks, too
            others = torch.tensor([i for i in range(T) if i != hidden])
            before = before.index_select(self.layout.token_axis, others)
            after = after.index_select(self.layout.token_axis, others)
        return difference(after, before) < 1e-3 and bool(before.detach().abs().max() > 0)

    def _find_sizes(self) -> None:
        """Finds out whether it takes groups of heads, more keys than queries, and long sequences."""
        self.takes_groups = self.layout is HEADS and self._runs(self._probe(B=1, T=3, H=4, G=2))
        if self.layout is not X:
            case = self._probe()
            self.takes_other_lengths = self.exact_length is None and self._runs(case, S=case.T + 2)
        if self.exact_length is None and self.length is None and not self._runs(self._probe(B=1, T=131)):
            self.length = max((n for n in (2, 5, 8, 16, 32, 64, 128) if self._runs(self._probe(B=1, T=n))), default=5)

    def _runs(self, case: Case, S: int | None = None) -> bool:
        try:
            self._call(case, self.inputs(case, S))
        except CouldNotBeAsked:
            return False
        return True

    def _find_precision(self) -> None:
        """Finds out whether it computes in float32 whatever comes in, as many a softmax does.

        Along a line, f(x + 2h) − 2f(x + h) + f(x) is of the order h² for what is computed in float64; rounding to
        float32 on the way leaves steps of 1e-8 in it.
        """
        case = self._probe(B=1)
        if case.dtype != "float64":
            return
        inputs = self.inputs(case)
        roughness = 0.0
        for n in range(1, 5):
            h = 3e-8 * n
            with torch.no_grad():
                points = [self._call(case, [x * (1 + i * h) for x in inputs]) for i in range(3)]
            if points[0].dtype != torch.float64:
                self.precision = "float32"
                return
            bend = points[2] - 2 * points[1] + points[0]
            roughness = max(roughness, float(bend.abs().max() / points[0].abs().max().clamp(min=1e-30)))
        if roughness > 1e-11:
            self.precision = "float32"

    def _find_claim(self) -> None:
        """Finds out whether it claims to be causal, where nobody said.

        What can be told by a flag or a mask claims it. What cannot be told and sees every later token as much as
        earlier ones is meant to; what sees some of them, or sees them faintly, is not.
        """
        if self._claims is not None:
            return
        if self.can_be_told:
            self._claims = True
            return
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.label).lower()
        if "causal" in name or "masked" in name:
            self._claims = True
            return
        influence = self._influence()
        T = len(influence)
        ahead = influence[torch.ones(T, T, dtype=torch.bool).triu(1)]
        behind = influence[torch.ones(T, T, dtype=torch.bool).tril(-1)]
        both_ways = T > 1 and bool((ahead > 0.01 * behind.median()).all()) and bool(behind.median() > 0)
        self._claims = not both_ways

    def _influence(self) -> Tensor:
        """Returns how much the output at each token moves when the value of each other token changes, [T,T].

        Values are what attention mixes: a key that is seen through a sum over all of them, and no value, is a leak.
        """
        case = self._probe(B=2)
        inputs = self.inputs(case)
        axis = self.layout.token_axis
        with torch.no_grad():
            before = self._call(case, inputs)
            rows = []
            for j in range(case.T):
                changed = [x.clone() for x in inputs]
                row = changed[-1].select(axis, j)
                row.copy_(case.draw(*row.shape, stream=50))
                moved = (self._call(case, changed) - before).abs().movedim(axis, 0).flatten(1)
                rows.append(moved.amax(1))
        return torch.stack(rows, 1)


def stranger(
    thing: Any,
    label: str | None = None,
    source: str | None = None,
    causal: bool | None = None,
    length: int | None = None,
    width: int | None = None,
) -> Stranger:
    """Returns a function, a module, or a class of modules that needs no arguments, ready for the laws."""
    if isinstance(thing, type) and issubclass(thing, nn.Module):
        needed = len(_required_names(thing))
        if needed:
            raise PluginError(f"{thing.__name__} needs {needed} arguments to be built; name an instance of it instead")
        thing = thing()
    label = str(label or getattr(thing, "__name__", type(thing).__name__))
    if not callable(thing):
        raise PluginError(
            f"{label} is a {type(thing).__name__}; expected a mechanism, f(q, k, v, causal=True) or an nn.Module"
        )
    made = Stranger(thing, label, source or f"regard.subject({label})", causal, length, width)
    masks = {*_CAUSAL_NAMES, *_KEY_MASKS, *_ANY_MASKS}
    data = [name for name in made.required if name not in masks]
    if len(data) > 3 or len(data) == 2:
        raise PluginError(
            f"{label} needs {len(data)} arguments ({', '.join(data)}); expected f(q, k, v, causal=True), a module over "
            "x [B,T,D], or a module over query, key and value"
        )
    if made.layout is X and made.width is None:
        raise PluginError(
            f"{label}: cannot tell the width of its input; give the module an attribute `width`, or say width=…"
        )
    return made


def _possible_forms(name: str, has_causal_flag: bool) -> Iterator[MaskForm]:
    """Yields the forms that a mask of this name may have, the likeliest first."""
    if name in _KEY_MASKS:
        marks = ["visible", "hidden"]
        if _KEY_MASKS[name]:
            marks.reverse()
        yield from (MaskForm(name, "keys", mark) for mark in marks)
        return
    shapes = ["head pairs", "batch pairs", "pairs", "keys"]
    if has_causal_flag:  # then a mask is more likely to be one of keys
        shapes = ["keys", "head pairs", "batch pairs", "pairs"]
    for shape in shapes:
        for mark in ("visible", "hidden", "ones", "added"):
            yield MaskForm(name, shape, mark)


def _parameter_names(f: Callable[..., Any]) -> list[str]:
    try:
        signature = inspect.signature(_callable_of(f))
    except ValueError:  # a builtin
        return list(_BUILTIN_PARAMETERS)
    return list(signature.parameters)


def _required_names(f: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        signature = inspect.signature(_callable_of(f))
    except ValueError:
        return list(_BUILTIN_PARAMETERS[:3])
    return [n for n, p in signature.parameters.items() if p.kind in kinds and p.default is p.empty]


def _callable_of(f: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(f, nn.Module):
        return f.forward
    return f


def _find_width(f: Any) -> int | None:
    """Returns the width of a module's tokens: an attribute by one of its usual names, or its first Linear's."""
    if not isinstance(f, nn.Module):
        return None
    found = [_read_number(f, name) for name in _WIDTH_NAMES]
    found += [m.in_features for m in f.modules() if isinstance(m, nn.Linear)]
    return next((n for n in found if n is not None), None)


def _find_length(f: Any) -> int | None:
    """Returns the most tokens that a module takes, where an attribute by one of the usual names says so."""
    if not isinstance(f, nn.Module):
        return None
    return next((n for n in (_read_number(f, name) for name in _LENGTH_NAMES) if n is not None), None)


def _read_number(module: nn.Module, name: str) -> int | None:
    for holder in (module, getattr(module, "config", None)):
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _what_to_pass(made: Stranger) -> str:
    if isinstance(made.f, nn.Module):
        return (
            "A module is called with x [B,T,D], or with query, key and value [B,T,D]; say width=… and length=… where "
            "it does not say them itself."
        )
    return "A function is called with q [B,H,T,K], k [B,H,S,K], v [B,H,S,V], or with three tensors [n,T,d]."
