"""Writes each notebook of the course as one page without scripts, and as a PDF: build/course/N-….html and .pdf.

python docs/site/course.py [--no-pdf] [NOTEBOOK …]
"""

from __future__ import annotations

import argparse
import posixpath
import re
import shutil
from pathlib import Path

from formulas import mathml
from links import ROOT, apart_from_code
from markdown import Markdown
from notebook import ACTIVE, NotebookError, in_order, markdown, title
from playwright.sync_api import sync_playwright
from pygments.formatters import HtmlFormatter

from regard.report.page import POLICY
from regard.report.palette import css_variables

CHROMIUM = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
]  # fmt: skip
EXTENSIONS = ["admonition", "attr_list", "md_in_html", "tables", "pymdownx.superfences", "pymdownx.highlight"]
SETTINGS = {"pymdownx.arithmatex": {"generic": True}}


def page(path: Path) -> str:
    """The notebook as a whole document: pictures inside, formulas as MathML, nothing to load and nothing to run."""
    reader = Markdown(extensions=[*EXTENSIONS, "pymdownx.arithmatex"], extension_configs=SETTINGS)
    body = mathml(reader.convert(apart_from_code(markdown(path), _near)), path.name)
    if ACTIVE.search(re.sub(r"<code.*?</code>", "", body, flags=re.DOTALL)):
        raise NotebookError(f"{path}: its page would run or load something; take the HTML out of its text")
    light = HtmlFormatter(style="friendly").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    css = (Path(__file__).parent / "course.css").read_text(encoding="utf-8")
    style = f"{css_variables()}\n{light}\n@media screen and (prefers-color-scheme:dark){{{dark}}}\n{css}"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title(path)}</title>\n<style>{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _near(text: str) -> str:
    """Links between notebooks lead to their pages; those into the repository, which is not there, are plain text."""

    def changed(found: re.Match[str]) -> str:
        name, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        file = posixpath.basename(target.partition("#")[0])
        return f"[{name}]({file.removesuffix('.ipynb')}.html)" if file.endswith(".ipynb") else name

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", changed, text)


def browser_path() -> str:
    """Where chromium is, or a word about what needs it."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        raise SystemExit("chromium prints PDFs and takes pictures, and is not installed (--no-pdf does without)")
    return found


def print_pages(pages: list[Path]) -> None:
    """Each page beside itself as a PDF, by chromium."""
    looks = "font: 8px sans-serif; width: 100%; text-align: center; color: #57606b"
    foot = f'<div style="{looks}"><span class="pageNumber"></span></div>'
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=browser_path(), args=CHROMIUM)
        for path in pages:
            tab = browser.new_page()
            tab.goto(path.as_uri())
            margins = {"top": "16mm", "bottom": "16mm", "left": "17mm", "right": "17mm"}
            tab.pdf(
                path=path.with_suffix(".pdf"), format="A4", margin=margins, display_header_footer=True,
                header_template="<span></span>", footer_template=foot, outline=True, tagged=True,
            )  # fmt: skip
            tab.close()
        browser.close()


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    asked.add_argument("notebooks", nargs="*", type=Path, help="those of examples/ unless said")
    asked.add_argument("--out", type=Path, default=ROOT / "build" / "course", help="the folder to write")
    asked.add_argument("--no-pdf", action="store_true", help="pages only")
    given = asked.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    written = []
    for path in given.notebooks or in_order(ROOT / "examples"):
        written.append((given.out / f"{path.stem}.html").resolve())
        written[-1].write_text(page(path), encoding="utf-8")
    if not given.no_pdf:
        print_pages(written)
    for one in written:
        print(one if given.no_pdf else f"{one}  {one.with_suffix('.pdf').name}")


if __name__ == "__main__":
    main()
