"""What the masks of somebody's attention mean is found out by hiding one key and seeing whether it still matters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from regard.laws.case import CouldNotBeAsked, difference
from regard.laws.layouts import MaskForm, possible_forms
from regard.laws.masks import MaskReading, read_mask
from regard.laws.signatures import ANY_MASKS, KEY_MASKS, LENGTHS

if TYPE_CHECKING:
    from regard.laws.probing import ProbedCaller

HIDDEN = 1e-3  # largest change of outputs by a key that counts as hidden
WEAKENED = 0.05  # and by one that counts as nearly hidden, as by a mask that adds −10


def find_masks(call: ProbedCaller) -> None:
    """Finds out what the masks of a call mean: one of keys, and one of pairs of query and key."""
    if call.layout.name == "matrices":
        return
    names = [name for name in call.parameters if name in KEY_MASKS or name in ANY_MASKS]
    # Lengths say less than a mask, and come after it.
    named = [_find_form(call, name) for name in [*names, *(name for name in call.parameters if name in LENGTHS)]]

    def hides(form: MaskForm) -> bool:
        call.key_mask, call.pair_mask = form, None
        return _measure_hidden_key(call) < WEAKENED

    read = [read_mask(call, call.probe(), form, hides) for form in named if form is not None]
    asked = next((reading for reading in read if reading.keys is not None), MaskReading(None, None))
    call.key_mask = asked.keys
    call.mask_blame = asked.blame
    call.pair_mask = next((reading.pairs for reading in read if reading.pairs is not None), None)
    call.mask_remarks = tuple(reading.remark for reading in read if reading.remark)


def _find_form(call: ProbedCaller, name: str) -> MaskForm | None:
    """Returns the first form of a mask under which a hidden key does not matter, else the first that runs.

    Numbers added to scores hide where nothing else does, too: they do not count where a mask has hidden the key
    but for a remainder, as one of −10 does.
    """
    fallback = weak = None
    for form in possible_forms(name, call.causal_name is not None):
        call.key_mask = form
        call.pair_mask = None
        try:
            remains = _measure_hidden_key(call)
        except CouldNotBeAsked:
            continue
        if remains < HIDDEN and (weak is None or form.marks != "added"):
            return form
        if remains < WEAKENED:
            weak = weak or form
        fallback = fallback or form
    return weak or fallback


def _measure_hidden_key(call: ProbedCaller) -> float:
    """Returns how much outputs move with a hidden key, infinity where a mask does not do what masks do."""
    case = call.probe()
    inputs = call.draw_inputs(case)
    T = case.T
    hidden = T - 2
    visible = torch.ones(case.B, T, dtype=torch.bool, device=case.device)
    visible[:, hidden] = False
    if call.key_mask is not None and call.key_mask.shape == "lengths":
        visible[:, hidden:] = False
        hidden = T - 1
    before = call.call(case, inputs, visible)
    if before.dim() != inputs[0].dim() and not call.pools:  # a mask of the wrong shape was broadcast
        return math.inf
    if before.shape != call.call(case.but(causal=False), inputs).shape:
        return math.inf
    changed = [x.clone() for x in inputs]
    keys = changed
    if len(changed) > 1:
        keys = changed[1:]
    for n, x in enumerate(keys):
        row = x.select(call.layout.token_axis, hidden)
        row.copy_(case.draw(*row.shape, stream=40 + n))
    after = call.call(case, changed, visible)
    if len(changed) == 1 and not call.pools:  # the hidden token asks, too
        others = torch.tensor([i for i in range(T) if i != hidden], device=case.device)
        before = before.index_select(call.layout.token_axis, others)
        after = after.index_select(call.layout.token_axis, others)
    # A mask [T,T] that is read as one of [B,S] leaves the rows beyond the T-th empty.
    filled = before.detach().flatten(1).abs().amax(1) > 0
    if not bool(filled.all()):
        return math.inf
    return difference(after, before)
