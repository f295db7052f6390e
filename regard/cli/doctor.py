"""`regard doctor`."""

from __future__ import annotations

import os
import platform
import re
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer

from regard.cli.show import console, print_json, table
from regard.laws import LAWS, Case, Finding, ask, subject
from regard.mechanisms import mechanisms as known
from regard.version import __version__

EXTRAS = {
    "text": "BPE tokenizers, ROUGE",
    "hf": "Hugging Face models",
    "plot": "plots and reports",
    "lab": "design of queries",
    "serve": "regard serve",
    "notebook": "widgets in notebooks",
    "sweep": "searched sweeps",
    "models": "two small pretrained models",
}
ASKED = ("weights", "recurrent", "kernel")


class Line(NamedTuple):
    """`fine` is None where something is absent that one can do without."""

    what: str
    fine: bool | None
    found: str
    do: str = ""


def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """Say what works here and what does not: versions, devices, extras, and whether each mechanism keeps its laws."""
    lines = []
    with console(stderr=True).status("looking") as status:
        for line in _all():
            status.update(f"looking: {line.what}")
            lines.append(line)
    if json:
        print_json([line._asdict() for line in lines])
    else:
        made = table("", "what", "found", "to do")
        for line in lines:
            made.add_row({True: "✓", None: "–", False: "✗"}[line.fine], line.what, line.found, line.do)
        console().print(made)
    raise typer.Exit(1 if any(line.fine is False for line in lines) else 0)


def _all() -> Iterator[Line]:
    yield Line("regard", True, f"{__version__}, Python {platform.python_version()}, {platform.system()}")
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    yield Line("PyTorch", True, f"{torch.__version__}, {threads} of {cores} cores")
    yield from _devices()
    yield from _extras()
    yield _writable(Path.cwd())
    for device in ["cpu"] + (["cuda"] if torch.cuda.is_available() else []):
        for name in known():
            yield _lawful(name, device)


def _devices() -> Iterator[Line]:
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        why = "has CUDA, but sees no GPU: is a driver loaded?" if built else "is without CUDA"
        yield Line("GPU", None, f"none; this PyTorch {why}")
        return
    for n in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(n)
        yield Line(f"GPU {n}", True, f"{one.name}, {one.total_memory / 2**30:.0f} GiB, sm_{one.major}{one.minor}")
    version = _version("triton")
    do = "" if version else 'pip install "regard[triton]": linear attention and decoding run their references'
    yield Line("triton", True if version else None, version or "absent", do)


def _extras() -> Iterator[Line]:
    """Those that a user may want, each with the packages that it lacks."""
    wanted: dict[str, list[str]] = {}
    try:
        required = metadata.requires("regard") or []
    except metadata.PackageNotFoundError:
        yield Line("extras", None, "unknown: regard runs from its sources", "pip install -e .")
        return
    for text in required:
        package, named = re.match(r"[\w.-]+", text), re.search(r"extra == ['\"](\w+)['\"]", text)
        if package and named and named[1] in EXTRAS:
            wanted.setdefault(named[1], []).append(package[0])
    for extra, what in EXTRAS.items():
        versions = {name: _version(name) for name in wanted.get(extra, [])}
        lacking = [name for name, version in versions.items() if version is None]
        there = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
        found = "; ".join(filter(None, [there, f"without {', '.join(lacking)}" if lacking else ""]))
        yield Line(what, None if lacking else True, found, f'pip install "regard[{extra}]"' if lacking else "")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _writable(folder: Path) -> Line:
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            return Line("runs", True, f"go to {folder / 'runs'}")
    except OSError as error:
        return Line("runs", False, f"{folder}: {error.strerror}", "start regard elsewhere, or give --out")


def _lawful(name: str, device: str) -> Line:
    """Its three faces and its kernels, on one small case."""
    what, worst = f"{name} on {device}", 0.0
    for law in ASKED:
        found = ask(LAWS[law], subject(name), Case(T=11, K=5, V=7, dtype="float32", device=device))
        do = f"regard check {name} --device {device}"
        if isinstance(found, Finding):
            if found.broken:
                return Line(what, False, f"{law}: {found.what}, error {found.error:.1e}", do)
            worst = max(worst, found.error)
        elif found.status == "could not be asked":
            return Line(what, False, f"{law}: {found.reason}", do)
    return Line(what, True, f"its faces agree within {worst:.0e}")
