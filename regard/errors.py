"""One family of errors: each names the place, what was expected, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class RegardError(Exception):
    """Anything regard refuses to do; the message says why and what to do instead."""


class ShapeError(RegardError, ValueError):
    """A tensor has the wrong rank, size or dtype."""


class MaskError(RegardError, ValueError):
    """A mask asks for something that this mechanism cannot honour."""


class LengthError(RegardError, ValueError):
    """A sequence is longer than a mechanism was built for."""


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
    """A run folder that is missing, in the way, or cannot be written."""


class PluginError(RegardError, ValueError):
    """A plugin file cannot be used."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message: " Did you mean …?" where something close is known, and what is known."""
    known = sorted(known)
    hint = ""
    close = get_close_matches(name, known, n=1)
    if close:
        hint = f" Did you mean '{close[0]}'?"
    return f"{hint} Known: {', '.join(known)}."
