"""`regard export`."""

from __future__ import annotations

from typing import Annotated

import typer

from regard import hub
from regard.cli.show import console, print_json
from regard.hub.opening import load_regard_model


def export(
    model: Annotated[str, typer.Argument(help="A run, a model folder, or a Hugging Face folder or name.")],
    to: Annotated[str, typer.Option("--to", help="The folder to write: one that is not there yet, or empty.")],
    download: Annotated[bool, typer.Option("--download", help="Fetch a model by its name on the hub.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Write a model as transformers' AutoModel and AutoTokenizer load it, with the same numbers; or say what of it
    transformers has no equivalent of."""
    done = hub.export(load_regard_model(model, download=download), to)
    if json:
        notes = {"files": done.files, "left_out": list(done.notes)}
        print_json({"folder": to, "class": done.architecture, "loads_with": done.loads_with, **notes})
        return
    out = console()
    out.print(f"{to}: a {done.architecture}, for transformers.{done.loads_with}.from_pretrained", soft_wrap=True)
    for name, size in done.files.items():
        out.print(f"  {name:<24}{_shown(size):>10}")
    for note in done.notes:
        out.print(f"left out: {note}", soft_wrap=True)


def _shown(size: int) -> str:
    return f"{size:,} B" if size < 10_000 else f"{size / 1e3:,.0f} kB" if size < 1e7 else f"{size / 1e6:,.0f} MB"
