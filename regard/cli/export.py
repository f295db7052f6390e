"""`regard export`."""

from __future__ import annotations

from typing import Annotated

import typer

from regard import hub
from regard.cli.models import OWN_HELP
from regard.cli.show import console, print_json
from regard.hub.opening import load_regard_model


def export(
    model: Annotated[str, typer.Argument(help=OWN_HELP)],
    to: Annotated[str, typer.Option("--to", help="The folder to write, which must be new or empty.")],
    download: Annotated[bool, typer.Option("--download", help="Download a model by its Hugging Face name.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Write a model as a folder that transformers loads, with the same outputs; or say which of its parts transformers
    does not have."""
    exported = hub.export(load_regard_model(model, download=download), to)
    if json:
        notes = {"files": exported.files, "left_out": list(exported.notes)}
        print_json({"folder": to, "class": exported.architecture, "loads_with": exported.loads_with, **notes})
        return
    out = console()
    loader = f"transformers.{exported.loads_with}.from_pretrained"
    out.print(f"{to}: a {exported.architecture}, for {loader}", soft_wrap=True)
    for name, size in exported.files.items():
        out.print(f"  {name:<24}{_format_size(size):>10}")
    for note in exported.notes:
        out.print(f"left out: {note}", soft_wrap=True)


def _format_size(size: int) -> str:
    """Formats the size of a file in B, kB or MB, with at least two digits."""
    if size < 10_000:
        return f"{size:,} B"
    if size < 1e7:
        return f"{size / 1e3:,.0f} kB"
    return f"{size / 1e6:,.0f} MB"
