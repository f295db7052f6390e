"""`regard bench`."""

from __future__ import annotations

import json as json_format
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from regard.checking import plugin as plugged
from regard.cli.show import align_right, console, print_json, table
from regard.errors import OptionError
from regard.lab.base import RESULTS
from regard.lab.bench import page as pages
from regard.lab.bench.config import QUICK
from regard.lab.bench.peers import PEERS
from regard.lab.bench.results import RaceResults
from regard.lab.bench.run import PASSES, Race, race
from regard.reading import check_path
from regard.storage import atomic_write
from regard.train.claim import claimed

PEER_NAMES = [peer.name for peer in PEERS]
ON_GPU: dict[str, Any] = {"tokens": (1024, 4096, 16384, 65536), "total": 32768}


def bench(
    mechanisms: Annotated[list[str] | None, typer.Argument(help="Mechanisms to race; default: all.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Sequence lengths, e.g. 256,1024,4096.")] = None,
    passes: Annotated[str, typer.Option(help="Which passes are timed, with commas between.")] = ",".join(PASSES),
    batch: Annotated[int, typer.Option(help="Sequences in a batch.")] = 1,
    total: Annotated[int, typer.Option(help="Tokens of all sequences together, instead of --batch.")] = 0,
    heads: Annotated[int | None, typer.Option(help="Query heads; default: 16 on a GPU, else 8.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads; default: as many as --heads.")] = None,
    width: Annotated[int, typer.Option(help="Width of a head.")] = 64,
    features: Annotated[int, typer.Option(help="Random features of performer and fourier.")] = 256,
    not_causal: Annotated[bool, typer.Option("--not-causal", help="Every token attends to all tokens.")] = False,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 …; default: bf16 on a GPU, else fp32.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Also time other libraries, if installed.")] = False,
    plugin: Annotated[list[str] | None, typer.Option(help="A file.py[:name] to race, too; repeatable.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short lengths and few repeats: half a minute.")] = False,
    patience: Annotated[
        float | None, typer.Option(help="Skip runs that would take more than this many seconds.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random features and of the laws' cases.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The folder to write; default: runs/bench-<time>.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Time mechanisms on this machine: time, memory, FLOP/s and bytes/s by length, beside the least time possible."""
    device = device or _default_device()
    settings: dict[str, Any] = {}
    default_heads = 8
    default_dtype = "fp32"
    if device.startswith("cuda"):
        settings |= ON_GPU
        default_heads = 16
        default_dtype = "bf16"
    if quick:
        settings |= QUICK
    # Options of the command line override the presets of a GPU or a quick race.
    if tokens:
        settings["tokens"] = _parse_tokens(tokens)
    if total:
        settings["total"] = total
    if patience is not None:
        settings["patience"] = patience
    heads = heads or default_heads
    config = Race(
        passes=tuple(passes.split(",")),
        device=device,
        dtype=dtype or default_dtype,
        batch=batch,
        heads=heads,
        groups=kv_heads or heads,
        width=width,
        features=features,
        causal=not not_causal,
        seed=seed,
        **settings,
    )
    folder = check_path(out or Path("runs") / f"bench-{time.strftime('%Y%m%d-%H%M%S')}", OptionError)
    head = {"lab": "bench", "command": f"regard {shlex.join(sys.argv[1:])}"}
    peer_names: Sequence[str] = ()
    if peers:
        peer_names = PEER_NAMES
    with claimed(folder, [RESULTS], (folder / RESULTS).exists):  # results are never overwritten
        with _progress() as say:
            strangers = [plugged(file) for file in plugin or ()]
            save = partial(_write_results, folder, head)
            results = race(config, mechanisms or (), strangers, peer_names, say, save)
        _write_files(results, folder, head)
    if json:
        print_json(head | results.as_dict())
    else:
        _print_results(results, folder)
    if results.interrupted:
        raise typer.Exit(130)
    if not results.rows:
        raise typer.Exit(1)


def _default_device() -> str:
    """Returns "cuda" if there is a GPU, else "cpu"."""
    if torch.cuda.is_available():
        return "cuda"
    return "cpu"


def _parse_tokens(text: str) -> tuple[int, ...]:
    """Returns the lengths that --tokens lists."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"--tokens {text!r}: expected whole numbers with commas between, such as 256,1024") from None


def _write_results(folder: Path, head: dict[str, Any], results: RaceResults) -> None:
    """Writes results.json; called after each size, so that little is lost if the race is killed."""
    with atomic_write(folder / RESULTS) as file:
        file.write(json_format.dumps(head | results.as_dict(), indent=1, ensure_ascii=False).encode() + b"\n")


def _write_files(results: RaceResults, folder: Path, head: dict[str, Any]) -> None:
    """Writes results.json, the page and the pictures."""
    _write_results(folder, head, results)
    if results.rows:
        pages.bench_page(head | results.as_dict()).write(folder / "bench.html")
        for ending in ("png", "svg"):
            pages.picture([results], folder / f"bench.{ending}")


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows a status line while a race runs, and yields the function that changes its text."""
    with console(stderr=True).status("racing") as status:
        yield status.update


def _print_results(results: RaceResults, folder: Path) -> None:
    """Prints the tables of a race and the paths of its files."""
    out = console()
    out.print(_describe_device(results))
    for passing, title in pages.PASSES.items():
        rows = [[str(cell) for cell in row] for row in pages.pass_table(results, passing)]
        if rows:
            out.print(_pass_table(rows, f"\n{title}"))
    if results.absent:
        out.print("\nLeft out:", style="bold")
        for absence in results.absent:
            where = ""
            if absence.N is not None:
                where = f", {absence.passing} from {absence.N:,} tokens on"
            out.print(f"  {absence.what}{where}: {absence.why}", soft_wrap=True)
    if results.interrupted:
        out.print("\nInterrupted: this is what was measured until then.", style="bold")
    if results.rows:
        out.print(f"\n{folder / 'bench.html'} (and bench.png, bench.svg, {RESULTS})", soft_wrap=True)


def _describe_device(results: RaceResults) -> str:
    """Returns the name of the device with its peak, its bandwidth and their source."""
    device = results.device
    peak = ""
    if device.flops:
        peak = f"{device.flops / 1e9:,.0f} GFLOP/s, "
    source = "as stated by the maker"
    if device.measured:
        source = "measured here"
    return f"{device.name}: {peak}{device.bandwidth / 1e9:,.0f} GB/s ({source})"


def _pass_table(rows: list[list[str]], title: str) -> Table:
    """Returns the table of one pass, grouped by name; only the first row of a group has the name."""
    made = align_right(table(*pages.COLUMNS, title=title), 1)
    # Rows are sorted by length; readers compare the lengths of one name.
    groups: dict[str, list[list[str]]] = {}
    for name, *cells in rows:
        groups.setdefault(name, []).append(cells)
    for name, members in groups.items():
        made.add_section()
        first, *others = members
        made.add_row(name, *first)
        for cells in others:
            made.add_row("", *cells)
    return made
