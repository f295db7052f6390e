"""`regard serve`."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from regard.cli.models import HELP
from regard.cli.show import console
from regard.lens.heads.examine import default_labels
from regard.lens.models import open_recordable
from regard.lens.pages.server import EXAMPLE, SharedModel, require_server_packages
from regard.lens.pages.server import serve as run
from regard.lens.small_model import is_shipped, shipped, shipped_text


def serve(
    model: Annotated[str | None, typer.Argument(help=f"{HELP} Default: small.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: any free one.")] = 8080,
    labels: Annotated[
        bool, typer.Option("--labels/--no-labels", help="Label what each head does, from a dozen short texts.")
    ] = True,
    device: Annotated[str | None, typer.Option(help="Where to run, e.g. cuda.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of random weights.")] = 0,
    download: Annotated[
        bool, typer.Option("--download", help="Download a model if it is not on this machine.")
    ] = False,
) -> None:
    """Show a model on a local page: type a text and see its attention, or let the model continue the text."""
    require_server_packages()
    with console(stderr=True).status("loading"):
        subject = open_recordable(model or shipped(), device or "cpu", seed=seed, download=download)
        head_labels = None
        if labels:
            head_labels = default_labels(subject, seed)
    example = EXAMPLE
    if not model or is_shipped(model):
        example = shipped_text()
    server = SharedModel(subject, head_labels, example)
    # Ctrl-C is the usual way to end it.
    with suppress(KeyboardInterrupt):
        run(server, port, lambda address: _print_address(address, subject.card.name))


def _print_address(address: str, name: str) -> None:
    """Prints the address of the page; called once the server listens."""
    out = console()
    out.print(f"{name} is at {address}", soft_wrap=True)
    out.print("Only this machine can open it, and only with that address. Ctrl-C ends it.", soft_wrap=True)
