"""`regard plot`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.groups import Group
from regard.cli.models import HELP
from regard.cli.show import console
from regard.errors import OptionError
from regard.lens.models import open_recordable
from regard.report import paper

plot = typer.Typer(
    cls=Group, help="Draw figures for papers, as PNG, SVG or PDF.", no_args_is_help=True, rich_markup_mode=None
)

Out = Annotated[Path, typer.Option("--out", "-o", help="The file to write: .png, .svg or .pdf.")]
Inches = Annotated[str | None, typer.Option(help="Width and height in inches, e.g. 7x4.")]


@plot.command()
def masks(
    out: Out = Path("masks.pdf"),
    size: Inches = None,
    length: Annotated[int, typer.Option(help="Tokens.")] = 12,
) -> None:
    """Draw each kind of mask, in self- and cross-attention, and why keys are hidden."""
    paper.plot_masks(out, _parse_inches(size) or (8.0, 4.2), length)
    _print_written(out)


@plot.command()
def positions(
    out: Out = Path("positions.pdf"),
    size: Inches = None,
    length: Annotated[int, typer.Option(help="Tokens.")] = 64,
    width: Annotated[int, typer.Option(help="Dimensions of a position.")] = 32,
) -> None:
    """Draw sinusoidal positions and their shift matrix, rotary positions, and ALiBi."""
    paper.plot_positions(out, _parse_inches(size) or (7.0, 4.6), length, width)
    _print_written(out)


@plot.command()
def weights(
    model: Annotated[str, typer.Argument(help=HELP)],
    text: Annotated[str, typer.Argument(help="A text, or the file of an image, for the model to read.")],
    out: Out = Path("weights.pdf"),
    size: Inches = None,
    layer: Annotated[list[int] | None, typer.Option(help="Draw only this layer; repeatable.")] = None,
    head: Annotated[list[int] | None, typer.Option(help="Draw only this head; repeatable.")] = None,
    device: Annotated[str | None, typer.Option(help="Where to run, e.g. cuda.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of random weights.")] = 0,
    download: Annotated[
        bool, typer.Option("--download", help="Download a model if it is not on this machine.")
    ] = False,
) -> None:
    """Draw the attention weights of a model's heads over a text: all of them, or one with its tokens."""
    inches = _parse_inches(size)
    recording = open_recordable(model, device or "cpu", seed=seed, download=download).record_one(text)
    paper.plot_weights(recording, out, inches, layer or (), head or ())
    _print_written(out)


def _parse_inches(size: str | None) -> tuple[float, float] | None:
    """Returns width and height; None where no size was given."""
    if size is None:
        return None
    match = re.fullmatch(r"(\d+\.?\d*)\s*[x×,]\s*(\d+\.?\d*)", size.strip())
    if match is None:
        raise OptionError(f"--size {size!r}: expected width and height in inches, such as 7x4")
    return float(match[1]), float(match[2])


def _print_written(path: Path) -> None:
    """Prints which file was written, and its size."""
    console().print(f"{path}: {path.stat().st_size:,} bytes", soft_wrap=True)
