"""How attention that somebody else wrote wants to be called, and what its masks mean, is found out by trying.

People write attention in a few ways (see `layouts`), and nothing in a signature says which. So the layout of the inputs
is the first that gives outputs of the right shape, the axis of heads is found by which values mix, and the meaning of a
mask by hiding one key and seeing whether it still matters.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import nn

from regard.laws.calling import MOST_HEADS, Caller
from regard.laws.case import Case, CouldNotBeAsked
from regard.laws.habits import find_own_autocast, measure_roughness, mixes_along
from regard.laws.hiding import find_masks
from regard.laws.layouts import (
    CROSS,
    HEADS,
    HEADS_LAST,
    MERGED,
    MULTI_QUERY,
    MULTI_QUERY_LAST,
    PACKED,
    SEQUENCES,
    SEQUENCES_OF_QKV,
    TOKENS,
    TOKENS_FIRST,
    Layout,
    MaskForm,
    X,
    find_output_form,
    guess_layouts,
)
from regard.laws.signatures import (
    ANY_MASKS,
    CAUSAL_NAMES,
    KEY_MASKS,
    LENGTHS,
    says_heads_first,
    says_heads_last,
    says_tokens_first,
)

ALL_DTYPES = ("float64", "float32", "bfloat16", "float16")
HEAD_WIDTHS = (16, 64)  # tried for kernels that take heads of a few widths only
MOST_SINGLE_QUERIES = 32  # that are asked one call each


class ProbedCaller(Caller):
    """A caller that tries calls and keeps what runs: layout, masks, dtypes, lengths, groups and precision."""

    device = "cpu"

    def __init__(
        self,
        f: Callable[..., Any],
        label: str,
        length: int | None = None,
        width: int | None = None,
        step: str | Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(f, label, length, width, step)
        self.layout = guess_layouts(self.f, self.data, self.required, self.packing, self.width)[0]
        self.takes_groups = False
        self.with_fewer_queries: set[bool] = set()  # whether it takes them not causal, and causal
        self.same_widths = False
        self.even_widths = False  # as rotary positions want them
        self.exact_length: int | None = None
        self.dtypes: tuple[str, ...] = ALL_DTYPES
        self.precision: str | None = None
        self.own_autocast: str | None = None

    def find_call(self) -> None:
        """Finds a way to call the attention by trying; raises `CouldNotBeAsked` if none works."""
        self._find_layout_and_flag()
        self._find_token_axis()
        self._find_causal_flag()
        find_masks(self)
        self._find_sizes()
        self._find_own_autocast()
        self._find_precision()

    def fit_layout(self, case: Case) -> Case:
        if self.layout.projects:
            case = case.but(H=1, G=1, K=self.width or case.K, V=self.width or case.K)
            return case
        if self.width is not None:  # kernels take heads of a few widths
            case = case.but(K=self.width, V=self.width)
        if not self.layout.has_heads:
            case = case.but(H=1, G=1)
        elif self.layout.shares_keys:
            case = case.but(G=1)
        elif self.layout is MERGED:
            case = case.but(H=MOST_HEADS, G=MOST_HEADS)
        if self.even_widths and self.width is None:
            case = case.but(K=case.K + case.K % 2, V=case.V + case.V % 2)
        if self.same_widths or self.layout.same_widths:
            case = case.but(V=case.K)
        if self.layout in (PACKED, SEQUENCES_OF_QKV):
            case = case.but(G=case.H)
        return case

    def probe(self, **changes: Any) -> Case:
        """Returns a small case, no two of whose sizes are alike, that fits what is known so far."""
        case = Case(B=7, T=5, H=3, G=3, K=6, V=4, causal=False, device=self.device)
        case = self.fit_layout(case.but(**changes))
        if self.exact_length is not None:
            case = case.but(T=self.exact_length)
        elif self.length is not None:
            case = case.but(T=min(case.T, self.length))
        if case.dtype not in self.dtypes:
            case = case.but(dtype=self.dtypes[0])
        return case

    def _find_layout_and_flag(self) -> None:
        """Finds the layout; where no call runs, with a flag that says causal or not, as some take one value only."""
        name = next((name for name in CAUSAL_NAMES if name in self.parameters), None)
        told: list[tuple[bool, ...]] = [(False, True), (False,), (True,)]
        if name is None:
            told = told[:1]
        elif name in self.required:
            told = told[1:]
        refusals = []
        for values in told:
            if len(values) == 1:
                self.causal_name = name
                self.causal_values = values
            try:
                return self._find_layout_and_width()
            except CouldNotBeAsked as refusal:
                refusals.append(refusal)
        raise refusals[0]

    def _find_layout_and_width(self) -> None:
        """Finds the layout; if none runs, as with kernels of a few head widths only, tries again with HEAD_WIDTHS."""
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
        """Takes the first layout that gives an output of the right shape, else the first that gives any.

        A layout under which sequences of a batch mix is taken last: an output may have the right shape because a
        query [B,1,D] was broadcast.
        """
        fillers: list[MaskForm | None] = [None]
        for name in self.required:
            if name in ANY_MASKS or name in KEY_MASKS:
                fillers += [MaskForm(name, shape, "visible") for shape in ("head pairs", "pairs", "keys")]
            elif name in LENGTHS:
                fillers.append(MaskForm(name, "lengths", "visible"))
        ways = product(
            (ALL_DTYPES, ("float32",), ("bfloat16",)),
            fillers,
            guess_layouts(self.f, self.data, self.required, self.packing, self.width),
            (False, True),
        )
        fallback = suspect = None
        failures: dict[str, str] = {}  # the first of each dtype
        for way in ways:
            self.dtypes, self.filler, self.layout, self.same_widths = way
            try:
                fits = self._try_lengths()
            except CouldNotBeAsked as failure:
                failures.setdefault(self.dtypes[0], str(failure))
                continue
            single = self.layout.single
            # A row [1,B,D] of queries may be one token of attention that wants tokens first, so that it running proves
            # nothing against `suspect`. Packed sequences that mix are a fault, and no sign of another layout.
            is_packed = self.layout.is_packed
            if fits and (
                is_packed or not ((suspect and single and single.is_row) or self._mixes_along(0, self.probe()))
            ):
                return self._settle(way)
            if fits and single is None:
                suspect = suspect or way
            fallback = fallback or way
        if suspect is not None:
            return self._settle(suspect)
        if fallback is None:
            told = failures["float64"]
            if _complaint(failures["float32"]) != _complaint(told):
                told += f"; in float32 {failures['float32']}"
            raise CouldNotBeAsked(f"{told}. {_what_to_pass(self)}")
        self.dtypes, self.filler, self.layout, self.same_widths = fallback
        self.pools = self._gives_as_many_of_any()

    def _settle(self, way: tuple[tuple[str, ...], MaskForm | None, Layout, bool]) -> None:
        """Sets a way of calling that gives outputs of the right shape; finds its lengths, dtypes and axis of heads."""
        self.dtypes, self.filler, self.layout, self.same_widths = way
        self._try_lengths()  # sets what goes with the way, which later ones may have changed
        self._find_dtypes()
        self._find_head_axis()

    def _try_lengths(self) -> bool:
        """Returns whether outputs have the right shape at 5 tokens or, where it takes no other, at `length`."""
        self.exact_length = None
        self.output_form = "same"
        try:
            case = self.probe()
            out = self.call(case, self.draw_inputs(case))
        except CouldNotBeAsked:
            if self.length is None:
                raise
            self.exact_length = self.length
            case = self.probe()
            out = self.call(case, self.draw_inputs(case))
        if self.layout.projects:
            return out.shape[:2] == (case.B, case.T)
        form = find_output_form(out, self.layout, (case.B, case.H, case.T, case.V))
        self.output_form = form or "same"
        return form is not None

    def _gives_as_many_of_any(self) -> bool:
        """Returns whether tokens become a vector a sequence, or a fixed number of them, as pooling does."""
        if not self.layout.projects or self.length is not None or self.exact_length is not None:
            return False
        shapes = set()
        for T in (3, 5, 8):
            case = self.probe(T=T)
            shapes.add(self.call(case, self.draw_inputs(case)).shape)
        (shape, *others) = shapes
        return not others and len(shape) in (2, 3) and shape[0] == case.B

    def _find_dtypes(self) -> None:
        """Adds the other dtypes in which the attention runs, if it does not run in float64."""
        if self.dtypes == ALL_DTYPES:
            return
        known = self.dtypes
        for dtype in ALL_DTYPES[1:]:
            self.dtypes = (dtype,)
            if dtype not in known and self._runs(self.probe(B=1)):
                known = (*known, dtype)
        self.dtypes = known

    def _find_head_axis(self) -> None:
        """Takes heads to come after tokens where values mix along the second axis and not along the third.

        Where they mix along the first, tokens come before the batch if the code says so.
        """
        if self.layout is MULTI_QUERY:
            if self._queries_differ_by_head():
                self.layout = MULTI_QUERY_LAST
            return
        if self.layout not in (HEADS, HEADS_LAST):
            return
        case = self.probe()
        along_batch, along_heads, along_tokens = (self._mixes_along(axis, case) for axis in range(3))
        if self.layout is HEADS and along_heads and not along_tokens:
            if not says_heads_first(self.pristine):  # else it mixes heads, and a law says so
                self.layout = HEADS_LAST
        elif self.layout is HEADS and self.output_form == "same" and says_heads_last(self.pristine):
            if along_tokens and not along_batch:
                self.layout = HEADS_LAST  # it mixes heads where it was to mix tokens, and a law says so
        elif says_tokens_first(self.pristine) and along_batch and not along_tokens:
            self.layout = TOKENS_FIRST

    def _queries_differ_by_head(self) -> bool:
        """Returns whether some heads see the last key and others not, and no token differs: it counts by heads.

        Of queries that share their keys heads and tokens are alike, but for which keys a token may see.
        """
        if says_heads_first(self.pristine):
            return False
        case = self.probe()
        inputs = self.draw_inputs(case)
        changed = [x.clone() for x in inputs]
        changed[-1][:, :, -1] += 1
        with torch.no_grad():
            moved = (self.call(case, changed) - self.call(case, inputs)).abs().amax((0, 3)) > 0
        return bool((moved == moved[:, :1]).all()) and not bool((moved == moved[:1]).all())

    def _find_token_axis(self) -> None:
        """Takes tokens to come before the batch where a module says so, and mixes along the first axis only."""
        layout = self.layout
        if layout not in (X, TOKENS, CROSS) or hasattr(self.f, "batch_first"):
            return
        if not says_tokens_first(self.pristine):
            return
        case = self.probe(B=3)
        if case.T > 1:
            self.tokens_first = self._mixes_along(0, case) and not self._mixes_along(1, case)

    def _mixes_along(self, axis: int, case: Case) -> bool:
        return mixes_along(axis, lambda inputs: self.call(case, inputs), case, self.draw_inputs(case))

    def _find_causal_flag(self) -> None:
        for name in CAUSAL_NAMES:
            if name not in self.parameters:
                continue
            self.causal_name = name
            values = []
            for value in (False, True):
                self.causal_values = (value,)
                if self._runs(self.probe(causal=value)):
                    values.append(value)
            # What takes False only, and need not be given, is a hint beside a mask, as in nn.MultiheadAttention.
            if True in values or (values and name in self.required):
                self.causal_values = tuple(values)
                return
            self.causal_name = None
        self.causal_values = (False, True)

    def _find_sizes(self) -> None:
        """Finds out whether it takes groups of heads, more keys than queries, and long sequences."""
        if not self.layout.projects:
            self.even_widths = not self._runs(self.probe(B=1, K=7, V=7))
        with_groups = self.layout in (HEADS, HEADS_LAST, TOKENS_FIRST, SEQUENCES)
        self.takes_groups = with_groups and self._runs(self.probe(B=1, T=3, H=4, G=2))
        has_keys = self.layout.inputs > 1 and self.layout not in (PACKED, SEQUENCES_OF_QKV)
        if self.layout.is_packed:  # one list of lengths is of queries and keys alike
            has_keys = has_keys and any(side == "k" for _, side in self.packing.values())
        if has_keys and self.exact_length is None:
            for causal in (False, True):
                case = self.probe(causal=causal)
                if self._runs(case, S=case.T + 2) and not self._reads_lengths_of_both(case):
                    self.with_fewer_queries.add(causal)
        if self.layout.single is not None and self.length is None:
            self.length = MOST_SINGLE_QUERIES
        if self.exact_length is None and self.length is None and not self._runs(self.probe(B=1, T=131)):
            self.length = max((n for n in (2, 5, 8, 16, 32, 64, 128) if self._runs(self.probe(B=1, T=n))), default=5)

    def _reads_lengths_of_both(self, case: Case) -> bool:
        """Returns whether lengths are taken for those of queries, too: of fewer queries than keys it gives others."""
        if self.key_mask is None or self.key_mask.shape != "lengths":
            return False
        out = self.call(case, self.draw_inputs(case, case.T + 2))
        return out.dim() <= self.layout.token_axis or out.shape[self.layout.token_axis] != case.T

    def _runs(self, case: Case, S: int | None = None) -> bool:
        try:
            self.call(case, self.draw_inputs(case, S))
        except CouldNotBeAsked:
            return False
        return True

    def _find_own_autocast(self) -> None:
        """If the attention turns on an autocast by itself, sets its dtype as the only one that it computes in."""
        case = self.probe(B=1)
        found = find_own_autocast(lambda: self.call(case, self.draw_inputs(case)))
        if found is not None and self._runs(case.but(dtype=found)):
            self.own_autocast = found
            self.dtypes = (found,)

    def _find_precision(self) -> None:
        """Finds out whether it computes in float32 or less even for float64 inputs, as many a softmax does."""
        if self.probe().dtype != "float64":
            return
        if self.roughness() > 1e-11 or self.roughness(2e-5) > 1e-5:
            self.precision = "float32"

    def roughness(self, step: float = 3e-8) -> float:
        """Returns how large the steps are that rounding leaves along a line of inputs, relative to outputs."""
        return measure_roughness(self, self.probe(B=1), step)


def _complaint(failure: str) -> str:
    """Returns the exception of a failed call, without the call."""
    return failure.partition(" raised ")[2].replace("float64", "float32")


def _what_to_pass(made: Caller) -> str:
    if isinstance(made.f, nn.Module):
        return (
            "A module is called with x [B,T,D], or with query, key and value [B,T,D]; say width=… and length=… where "
            "it does not say them itself."
        )
    return "A function is called with q [B,H,T,K], k [B,H,S,K], v [B,H,S,V], or with three tensors [n,T,d]."
