"""How somebody's attention is called, once its layout and its masks are known."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from regard.laws.case import Case, CouldNotBeAsked
from regard.laws.layouts import MATRICES, Layout, MaskForm, X, split_heads
from regard.laws.signatures import (
    ADJUSTMENTS,
    ANY_MASKS,
    DROPOUTS,
    HEAD_COUNTS,
    KEY_MASKS,
    KEY_WIDTHS,
    LENGTHS,
    MODULES,
    SCALES,
    STATE_FLAGS,
    STATES,
    data_names,
    find_length,
    find_width,
    packing_names,
    parameter_names,
    required_names,
    state_pair,
    takes_none,
    wants_names,
)
from regard.laws.subjects import explain_exception

MOST_HEADS = 2  # heads with which a function is called that takes their number as an argument


class Caller:
    """A function or module that somebody else wrote, and the way in which it takes its inputs and masks."""

    def __init__(
        self,
        f: Callable[..., Any],
        label: str,
        length: int | None,
        width: int | None,
        step: str | Callable[..., Any] | None = None,
    ) -> None:
        if isinstance(f, nn.Module):
            f = deepcopy(f).eval()  # it is cast to other dtypes
        self.f = f
        self.pristine = deepcopy(f)
        self.label = label
        self.step = step
        self.parameters = parameter_names(f)
        self.required = required_names(f)
        self.data = data_names(f)
        self.packing = packing_names(f)
        self.by_name = wants_names(f) or self.required[: len(self.data)] != self.data
        self.tokens_first = False  # whether tokens come before the batch in a module that does not say batch_first
        self.width = width or find_width(f)
        self.length = length or find_length(f)
        self.layout: Layout = X
        # "same" as the layout's; "transposed" [B,T,H,V] from inputs [B,H,T,K], as in transformers, or the other way
        # round; "merged" [B,T,H·V]
        self.output_form = "same"
        self.causal_name: str | None = None
        self.causal_values: tuple[bool, ...] = (False, True)  # that the flag of this name may have
        self.key_mask: MaskForm | None = None
        self.pair_mask: MaskForm | None = None
        self.mask_blame = ""  # why a mask should hide keys that was seen to hide none
        self.mask_remarks: tuple[str, ...] = ()  # on masks that hide no keys, and need not
        # What a mask that must be given is filled with until its meaning is known; None where None will do.
        self.filler: MaskForm | None = None
        self.pools = False  # whether the number of its outputs is the same for any number of tokens
        self.changed_inputs = False  # whether any call has written into its inputs
        self.changed_masks = False  # and into its masks

    def call_fresh(self, case: Case, *calls: list[Tensor], visible: Tensor | None = None) -> Tensor:
        """Makes some calls in a row of a copy that has never been called, and returns the output of the last one.

        All calls but the last are given the mask `visible`.
        """
        used = self.f
        self.f = deepcopy(self.pristine)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(case.seed)  # what is drawn in the first call of all is the same then
                for inputs in calls[:-1]:
                    self.call(case, inputs, visible)
                out = self.call(case, calls[-1])
        finally:
            self.f = used
        return out

    def draw_inputs(self, case: Case, S: int | None = None) -> list[Tensor]:
        """Returns the tensors that laws draw: q, k, v with heads, tokens, or tokens and their context."""
        S = S or case.T
        if not self.layout.projects:
            return list(case.qkv(S=S))
        tokens = [case.draw(case.B, n, case.K, stream=1 + i) for i, n in enumerate((case.T, S, S))]
        return tokens[: self.layout.inputs]

    def call(self, case: Case, inputs: list[Tensor], visible: Tensor | None = None) -> Tensor:
        """Calls it, and returns its output; an exception of its own becomes `CouldNotBeAsked` with the call."""
        if self.layout is MATRICES:
            rows = [self._call_whole(case, [x[b, 0] for x in inputs], inputs, {}) for b in range(len(inputs[0]))]
            return torch.stack(rows).unsqueeze(1)
        if self.layout.single is not None:
            return self._call_by_query(case, inputs, visible)
        options = self._filled_masks(case, inputs) | self._mask_options(case, inputs, visible)
        if self.layout.is_packed:
            B = inputs[0].shape[0]
            q, k = ([x.shape[self.layout.token_axis]] * B for x in (inputs[0], inputs[-1]))
            options |= self._packing(case, {"q": q, "k": k})
        out = self._call_whole(case, self.layout.pack(inputs), inputs, options)
        return self.unpack(out, inputs)

    def unpack(self, out: Tensor, inputs: list[Tensor]) -> Tensor:
        """Returns an output in the laws' own form, [B,H,T,V] or [B,T,D]."""
        out = self.layout.unpack(out, inputs)
        if self.output_form == "transposed" and out.dim() == 4:
            return out.transpose(1, 2)
        if self.output_form == "merged" and out.dim() == 3:
            if self.layout.name == "tokens first":
                out = out.transpose(0, 1)
            return split_heads(out, inputs[0].shape[1])
        return out

    @property
    def takes_packed(self) -> bool:
        """Whether it can be told where sequences begin that are packed one after another."""
        return bool(self.packing) and (self.layout.is_packed or self.layout.name in ("heads", "heads last"))

    def call_packed(self, case: Case, sequences: list[list[Tensor]]) -> list[Tensor]:
        """Returns the outputs [1,…] of sequences of any lengths, given as inputs [1,…] each, from one call."""
        axis = self.layout.token_axis
        inputs = [torch.cat(parts, axis) for parts in zip(*sequences, strict=True)]
        lengths = [parts[0].shape[axis] for parts in sequences]
        options = self._filled_masks(case, inputs) | self._packing(case, {"q": lengths, "k": lengths})
        out = self._call_whole(case, self.layout.pack(inputs), inputs, options)
        return list(self.unpack(out, inputs).split(lengths, axis))

    def _packing(self, case: Case, lengths: dict[str, list[int]]) -> dict[str, Any]:
        """Returns what says where sequences of some lengths begin, and how long the longest is."""
        options: dict[str, Any] = {}
        for name, (says, side) in self.packing.items():
            options[name] = max(lengths[side])
            if says == "starts":
                starts = torch.tensor([0, *lengths[side]], dtype=torch.int32, device=case.device).cumsum(0)
                options[name] = starts.to(torch.int32)
        return options

    def _call_by_query(self, case: Case, inputs: list[Tensor], visible: Tensor | None) -> Tensor:
        """Calls the attention once for each query, as it takes a single one, and returns all outputs as one tensor."""
        outs = []
        for t in range(inputs[0].shape[self.layout.token_axis]):
            alone = [inputs[0].narrow(self.layout.token_axis, t, 1), *inputs[1:]]
            options = self._filled_masks(case, alone) | self._mask_options(case, alone, visible)
            outs.append(self._call_whole(case, self.layout.pack_query(inputs, t), alone, options))
        joined = self.layout.join_queries(outs)
        if joined is None:
            given = self._describe_call(self.layout.pack_query(inputs, 0), {})
            raise CouldNotBeAsked(f"{given} returned {list(outs[0].shape)}, expected [B,V] for a single query")
        return joined

    def _call_whole(self, case: Case, given: list[Tensor], inputs: list[Tensor], options: dict[str, Any]) -> Tensor:
        """Returns the output of one call, batch first; if the call returns a tuple, that is its first element."""
        masks = {name: (x, x.clone()) for name, x in options.items() if isinstance(x, Tensor)}
        if self.causal_name is not None:
            options[self.causal_name] = case.causal if len(self.causal_values) == 2 else self.causal_values[0]
        if not self.layout.projects:
            options |= self._adjustments(case, inputs)
        out = self.call_with(case, given, options)
        self.changed_masks = self.changed_masks or any(not torch.equal(x, was) for x, was in masks.values())
        if isinstance(out, tuple | list):
            out = out[0]
        if not isinstance(out, Tensor):
            call = self._describe_call(given, options)
            raise CouldNotBeAsked(
                f"{call} returned a {type(out).__name__}; expected a tensor, or a tuple with it first"
            )
        if self.sequence_first:
            out = out.transpose(0, 1)
        return out

    def call_with(
        self, case: Case, given: list[Tensor], options: dict[str, Any], function: Callable[..., Any] | None = None
    ) -> Any:
        """Returns whatever a call gives; inputs are handed over as copies, so that a call cannot spoil them.

        `function` is what is called, where that is not the attention itself but its step.
        """
        own = function is None or isinstance(function, nn.Module) or function is self.f
        function = function or self.f
        required = self.required
        if not own:
            required = required_names(function)
        options = self._filled_arguments(case, required) | options
        if isinstance(self.f, nn.Module):
            self.f.to(case.device, case.type)
        copies = [x.clone() for x in given]
        if self.sequence_first:
            copies = [x.transpose(0, 1) for x in copies]
        before = [x.detach().clone() for x in copies]
        try:
            if own and self.data and self.by_name:
                out = function(**dict(zip(self.data, copies, strict=True)), **options)
            else:
                out = function(*copies, **options)
        except Exception as error:  # whatever a stranger raises is to be told, not to be judged
            raise explain_exception(error, self._describe_call(copies, options)) from error
        if any(not torch.equal(x.detach(), was) for x, was in zip(copies, before, strict=True)):
            self.changed_inputs = self.changed_inputs or all(bool(x.isfinite().all()) for x in before)
        return out

    @property
    def sequence_first(self) -> bool:
        """Whether tokens come before the batch, as in nn.MultiheadAttention unless told otherwise."""
        if self.layout.single is not None:
            return False  # the layout says it itself
        return self.layout.projects and (self.tokens_first or getattr(self.f, "batch_first", None) is False)

    def adjustment_name(self, kind: str) -> str | None:
        """Returns the name of the parameter that takes a bias, slopes or a softcap, or None."""
        return next((name for name in ADJUSTMENTS[kind] if takes_none(self.f, name)), None)

    def _adjustments(self, case: Case, inputs: list[Tensor]) -> dict[str, Any]:
        """Returns the bias, slopes or softcap of a case, under the name that the stranger has for it."""
        name = None
        if case.adjust != "none":
            name = self.adjustment_name(case.adjust)
        if name is None:
            return {}
        T = inputs[0].shape[self.layout.token_axis]
        S = inputs[-1].shape[self.layout.token_axis]
        return {name: case.adjustment(T, S)}

    def _filled_arguments(self, case: Case, required: list[str]) -> dict[str, Any]:
        """Returns values for the `required` arguments that follow from the case: head counts, scales, widths."""
        filled: dict[str, Any] = {}
        for name in required:
            if name in self.data:
                continue
            if name in HEAD_COUNTS:
                filled[name] = case.H
            elif name in SCALES:
                filled[name] = case.K**-0.5
            elif name in KEY_WIDTHS:
                filled[name] = case.K
            elif name in DROPOUTS:
                filled[name] = 0.0
            elif name in MODULES:
                filled[name] = _stand_in(case)
            elif name == "training" or name in STATE_FLAGS:
                filled[name] = False
            elif name in STATES or name in LENGTHS or name in state_pair(self.f):
                filled[name] = None
        return filled

    def _filled_masks(self, case: Case, inputs: list[Tensor]) -> dict[str, Any]:
        """Returns the masks that must be given, with nothing hidden."""
        names = [name for name in self.required if name in ANY_MASKS or name in KEY_MASKS]
        if self.filler is None:
            return dict.fromkeys(names)
        if self.filler.shape == "lengths":
            lengths = self.filler.build(self._everything(case, inputs), case.type)
            return {**dict.fromkeys(names), self.filler.name: lengths}
        return {name: self.filler.build(self._everything(case, inputs), case.type) for name in names}

    def _everything(self, case: Case, inputs: list[Tensor]) -> Tensor:
        """Returns a mask under which every query sees every key, [B,T,S]."""
        B = inputs[0].shape[0]
        T = inputs[0].shape[self.layout.token_axis]
        S = inputs[-1].shape[self.layout.token_axis]
        return torch.ones(B, T, S, dtype=torch.bool, device=case.device)

    def _mask_options(self, case: Case, inputs: list[Tensor], visible: Tensor | None) -> dict[str, Any]:
        """Returns masks by parameter name: a causal one unless a flag says it, and one that hides keys by `visible`."""
        everything = self._everything(case, inputs)
        T, S = everything.shape[1:]
        allowed: dict[MaskForm, Tensor] = {}
        if self.pair_mask is not None and self.causal_name is None and case.causal:
            allowed[self.pair_mask] = everything & (case.range(S) <= case.range(T)[:, None] + (S - T))
        if self.key_mask is not None and visible is not None:
            seen = everything
            if self.pair_mask is not None and self.pair_mask.name == self.key_mask.name:
                seen = allowed.pop(self.pair_mask, everything)
            allowed[self.key_mask] = seen & visible[:, None, :]
        for form in (self.pair_mask, self.key_mask):
            if form is not None and form.name in self.required and not allowed:
                allowed[form] = everything
        return {form.name: form.build(see, case.type) for form, see in allowed.items()}

    def _describe_call(self, given: list[Tensor], options: dict[str, Any]) -> str:
        names: tuple[str, ...] = ("x",)
        if len(given) == 2:
            names = ("x", "context")
        elif len(given) == 3:
            names = ("q", "k", "v")
        parts = [f"{n} {list(x.shape)}" for n, x in zip(names, given, strict=True)]
        for name, value in options.items():
            shown = value
            if isinstance(value, Tensor):
                shown = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            elif isinstance(value, nn.Module):
                shown = type(value).__name__
            parts.append(f"{name}={shown}")
        return f"{self.label}({', '.join(parts)})"


def _stand_in(case: Case) -> nn.Module:
    """Returns a module with what attention functions of transformers read from the layer that calls them."""
    module = nn.Module().eval()
    read = {"num_key_value_groups": case.H // case.G, "is_causal": case.causal, "scaling": case.K**-0.5}
    for name, value in {**read, "head_dim": case.K, "layer_idx": 0}.items():
        setattr(module, name, value)
    return module
