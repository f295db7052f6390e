"""`regard check`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from regard.checking import DRAWS, Verdict, Verdicts, check_model, plugin
from regard.checking import check as run_laws
from regard.checking.verdicts import MARKS
from regard.cli.models import HELP as MODEL
from regard.cli.show import console, print_json, table
from regard.errors import HubError, OptionError, UnknownNameError, did_you_mean, printable
from regard.hub.opening import RANDOM, find_source, open_model
from regard.hub.tiny import TINY
from regard.mechanisms import mechanisms
from regard.models import Model
from regard.plugins import import_file
from regard.reading import check_path

_STYLES = {
    "holds": "green",
    "broken": "bold red",
    "noted": "yellow",
    "does not apply": "dim",
    "could not be asked": "magenta",
}
_SHORT = {"could not be asked": "not asked"}  # a table has 80 columns


def check(
    thing: Annotated[
        str | None,
        typer.Argument(help=f"A mechanism, or a model: {MODEL[0].lower()}{MODEL[1:]} None: all mechanisms."),
    ] = None,
    plugin_file: Annotated[
        str | None,
        typer.Option(
            "--plugin",
            help="file.py[:name] with a mechanism, a function f(q, k, v, causal=True) or an nn.Module; beside a model: "
            "the file of its mechanism.",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp64, fp32, bf16 or fp16; default: fp64 and fp32 in turn (Hugging Face: fp32).")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Check only this law, and --like; repeatable.")] = None,
    device: Annotated[str, typer.Option(help="Where to run, e.g. cuda.")] = "cpu",
    draws: Annotated[int, typer.Option(help="Random cases for each law.")] = DRAWS,
    seed: Annotated[int, typer.Option(help="Seed of the random cases.")] = 0,
    download: Annotated[
        bool, typer.Option("--download", help="Download a Hugging Face model if it is not on this machine.")
    ] = False,
    like: Annotated[
        str | None,
        typer.Option(help="Also check that its outputs equal those of this mechanism or file.py:name; e.g. softmax."),
    ] = None,
    causal: Annotated[
        bool | None,
        typer.Option("--causal/--not-causal", help="Whether the plugin claims to be causal; default: find out."),
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="The most tokens that a module takes, if it has no attribute for it.")
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(help="The width of a module's tokens or of a function's heads, if it cannot be found."),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(help="The plugin's method, or a function in its file, for one decoding step: (token, state)."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check attention against its laws: each holds, is broken (with a reproducer), or does not apply."""
    if thing is not None and plugin_file is not None:
        if thing in mechanisms():
            raise OptionError(f"give a mechanism ('{thing}') or --plugin {plugin_file}, not both")
        import_file(plugin_file)  # a model may have a mechanism of it
        plugin_file = None
    if step is not None and plugin_file is None:
        raise OptionError(f"--step {step}: only what --plugin names has one; mechanisms have extend()")
    asked: dict[str, Any] = {"only": only or (), "dtype": dtype, "device": device, "draws": draws, "seed": seed}
    with _progress() as progress:
        if thing is not None and (thing not in mechanisms() or Path(thing).is_dir()):
            if like is not None:
                raise OptionError(f"--like {like}: whole models have laws of their own; check mechanisms with it")
            model = _model(thing, download)
            verdicts = check_model(model, progress=progress, source=_source(thing, model), **asked)
        else:
            subject: Any = thing
            if plugin_file is not None:
                subject = plugin(plugin_file, causal=causal, length=length, width=width, step=step)
            verdicts = run_laws(subject, like=_reference(like), progress=progress, **asked)
    if json:
        print_json(verdicts.as_json())
    else:
        _print(verdicts)
    raise typer.Exit(_exit_code(verdicts))


def _exit_code(verdicts: Verdicts) -> int:
    """Returns the exit code: 1 if a law is broken, 2 if none could be asked, else 0."""
    if not verdicts.ok:
        return 1
    if not verdicts.asked:
        return 2
    return 0


def _reference(like: str | None) -> Any:
    """Returns what --like names: a mechanism's name, or the plugin of a Python file."""
    if like is None or like in mechanisms():
        return like
    if ".py" in like:
        return plugin(like)
    raise UnknownNameError(f"--like {like}: no such mechanism.{did_you_mean(like, mechanisms())} Or file.py:name.")


def _model(name: str, download: bool) -> Any:
    """Returns the model of this name; if there is none, the error also lists mechanisms with a similar name."""
    try:
        return open_model(_small(name), download=download).model
    except HubError:
        if check_path(name).is_dir() or name.startswith(RANDOM) or "/" in name or download:
            raise
        if name.partition(":")[0].endswith(".py"):
            raise UnknownNameError(f"{name} is a file of Python: regard check --plugin {name}") from None
        raise UnknownNameError(
            f"no mechanism is called '{name}'.{did_you_mean(name, mechanisms())} And no model: expected a folder, a "
            f"name that was downloaded before (or --download), or random:{name}"
        ) from None


def _small(name: str) -> str:
    """Returns the name, with '@tiny' added for a type of models such as random:llama: laws do not depend on size."""
    source = find_source(name)
    is_type = source.kind == "transformers" and not source.trained and not Path(source.location).exists()
    if is_type and "/" not in source.location and not name.endswith(TINY):
        return name + TINY
    return name


def _source(name: str, model: Any) -> str:
    """Returns the line of Python that builds the same model, for reproducers."""
    source = find_source(_small(name))
    if not isinstance(model, Model):
        function = "fetch" if source.trained else "untrained"
        return f"regard.hub.{function}({source.location!r}).model"
    if source.trained:
        return f"regard.load({source.location!r})"
    return "model  # the untrained model that was checked"


@contextmanager
def _progress() -> Iterator[Callable[[str, str], None]]:
    with console(stderr=True).status("checking") as status:
        yield lambda subject, law: status.update(f"{subject}: {law}")


def _print(verdicts: Verdicts) -> None:
    subjects = list(dict.fromkeys(v.subject for v in verdicts))
    out = console()
    if len(subjects) > 1:
        out.print(_matrix(verdicts))
    else:
        for part in _list(verdicts):
            out.print(part)
    before: list[str] = []
    for verdict in verdicts.broken:
        _explain(verdict, before)
        before = (verdict.reproducer or "").splitlines()
    for verdict in verdicts.having("noted"):
        out.print(
            Text(printable(f"\n! {verdict.subject}, '{verdict.law}', no fault: {verdict.detail}")), soft_wrap=True
        )
    for problem in verdicts.problems:
        out.print(Text(printable(f"\n? Could not be asked: {problem}")), soft_wrap=True)
    asked = sum(v.draws for v in verdicts)
    numbers = {status: len(verdicts.having(status)) for status in MARKS}
    counts = [f"{n} {status}" for status, n in numbers.items() if n or status in ("holds", "broken")]
    style = "bold"
    if not verdicts.ok:
        style = "bold red"
    out.print(f"\n{', '.join(counts)}; {asked:,} trials", style=style)
    # Printed last, so that readers of the end alone see what was not checked.
    for sentence in verdicts.unasked:
        out.print(Text(printable(f"\n{sentence}"), style="yellow"), soft_wrap=True)


def _matrix(verdicts: Verdicts) -> object:
    laws = list(dict.fromkeys(v.law for v in verdicts))
    made = table("", *laws, padding=(0, 1, 0, 0))
    made.columns[0].no_wrap = True
    for column in made.columns[1:]:
        column.justify = "center"
        column.overflow = "fold"  # in a narrow terminal, names of laws are broken and those of mechanisms are not
    for subject, row in groupby(verdicts, key=lambda v: v.subject):
        made.add_row(subject, *(Text(MARKS[v.status], _STYLES[v.status]) for v in row))
    return made


def _list(verdicts: Verdicts) -> list[Table | Text]:
    """Returns the table of the laws that were checked on one subject, and lines about those that do not apply."""
    title = None
    if len(verdicts):
        title = f"{verdicts[0].subject}\n"
    made = table("law", "says", "verdict", "worst", "allowed", title=title)
    made.columns[1].max_width = 62
    left_out: dict[str, list[str]] = {}
    for v in verdicts:
        if v.status == "does not apply":
            left_out.setdefault(v.detail, []).append(v.law)
            continue
        verdict = Text(f"{MARKS[v.status]} {_SHORT.get(v.status, v.status)}", _STYLES[v.status])
        made.add_row(v.law, v.claim, verdict, _number(v.error), _number(v.limit))
    parts: list[Table | Text] = [made]
    if left_out:
        parts.append(Text("\nDoes not apply"))
    for why, laws in left_out.items():
        parts.append(Text(printable(f"{MARKS['does not apply']} {', '.join(laws)}: {why}"), "dim"))
    return parts


def _explain(v: Verdict, before: Sequence[str]) -> None:
    """Prints a broken law with its reproducer, without the lines that it shares with the one printed before."""
    out = console()
    out.print(Text(printable(f"\n✗ {v.subject} breaks '{v.law}': {v.claim}"), style="bold red"))
    out.print(f"  {v.measured}", soft_wrap=True)
    lines = (v.reproducer or "").splitlines()
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(lines, before, strict=False))))
    if shared:
        out.print("  To see it again, after the first lines of the one above:")
    else:
        out.print("  To see it again:")
    for line in lines[shared:]:
        out.print(f"    {line}", soft_wrap=True)


def _number(x: float | None) -> str:
    if x is None:
        return ""
    if math.isinf(x):
        return "∞"
    if x == 0:
        return "0"
    return f"{x:.1e}"
