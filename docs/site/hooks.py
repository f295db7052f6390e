"""What mkdocs does besides: notebooks become pages, formulas MathML, links of the repository links of the site, and the
tags of commands a line above them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from formulas import drawn, mathml
from links import PAGES, ROOT, outside, rewritten
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebook import in_order, markdown, title

_COMMANDS = re.compile(r"^```console (run|gpu|shown: (?P<why>.+))$", re.MULTILINE)
_TWINS = re.compile(r'(<img [^>]*src="[^"]*?)(gallery/[\w-]+\.png)("[^>]*>)')


def notebooks() -> list[Path]:
    return in_order(ROOT / "examples")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lists the notebooks behind the page about the course, and the pages from the root at the end of the guide."""
    sections: dict[str, Any] = {name: entries for one in config.nav for name, entries in one.items()}
    rooted = [{"Contributing": PAGES["CONTRIBUTING.md"]}, {"Changes": PAGES["CHANGELOG.md"]}]
    sections["Guide"] += rooted
    sections["Course"] += [{title(path): f"course/{path.stem}.md"} for path in notebooks()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the notebooks, the pages that live in the repository's root, and every other file that a page links to."""
    linked: set[str] = set()
    for file in files.documentation_pages():
        linked |= outside(file.content_string, f"docs/{file.src_uri}")
    for path in notebooks():
        source, page = f"examples/{path.name}", f"course/{path.stem}.md"
        text = markdown(path)
        linked |= outside(text, source)
        files.append(File.generated(config, page, content=rewritten(text, source, page)))
    for name, page in PAGES.items():
        if files.get_file_from_path(page) is None:
            text = (ROOT / name).read_text(encoding="utf-8")
            linked |= outside(text, name)
            files.append(File.generated(config, page, content=rewritten(text, name, page)))
    for path in sorted(linked):
        files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links of a page of docs/ that lead out of it, and the tags of commands."""
    if page.file.generated_by is None:
        text = rewritten(text, f"docs/{page.file.src_uri}", page.file.src_uri)
    return _COMMANDS.sub(_tagged, text)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas, those in headings also where the headings are listed."""
    listed = list(page.toc)
    while listed:
        entry = listed.pop()
        entry.title = drawn(entry.title, page.file.src_uri)
        listed += entry.children
    return _TWINS.sub(_both, mathml(html, page.file.src_uri))


def _both(found: re.Match[str]) -> str:
    """A picture of the gallery in light, and its dark twin on a dark page."""
    light, before, name, after = found[0], *found.groups()
    return f"{light.replace(name, name + '#only-light')}{before}{name[:-4]}-dark.png#only-dark{after}"


def _tagged(found: re.Match[str]) -> str:
    above = {"run": "", "gpu": ' title="needs a GPU"'}.get(found[1], f' title="{found["why"]}"')
    return f"```bash{above}"
