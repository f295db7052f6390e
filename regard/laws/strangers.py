"""Attention that somebody else wrote, as a subject of the laws; `probing` finds out by trying how it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from regard.errors import PluginError
from regard.laws.case import Case, CouldNotBeAsked
from regard.laws.embedded import over_embeddings
from regard.laws.habits import claims_causality, knows_positions
from regard.laws.layouts import CROSS, HEADS, Layout, MaskForm
from regard.laws.probing import ProbedCaller
from regard.laws.signatures import attends_twice, find_softcap, required_names
from regard.laws.states import StateCall, find_state_call
from regard.laws.subjects import Subject

__all__ = ["HEADS", "Stranger", "stranger"]


class Stranger(ProbedCaller, Subject):
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
        ProbedCaller.__init__(self, f, label, length, width, step)
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
    def hides_ends_only(self) -> bool:  # type: ignore[override]
        self.find_out()
        return self.key_mask is not None and self.key_mask.shape == "lengths"

    @property
    def state_call(self) -> StateCall | None:
        self.find_out()
        if not self._tried_states:
            self._state_call = find_state_call(self, self.probe(B=2))
            self._tried_states = True  # set afterwards, so that a named step that does not run raises each time
        return self._state_call

    @property
    def causal(self) -> bool:  # type: ignore[override]
        self.find_out()
        return bool(self._claims)

    @property
    def knows_positions(self) -> bool:  # type: ignore[override]
        self.find_out()
        if self._knows_positions is None:
            case = self.probe(B=2, causal=self.causal)
            # Of two tokens there is no other order.
            self._knows_positions = case.T > 2 and knows_positions(self, case)
        return self._knows_positions

    @property
    def queries_meet(self) -> bool:  # type: ignore[override]
        self.find_out()
        return self.layout is CROSS and attends_twice(self.f)

    @property
    def reads_context(self) -> bool:  # type: ignore[override]
        self.find_out()
        return self.layout is CROSS or self.single_query

    @property
    def single_query(self) -> bool:
        """Whether a call takes a single query."""
        self.find_out()
        return self.layout.single is not None

    @property
    def can_be_told(self) -> bool:
        """Whether a parameter says if it is to be causal: a flag, or a mask of pairs."""
        self.find_out()
        if len(self.causal_values) < 2:
            return False
        return self.causal_name is not None or self.pair_mask is not None

    def fit(self, case: Case) -> Case:
        self.find_out()
        case = self.fit_layout(case)
        if not self.takes_groups and not self.layout.shares_keys:
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
        if self.hides_ends_only and case.padding != "none":
            case = case.but(padding="right")
        if case.adjust != "none" and self.adjustment_name(case.adjust) is None:
            case = case.but(adjust="none")
        return case.but(window=None, documents=False, softcap=find_softcap(self.pristine))

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
        """Returns the subject itself, which is then called in this way without any trial calls.

        This is for calls that take long, and for those that end the process if they are wrong, as on a GPU.
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
            self.find_call()
            self._find_claim()
        except CouldNotBeAsked as refusal:
            self._found_out = False
            self._refusal = (self.device, refusal)
            raise

    def _find_claim(self) -> None:
        """Finds out whether it claims to be causal, unless the user said; one with a causal flag or mask claims it."""
        if self._claims is None and len(self.causal_values) == 1:
            self._claims = self.causal_values[0]
        elif self._claims is None:
            self._claims = self.can_be_told or claims_causality(self, self.probe(B=2))


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
    if isinstance(thing, nn.Module):
        thing = over_embeddings(thing)
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
