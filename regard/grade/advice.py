"""What to do about errors that students often meet: a sentence for each, found by a part of the error's words."""

from __future__ import annotations

# A part of the message, and what to do. The first that fits counts.
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
    """Returns what to do about an error, or nothing where it is none of the common ones."""
    if isinstance(error, NameError):
        return "Is it imported, and spelt as where it is defined?"
    text = str(error)
    return next((advice for part, advice in COMMON_ERRORS if part in text), "")
