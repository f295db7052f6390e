"""The colours of pages and figures, each for a light and a dark page, and one style a series.

Every colour of text and lines has a contrast of at least 4.5 with the card it stands on. Colour-blind readers can tell
the series' colours apart, too; dashes and markers differ as well, so that no meaning depends on colour alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Shade(NamedTuple):
    """One colour: its CSS name, and its values on light and dark pages."""

    name: str
    light: str
    dark: str


INK = Shade("ink", "#1b2129", "#e7eaee")
MUTED = Shade("muted", "#57606b", "#a6afba")
RULE = Shade("rule", "#d5dae1", "#3a424d")
CARD = Shade("card", "#ffffff", "#1b2027")
PAGE = Shade("page", "#f4f5f7", "#12151a")
WASH = Shade("wash", "#e9f1fb", "#1d3047")
SERIES = (
    Shade("series-0", "#1d5fa6", "#6cb2f5"),
    Shade("series-1", "#b3470b", "#ff9f60"),
    Shade("series-2", "#0a7459", "#3fcda0"),
    Shade("series-3", "#94378a", "#ea93dc"),
    Shade("series-4", "#6a6204", "#d3c650"),
    Shade("series-5", "#4a5675", "#b3bfdd"),
)
SHADES = (INK, MUTED, RULE, CARD, PAGE, WASH, *SERIES)

_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)))
_MARKERS = "osD^vPXh*<>p"


class Style(NamedTuple):
    """The style of one series: its light colour, which the canvas replaces by a CSS variable, its dash, its marker."""

    colour: str
    dash: str | tuple[int, tuple[float, ...]]
    marker: str


def style(n: int) -> Style:
    """Returns the n-th style. When the colours are used up, the next dash and other markers begin."""
    rounds, place = divmod(n, len(SERIES))
    return Style(SERIES[place].light, _DASHES[rounds % len(_DASHES)], _MARKERS[n % len(_MARKERS)])


def styles(names: Iterable[str]) -> dict[str, Style]:
    """Returns one style for each name, in order; pass the same dict to every figure of a page."""
    return {name: style(n) for n, name in enumerate(dict.fromkeys(names))}


def css_variables() -> str:
    """Returns the CSS that gives every colour its value: light, or dark on screens of readers who prefer that."""
    light = "".join(f"--{s.name}:{s.light};" for s in SHADES)
    dark = "".join(f"--{s.name}:{s.dark};" for s in SHADES)
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
