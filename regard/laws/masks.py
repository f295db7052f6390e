"""What a mask of somebody's attention is held to: what was found by trying, against what is said of it.

A mask that hides keys in one way of giving it may be said to hide them in another, and a mask that hides none in any
way tried may be a fault, or one of a kind that nobody asked about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from regard.laws.calling import Caller
from regard.laws.case import Case, CouldNotBeAsked, difference
from regard.laws.docstrings import says_boolean, says_lengths, says_mask, says_other_mask, says_rank
from regard.laws.layouts import MaskForm, possible_forms
from regard.laws.signatures import CERTAIN_MASKS

UNMOVED = 1e-9  # how much outputs may change, by another order of sums, with what is not read


class MaskReading(NamedTuple):
    """The forms in which a mask is asked to hide keys and pairs, None where it is not asked.

    `blame` says why it should hide keys, though it was seen to hide none; `remark` is worth knowing of a mask that
    nobody can be blamed for.
    """

    keys: MaskForm | None
    pairs: MaskForm | None
    blame: str = ""
    remark: str = ""


def read_mask(call: Caller, case: Case, form: MaskForm, hides: Callable[[MaskForm], bool]) -> MaskReading:
    """Returns how a mask is asked, from the form found by trying; `hides` tells of a form whether it hides a key."""
    if form.shape == "lengths":
        return _read_lengths(call, case, form, hides)
    said = says_mask(call.pristine, form.name)
    if hides(form):
        if form.marks in ("added", "ones"):
            return _read_numbers(call, case, form, hides)
        return _of(form.as_said(said))
    running = list(_forms_that_run(call, case, form))
    if not running:
        return MaskReading(None, None, remark=f"{form.name} was tried in many ways, and no call runs with it")
    if form not in running:
        form = running[0]
    rank = says_rank(call.pristine, form.name)
    fitting = [f for f in running if rank in (None, f.rank)]
    if says_other_mask(call.pristine, form.name):
        remark = f"{form.name} hides no key, and is said to be another kind of mask; it was not asked about"
        return MaskReading(None, None, remark=remark)
    if (said is not None or says_boolean(call.pristine, form.name)) and fitting:
        asked = _of(fitting[0].as_said(said))
        return asked._replace(blame=f"what is said of {form.name} makes it hide keys, and given so it hides none")
    looks = [_look(call, case, f) for f in running]
    if any(is_of_both for _, is_of_both in looks):
        remark = f"{form.name} hides a token's key from all others and not from itself, as numbers of documents do"
        return MaskReading(None, None, remark=f"{remark}; it was not asked about")
    if form.name in CERTAIN_MASKS:
        return _of(form)
    words = "changes nothing"
    if any(reads for reads, _ in looks):
        words = "hides no key in any of the ways tried: True or False, 1 and 0, 0 and −∞, of what may be seen or hidden"
    return MaskReading(None, None, remark=f"{form.name} {words}")


def _of(form: MaskForm) -> MaskReading:
    return MaskReading(form if form.has_batch else None, form if form.has_pairs else None)


def _read_lengths(call: Caller, case: Case, form: MaskForm, hides: Callable[[MaskForm], bool]) -> MaskReading:
    """Returns how lengths are asked, which hide all keys beyond them; lengths of something else hide none."""
    try:
        are_lengths = hides(form)
        reads, is_exact = _look(call, case, form)
    except CouldNotBeAsked:  # one number for all sequences, or of another kind
        return MaskReading(None, None)
    if are_lengths and not is_exact:
        blame = f"the first key beyond {form.name} is seen: is its position compared by ≤ where < belongs?"
        return _of(form)._replace(blame=blame)
    if are_lengths or form.name in call.required:
        return _of(form)
    if says_lengths(call.pristine, form.name):
        return _of(form)._replace(blame=f"what is said of {form.name} makes it hide the keys beyond, and it hides none")
    if reads:
        return MaskReading(
            None, None, remark=f"{form.name} changes outputs and hides no key beyond; it was not asked about"
        )
    return MaskReading(None, None)


def _read_numbers(call: Caller, case: Case, form: MaskForm, hides: Callable[[MaskForm], bool]) -> MaskReading:
    """Returns how a mask of numbers that hides keys is asked: as a boolean if it is said to be one, and hides none."""
    said = says_mask(call.pristine, form.name)
    found = _of(form.as_said(said))
    booleans = [f for f in _forms_that_run(call, case, form) if f.marks in ("visible", "hidden")]
    alike = [f for f in booleans if f.shape == form.shape and _look(call, case, f)[0]]
    if not alike or any(hides(f) for f in booleans):
        return found
    words = "hides no key"
    if form.marks == "added":
        words += ": it is added to the scores as 0 and 1, and hidden keys only lose a factor"
    if says_boolean(call.pristine, form.name) and form.has_batch:
        boolean = alike[0].as_said(said)
        return found._replace(keys=boolean, blame=f"{form.name} is said to be boolean, and then {words}")
    return found._replace(remark=f"a boolean {form.name} {words}")


def _forms_that_run(call: Caller, case: Case, like: MaskForm) -> Iterator[MaskForm]:
    """Yields the forms of a mask under which a call runs, and its outputs keep their shape."""
    inputs = call.draw_inputs(case)
    expected = _run(call, case, None, inputs).shape
    for form in possible_forms(like.name, call.causal_name is not None):
        try:
            keeps_shape = _run(call, case, form, inputs).shape == expected
        except CouldNotBeAsked:
            continue
        if keeps_shape:
            yield form


def _run(call: Caller, case: Case, form: MaskForm | None, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Returns the output with the last token but one hidden by a mask of this form, or without any mask.

    Lengths hide the last one, too.
    """
    visible = torch.ones(case.B, case.T, dtype=torch.bool, device=case.device)
    visible[:, case.T - 2] = False
    visible[:, case.T - 1] = form is None or form.shape != "lengths"
    call.key_mask, call.pair_mask = form, None
    with torch.no_grad():
        return call.call(case, inputs, visible)


def _look(call: Caller, case: Case, form: MaskForm) -> tuple[bool, bool]:
    """Returns whether outputs depend on a mask, and whether it hides a token's key from all tokens but itself."""
    inputs = call.draw_inputs(case)
    axis = call.layout.token_axis
    hidden = case.T - 2
    masked = _run(call, case, form, inputs)
    plain = _run(call, case, None, inputs)
    changed = [x.clone() for x in inputs]
    for n, x in enumerate(changed[1:] or changed):
        row = x.select(axis, hidden)
        row.copy_(case.draw(*row.shape, stream=40 + n))
    after = _run(call, case, form, changed)
    reads = difference(masked, plain) > UNMOVED
    if call.pools or not reads:
        return reads, False
    others = torch.tensor([t for t in range(case.T) if t != hidden], device=case.device)
    left, right = (x.index_select(axis, others) for x in (after, masked))
    return reads, difference(left, right) <= UNMOVED
