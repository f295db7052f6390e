"""The site and the printed course: no warning, no formula left undrawn, and nothing asked of another host."""

# ruff: noqa: E402  (what is tested lies beside the pages, outside the package)

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import regard

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "site"))
pytest.importorskip("latex2mathml")
pytest.importorskip("mkdocs")
pytest.importorskip("playwright")

import course
import formulas
import gallery
import hooks
import links
import notebook

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
PUBLISHED = sorted((ROOT / "docs").rglob("*.md"))


def marked(latex, tag="span"):
    opening, closing = ("\\(", "\\)") if tag == "span" else ("\\[", "\\]")
    return f'<{tag} class="arithmatex">{opening}{latex}{closing}</{tag}>'


def test_a_formula_becomes_mathml_in_its_place():
    html = formulas.mathml(f"<p>with {marked('a &lt; b')} and</p>{marked('x^2', 'div')}", "here")
    assert html.count("<math") == 2 and 'display="inline"' in html and 'display="block"' in html
    assert "<mo>&lt;</mo>" in html or "<mo>&#x0003C;</mo>" in html
    assert "\\" not in html and "arithmatex" not in html
    assert formulas.drawn("by \\(\\sqrt{K}\\)", "here").startswith("by <math")


def test_a_formula_that_cannot_be_drawn_is_named():
    with pytest.raises(formulas.FormulaError, match=r"page\.md: the formula .*sofmax"):
        formulas.mathml(marked("\\sofmax x"), "page.md")


@pytest.mark.parametrize(
    ("link", "source", "page", "becomes"),
    [
        ("laws.md", "docs/models.md", "models.md", "laws.md"),
        ("../CONTRIBUTING.md#a-kernel", "docs/laws.md", "laws.md", "contributing.md#a-kernel"),
        ("../../README.md", "docs/howto/gpu.md", "howto/gpu.md", "../index.md"),
        ("../examples/keys.csv", "docs/design.md", "design.md", "files/examples/keys.csv"),
        ("2-masks.ipynb", "examples/1-hand.ipynb", "course/1-hand.md", "2-masks.md"),
        ("../docs/lab.md#scale", "examples/1-hand.ipynb", "course/1-hand.md", "../lab.md#scale"),
        ("docs/lab.md", "CONTRIBUTING.md", "contributing.md", "lab.md"),
        ("https://example.org/a.md", "docs/lab.md", "lab.md", "https://example.org/a.md"),
        ("#here", "docs/lab.md", "lab.md", "#here"),
    ],
)
def test_links_of_the_repository_are_links_of_the_site(link, source, page, becomes):
    assert links.rewritten(f"see [this]({link}).", source, page) == f"see [this]({becomes})."


def test_links_in_code_stay():
    code = "```python\nx[a](../b.md)\n```"
    assert links.rewritten(f"[a](../README.md)\n{code}\n", "docs/x.md", "x.md") == f"[a](index.md)\n{code}\n"


def test_the_tag_of_a_command_is_told_where_it_matters():
    shown = hooks._COMMANDS.sub(hooks._tagged, "```console run\na\n```\n```console shown: takes minutes\nb\n```\n")
    assert shown == '```bash\na\n```\n```bash title="takes minutes"\nb\n```\n'


def written(path, *cells):
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": list(cells)}))
    return path


def code(source, *outputs, tags=()):
    return {"cell_type": "code", "source": source, "metadata": {"tags": list(tags)}, "outputs": list(outputs)}


def text(source):
    return {"cell_type": "markdown", "source": source, "metadata": {}}


def html(given):
    return {"output_type": "display_data", "data": {"text/html": given}, "metadata": {}}


def test_a_notebook_is_text_code_and_what_it_printed(tmp_path):
    printed = {"output_type": "stream", "name": "stdout", "text": ["\x1b[1m✗ broken\x1b[0m\n", "```\n"]}
    drawn = {"output_type": "display_data", "data": {"image/png": "AAAA\n", "text/plain": "<Figure>"}, "metadata": {}}
    exercise = code("# exercise: mine\ndef mine(): ...", tags=["exercise"])
    path = written(tmp_path / "1.ipynb", text("# One\nwith $x$"), code("f()", printed, drawn), exercise)
    made = notebook.markdown(path)
    assert notebook.title(path) == "One"
    assert "````{ .text .output }\n✗ broken\n```\n````" in made, "a fence longer than what was printed, no colours"
    assert 'src="data:image/png;base64,AAAA"' in made and "<Figure>" not in made
    assert '```python title="Exercise"\n# exercise: mine' in made


@pytest.mark.parametrize(
    "given", ["<script>1</script>", '<b onclick="x()">', "<iframe src=a>", '<link href="x">', '<a href="javascript:1">']
)
def test_a_notebook_that_would_run_something_is_refused(given, tmp_path):
    with pytest.raises(notebook.NotebookError, match="script or loads"):
        notebook.markdown(written(tmp_path / "1.ipynb", text("# One"), code("f()", html(given))))
    with pytest.raises(notebook.NotebookError, match="run or load"):
        course.page(written(tmp_path / "2.ipynb", text(f"# Two\n\n{given}\n")))


def test_a_notebook_that_failed_is_refused(tmp_path):
    failed = {"output_type": "error", "ename": "NameError", "evalue": "no", "traceback": []}
    with pytest.raises(notebook.NotebookError, match="NameError: no"):
        notebook.markdown(written(tmp_path / "1.ipynb", text("# One"), code("f()", failed)))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_page_of_the_course_stands_alone(path):
    page = course.page(path)
    outside = re.findall(r'(?:src|href)="([^"]*)"', re.sub(r"<code.*?</code>", "", page, flags=re.S))
    assert all(re.match(r"data:image/(png|svg\+xml);base64,|#|[\w-]+\.html$", one) for one in outside), outside
    assert "@import" not in page and "url(" not in page and course.POLICY in page
    assert not re.search(r"\\[(\[]", re.sub(r"<(code|pre).*?</\1>", "", page, flags=re.S)), "a formula was not drawn"


@pytest.mark.browser
def test_the_course_is_printed(tmp_path):
    page = tmp_path / "1-one.html"
    path = written(tmp_path / "1-one.ipynb", text("# One\n\n$$x^2$$\n"), code("1 + 1"))
    page.write_text(course.page(path))
    course.print_pages([page])
    printed = page.with_suffix(".pdf").read_bytes()
    assert printed.startswith(b"%PDF-") and re.search(rb"/Type ?/Page\b", printed)


def test_everything_public_is_on_a_page_of_the_api():
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    shown = set(re.findall(r"^::: regard\.([\w.]+)", pages, re.M)) | set(re.findall(r"heading: regard\.(\w+)", pages))
    assert set(regard.__all__) - shown <= {"RegardError", "__version__"} and "errors" in shown


def test_the_gallery_is_complete():
    there = {path.name: path.stat().st_size for path in gallery.PICTURES.iterdir()}
    names = [name for name, *_ in gallery.listed()]
    assert sorted(there) == sorted(f"{name}{twin}.png" for name in names for twin in ("", "-dark"))
    assert max(there.values()) <= gallery.MOST
    page = gallery.PAGE.read_text()
    assert re.findall(r"\(images/gallery/([\w-]+)\.png\)", page) == names
    for _, file, _, commands in gallery.listed():
        assert any(f"--out {file.removesuffix('/report.html')}" in command for command in commands), file


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    made = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(made)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return made


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site):
    """In every page and style: what is fetched by itself is within the site."""
    for page in site.rglob("*.html"):
        read = page.read_text()
        loads = re.findall(r"<(?:script|img|link|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?([^\"'\s>]+)", read)
        assert loads and not [one for one in loads if re.match(r"(https?:)?//", one)], page
        assert not re.search(r"\\\(|\\\[(?!['\"\w])", re.sub(r"<(code|pre).*?</\1>", "", read, flags=re.S)), page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", sheet.read_text()), sheet
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in PUBLISHED}
    pages |= {Path("course") / f"{path.stem}.html" for path in NOTEBOOKS}
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.timeout(600)
def test_the_site_opens_from_a_disk_without_a_network(site, chromium):
    """Every page, with a browser that is told of each request; and the search finds."""
    asked, said = [], []
    tab = chromium.new_page()
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    for page in sorted(site.rglob("*.html")):
        if page.name != "404.html":  # its links are those of a server
            tab.goto(page.as_uri())
    tab.goto((site / "index.html").as_uri())
    tab.keyboard.press("/")
    tab.keyboard.type("straight-through")
    found = tab.locator(".md-search-result__item")
    found.first.wait_for(timeout=20_000)
    for word in ("GQA", "MQA", "KV cache", "FlashAttention", "RetNet", "MultiheadAttention"):
        tab.locator(".md-search__input").fill("")
        tab.locator(".md-search__input").press_sequentially(word)  # the search listens to keys
        found.filter(has_text=word.split()[0]).first.wait_for(timeout=20_000)
    tab.close()
    assert asked and not [url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))]
    assert not said
