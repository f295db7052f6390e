"""Figures by matplotlib as SVG for pages: in the page's colours, with text as text; equal calls give equal bytes.

Figures are drawn in the light colours of the palette; afterwards each colour is replaced by a CSS variable that falls
back to it. No global state of matplotlib is touched.
"""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from regard.report.markup import Markup, clean_text, tag
from regard.report.palette import INK, MUTED, RULE, SHADES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = 10.0  # points of text: legible in a figure of 4.7 inches from a phone's width to a page's
_SETTINGS: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "regard",  # ids that do not depend on the time
    "text.parse_math": False,  # a token may be "$"
    "axes.unicode_minus": True,
    "font.family": ["DejaVu Sans"],  # comes with matplotlib: the same measures everywhere
    "font.size": SIZE,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": MUTED.light,
    "axes.linewidth": 0.8,
    "axes.labelcolor": MUTED.light,
    "axes.labelsize": SIZE,
    "axes.titlesize": SIZE,
    "axes.titlecolor": INK.light,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE.light,
    "grid.linewidth": 0.7,
    "text.color": INK.light,
    "xtick.color": MUTED.light,
    "ytick.color": MUTED.light,
    "xtick.labelsize": SIZE,
    "ytick.labelsize": SIZE,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.8,
    "path.simplify": False,
    "lines.solid_capstyle": "round",
}
_VARIABLES = {s.light: f"var(--{s.name},{s.light})" for s in SHADES}


def draw(paint: Callable[[Figure], None], alt: str, width: float = 4.7, height: float = 2.9) -> Markup:
    """Returns the SVG of what `paint` draws on a figure of this size in inches; `alt` describes it in words."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    with rc_context(_SETTINGS), warnings.catch_warnings():
        # This font only measures widths: the reader's browser has others for the glyphs that it lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        fig = Figure(figsize=(width, height), layout="constrained")
        paint(fig)
        fig.savefig(buffer, format="svg", metadata={"Date": None})
    return _fit_to_page(buffer.getvalue(), alt, round(72 * width), round(72 * height))


def _fit_to_page(svg: str, alt: str, width: int, height: int) -> Markup:
    """Returns matplotlib's SVG without its preamble and style sheet, with the page's colours and with unique ids."""
    # The page has what matplotlib writes before the drawing: doctype, sizes, metadata, a style sheet.
    inner = svg[svg.index("</metadata>") + len("</metadata>") : svg.rindex("</svg>")]
    inner = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", inner, count=1, flags=re.DOTALL)
    used_ids = set(re.findall(r'(?:url\(|href=")#([\w.]+)', inner))
    # Ids are shared by a whole page, so each begins with a hash of its drawing.
    digest = hashlib.sha256(inner.encode()).hexdigest()[:10]
    new_ids = {old: f"f{digest}-{n}" for n, old in enumerate(sorted(used_ids))}

    def rename_id(match: re.Match[str]) -> str:
        """Returns an id attribute with its new name, or "" if nothing refers to it."""
        if match[1] in new_ids:
            return f' id="{new_ids[match[1]]}"'
        return ""

    def rename_reference(match: re.Match[str]) -> str:
        """Returns a reference with the new name; anything else, such as a colour, stays."""
        if match[1] in new_ids:
            return f"#{new_ids[match[1]]}"
        return match[0]

    def rewrite_tag(match: re.Match[str]) -> str:
        """Returns one tag with new ids, colours and font. The text between tags is the user's and is not changed."""
        text = match[0].replace("xlink:href", "href")
        text = re.sub(r' id="([^"]*)"', rename_id, text)
        text = re.sub(r"#([\w.]+)", rename_reference, text)
        # A colour after "key: " in a style; the palette's become variables, others stay.
        text = re.sub(r"(?<=: )#[0-9a-f]{6}\b", lambda m: _VARIABLES.get(m[0], m[0]), text)
        # The page's own font instead of the one that widths were measured with.
        text = re.sub(r" ?font-family: [^;\"]*;?", "", text)
        # matplotlib turns even level text, by an angle of −0.
        return re.sub(r' transform="rotate\(-0 [^"]*"', "", text)

    inner = re.sub(r"\s*\n\s*(?=<)", "\n", re.sub(r"<[^>]*>", rewrite_tag, inner))
    return tag(
        "svg",
        Markup(inner),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=clean_text(alt),
        font_family="system-ui, sans-serif",
        stroke_linejoin="round",
        style=f"--width:{width}",
    )
