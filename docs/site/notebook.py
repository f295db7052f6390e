"""A notebook that has been run, as Markdown: its text, its code, and what each cell printed and drew."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ACTIVE = re.compile(r"<(script|iframe|object|embed|link|meta)\b|\son\w+\s*=|javascript:", re.IGNORECASE)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class NotebookError(ValueError):
    """A notebook that cannot be a page."""


def read(path: Path) -> list[Mapping[str, Any]]:
    """The cells of a notebook in format 4."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    if notebook.get("nbformat") != 4:
        raise NotebookError(f"{path} has format {notebook.get('nbformat')}, expected 4")
    cells: list[Mapping[str, Any]] = notebook["cells"]
    return cells


def in_order(folder: Path) -> list[Path]:
    """Returns the notebooks of a folder in the order of the numbers that their names begin with."""
    return sorted(folder.glob("*.ipynb"), key=lambda path: int(path.name.partition("-")[0]))


def title(path: Path) -> str:
    """The first heading."""
    found = re.search(r"^# (.+)$", "\n".join(_text(c["source"]) for c in read(path)), re.MULTILINE)
    if found is None:
        raise NotebookError(f"{path} has no heading `# …`")
    return found[1].strip()


def markdown(path: Path) -> str:
    """The notebook as one Markdown text."""
    return "\n\n".join(part for cell in read(path) for part in _cell(cell, path)) + "\n"


def _cell(cell: Mapping[str, Any], path: Path) -> Iterator[str]:
    source, tags = _text(cell["source"]).rstrip(), cell["metadata"].get("tags", [])
    if cell["cell_type"] == "markdown":
        yield source
    elif cell["cell_type"] == "code" and source:
        yield _fence('python title="Exercise"' if "exercise" in tags else "python", source)
        if "lens-page" in tags:
            yield "*In the notebook the lens stands here, to click through; these pages run no scripts.*"
            return
        for output in cell["outputs"]:
            yield from _output(output, path)


def _output(output: Mapping[str, Any], path: Path) -> Iterator[str]:
    if output["output_type"] == "error":
        raise NotebookError(f"{path}: a cell ends with {output['ename']}: {output['evalue']}; run the notebook again")
    if output["output_type"] == "stream":
        yield _fence("{ .text .output }", COLOURS.sub("", _text(output["text"])).rstrip("\n"))
        return
    data = output["data"]
    alt = "What the cell above draws"
    if "image/png" in data:
        yield _picture("image/png", "".join(data["image/png"].split()), alt)
    elif "image/svg+xml" in data:
        yield _picture("image/svg+xml", base64.b64encode(_text(data["image/svg+xml"]).encode()).decode(), alt)
    elif "text/html" in data:
        html = _text(data["text/html"])
        if ACTIVE.search(html):
            raise NotebookError(f"{path}: a cell's HTML has a script or loads something; show a picture instead")
        yield '<div class="output">' + re.sub(r"\n\s*\n", "\n", html) + "</div>"
    elif "text/plain" in data:
        yield _fence("{ .text .output }", _text(data["text/plain"]))


def _picture(kind: str, data: str, alt: str) -> str:
    return f'<p class="output"><img alt="{alt}" src="data:{kind};base64,{data}"></p>'


def _fence(info: str, text: str) -> str:
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`{3,}", text)), default=0))
    return f"{ticks}{info}\n{text}\n{ticks}"


def _text(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)
