"""Formulas between dollars as MathML, which browsers draw by themselves: no script, no font, no picture."""

from __future__ import annotations

import re
from html import unescape

from latex2mathml.converter import convert

# What the Markdown extension arithmatex makes of $…$ and $$…$$.
_MARKED = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
# What the converter leaves to be set: a little room around names such as cos, and none around a slash.
_SPACING = {
    r"(<mi>[a-z]{2,}</mi>)(?=<m(?:i|n|sub|sup|subsup|sqrt)\b)": r'\1<mspace width="0.167em"></mspace>',
    r"(</m(?:i|n|sub|sup|sqrt)>)(?=<mi>[a-z]{2,}</mi>)": r'\1<mspace width="0.167em"></mspace>',
    r"<mo>&#x0002F;</mo>": '<mo lspace="0.05em" rspace="0.05em">/</mo>',
}


class FormulaError(ValueError):
    """A formula that cannot be drawn."""


def mathml(html: str, where: str) -> str:
    """Returns the page with each marked formula drawn; a command that is not known is an error that names it."""
    return _MARKED.sub(lambda found: _drawn(unescape(found[2]).strip(), found[1] == "div", where), html)


def drawn(text: str, where: str) -> str:
    """Returns a heading with its formulas drawn, as a list of contents has it: without marks around them."""
    return re.sub(r"\\\((.*?)\\\)", lambda found: _drawn(unescape(found[1]).strip(), False, where), text)


def _drawn(latex: str, block: bool, where: str) -> str:
    try:
        made: str = convert(latex, display="block" if block else "inline")
    except Exception as error:  # the converter has many of its own, without a common parent
        raise FormulaError(
            f"{where}: the formula {latex!r} cannot be read ({type(error).__name__}: {error})"
        ) from error
    if "\\" in made:
        raise FormulaError(f"{where}: the formula {latex!r} has a command that is not known; write it another way")
    for found, spaced in _SPACING.items():
        made = re.sub(found, spaced, made)
    return f'<div class="formula">{made}</div>' if block else made
