"""`regard eject`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.models import OWN_HELP
from regard.cli.show import console
from regard.hub.opening import load_regard_model
from regard.models.eject import eject as write
from regard.models.eject import example_text


def eject(
    model: Annotated[str, typer.Argument(help=OWN_HELP)],
    out: Annotated[Path, typer.Option(help="The new folder to write model.py, its weights and tokenizer into.")],
    download: Annotated[bool, typer.Option("--download", help="Download a model by its Hugging Face name.")] = False,
) -> None:
    """Write a model as one readable file of plain PyTorch, which needs nothing of regard.

    The file loads the weights beside it and computes what regard computes, with any of regard's mechanisms.
    """
    loaded = load_regard_model(model, "cpu", download=download)
    path = write(loaded, out, Path(model).name or model)
    lines = len(path.read_text("utf-8").splitlines())
    call = shlex.join(["python", str(path), example_text(loaded)])
    console().print(f"{path}: {lines} lines, without regard. Try: {call}", soft_wrap=True)
