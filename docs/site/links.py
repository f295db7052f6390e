"""Links of Markdown files, which hold in the repository, as links of the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_FENCE = re.compile(r"^(?P<fence>`{3,}).*?^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def place(path: str) -> str:
    """Where a file of the repository is in the site: a page, a notebook's page, or the file itself."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith(".ipynb"):
        return f"course/{posixpath.basename(path)[:-6]}.md"
    return PAGES.get(path, f"files/{path}")


def outside(markdown: str, source: str) -> set[str]:
    """The files outside docs/ that a page links to and that are no pages themselves."""
    targets = {_target(found[2], source)[0] for found in _LINK.finditer(_FENCE.sub("", markdown))}
    return {path for path in targets if path and place(path).startswith("files/") and (ROOT / path).is_file()}


def rewritten(markdown: str, source: str, page: str) -> str:
    """The Markdown of `source`, a path in the repository, as it has to be on `page` of the site."""

    def changed(found: re.Match[str]) -> str:
        path, anchor = _target(found[2], source)
        if not path:
            return found[0]
        return f"{found[1]}{posixpath.relpath(place(path), posixpath.dirname(page))}{anchor}{found[3]}"

    return apart_from_code(markdown, lambda text: _LINK.sub(changed, text))


def apart_from_code(markdown: str, change: Callable[[str], str]) -> str:
    """The Markdown with everything but its code blocks changed."""
    parts, end = [], 0
    for found in _FENCE.finditer(markdown):
        parts += [change(markdown[end : found.start()]), found[0]]
        end = found.end()
    return "".join([*parts, change(markdown[end:])])


def _target(link: str, source: str) -> tuple[str, str]:
    """The file that a link means, as a path in the repository, and its anchor; no file where it is a web address."""
    path, mark, anchor = link.partition("#")
    if not path or re.match(r"[a-z]+:", path):
        return "", mark + anchor
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path)), mark + anchor
