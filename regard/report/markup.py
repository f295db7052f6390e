"""HTML that is safe because it was made here, and the numbers in it as people read them."""

from __future__ import annotations

import html
import math
import re

# No character of these may stand in HTML, and a lone surrogate not even in UTF-8.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """HTML whose every foreign string has been escaped; anything else is plain text."""

    __slots__ = ()


def escape(value: object) -> Markup:
    """Any value as HTML: markup as it is, text escaped, what HTML forbids as �."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(cleaned(value)))


def cleaned(value: object) -> str:
    """The text of any value, without characters that HTML forbids."""
    return _FORBIDDEN.sub("\ufffd", str(value))


def short(value: object, most: int = 40) -> str:
    """The text of any value, cut where a figure has no room for more."""
    text = cleaned(value)
    return text if len(text) <= most else text[: most - 1] + "…"


def join(*parts: object) -> Markup:
    """The parts one after the other, each escaped where it is not markup."""
    return Markup("".join(map(escape, parts)))


def tag(name: str, *parts: object, **attributes: object) -> Markup:
    """An element around parts; `class_` for class, `_` for `-` in an attribute, None for an attribute left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(cleaned(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{join(*parts)}</{name}>")


def strong(value: object) -> Markup:
    return tag("strong", value)


def code(value: object) -> Markup:
    return tag("code", value)


def percent(share: float | None, digits: int = 1) -> str:
    """0.508 → 50.8%; unknown → –."""
    return "–" if share is None or not math.isfinite(share) else f"{100 * share:.{digits}f}%"


def number(value: object) -> str:
    """Any value as it reads best: 12,345; 0.0123; 6e-05; a text as it is; unknown → –."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return cleaned(value)
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or 1e-4 <= abs(value) < 1e5:
        digits = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0
        shown = f"{value:,.{digits}f}"
        return shown.rstrip("0").rstrip(".") if "." in shown else shown
    return f"{value:.3g}"


def counted(n: int, noun: str) -> str:
    """1 document; 2,937 documents."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def duration(seconds: float | None) -> str:
    """95.2 → 1 min 35 s."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
