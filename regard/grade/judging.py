"""Judging a function or class by each kind of item, in this process and without limits."""

from __future__ import annotations

import inspect
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.checking import check
from regard.errors import quote
from regard.grade.advice import SubmissionError, end_sentence, explain_error
from regard.grade.cases import GradeCase, copy_arguments, describe_case, make_cases
from regard.grade.comparing import Mismatch, compare, compare_form, plain_output
from regard.grade.outcomes import ItemOutcome, outcome_of
from regard.grade.patterns import WrongCall, describe_pattern
from regard.grade.spec import Export, GradeItem, Spec

LAW_DRAWS = 8  # cases for each law
MOST_REPEATED = 4  # calls that are repeated, to find out whether outputs are random
CHANGES = (
    "Two calls with the same arguments give different outputs: something is random in each, such as dropout or "
    "new weights, or is kept from the last call"
)
ROUNDING = 100.0  # times the tolerance: how far outputs may differ from a slip's by rounding, as for large angles


def judge_item(spec: Spec, number: int, names: Mapping[str, Any], seed: int = 0) -> ItemOutcome:
    """Returns the outcome of one item, by its number; `names` has what the submission defines, by name."""
    started = time.monotonic()
    item = spec.items[number]
    seed += number
    export = spec.export_of(item)
    outcome = outcome_of(item, "passed")
    with _clean_state(seed):
        try:
            _require(export, names)
            _JUDGES[item.kind](spec, item, _caller(export, names[export.name]), seed)
        except SubmissionError as error:
            outcome = outcome_of(item, error.status, str(error), error.advice, error.slip)
    return replace(outcome, seconds=time.monotonic() - started)


@contextmanager
def _clean_state(seed: int) -> Iterator[None]:
    """Seeds random numbers and sets float32 for the block, whatever a submission has set, and hides its warnings."""
    torch.manual_seed(seed)
    random.seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(default)


def _require(export: Export, names: Mapping[str, Any]) -> None:
    """Raises a SubmissionError if a submission does not define the function or class of an export."""
    if export.name not in names:
        close = [name for name in names if name.lower() == export.name.lower()]
        hint = ""
        if close:
            hint = f" There is '{close[0]}': the name must be spelt exactly so."
        raise SubmissionError(f"The file defines no {export.kind} '{export.name}'.{hint}", "missing")
    thing = names[export.name]
    if export.kind == "class" and not inspect.isclass(thing):
        raise SubmissionError(f"'{export.name}' is not a class.", "missing")
    if not callable(thing):
        raise SubmissionError(f"'{export.name}' cannot be called; expected a {export.kind}.", "missing")


# Calling

Caller = Callable[[GradeCase], Any]  # from a case to the function or instance that is called with it


def _caller(export: Export, thing: Any) -> Caller:
    """Returns a function that returns what to call for a case: the function itself, or an instance of the class."""

    def make(case: GradeCase) -> Any:
        if export.kind == "function":
            if isinstance(thing, nn.Module):  # an instance may stand for a function
                thing.eval()
            return _TakesFirst(thing, export.takes_first)
        torch.manual_seed(0)
        made = attempt(thing, case.constructor, f"{export.name}{case.constructor}")
        if isinstance(made, nn.Module):
            made.eval()
        return made

    return make


class Called(NamedTuple):
    """A call that was made: its case, the function or instance that was called, its output, and the expected one."""

    case: GradeCase
    subject: Any
    output: Any = None
    want: Any = None


class _TakesFirst:
    """A function of a submission that, with `wanted`, returns only the first entry of a tuple."""

    def __init__(self, function: Callable[..., Any], wanted: bool) -> None:
        self.function = function
        self.wanted = wanted

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return take_first(self.function(*arguments, **named), self.wanted)


def _inner(subject: Any) -> Any:
    """Returns the function itself, or the `forward` of a module, whose parameters have the names for messages."""
    if isinstance(subject, _TakesFirst):
        return _inner(subject.function)
    if isinstance(subject, nn.Module):
        return subject.forward
    return subject


def take_first(output: Any, wanted: bool) -> Any:
    """Returns the first entry of a tuple if `wanted`, else the output unchanged."""
    if wanted and isinstance(output, tuple) and output:
        return output[0]
    return output


def attempt(function: Callable[..., Any], arguments: tuple[Any, ...], called: str) -> Any:
    """Returns what a call returns; turns what it raises into a SubmissionError in words for students."""
    try:
        return function(*copy_arguments(arguments))
    except SubmissionError:
        raise
    except (Exception, SystemExit) as error:
        raise explain_error(error, called) from error


# Kinds of items


def _judge_reference(spec: Spec, item: GradeItem, caller: Caller, seed: int) -> None:
    """Raises a SubmissionError if an output is not the reference's, with the slip that explains it."""
    seen: list[Called] = []
    wrong: tuple[Called, Mismatch] | None = None
    try:
        for called in _outputs(spec, item, caller, seed):
            seen.append(called)
            found = compare(called.output, called.want, item.tolerance)
            if found is not None and wrong is None:
                wrong = (called, found)
    except SubmissionError:
        if wrong is None:
            raise  # else the wrong output before the error explains more
    if wrong is None:
        return
    called, mismatch = wrong
    raise _explain(spec, item, called, mismatch.words, seen)


def _explain(spec: Spec, item: GradeItem, called: Called, words: str, seen: list[Called]) -> SubmissionError:
    """Returns the error for a wrong output, with the slip that explains it, else with what is peculiar about it."""
    slip = _find_slip(spec, item, seen)
    fault = _wrong(spec, item, called, words, slip)
    if slip is None:
        fault.advice = _describe_unknown(spec, item, called, seen) or fault.advice
    return fault


def _describe_unknown(spec: Spec, item: GradeItem, called: Called, seen: list[Called]) -> str:
    """Returns what is peculiar about outputs that no slip explains; "" if nothing is.

    The item's hint is added if more may be wrong.
    """
    export = spec.export_of(item)
    if any(_changes(one, item.tolerance, export) for one in (called, *seen[:MOST_REPEATED])):
        return end_sentence(CHANGES)
    wrong = [one for one in seen if compare(one.output, one.want, item.tolerance) is not None]
    pattern = describe_pattern([_wrong_call(spec, item, one) for one in wrong], item.tolerance)
    texts = [pattern.words]
    if not pattern.is_whole:  # else the hint would be about a part that is right
        texts.append(item.hint)
    if not pattern.words:
        return ""
    return " ".join(end_sentence(text) for text in texts if text)


def _wrong_call(spec: Spec, item: GradeItem, called: Called) -> WrongCall:
    """Returns a call with a wrong output, whose function returns the output alone if the submission adds weights."""
    export = spec.export_of(item)

    def call(*arguments: Any) -> Any:
        return take_first(called.subject(*arguments), export.takes_first)

    def reference(*arguments: Any) -> Any:
        case = replace(called.case, arguments=arguments)
        return _model_output(spec.function(item.reference), export, called.subject, case)

    return WrongCall(call, reference, called.case.arguments, called.output, called.want)


def _changes(called: Called, tolerance: float, export: Export) -> bool:
    """Returns whether a repeated call has another output than before."""
    try:
        again = take_first(called.subject(*copy_arguments(called.case.arguments)), export.takes_first)
        first, second = (plain_output(output, torch.float32) for output in (called.output, again))
        return compare(second, first, tolerance) is not None
    except (Exception, SystemExit):  # the first call succeeded, so something is kept between calls
        return True


def _judge_shape(spec: Spec, item: GradeItem, caller: Caller, seed: int) -> None:
    """Raises a SubmissionError if the type or the shape of an output is not the reference's."""
    seen: list[Called] = []
    for called in _outputs(spec, item, caller, seed):
        seen.append(called)
        found = compare_form(called.output, called.want)
        if found is not None:
            raise _explain(spec, item, called, found.words, seen)


def _judge_slip(spec: Spec, item: GradeItem, caller: Caller, seed: int) -> None:
    """Raises a SubmissionError if all outputs are those of one of the item's slips."""
    seen = list(_outputs(spec, item, caller, seed))
    if all(compare(called.output, called.want, item.tolerance) is None for called in seen):
        return
    slip = _find_slip(spec, item, seen)
    if slip is not None:
        raise _wrong(spec, item, seen[0], "the output is that of a known mistake", slip)


def _judge_property(spec: Spec, item: GradeItem, caller: Caller, seed: int) -> None:
    """Raises a SubmissionError if the property, a function of the spec's source, returns a fault: words or a slip."""
    function = spec.function(item.check)
    for case in make_cases(spec.function(item.cases), seed):
        subject = caller(case)
        asked = _plain(subject)
        said = attempt(lambda *given, asked=asked: function(asked, *given), case.arguments, "It")
        called = Called(case, subject)
        if said is not None:
            slip, words = _split_finding(spec, said)
            raise _wrong(spec, item, called, words, slip)


def _plain(subject: Any) -> Any:
    """Returns a function whose outputs are plain tensors, which properties need, also for NumPy submissions."""
    if not isinstance(subject, _TakesFirst):
        return subject

    @wraps(_inner(subject))
    def call(*arguments: Any, **named: Any) -> Any:
        output = plain_output(subject(*arguments, **named), _dtype_of(arguments))
        if output is None:
            raise SubmissionError("It returns None: is a `return` missing?", "failed")
        return output

    return call


def _dtype_of(arguments: tuple[Any, ...]) -> torch.dtype:
    """Returns the dtype of the first floating-point tensor; float32 if there is none."""
    found = (x.dtype for x in arguments if isinstance(x, Tensor) and x.is_floating_point())
    return next(found, torch.float32)


def _split_finding(spec: Spec, said: Any) -> tuple[str | None, str]:
    """Returns the slip and the words of a property's fault, which is words, the name of a slip, or a pair of both."""
    if isinstance(said, tuple):
        return str(said[0]), str(said[1])
    if said in spec.table.slips:
        return str(said), ""
    return None, str(said)


def _judge_law(spec: Spec, item: GradeItem, caller: Caller, seed: int) -> None:
    """Raises a SubmissionError if a law of `regard check` is broken, or none could be asked."""
    subject = _with_names(spec, item, caller(GradeCase((), item.constructor)))
    words = broken_law(subject, like=item.like or None, only=item.laws, dtype="fp32", seed=seed)
    if words is not None:
        raise SubmissionError(end_sentence(words), "failed", end_sentence(item.hint))


def _with_names(spec: Spec, item: GradeItem, subject: Any) -> Any:
    """Returns a function with the names of its reference's arguments where its own signature is `*arguments`."""
    if not isinstance(subject, _TakesFirst):
        return subject
    parameters = inspect.signature(_inner(subject)).parameters.values()
    if not parameters or any(x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD) for x in parameters):
        return subject
    references = [x.reference for x in spec.items if x.reference and spec.export_of(x) is spec.export_of(item)]
    plain = _plain(subject)
    if references:
        plain.__signature__ = inspect.signature(spec.function(references[0]))
    return plain


def broken_law(subject: Any, *, draws: int = LAW_DRAWS, **options: Any) -> str | None:
    """Returns in words the first law that a subject breaks, or None; `options` are those of `regard.check`."""
    verdicts = check(_plain(subject), draws=draws, **options)
    if verdicts.broken:
        verdict = verdicts.broken[0]
        return f"It breaks the law '{verdict.law}' ({verdict.claim}): {verdict.detail}"
    if not verdicts.asked:
        raise SubmissionError(f"The laws could not be asked: {verdicts.problems[0]}")
    return None


_JUDGES: dict[str, Callable[[Spec, GradeItem, Caller, int], None]] = {
    "reference": _judge_reference,
    "shape": _judge_shape,
    "slip": _judge_slip,
    "property": _judge_property,
    "law": _judge_law,
}


def _outputs(spec: Spec, item: GradeItem, caller: Caller, seed: int) -> Iterator[Called]:
    """Yields the call of each case, with its output and the reference's."""
    export = spec.export_of(item)
    reference = spec.function(item.reference)
    for case in make_cases(spec.function(item.cases), seed):
        subject = caller(case)
        called = f"{export.name}({describe_case(case, _inner(subject))})"
        got = take_first(attempt(subject, case.arguments, called), export.takes_first)
        yield Called(case, subject, got, _model_output(reference, export, subject, case))


def _model_output(function: Callable[..., Any], export: Export, subject: Any, case: GradeCase) -> Any:
    """Returns the output of a reference or a slip; for a class, it gets the instance, whose weights it reads."""
    arguments = copy_arguments(case.arguments)
    if export.kind == "function":
        return function(*arguments)
    try:
        return function(subject, *arguments)
    except SubmissionError:
        raise
    except Exception as error:  # weights may have other shapes than the task asks for
        raise SubmissionError(f"{export.name} is not built as the task says: {quote(error)}.") from error


def _find_slip(spec: Spec, item: GradeItem, seen: list[Called]) -> str | None:
    """Returns the name of the first slip, of the item or else of the spec, that explains all of the outputs.

    If none does within the item's tolerance, outputs may differ from a slip's by ROUNDING times as much, provided that
    one is ten times further than that from the right output.
    """
    exact = _matching_slip(spec, item, seen, item.tolerance)
    loosely = ROUNDING * item.tolerance
    is_far = any(compare(called.output, called.want, 10 * loosely) is not None for called in seen)
    if exact is not None or not is_far:
        return exact
    return _matching_slip(spec, item, seen, loosely)


def _matching_slip(spec: Spec, item: GradeItem, seen: list[Called], tolerance: float) -> str | None:
    """Returns the name of the first slip whose outputs equal all of these within a tolerance."""
    export = spec.export_of(item)
    for name in item.slips or spec.table.slips:
        function = getattr(spec.module, name, None)
        if function is None:  # a slip that only properties find
            continue
        try:
            made = [_model_output(function, export, called.subject, called.case) for called in seen]
        except Exception:  # the slip is impossible for these sizes, or is one of another export
            continue
        pairs = zip(seen, made, strict=True)
        if all(compare(called.output, slipped, tolerance) is None for called, slipped in pairs):
            return name
    return None


def _wrong(spec: Spec, item: GradeItem, called: Called, words: str, slip: str | None) -> SubmissionError:
    """Returns the error for a wrong output: how it differs, in which case, and advice."""
    advice = item.hint
    if slip is not None:
        advice = spec.table.slips[slip]
    where = ""
    if words:
        where = f"{_capitalised(words)} ({describe_case(called.case, _inner(called.subject))})"
    return SubmissionError(end_sentence(where), "failed", end_sentence(advice), slip)


def _capitalised(words: str) -> str:
    """Returns words with a capital first letter, except for a name of one letter such as x."""
    if words[1:2] == " " and words[0] != "a":
        return words
    return words[0].upper() + words[1:]
