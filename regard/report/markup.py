"""Safe HTML, in which every text was escaped here, and numbers formatted for readers."""

from __future__ import annotations

import html
import math
import re

# These characters are not allowed in HTML, and lone surrogates not even in UTF-8.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_UNKNOWN = "–"


class Markup(str):
    """HTML in which all text is escaped. A plain `str` is text, not HTML."""

    __slots__ = ()


def escape(value: object) -> Markup:
    """Returns any value as HTML: markup unchanged, text escaped, characters that HTML forbids as �."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(clean_text(value)))


def clean_text(value: object) -> str:
    """Returns the text of any value, with � for each character that HTML forbids."""
    return _FORBIDDEN.sub("\ufffd", str(value))


def shorten(value: object, max_length: int = 40) -> str:
    """Returns the text of any value, cut with an ellipsis if it is longer than `max_length`."""
    text = clean_text(value)
    if len(text) <= max_length:
        return text
    return text[: max_length - 1] + "…"


def join(*parts: object) -> Markup:
    """Returns the parts one after the other; those that are not markup are escaped."""
    return Markup("".join(map(escape, parts)))


def tag(name: str, *parts: object, **attributes: object) -> Markup:
    """Returns an element around the parts.

    Attributes are keywords: `class_` for class, `_` for each `-`, and None for an attribute that is left out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(clean_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{join(*parts)}</{name}>")


def strong(value: object) -> Markup:
    """Returns the value in bold."""
    return tag("strong", value)


def code(value: object) -> Markup:
    """Returns the value as code."""
    return tag("code", value)


def percent(share: float | None, digits: int = 1) -> str:
    """Formats a share: 0.508 → 50.8%; unknown → –."""
    if share is None or not math.isfinite(share):
        return _UNKNOWN
    return f"{100 * share:.{digits}f}%"


def number(value: object) -> str:
    """Formats any value for readers: 12,345; 0.0123; 6e-05; a text unchanged; unknown → –."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return _UNKNOWN
    if isinstance(value, bool) or not isinstance(value, int | float):
        return clean_text(value)
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0:
        return f"{value:.0f}"
    if not 1e-4 <= abs(value) < 1e5:
        return f"{value:.3g}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))  # four significant digits
    text = f"{value:,.{digits}f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return text


def count_noun(n: int, noun: str) -> str:
    """Returns a number with its noun: 1 document; 2,937 documents."""
    if n == 1:
        return f"1 {noun}"
    return f"{n:,} {noun}s"


def duration(seconds: float | None) -> str:
    """Formats a time: 95.2 → 1 min 35 s; unknown → –."""
    if seconds is None or not math.isfinite(seconds):
        return _UNKNOWN
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {rest} s"
    return f"{rest} s"
