"""What a law is put to: a mechanism, a function f(q, k, v, causal=True), or a module over tokens."""

from __future__ import annotations

import traceback
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.devices import DTYPES
from regard.errors import MaskError, OptionError
from regard.laws.case import Adjust, Case, CouldNotBeAsked, cancellation_scale
from regard.laws.gating import TokenGated
from regard.mechanisms import Mechanism, Recurrence, fitted, lookup
from regard.shapes import Mask, Size

_HERE = Path(__file__).resolve().parents[1]


class Subject:
    """Anything that laws can be asked of. `source` is a Python expression that makes it again.

    `token_axis` is the axis of tokens in inputs and outputs. `causal` says whether it claims not to look ahead.
    `takes_visible` says whether it can be told which keys may be seen, `hides_ends_only` that these must be the first
    ones. `own` says whether it is one of regard's mechanisms or registered beside them: these keep all laws, strangers
    those that everybody agrees on.
    `promises_zeros` says whether a query that sees nothing must give zeros. `projects` says whether it projects tokens
    to queries, keys and values of its own. `state_call` is how somebody else's attention takes a state, where it does.
    `knows_positions` says whether somebody else's attention counts tokens, hidden ones too, so that padding moves them.
    `changed_inputs` and `changed_masks` say whether any call so far has written into these. `device` is where somebody
    else's attention is called to find out how it wants to be called. `queries_meet` says whether queries attend to one
    another beside their keys, as in a decoder's layer. `pools` says whether the number of its outputs is the same for
    any number of tokens. `mask_blame` says why its mask should hide keys that was seen to hide none, and `mask_remarks`
    what is worth knowing of masks that need not hide any. `reads_context` says whether its keys are those of another
    sequence than its queries.
    """

    token_axis = 2
    causal = True
    takes_visible = False
    hides_ends_only = False
    own = False
    promises_zeros = False
    projects = False
    state_call: Any = None
    device = "cpu"
    changed_inputs = False
    changed_masks = False
    knows_positions = False
    queries_meet = False
    pools = False
    reads_context = False
    mask_blame = ""
    mask_remarks: tuple[str, ...] = ()

    def __init__(self, label: str, source: str) -> None:
        self.label = label
        self.source = source

    def on(self, device: str) -> Subject:
        """Returns the subject itself, which is called on this device from now on to find out how it is called."""
        self.device = device
        return self

    def fit(self, case: Case) -> Case:
        """Returns the case with sizes that the subject can take."""
        return case

    def takes_fewer_queries(self, causal: bool) -> bool:
        """Returns whether it can be run with fewer queries than keys, causal or not."""
        return False

    def takes_length(self, T: int) -> bool:
        """Returns whether it can be given T tokens."""
        return True

    def mechanism(self, case: Case) -> Mechanism | None:
        """Returns the mechanism for the sizes of a case, or None for what is no mechanism."""
        return None

    def inputs(self, case: Case, S: int | None = None) -> list[Tensor]:
        """Returns the inputs of a case: q, k and v, over S keys where said, or tokens x."""
        return list(case.qkv(S=S))

    def run(self, case: Case, inputs: list[Tensor], visible: Tensor | None = None) -> Tensor:
        """Returns the output for some inputs; keys where `visible` [B,S] is False are hidden."""
        raise NotImplementedError

    def unambiguous_rows(self, case: Case, inputs: list[Tensor]) -> Tensor | None:
        """Returns the rows [B,H,T] whose result does not hang on rounding, or None for all."""
        return None

    def cancellation_scale(self, case: Case, inputs: list[Tensor]) -> Tensor | None:
        """Returns what rounding is relative to in each row where weights can cancel, or None."""
        return None


class MechanismSubject(Subject):
    """A mechanism: a registered name, a class, or an instance."""

    takes_visible = True
    own = True
    promises_zeros = True

    def __init__(self, thing: str | type[Mechanism] | Mechanism, source: str | None = None, **options: Any) -> None:
        if isinstance(thing, str):
            lookup(thing)
            name = thing
        else:
            name = thing.name or getattr(thing, "__name__", type(thing).__name__)
        given = [f"{n}={x!r}" for n, x in options.items()]
        label = name
        if given:
            label = f"{name}({', '.join(given)})"
        super().__init__(label, source or f"regard.subject({', '.join([repr(name), *given])})")
        self.thing = thing
        self.options = options
        self._built: dict[tuple[object, ...], Mechanism] = {}
        self._honours: dict[Adjust, bool] = {}

    def fit(self, case: Case) -> Case:
        if case.adjust != "none" and not self._takes(case.adjust):
            case = case.but(adjust="none")
        if case.softcap is not None and not self._takes("softcap"):
            case = case.but(softcap=None)
        if self._class.causal_only:
            case = case.but(causal=True, window=None)
        if not isinstance(self.thing, Mechanism):
            return case
        heads = getattr(self.thing, "heads", None)
        width = getattr(self.thing, "width", None)
        length = getattr(self.thing, "length", None)
        directions = getattr(self.thing, "w", None)
        if directions is not None:
            width = directions.shape[1]
        if length:
            case = case.but(T=min(case.T, max(1, length // 2)))
        if heads:
            groups = case.G
            if heads % groups:
                groups = heads
            case = case.but(H=heads, G=groups)
        return case.but(K=width or case.K)

    @property
    def _class(self) -> type[Mechanism]:
        """The class of the mechanism."""
        if isinstance(self.thing, Mechanism):
            return type(self.thing)
        return lookup(self.thing)

    def _takes(self, adjust: Adjust) -> bool:
        """Returns whether the mechanism honours a bias, slopes or a softcap; some refuse them."""
        if adjust not in self._honours:
            case = self.fit(Case(B=1, T=3, S=3)).but(adjust=adjust)
            q, k, _ = case.qkv()
            try:
                self.mechanism(case).weights(q, k, case.adjusted(Mask(causal=True), case.T, case.T))
            except MaskError:
                self._honours[adjust] = False
            else:
                self._honours[adjust] = True
        return self._honours[adjust]

    def takes_fewer_queries(self, causal: bool) -> bool:
        # Without causality fewer queries than keys are cross-attention.
        return causal or self._class.crosses

    def mechanism(self, case: Case) -> Mechanism:
        sizes = (case.T, case.H, case.G, case.K, case.V, case.seed, case.dtype, case.rounded, case.device)
        if sizes not in self._built:
            if len(self._built) >= 4:
                self._built.clear()
            self._built[sizes] = self._build(case).eval()
        mechanism = self._built[sizes]
        mechanism.use = "auto"
        return mechanism

    def _build(self, case: Case) -> Mechanism:
        if isinstance(self.thing, Mechanism):
            mechanism = deepcopy(self.thing)
        else:
            # Mechanisms with parameters or random features: the same ones for the same case.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(case.seed)
                longest = Size(T=2 * case.T + 8, S=2 * case.T + 8, H=case.H, G=case.G, K=case.K, V=case.V)
                mechanism = fitted(self.thing, longest, **self.options)
        if isinstance(mechanism, Recurrence):
            mechanism = TokenGated(mechanism, case.seed)
        if case.rounded is not None:
            mechanism = mechanism.to(DTYPES[case.rounded])
        return mechanism.to(case.device, case.type)

    def run(self, case: Case, inputs: list[Tensor], visible: Tensor | None = None) -> Tensor:
        mask = self._mask(case, inputs).but(visible=visible)
        out: Tensor = self.mechanism(case)(*inputs, mask)
        return out

    def _mask(self, case: Case, inputs: list[Tensor]) -> Mask:
        """Returns the mask of a call: causality, the window, and what is done to scores."""
        return case.adjusted(Mask(case.causal, window=case.window), inputs[0].shape[2], inputs[1].shape[2])

    def unambiguous_rows(self, case: Case, inputs: list[Tensor]) -> Tensor | None:
        q, k, _ = inputs
        return self.mechanism(case).unambiguous_rows(q, k, self._mask(case, inputs))

    def cancellation_scale(self, case: Case, inputs: list[Tensor]) -> Tensor | None:
        mechanism = self.mechanism(case)
        q, k, v = inputs
        return cancellation_scale(mechanism, q, k, self._mask(case, inputs), v)


def subject(
    thing: Any,
    *,
    label: str | None = None,
    source: str | None = None,
    causal: bool | None = None,
    length: int | None = None,
    width: int | None = None,
    step: Any = None,
    **options: Any,
) -> Subject:
    """Returns anything that can be checked, ready for the laws.

    `causal` says whether it claims not to look ahead; None finds out. `length` is the number of tokens of a module
    that takes no other, or the most that it takes, and `width` the width of its tokens, or of a function's heads, where
    it does not say. `step` is the function, or the name of the method, that takes one token more and a state.
    """
    from regard.laws.strangers import stranger  # which needs Subject from here

    if isinstance(thing, Subject):
        return thing
    is_mechanism = isinstance(thing, str | Mechanism) or (isinstance(thing, type) and issubclass(thing, Mechanism))
    if options and (isinstance(thing, Mechanism) or not is_mechanism):
        raise OptionError(
            f"{', '.join(options)}: only a mechanism by its name or class is built here and takes options; "
            f"a {type(thing).__name__} is checked as it is"
        )
    if is_mechanism:
        if width is not None:
            options["width"] = width
        if length is not None:
            options["length"] = length
        return MechanismSubject(thing, source, **options)
    return stranger(thing, label, source, causal, length, width, step)


def explain_exception(error: Exception, call: str) -> CouldNotBeAsked:
    """Returns the error for an exception that a subject raised: the call, the exception, the user's file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not _belongs_to_a_library(f.filename)]
    place = ""
    if theirs:
        place = f" ({Path(theirs[-1].filename).name}, line {theirs[-1].lineno})"
    message = str(error).strip().partition("\n")[0][:200]
    return CouldNotBeAsked(f"{call} raised {type(error).__name__}: {message}{place}")


def _belongs_to_a_library(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(_HERE) or "site-packages" in path.parts or not path.exists()


def is_module(thing: Any) -> bool:
    """Returns whether something is an nn.Module and no mechanism."""
    return isinstance(thing, nn.Module) and not isinstance(thing, Mechanism)
