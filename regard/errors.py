"""One family of errors: each names the place, what was expected, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

MAX_QUOTED = 200  # characters of a value, a name or another library's message that an error quotes

# What a terminal acts on or shows in another order: control characters other than tab and line feed, the marks that
# change the direction of text, line and paragraph separators, halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class RegardError(Exception):
    """Anything regard refuses to do; the message says why and what to do instead."""


class ShapeError(RegardError, ValueError):
    """A tensor has the wrong rank, size or dtype."""


class MaskError(RegardError, ValueError):
    """A mask asks for something that this mechanism cannot honour."""


class GateError(RegardError, ValueError):
    """A decay, a write strength or a key with which a memory would grow instead of fade."""


class LengthError(RegardError, ValueError):
    """A sequence is longer than a mechanism was built for."""


class TokenError(RegardError, IndexError):
    """A token that is not in a model's vocabulary."""


class ZeroRowError(RegardError, ArithmeticError):
    """A query's similarities sum to zero although it may see some key (`strict=True`)."""


class NegativeSimilarityError(RegardError, ArithmeticError):
    """A similarity φ(q)·φ(k) is negative, so that its row is no average of values (`strict=True`)."""


class KernelError(RegardError, RuntimeError):
    """A kernel was asked for by name and cannot run here."""


class UnknownNameError(RegardError, LookupError):
    """A name that is not registered."""


class OptionError(RegardError, TypeError):
    """An option that does not exist or is missing."""


class HubError(RegardError, RuntimeError):
    """A Hugging Face model, or something that it asks for, that regard cannot work with."""


class ExtraMissingError(RegardError, ImportError):
    """A feature needs an optional dependency."""


class DataError(RegardError, ValueError):
    """A file of data that cannot be read, or cannot be written, as it is."""


class RunError(RegardError, OSError):
    """A run folder that is missing, that exists already, or that cannot be written."""


class PluginError(RegardError, ValueError):
    """A plugin file cannot be used."""


class Interrupted(RegardError):
    """A training was asked to stop, and has saved a checkpoint."""


class ResourceError(RegardError, MemoryError):
    """More memory was asked for than there is."""


def printable(text: str) -> str:
    r"""Returns the text with what a terminal would act on, such as escapes and U+202E, written as \u001b and \u202e."""
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def quote(value: object, marks: bool = True) -> str:
    """Returns a value, or the message of an exception, for an error message: printable, and not more than `MAX_QUOTED`
    characters of it. `marks`: a text stands in quotation marks, as Python writes it."""
    if isinstance(value, BaseException):
        value = str(value) or type(value).__name__
        marks = False
    if isinstance(value, str):
        shown = value[: MAX_QUOTED + 1]
    else:
        shown = _shorten(value)
    if marks and isinstance(value, str):
        shown = repr(shown)
    shown = printable(shown)
    if len(shown) > MAX_QUOTED:
        shown = shown[: MAX_QUOTED - 1] + "…"
    return shown


def _shorten(value: object) -> str:
    """Returns the representation of a value; that of a large number or a large collection is not written out."""
    if isinstance(value, int) and value.bit_length() > 4 * MAX_QUOTED:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, list | tuple | dict | set) and len(value) > MAX_QUOTED:
        return f"a {type(value).__name__} of {len(value)} entries"
    try:
        return repr(value)
    except ValueError:  # Python refuses to write a number of thousands of digits
        return f"a {type(value).__name__}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message: " Did you mean …?" if a known name is close, then all known names."""
    known = sorted(known)
    hint = ""
    close = get_close_matches(name[:MAX_QUOTED], known, n=1)
    # get_close_matches misses short names with two letters exchanged, such as ml for lm.
    close += [other for other in known if sorted(other) == sorted(name)]
    if close:
        hint = f" Did you mean '{close[0]}'?"
    return f"{hint}{list_known(known)}"


def list_known(known: Iterable[str]) -> str:
    """Returns the sentence of an error message that lists the known names, 100 at most."""
    # Known names may come from a file, such as its columns.
    shown = ", ".join(quote(other[:60], marks=False) for other in sorted(known)[:100])
    return f" Known: {shown}."
