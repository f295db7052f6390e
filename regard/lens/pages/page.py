"""A trace as one self-contained HTML file, which loads nothing else.

The header, the overviews and the lens script come first and the other blocks after them, so that the grid of heads is
shown while the rest of the file is still loading. The Content-Security-Policy allows one script and one style sheet, by
their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path

from regard.lens.trace.format import Encoded, encode
from regard.lens.trace.trace import Trace
from regard.storage import atomic_write

_START = 'const app=regardLens.mount(document.getElementById("lens"),regardLens.embedded(document),{address:true});'
# Style of the page around the lens.
PAGE_CSS = (
    "html{background:#f4f5f7}body{margin:0}#lens{min-height:100vh}"
    "@media(prefers-color-scheme:dark){html{background:#12151a}}"
)


def page(encoded: Encoded, title: str, opened: Mapping[str, str | int] | None = None) -> Iterator[str]:
    """Yields the HTML document in parts, because the page of a long text has hundreds of megabytes.

    `opened` is the part of the page's state that says what is shown first, such as view, attention and head; by default
    all heads are shown.
    """
    script = _static("lens.js") + _START
    if opened:
        script += f"app.store.set({json.dumps(dict(opened))});"
    style = PAGE_CSS + _static("lens.css")
    header, overviews, *blocks = encoded.elements()
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(script, style)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<div id="lens" class="lens" data-theme="auto"></div>\n'
        "<noscript>The lens draws with JavaScript; it loads nothing and sends nothing.</noscript>\n"
    )
    yield header
    yield overviews
    yield f"<script>{script}</script>\n"
    yield from blocks
    yield "</body>\n</html>\n"


def policy(script: str, style: str) -> str:
    """Returns the Content-Security-Policy: only this script, this style sheet and data: images are allowed."""
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )


def write_page(trace: Trace | Encoded, path: str | Path, title: str | None = None) -> int:
    """Writes the page of a trace, and returns its size in bytes.

    An earlier file is replaced only once the new one is complete.
    """
    encoded = encode(trace) if isinstance(trace, Trace) else trace
    names = dict.fromkeys(card["name"] for card in encoded.header["models"])
    size = 0
    with atomic_write(path) as file:
        for part in page(encoded, title or f"{', '.join(names)} · regard"):
            size += file.write(part.encode())
    return size


def _static(name: str) -> str:
    return files("regard.lens").joinpath("static", name).read_text("utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
