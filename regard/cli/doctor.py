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
    "hf": "Hugging Face models",
    "serve": "regard serve",
    "notebook": "widgets in notebooks",
    "models": "a small pretrained model",
}
CHECKED_LAWS = ("weights", "recurrent", "kernel")
SIGNS = {True: "✓", None: "–", False: "✗"}


class HealthCheck(NamedTuple):
    """One check: what was checked, what was found, and what to do about it.

    `fine` is None if something optional is missing.
    """

    what: str
    fine: bool | None
    found: str
    do: str = ""


def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """Check what works on this machine: versions, devices, extras, and whether each mechanism keeps its laws."""
    checks = []
    with console(stderr=True).status("looking") as status:
        # `_run_checks` is a generator, so the line shows the progress.
        for check in _run_checks():
            status.update(f"looking: {check.what}")
            checks.append(check)
    if json:
        print_json([check._asdict() for check in checks])
    else:
        made = table("", "what", "found", "to do")
        for check in checks:
            made.add_row(SIGNS[check.fine], check.what, check.found, check.do)
        console().print(made)
    if any(check.fine is False for check in checks):
        raise typer.Exit(1)


def _run_checks() -> Iterator[HealthCheck]:
    """Yields all checks, the quick ones first."""
    yield HealthCheck("regard", True, f"{__version__}, Python {platform.python_version()}, {platform.system()}")
    threads = torch.get_num_threads()
    yield HealthCheck("PyTorch", True, f"{torch.__version__}, {threads} of {os.cpu_count() or 1} cores")
    yield from _check_gpus()
    yield from _check_extras()
    yield _check_writable(Path.cwd())
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.append("cuda")
    for device in devices:
        for name in known():
            yield _check_laws(name, device)


def _check_gpus() -> Iterator[HealthCheck]:
    """Yields each GPU with its memory, and Triton, which their kernels need; or why there is none."""
    if not torch.cuda.is_available():
        why = "is without CUDA"
        if torch.version.cuda is not None:
            why = "has CUDA, but sees no GPU: is a driver loaded?"
        yield HealthCheck("GPU", None, f"none; this PyTorch {why}")
        return
    for n in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(n)
        found = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}"
        yield HealthCheck(f"GPU {n}", True, found)
    version = _version("triton")
    if version:
        yield HealthCheck("triton", True, version)
    else:
        do = 'pip install "regard[triton]": linear attention and decoding run their references'
        yield HealthCheck("triton", None, "absent", do)


def _check_extras() -> Iterator[HealthCheck]:
    """Yields a check of each optional extra, with the packages that are missing."""
    packages: dict[str, list[str]] = {}
    try:
        required = metadata.requires("regard") or []
    except metadata.PackageNotFoundError:
        yield HealthCheck("extras", None, "unknown: regard runs from its sources", "pip install -e .")
        return
    for text in required:
        # A requirement reads: starlette>=1.0; extra == "serve"
        package = re.match(r"[\w.-]+", text)
        extra = re.search(r"extra == ['\"](\w+)['\"]", text)
        if package and extra and extra[1] in EXTRAS:
            packages.setdefault(extra[1], []).append(package[0])
    for name, what in EXTRAS.items():
        yield _check_extra(name, what, packages.get(name, []))


def _check_extra(name: str, what: str, packages: list[str]) -> HealthCheck:
    """Returns the check of an extra: the versions of its packages, and how to install missing ones."""
    versions = {package: _version(package) for package in packages}
    present = ", ".join(f"{package} {version}" for package, version in versions.items() if version is not None)
    lacking = ", ".join(package for package, version in versions.items() if version is None)
    if not lacking:
        return HealthCheck(what, True, present)
    found = f"without {lacking}"
    if present:
        found = f"{present}; {found}"
    return HealthCheck(what, None, found, f'pip install "regard[{name}]"')


def _version(package: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _check_writable(folder: Path) -> HealthCheck:
    """Returns the check that runs can be written in the current folder."""
    # By writing a file, as permissions say nothing about full or read-only file systems.
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            return HealthCheck("runs", True, f"go to {folder / 'runs'}")
    except OSError as error:
        return HealthCheck("runs", False, f"{folder}: {error.strerror}", "start regard elsewhere, or give --out")


def _check_laws(name: str, device: str) -> HealthCheck:
    """Returns the check, on one small case, that a mechanism's three faces and its kernels agree."""
    what = f"{name} on {device}"
    worst = 0.0
    # All sizes differ, so that exchanged axes are noticed.
    for law in CHECKED_LAWS:
        found = ask(LAWS[law], subject(name), Case(T=11, K=5, V=7, dtype="float32", device=device))
        do = f"regard check {name} --device {device}"
        if isinstance(found, Finding):
            if found.broken:
                return HealthCheck(what, False, f"{law}: {found.what}, error {found.error:.1e}", do)
            worst = max(worst, found.error)
        elif found.status == "could not be asked":
            return HealthCheck(what, False, f"{law}: {found.reason}", do)
    return HealthCheck(what, True, f"its faces agree within {worst:.0e}")
