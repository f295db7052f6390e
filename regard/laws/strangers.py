"""Attention that somebody else wrote: how to call it, and what its masks mean, is found out by trying.

People write attention in a few ways (see `layouts`), and nothing in a signature says which. So the layout of the inputs
is found by trying, the axis of heads by which values mix, and the meaning of a mask by hiding one key and seeing
whether it still matters.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import PluginError
from regard.laws.calling import MOST_HEADS, Caller
from regard.laws.case import Case, CouldNotBeAsked, difference
from regard.laws.habits import claims_causality, knows_positions, measure_roughness, mixes_along
from regard.laws.layouts import (
    CROSS,
    FLAT,
    HEADS,
    HEADS_LAST,
    MATRICES,
    MERGED,
    PACKED,
    TOKENS,
    TOKENS_FIRST,
    Layout,
    MaskForm,
    X,
    possible_forms,
)
from regard.laws.signatures import (
    ANY_MASKS,
    CAUSAL_NAMES,
    HEAD_COUNTS,
    KEY_MASKS,
    MODULES,
    attends_twice,
    required_names,
    says_tokens_first,
)
from regard.laws.states import StateCall, find_state_call
from regard.laws.subjects import Subject

__all__ = ["HEADS", "Stranger", "stranger"]

_ALL_DTYPES = ("float64", "float32", "bfloat16", "float16")
HEAD_WIDTHS = (16, 64)  # that kernels take where they do not take any


class Stranger(Caller, Subject):
    """A function or module that somebody else wrote. How it is called is found out when a law first needs it."""

    def __init__(
        self,
        f: Callable[..., Any],
        label: str,
        source: str,
        causal: bool | None = None,
        length: int | None = None,
        width: int | None = None,
        step: str | Callable[..., Any] | None = None,
    ) -> None:
        Subject.__init__(self, label, source)
        Caller.__init__(self, f, label, length, width, step)
        self.layout = self._guess_layouts()[0]
        self.takes_groups = False
        self.with_fewer_queries: set[bool] = set()  # whether it takes them not causal, and causal
        self.same_widths = False
        self.exact_length: int | None = None
        self.dtypes: tuple[str, ...] = _ALL_DTYPES
        self.precision: str | None = None
        self._state_call: StateCall | None = None
        self._tried_states = False
        self._claims = causal
        self._knows_positions: bool | None = None
        self._found_out = False
        self._refusal: tuple[str, CouldNotBeAsked] | None = None

    @property
    def token_axis(self) -> int:  # type: ignore[override]
        self.find_out()
        return self.layout.token_axis

    @property
    def projects(self) -> bool:  # type: ignore[override]
        self.find_out()
        return self.layout.projects

    @property
    def takes_visible(self) -> bool:  # type: ignore[override]
        self.find_out()
        return self.key_mask is not None

    @property
    def state_call(self) -> StateCall | None:
        self.find_out()
        if not self._tried_states:
            self._state_call = find_state_call(self, self._probe(B=2))
            self._tried_states = True  # after it: a step that was told and does not run is told of each time
        return self._state_call

    @property
    def causal(self) -> bool:  # type: ignore[override]
        self.find_out()
        return bool(self._claims)

    @property
    def knows_positions(self) -> bool:  # type: ignore[override]
        self.find_out()
        if self._knows_positions is None:
            case = self._probe(B=2, causal=self.causal)
            # Of two tokens there is no other order.
            self._knows_positions = case.T > 2 and knows_positions(self, case)
        return self._knows_positions

    @property
    def queries_meet(self) -> bool:  # type: ignore[override]
        self.find_out()
        return self.layout is CROSS and attends_twice(self.f)

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
        if not self.causal or not self.can_be_told:
            case = case.but(causal=self.causal)
        if self.exact_length is not None:
            case = case.but(T=self.exact_length)
        elif self.length is not None:
            case = case.but(T=min(case.T, self.length))
        if case.dtype not in self.dtypes:
            case = case.but(dtype=self.dtypes[0])
        if self.precision is not None and case.dtype == "float64":
            case = case.but(precision=self.precision)
        if case.adjust != "none" and self.adjustment_name(case.adjust) is None:
            case = case.but(adjust="none")
        return case.but(window=None, documents=False)

    def takes_fewer_queries(self, causal: bool) -> bool:
        self.find_out()
        return causal in self.with_fewer_queries and (self.can_be_told or causal == self.causal)

    def takes_length(self, T: int) -> bool:
        self.find_out()
        if self.exact_length is not None:
            return self.exact_length == T
        return self.length is None or self.length >= T

    def inputs(self, case: Case, S: int | None = None) -> list[Tensor]:
        return self.draw_inputs(case, S)

    def run(self, case: Case, inputs: list[Tensor], visible: Tensor | None = None) -> Tensor:
        self.find_out()
        return self.call(case, inputs, visible)

    def assume(self, layout: Layout, dtypes: tuple[str, ...], key_mask: MaskForm | None = None) -> Stranger:
        """Returns the subject itself, which is called in this way and not asked how it is called.

        That is for calls that take long, and for those that end the process if they are wrong, as on a GPU.
        """
        self.layout = layout
        self.dtypes = dtypes
        self.key_mask = key_mask
        self._claims = bool(self._claims)
        self._found_out = True
        return self

    def find_out(self) -> None:
        """Finds out how it wants to be called; raises `CouldNotBeAsked` where no way works."""
        if self._found_out:
            return
        if self._refusal is not None and self._refusal[0] == self.device:
            raise self._refusal[1]  # every case of every law comes here, and trying all ways takes its time
        self._found_out = True  # what follows asks `run` and `fit`, which would come here again
        try:
            self._find_layout_and_width()
            self._find_token_axis()
            self._find_causal_flag()
            self._find_mask()
            self._find_sizes()
            self._find_precision()
            self._find_claim()
        except CouldNotBeAsked as refusal:
            self._found_out = False
            self._refusal = (self.device, refusal)
            raise

    def _fit_layout(self, case: Case) -> Case:
        if self.layout.projects:
            case = case.but(H=1, G=1, K=self.width or case.K, V=self.width or case.K)
            return case
        if self.width is not None:  # kernels take heads of a few widths
            case = case.but(K=self.width, V=self.width)
        if not self.layout.has_heads:
            case = case.but(H=1, G=1)
        elif self.layout is MERGED:
            case = case.but(H=MOST_HEADS, G=MOST_HEADS)
        if self.same_widths or self.layout.same_widths:
            case = case.but(V=case.K)
        if self.layout is PACKED:
            case = case.but(G=case.H)
        return case

    def _probe(self, **changes: Any) -> Case:
        """Returns a small case, no two of whose sizes are alike, that fits what is known so far."""
        case = Case(B=7, T=5, H=3, G=3, K=6, V=4, causal=False, device=self.device)
        case = self._fit_layout(case.but(**changes))
        if self.exact_length is not None:
            case = case.but(T=self.exact_length)
        elif self.length is not None:
            case = case.but(T=min(case.T, self.length))
        if case.dtype not in self.dtypes:
            case = case.but(dtype=self.dtypes[0])
        return case

    def _guess_layouts(self) -> list[Layout]:
        is_module = isinstance(self.f, nn.Module)
        if len(self.data) == 1:
            layouts = [X]
            if not is_module or self.width is None:
                layouts.append(PACKED)
            return layouts
        if len(self.data) == 2:
            return [CROSS]
        if is_module and self.width is not None:
            return [TOKENS, HEADS, FLAT]
        if any(name in HEAD_COUNTS for name in self.required):
            return [MERGED, HEADS, FLAT]
        return [HEADS, FLAT, MATRICES]

    def _find_layout_and_width(self) -> None:
        """Finds the layout and, of a function that takes heads of a few widths only, as kernels do, one of these."""
        try:
            return self._find_layout()
        except CouldNotBeAsked as failure:
            if self.width is not None or isinstance(self.f, nn.Module):
                raise
            for width in HEAD_WIDTHS:
                self.width = width
                try:
                    return self._find_layout()
                except CouldNotBeAsked:
                    self.width = None
            raise failure

    def _find_layout(self) -> None:
        """Takes the first layout that gives an output of the right shape, else the first that gives any."""
        fillers: list[MaskForm | None] = [None]
        for name in self.required:
            if name in ANY_MASKS or name in KEY_MASKS:
                fillers += [MaskForm(name, shape, "visible") for shape in ("head pairs", "pairs", "keys")]
        ways = product((_ALL_DTYPES, ("float32",), ("bfloat16",)), fillers, self._guess_layouts(), (False, True))
        fallback = None
        failures: dict[str, str] = {}  # the first of each dtype
        for way in ways:
            self.dtypes, self.filler, self.layout, self.same_widths = way
            self.exact_length = None
            self.output_form = "same"
            try:
                fits = self._try_lengths()
            except CouldNotBeAsked as failure:
                failures.setdefault(self.dtypes[0], str(failure))
                continue
            if fits:
                self._find_dtypes()
                self._find_head_axis()
                return
            fallback = fallback or way
        if fallback is None:
            told = failures["float64"]
            if _complaint(failures["float32"]) != _complaint(told):
                told += f"; in float32 {failures['float32']}"
            raise CouldNotBeAsked(f"{told}. {_what_to_pass(self)}")
        self.dtypes, self.filler, self.layout, self.same_widths = fallback
        self.pools = self._gives_as_many_of_any()

    def _try_lengths(self) -> bool:
        """Returns whether outputs have the right shape at 5 tokens or, where it takes no other, at `length`."""
        try:
            case = self._probe()
            out = self.call(case, self.inputs(case))
        except CouldNotBeAsked:
            if self.length is None:
                raise
            self.exact_length = self.length
            case = self._probe()
            out = self.call(case, self.inputs(case))
        if self.layout.projects:
            return out.shape[:2] == (case.B, case.T)
        as_in_transformers = any(name in MODULES for name in self.required)
        if as_in_transformers and out.shape == (case.B, case.T, case.H, case.V):
            self.output_form = "transposed"
            return True
        return out.shape == (case.B, case.H, case.T, case.V)

    def _gives_as_many_of_any(self) -> bool:
        """Returns whether tokens become a vector a sequence, or a fixed number of them, as pooling does."""
        if not self.layout.projects or self.length is not None or self.exact_length is not None:
            return False
        shapes = set()
        for T in (3, 5, 8):
            case = self._probe(T=T)
            shapes.add(self.call(case, self.inputs(case)).shape)
        (shape, *others) = shapes
        return not others and len(shape) in (2, 3) and shape[0] == case.B

    def _find_dtypes(self) -> None:
        """Adds the other dtypes that it takes, where it does not take float64."""
        if self.dtypes == _ALL_DTYPES:
            return
        known = self.dtypes
        for dtype in _ALL_DTYPES[1:]:
            self.dtypes = (dtype,)
            if dtype not in known and self._runs(self._probe(B=1)):
                known = (*known, dtype)
        self.dtypes = known

    def _find_head_axis(self) -> None:
        """Takes heads to come after tokens where values mix along the second axis and not along the third.

        Where they mix along the first, tokens come before the batch if the code says so.
        """
        if self.layout is not HEADS or self.output_form != "same":
            return
        case = self._probe()
        if self._mixes_along(1, case) and not self._mixes_along(2, case):
            self.layout = HEADS_LAST
        elif says_tokens_first(self.pristine) and self._mixes_along(0, case) and not self._mixes_along(2, case):
            self.layout = TOKENS_FIRST

    def _find_token_axis(self) -> None:
        """Takes tokens to come before the batch where a module says so, and mixes along the first axis only."""
        if not self.layout.projects or hasattr(self.f, "batch_first") or not says_tokens_first(self.pristine):
            return
        case = self._probe(B=3)
        if case.T > 1:
            self.tokens_first = self._mixes_along(0, case) and not self._mixes_along(1, case)

    def _mixes_along(self, axis: int, case: Case) -> bool:
        return mixes_along(axis, lambda inputs: self.call(case, inputs), case, self.inputs(case))

    def _find_causal_flag(self) -> None:
        for name in CAUSAL_NAMES:
            if name not in self.parameters:
                continue
            self.causal_name = name
            try:
                case = self._probe(causal=True)
                self.call(case, self.inputs(case))
                return
            except CouldNotBeAsked:
                self.causal_name = None  # as nn.MultiheadAttention, whose flag is a hint beside a mask

    def _find_mask(self) -> None:
        """Finds out what its masks mean: one of keys, and one of pairs of query and key."""
        if self.layout is MATRICES:
            return
        named = [self._find_form(name) for name in self.parameters if name in KEY_MASKS or name in ANY_MASKS]
        forms = [form for form in named if form is not None]
        self.key_mask = next((form for form in forms if form.has_batch), None)
        self.pair_mask = next((form for form in forms if form.has_pairs), None)

    def _find_form(self, name: str) -> MaskForm | None:
        """Returns the first form of a mask under which a hidden key does not matter, else the first that runs."""
        fallback = None
        for form in possible_forms(name, self.causal_name is not None):
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
        visible = torch.ones(case.B, T, dtype=torch.bool, device=case.device)
        visible[:, hidden] = False
        before = self.call(case, inputs, visible)
        if before.dim() != inputs[0].dim() and not self.pools:  # a mask of the wrong shape was broadcast
            return False
        if before.shape != self.call(case.but(causal=False), inputs).shape:
            return False
        changed = [x.clone() for x in inputs]
        keys = changed
        if len(changed) > 1:
            keys = changed[1:]
        for n, x in enumerate(keys):
            row = x.select(self.layout.token_axis, hidden)
            row.copy_(case.draw(*row.shape, stream=40 + n))
        after = self.call(case, changed, visible)
        if len(changed) == 1 and not self.pools:  # the hidden token asks, too
            others = torch.tensor([i for i in range(T) if i != hidden], device=case.device)
            before = before.index_select(self.layout.token_axis, others)
            after = after.index_select(self.layout.token_axis, others)
        # A mask [T,T] that is read as one of [B,S] leaves the rows beyond the T-th empty.
        filled = before.detach().flatten(1).abs().amax(1) > 0
        return difference(after, before) < 1e-3 and bool(filled.all())

    def _find_sizes(self) -> None:
        """Finds out whether it takes groups of heads, more keys than queries, and long sequences."""
        with_groups = self.layout in (HEADS, HEADS_LAST, TOKENS_FIRST)
        self.takes_groups = with_groups and self._runs(self._probe(B=1, T=3, H=4, G=2))
        if self.layout.inputs > 1 and self.layout is not PACKED and self.exact_length is None:
            for causal in (False, True):
                case = self._probe(causal=causal)
                if self._runs(case, S=case.T + 2):
                    self.with_fewer_queries.add(causal)
        if self.exact_length is None and self.length is None and not self._runs(self._probe(B=1, T=131)):
            self.length = max((n for n in (2, 5, 8, 16, 32, 64, 128) if self._runs(self._probe(B=1, T=n))), default=5)

    def _runs(self, case: Case, S: int | None = None) -> bool:
        try:
            self.call(case, self.inputs(case, S))
        except CouldNotBeAsked:
            return False
        return True

    def _find_precision(self) -> None:
        """Finds out whether it computes in float32, or less, whatever comes in, as many a softmax does."""
        if self._probe().dtype != "float64":
            return
        if self.roughness() > 1e-11 or self.roughness(2e-5) > 1e-5:
            self.precision = "float32"

    def roughness(self, step: float = 3e-8) -> float:
        """Returns how large the steps are that rounding leaves along a line of inputs, relative to outputs."""
        return measure_roughness(self, self._probe(B=1), step)

    def _find_claim(self) -> None:
        """Finds out whether it claims to be causal, where nobody said; what can be told to be claims it."""
        if self._claims is None:
            self._claims = self.can_be_told or claims_causality(self, self._probe(B=2))


def stranger(
    thing: Any,
    label: str | None = None,
    source: str | None = None,
    causal: bool | None = None,
    length: int | None = None,
    width: int | None = None,
    step: str | Callable[..., Any] | None = None,
) -> Stranger:
    """Returns a function, a module, or a class of modules that needs no arguments, ready for the laws."""
    if isinstance(thing, type) and issubclass(thing, nn.Module):
        needed = len(required_names(thing))
        if needed:
            raise PluginError(f"{thing.__name__} needs {needed} arguments to be built; name an instance of it instead")
        thing = thing()
    label = str(label or getattr(thing, "__name__", type(thing).__name__))
    if not callable(thing):
        raise PluginError(
            f"cannot ask {thing!r:.60} of type {type(thing).__name__}; expected a mechanism, f(q, k, v, causal=True) "
            "or an nn.Module"
        )
    made = Stranger(thing, label, source or f"regard.subject({label})", causal, length, width, step)
    if not 1 <= len(made.data) <= 3:
        raise PluginError(
            f"{label} needs {len(made.data)} arguments ({', '.join(made.data)}); expected f(q, k, v, causal=True), a "
            "module over x [B,T,D], over x and its context, or over query, key and value"
        )
    if made.layout.projects and made.width is None and isinstance(thing, nn.Module):
        raise PluginError(
            f"{label}: cannot tell the width of its input; give the module an attribute `width`, or say width=…"
        )
    return made


def _complaint(failure: str) -> str:
    """Returns the exception of a failed call, without the call."""
    return failure.partition(" raised ")[2].replace("float64", "float32")


def _what_to_pass(made: Stranger) -> str:
    if isinstance(made.f, nn.Module):
        return (
            "A module is called with x [B,T,D], or with query, key and value [B,T,D]; say width=… and length=… where "
            "it does not say them itself."
        )
    return "A function is called with q [B,H,T,K], k [B,H,S,K], v [B,H,S,V], or with three tensors [n,T,d]."
