"""`regard check`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from regard.checking import DRAWS, Verdict, Verdicts, check_model, plugin
from regard.checking import check as run_laws
from regard.cli.models import HELP as MODEL
from regard.cli.show import console, print_json, table
from regard.errors import HubError, OptionError, UnknownNameError, did_you_mean
from regard.hub.opening import RANDOM, find_source, open_model
from regard.mechanisms import mechanisms
from regard.models import Model

_MARK = {"holds": ("✓", "green"), "broken": ("✗", "bold red"), "does not apply": ("–", "dim")}


def check(
    thing: Annotated[
        str | None,
        typer.Argument(help=f"A mechanism, or a model: {MODEL[0].lower()}{MODEL[1:]} None: all mechanisms."),
    ] = None,
    plugin_file: Annotated[
        str | None,
        typer.Option("--plugin", help="file.py[:name] with a function f(q, k, v, causal=True) or an nn.Module."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp64, fp32, bf16 or fp16; none: fp64 and fp32 in turn (Hugging Face: fp32).")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this law; may be repeated.")] = None,
    device: Annotated[str, typer.Option(help="Where to run, e.g. cuda.")] = "cpu",
    draws: Annotated[int, typer.Option(help="Cases a law.")] = DRAWS,
    seed: Annotated[int, typer.Option(help="Where the drawing of cases starts.")] = 0,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch a Hugging Face model that is not here yet.")
    ] = False,
    not_causal: Annotated[bool, typer.Option("--not-causal", help="The plugin never claims to be causal.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Put attention to the laws: holds, broken (with a small example and a reproducer), or does not apply."""
    if thing is not None and plugin_file is not None:
        raise OptionError(f"give a mechanism ('{thing}') or --plugin {plugin_file}, not both")
    subject = plugin(plugin_file, causal=not not_causal) if plugin_file is not None else thing
    model = None if thing is None or (thing in mechanisms() and not Path(thing).is_dir()) else _model(thing, download)
    with _progress() as progress:
        asked: dict[str, Any] = {"only": only or (), "dtype": dtype, "device": device, "draws": draws, "seed": seed}
        if model is not None:
            verdicts = check_model(model, progress=progress, source=_source(thing or "", model), **asked)
        else:
            verdicts = run_laws(subject, progress=progress, **asked)
    if json:
        print_json(verdicts.as_json())
    else:
        _print(verdicts)
    raise typer.Exit(0 if verdicts.ok else 1)


def _model(name: str, download: bool) -> Any:
    """The model of that name; a name that could be a mechanism's is said to be neither."""
    try:
        return open_model(name, download=download).model
    except HubError:
        if Path(name).is_dir() or name.startswith(RANDOM) or "/" in name or download:
            raise
        raise UnknownNameError(
            f"no mechanism is called '{name}'.{did_you_mean(name, mechanisms())} And no model: expected a folder, a "
            f"name that was downloaded before (or --download), or random:{name}"
        ) from None


def _source(name: str, model: Any) -> str:
    """The line of Python that makes the model again."""
    source = find_source(name)
    if not isinstance(model, Model):
        function = "fetch" if source.trained else "untrained"
        return f"regard.hub.{function}({source.location!r}).model"
    if source.trained:
        return f"regard.load({source.location!r})"
    return "model  # the untrained twin that was checked"


@contextmanager
def _progress() -> Iterator[Callable[[str, str], None]]:
    with console(stderr=True).status("checking") as status:
        yield lambda subject, law: status.update(f"{subject}: {law}")


def _print(verdicts: Verdicts) -> None:
    subjects = list(dict.fromkeys(v.subject for v in verdicts))
    out = console()
    out.print(_matrix(verdicts) if len(subjects) > 1 else _list(verdicts))
    for verdict in verdicts.broken:
        _explain(verdict)
    asked = sum(v.draws for v in verdicts)
    counts = [f"{sum(v.status == s for v in verdicts)} {s}" for s in _MARK]
    out.print(f"\n{', '.join(counts)}; {asked:,} trials", style="bold" if verdicts.ok else "bold red")


def _matrix(verdicts: Verdicts) -> object:
    laws = list(dict.fromkeys(v.law for v in verdicts))
    made = table("", *laws)
    for column in made.columns[1:]:
        column.justify = "center"
    for subject, row in groupby(verdicts, key=lambda v: v.subject):
        made.add_row(subject, *(Text(*_MARK[v.status]) for v in row))
    return made


def _list(verdicts: Verdicts) -> object:
    made = table(
        "law", "says", "verdict", "worst", "allowed", title=f"{verdicts[0].subject}\n" if len(verdicts) else None
    )
    made.columns[1].max_width = 62
    for v in verdicts:
        mark, style = _MARK[v.status]
        verdict = Text(f"{mark} {v.status}", style)
        if v.status == "does not apply":
            made.add_row(v.law, v.detail, verdict, "", "", style="dim")
        else:
            made.add_row(v.law, v.claim, verdict, _number(v.error), _number(v.limit))
    return made


def _explain(v: Verdict) -> None:
    out = console()
    out.print(Text(f"\n✗ {v.subject} breaks '{v.law}': {v.claim}", style="bold red"))
    out.print(f"  {v.detail}: {_number(v.error)}, allowed {_number(v.limit)}", soft_wrap=True)
    out.print("  To see it again:")
    for line in (v.reproducer or "").splitlines():
        out.print(f"    {line}", soft_wrap=True)


def _number(x: float | None) -> str:
    return "" if x is None else "∞" if math.isinf(x) else "0" if x == 0 else f"{x:.1e}"
