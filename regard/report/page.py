"""Self-contained pages: no script, no network, no fonts to fetch; for light and dark screens of any width, and paper.

Functions turn plain values into blocks of markup; a `Page` puts blocks in order and writes one file. All text is
escaped, and the page's security policy forbids the browser to load or run anything.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from regard.errors import DataError, RegardError, quote
from regard.report.markup import Markup, escape, join, number, percent, tag
from regard.report.palette import css_variables
from regard.storage import atomic_write

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"

# A number, perhaps with a unit; columns of these are aligned on the right.
_NUMERIC = re.compile(r"[−-]?[\d.,]+(e[+-]\d+)?(%| ?(s|min|h)\b.*)?|–")

_BAR = "share-of-one"  # the CSS class of `share_bar`
COMMAND_WIDTH = 84  # characters of a line of a command before it is folded


class ReportError(RegardError, OSError):
    """A report that cannot be made or written."""


def build_part(key: str, build: Callable[[Mapping[str, Any]], Any], results: Mapping[str, Any], module: str) -> Any:
    """Returns the markup, or the list of blocks, that `build` makes from results.

    If `build` fails on the results, a ReportError names their part `key` and the `module` whose docstring describes it.
    """
    try:
        blocks = build(results)
        if isinstance(blocks, Markup):
            return blocks
        return list(blocks)  # a generator raises only when it is run
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ReportError(
            f"the results' part '{key}' is not as a report needs it ({type(error).__name__}: {quote(error)}); "
            f"{module} describes it"
        ) from error


def paragraph(*parts: object, quiet: bool = False) -> Markup:
    """Returns a paragraph of text, which may contain markup such as `strong`; `quiet` is smaller, for remarks."""
    if quiet:
        return tag("p", *parts, class_="quiet")
    return tag("p", *parts)


def heading(title: str, level: int = 2) -> Markup:
    """Returns a heading of level 2 to 4; those of level 2 are listed at the top of the page."""
    if level == 2:
        return tag("h2", title, id=_anchor(title))
    return tag(f"h{level}", title)


def table(
    rows: Iterable[Sequence[object]], columns: Sequence[object], caption: object, highlight: Collection[int] = ()
) -> Markup:
    """Returns a table of rows of cells; the first cell of each row is its name.

    Columns of numbers are aligned on the right. `highlight` are the numbers of rows to emphasise, from 0.
    """
    cells = [[_as_cell(value) for value in row] for row in rows]
    # The class of each column's cells: "n" for numbers, None for text.
    classes = [_column_class([row[n] for row in cells]) for n in range(len(columns))]
    head = join(*(tag("th", c, scope="col", class_=classes[n]) for n, c in enumerate(columns)))
    body = []
    for place, row in enumerate(cells):
        name = tag("th", row[0], scope="row", class_=classes[0])
        values = [tag("td", cell, class_=classes[n]) for n, cell in enumerate(row) if n]
        body.append(tag("tr", name, *values, class_="best" if place in highlight else None))
    whole = tag("table", tag("caption", tag("span", caption)), tag("thead", tag("tr", head)), tag("tbody", *body))
    return tag("div", whole, class_="scroll", tabindex=0, role="group", aria_label=_strip_tags(str(caption)))


def _as_cell(value: object) -> Markup:
    """Returns markup unchanged, and any other value formatted as a number or text."""
    if isinstance(value, Markup):
        return value
    return escape(number(value))


def _column_class(cells: Sequence[Markup]) -> str | None:
    """Returns "n" for a column of numbers alone, which bars of shares are not; else None."""
    numeric = bool(cells) and all(_NUMERIC.fullmatch(_strip_tags(cell)) for cell in cells)
    if numeric and _BAR not in cells[0]:
        return "n"
    return None


def _strip_tags(text: str) -> str:
    """Returns HTML without its tags."""
    return re.sub(r"<[^>]*>", "", text)


def figure(svg: Markup, caption: object, title: object = "") -> Markup:
    """Returns a picture on a card, with a caption that says what to see in it."""
    # Inside HTML an SVG needs no namespace; as a file of its own it does.
    inline = Markup(svg.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1))
    blocks = [tag("div", inline, class_="scroll"), tag("figcaption", caption)]
    if title:
        blocks.insert(0, tag("div", title, class_="title"))
    return tag("figure", *blocks)


def figures(*pictures: Markup) -> Markup:
    """Returns figures side by side, as far as there is room."""
    return tag("div", *pictures, class_="figures")


def details(summary: object, *blocks: Markup) -> Markup:
    """Returns blocks that unfold on request."""
    return tag("details", tag("summary", summary), *blocks)


def facts(pairs: Mapping[str, object], big: bool = False) -> Markup:
    """Returns a list of names and values; `big` is for the few numbers that matter most."""
    body = [tag("div", tag("dt", key), tag("dd", _as_cell(value))) for key, value in pairs.items()]
    kind = "facts"
    if big:
        kind = "big"
    return tag("dl", *body, class_=kind)


def samples(items: Iterable[object]) -> Markup:
    """Returns texts one below the other, with nothing changed in them."""
    return tag("ul", *(tag("li", item) for item in items), class_="samples")


def listing(text: str) -> Markup:
    """Returns preformatted text, such as a command or the output of a program."""
    return tag("pre", tag("code", text), tabindex=0)


def command_listing(command: str) -> Markup:
    """Returns a shell command, folded between words if it is long, so that all of it can be seen and copied."""
    if len(command) <= COMMAND_WIDTH:
        return listing(command)
    try:
        words = [shlex.quote(word) for word in shlex.split(command)]
    except ValueError:  # a command in a damaged file may have quotes that do not close
        return listing(command)
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) > COMMAND_WIDTH:
            lines.append("   ")
        lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return listing(" \\\n".join(lines))


def share_bar(value: float) -> Markup:
    """Returns a share from 0 to 1 as a small bar with its percentage."""
    return tag("span", percent(value, 0), class_=_BAR, style=f"--share:{100 * min(max(value, 0), 1):.1f}%")


class Page:
    """One page: a title, a lead (a first paragraph that says what was done and found), and blocks."""

    def __init__(self, title: str, lead: object, *blocks: Markup) -> None:
        self.title = title
        self.lead = lead
        self.blocks = list(blocks)

    def add(self, *blocks: Markup) -> None:
        """Appends blocks to the page."""
        self.blocks.extend(blocks)

    def html(self) -> str:
        """Returns the whole document."""
        body = _make_ids_unique(join(*self.blocks))
        # The list of contents is taken from the finished body, so all headings are in it.
        titles = re.findall(r'<h2 id="([^"]*)">(.*?)</h2>', body)
        links = [tag("a", Markup(name), href=f"#{anchor}") for anchor, name in titles]
        contents = Markup()
        if len(links) > 2:
            contents = tag("nav", *links, aria_label="Contents")
        css = Markup(css_variables() + "\n" + files("regard.report").joinpath("page.css").read_text("utf-8"))
        head = (
            f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            f"{tag('title', self.title)}\n{tag('style', css)}"
        )
        header = tag("header", tag("h1", self.title), tag("p", self.lead, class_="lead"), contents)
        footer = tag("footer", "Made by regard. This page loads nothing and runs nothing.")
        return (
            f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n'
            f"{header}\n{tag('main', body)}\n{footer}\n</body>\n</html>\n"
        )

    def write(self, path: str | Path) -> Path:
        """Writes the page and returns its path; an earlier file there stays whole until the new one is complete."""
        path = Path(path)
        text = self.html().encode()
        try:
            with atomic_write(path) as file:
                file.write(text)
        except DataError as error:
            raise ReportError(f"{error}; choose another place for the report") from error
        return path


def _make_ids_unique(body: Markup) -> Markup:
    """Returns the body with new ids in each drawing: ids must be unique in a page, and equal drawings have equal
    ones."""
    start, *drawings = body.split("<svg ")
    seen: Counter[str] = Counter()
    for n, drawing in enumerate(drawings):
        match = re.search(r' id="(f[0-9a-f]{10})-', drawing)
        if match:
            digest = match[1]
            seen[digest] += 1
            drawings[n] = drawing.replace(digest, f"{digest}n{seen[digest]}")
    return Markup("<svg ".join([start, *drawings]))


def _anchor(title: str) -> str:
    """Returns the id under which a heading can be linked to."""
    return re.sub(r"\W+", "-", title.lower()).strip("-") or "section"
