"""A page that needs nothing but itself: no script, no network, no fonts to fetch; light, dark, narrow, wide, on paper.

Blocks are functions from plain values to markup; a `Page` puts them in order and writes one file. Every string is
escaped, whoever wrote it, and the page's own policy forbids the browser to load or run anything.
"""

from __future__ import annotations

import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from regard.errors import RegardError
from regard.report.markup import Markup, escape, join, number, percent, tag
from regard.report.palette import variables

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"

# A number, perhaps with a unit: a column of these lines up on the right.
_NUMERIC = re.compile(r"[−-]?[\d.,]+(e[+-]\d+)?(%| ?(s|min|h)\b.*)?|–")

_BAR = "share-of-one"


class ReportError(RegardError, OSError):
    """A report that cannot be made or written."""


def told(key: str, build: Callable[[Mapping[str, Any]], Any], results: Mapping[str, Any], described: str) -> Any:
    """What `build` makes of results, all of it; where their part `key` is not as the module `described` says, an error
    that names it."""
    try:
        made = build(results)
        return made if isinstance(made, Markup) else list(made)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ReportError(
            f"the results' part '{key}' is not as a report needs it ({type(error).__name__}: {error}); "
            f"{described} describes it"
        ) from error


def paragraph(*parts: object, quiet: bool = False) -> Markup:
    """Text, with markup such as `strong` where wanted. `quiet`: smaller, for remarks."""
    return tag("p", *parts, class_="quiet" if quiet else None)


def heading(title: str, level: int = 2) -> Markup:
    """A heading of level 2 to 4; those of level 2 are listed at the top of the page."""
    return tag(f"h{level}", title, id=_anchor(title) if level == 2 else None)


def table(
    rows: Iterable[Sequence[object]], columns: Sequence[object], caption: object, highlight: Collection[int] = ()
) -> Markup:
    """Rows of cells, the first of each naming its row. `highlight`: the rows to bring out, counted from 0."""
    cells = [[escape(cell if isinstance(cell, Markup) else number(cell)) for cell in row] for row in rows]
    shown = [[re.sub(r"<[^>]*>", "", cell) for cell in row] for row in cells]
    right = [
        bool(shown) and all(_NUMERIC.fullmatch(row[n]) for row in shown) and _BAR not in cells[0][n]
        for n in range(len(columns))
    ]
    side = ["n" if r else None for r in right]
    head = join(*(tag("th", c, scope="col", class_=side[n]) for n, c in enumerate(columns)))
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row", class_=side[0]),
            *(tag("td", cell, class_=side[n]) for n, cell in enumerate(row) if n),
            class_="best" if place in highlight else None,
        )
        for place, row in enumerate(cells)
    ]
    whole = tag("table", tag("caption", tag("span", caption)), tag("thead", tag("tr", head)), tag("tbody", *body))
    return tag("div", whole, class_="scroll", tabindex=0, role="group", aria_label=re.sub(r"<[^>]*>", "", str(caption)))


def figure(svg: Markup, caption: object, title: object = "") -> Markup:
    """A picture on a card, with a caption that says what to see in it."""
    inline = Markup(svg.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1))
    above = tag("div", title, class_="title") if title else ""
    return tag("figure", above, tag("div", inline, class_="scroll"), tag("figcaption", caption))


def figures(*pictures: Markup) -> Markup:
    """Figures side by side where there is room."""
    return tag("div", *pictures, class_="figures")


def details(summary: object, *blocks: Markup) -> Markup:
    """Blocks that unfold on request."""
    return tag("details", tag("summary", summary), *blocks)


def facts(pairs: Mapping[str, object], big: bool = False) -> Markup:
    """Names and values. `big`: the few numbers that matter most."""
    body = [
        tag("div", tag("dt", key), tag("dd", x if isinstance(x, Markup) else number(x))) for key, x in pairs.items()
    ]
    return tag("dl", *body, class_="big" if big else "facts")


def samples(items: Iterable[object]) -> Markup:
    """Texts as they are, one below the other."""
    return tag("ul", *(tag("li", item) for item in items), class_="samples")


def listing(text: str) -> Markup:
    """Text whose spaces and lines count: a command, a table made by a program."""
    return tag("pre", tag("code", text), tabindex=0)


def share(value: float) -> Markup:
    """A share of one as a small bar with its number."""
    return tag("span", percent(value, 0), class_=_BAR, style=f"--share:{100 * min(max(value, 0), 1):.1f}%")


class Page:
    """A title, a first paragraph that says what was done and what came out, and blocks."""

    def __init__(self, title: str, lead: object, *blocks: Markup) -> None:
        self.title, self.lead, self.blocks = title, lead, list(blocks)

    def add(self, *blocks: Markup) -> None:
        self.blocks.extend(blocks)

    def html(self) -> str:
        """The whole document."""
        body = _distinct(join(*self.blocks))
        titles = re.findall(r'<h2 id="([^"]*)">(.*?)</h2>', body)
        links = [tag("a", Markup(name), href=f"#{anchor}") for anchor, name in titles]
        contents = tag("nav", *links, aria_label="Contents") if len(links) > 2 else Markup()
        css = Markup(variables() + "\n" + files("regard.report").joinpath("page.css").read_text("utf-8"))
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
        """Writes the page; an earlier file at that place stays whole until the new one is complete."""
        path = Path(path)
        text = self.html().encode()
        staged = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with staged.open("xb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            staged.replace(path)
        except OSError as error:
            reason = error.strerror or error
            raise ReportError(f"{path} cannot be written ({reason}); choose another place for the report") from error
        finally:
            # Where even the folder cannot be entered there is nothing to remove, and its error has been told.
            if os.path.lexists(staged):
                staged.unlink()
        return path


def _distinct(body: Markup) -> Markup:
    """The same with figures that are alike given names of their own: a name may stand only once on a page."""
    start, *drawings = body.split("<svg ")
    seen: Counter[str] = Counter()
    for n, drawing in enumerate(drawings):
        named = re.search(r' id="(f[0-9a-f]{10})-', drawing)
        if named:
            seen[named[1]] += 1
            drawings[n] = drawing.replace(named[1], f"{named[1]}n{seen[named[1]]}")
    return Markup("<svg ".join([start, *drawings]))


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()).strip("-") or "section"
