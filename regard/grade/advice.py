"""Errors of a submission in words for students, with advice about common ones."""

from __future__ import annotations

import linecache
import traceback

from regard.devices import requested_memory
from regard.errors import MAX_QUOTED, RegardError, quote
from regard.grade.outcomes import ItemStatus

SUBMITTED = "submitted.py"  # the end of the path under which a submission is imported

# A part of the error's message, and the advice. The first that matches is used.
COMMON_ERRORS = (
    ("Boolean value of Tensor", "A tensor of many entries is neither true nor false. Ask `if mask is not None:`"),
    ("truth value of an array", "An array of many entries is neither true nor false. Ask `if mask is not None:`"),
    (
        "with a bool tensor is not supported",
        "A mask is True and False: turn it round by ~mask, hide by masked_fill",
    ),
    ("before Module.__init__", "Write super().__init__() as the first line of __init__"),
    ("super().__init__", "Write super().__init__() as the first line of __init__"),
    ("view size is not compatible", "After a transpose use .reshape(…), or .contiguous() before .view(…)"),
    (
        "einsum(): ",
        "An einsum's letters name each tensor's axes in their order, and one letter has one length",
    ),
    (
        "Sizes of tensors must match except",
        "torch.cat joins tensors along one axis, dim; the others must agree",
    ),
    ("mat1 and mat2 shapes", "In a @ b the last axis of a is as long as the last but one of b. Print both shapes"),
    ("Expected size for first two dimensions", "In a @ b the last axis of a is as long as the last but one of b"),
    ("must match the size of tensor", "Two shapes do not fit together. Print both in the line before"),
    ("must match the existing size", "Two shapes do not fit together. Print both in the line before"),
    ("is invalid for input of size", "The new shape has not as many entries as the old one. Print the old one"),
    ("takes no arguments", "The name and the arguments must be those of the template, in that order"),
    ("positional argument", "The arguments must be those of the template, in that order"),
    ("'NoneType' object", "Something is None: a mask that was not given, or a function without a return"),
    ("require grad", "Use .detach() before .numpy(), or stay in torch"),
    ("Implicit dimension choice", "Say along which axis: dim=-1"),
)


def advise(error: BaseException) -> str:
    """Returns what to do about a common error; "" for other errors."""
    if isinstance(error, NameError):
        return "Is it imported, and spelt as where it is defined?"
    text = str(error)
    return next((advice for part, advice in COMMON_ERRORS if part in text), "")


class SubmissionError(RegardError, RuntimeError):
    """What a submission did instead of returning a right value, in words for students."""

    def __init__(self, words: str, status: ItemStatus = "error", advice: str = "", slip: str | None = None) -> None:
        super().__init__(words)
        self.status: ItemStatus = status
        self.advice = advice
        self.slip = slip


def explain_error(error: BaseException, called: str) -> SubmissionError:
    """Returns a SubmissionError that says what a submission raised, and at which of its own lines."""
    if isinstance(error, NotImplementedError):
        return SubmissionError("It is not written yet (NotImplementedError).", "missing")
    if isinstance(error, SystemExit):
        return SubmissionError("It calls exit() or sys.exit(), which ends the program; use return.")
    if isinstance(error, RecursionError):
        return SubmissionError(f"It calls itself without end (RecursionError){_place(error)}.")
    if isinstance(error, EOFError):
        return SubmissionError(f"It asks for input(), and nobody is there to type{_place(error)}.")
    asked = requested_memory(error)
    if asked is not None:
        return SubmissionError(f"It needs more memory than there is: {asked}{_place(error)}.", "memory")
    message = quote(error, marks=False).rstrip(".")
    words = f"{called} ends with {type(error).__name__}: {message}{_place(error)}."
    return SubmissionError(words, advice=end_sentence(advise(error)))


def _place(error: BaseException) -> str:
    """Returns in words the innermost line of the submission in a traceback; "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.endswith(SUBMITTED)]
    if not own:
        return ""
    line = linecache.getline(own[-1].filename, own[-1].lineno or 0).strip()
    return f", at `{line[:MAX_QUOTED]}`"


def end_sentence(text: str) -> str:
    """Returns a text with a full stop at its end, unless it is empty or has a mark there."""
    if text and text[-1] not in ".?!":
        return text + "."
    return text
