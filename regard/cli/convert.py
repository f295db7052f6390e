"""`regard convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.plugins import again
from regard.cli.progress import experiment_progress
from regard.cli.show import console, is_given, print_json, print_outcome
from regard.convert.run import convert as run
from regard.convert.run import resume as go_on
from regard.convert.settings import ConvertConfig
from regard.errors import OptionError
from regard.hub.opening import load_regard_model
from regard.models.locate import model_folder
from regard.train import Interrupted
from regard.train.recipe import parse
from regard.train.run import timestamped_path


def convert(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A run, a model folder, a Hugging Face folder or name.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes, e.g. train.lr=1e-4, distil.train.lr=1e-3, data.mix=1."),
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="The new number of key/value heads, pooled from the old.")
    ] = None,
    mechanism: Annotated[str | None, typer.Option(help="The new mechanism, e.g. performer.")] = None,
    layers: Annotated[str | None, typer.Option(help="Convert only these layers, e.g. 2,3; default: all.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option of the mechanism, e.g. features=256; repeatable."),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text to train on; default: that of the run.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of distillation.")] = ConvertConfig.steps,
    uptrain: Annotated[
        float | None,
        typer.Option(help="Training steps afterwards; below 1, a share of the run's own steps; default: 0.1."),
    ] = None,
    control: Annotated[
        bool,
        typer.Option("--control/--no-control", help="Also train a control without distillation, for as many steps."),
    ] = True,
    out: Annotated[Path | None, typer.Option(help="The folder to write; default: runs/convert-<time>.")] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Continue a conversion that was stopped.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of batches and dropout.")] = 0,
    device: Annotated[str | None, typer.Option(help="Where to run, e.g. cuda; default: cpu.")] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Download a model if it is not on this machine.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Convert a trained model to fewer key/value heads or another mechanism, then train it to recover its quality."""
    progress = experiment_progress()
    folder = resume or out or timestamped_path("convert")
    try:
        if resume is not None:
            others = (model, overrides, kv_heads, mechanism, layers, option, text, out, uptrain)
            if any(map(is_given, others)):
                raise OptionError(
                    "--resume continues with the options it was started with: leave out all others but --device"
                )
            results = go_on(resume, device, progress)
        else:
            if model is None:
                raise OptionError("expected a model, e.g. regard convert runs/lm-… --kv-heads 1")
            config = ConvertConfig(
                kv_heads=kv_heads,
                mechanism=mechanism,
                only=_parse_layers(layers),
                options=parse(option or (), sections=False),
                text=str(text or ""),
                steps=steps,
                uptrain=uptrain,
                control=control,
                seed=seed,
            )
            where = device or "cpu"
            original = load_regard_model(model, where, download=download)
            results = run(original, model, folder, config, overrides or (), where, progress)
    # Ctrl-C during a training is Interrupted; during surgery or measuring it is Python's own.
    except (Interrupted, KeyboardInterrupt):
        command = again(f"regard convert --resume {folder}")
        raise Interrupted(f"stopped; what was done is saved. Go on with: {command}") from None
    if json:
        print_json(results)
        return
    print_outcome(results)
    console().print(f"\nModel: {model_folder(folder).resolve()}", soft_wrap=True)
    console().print(f"Report: {(folder / 'report.html').resolve()}", soft_wrap=True)


def _parse_layers(text: str | None) -> tuple[int, ...] | None:
    """Returns the numbers of layers that --layers lists; None where it was not given."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise OptionError(f"--layers {text}: expected numbers of layers, counted from 0, such as 2,3")
    return tuple(map(int, parts))
