"""`regard bench`."""

from __future__ import annotations

import json as json_format
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from regard.checking import plugin as plugged
from regard.cli.show import console, print_json, table
from regard.data.files import atomic_write
from regard.errors import OptionError
from regard.lab.base import RESULTS
from regard.lab.bench import page as shown
from regard.lab.bench.peers import PEERS
from regard.lab.bench.results import RaceResults
from regard.lab.bench.run import PASSES, Race, race
from regard.report.canvas import require_matplotlib

NAMES = [peer.name for peer in PEERS]
QUICK: dict[str, Any] = {"tokens": (128, 512, 2048), "seconds": 0.05, "patience": 0.5, "draws": 1}


def bench(
    mechanisms: Annotated[list[str] | None, typer.Argument(help="Who races; none: all.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Lengths, e.g. 256,1024,4096.")] = None,
    passes: Annotated[str, typer.Option(help="What is timed.")] = ",".join(PASSES),
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    total: Annotated[int, typer.Option(help="As many sequences as make so many tokens, instead of --batch.")] = 0,
    heads: Annotated[int | None, typer.Option(help="Query heads; none: 16 on a GPU, else 8.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads; none: as many.")] = None,
    width: Annotated[int, typer.Option(help="Of a head.")] = 64,
    features: Annotated[int, typer.Option(help="Of performer and fourier.")] = 256,
    not_causal: Annotated[bool, typer.Option("--not-causal", help="Every token sees all.")] = False,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 …; none: bf16 on a GPU, else fp32.")] = None,
    device: Annotated[str | None, typer.Option(help="Where to race; none: a GPU where there is one.")] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Others' implementations too, where installed.")] = False,
    plugin: Annotated[list[str] | None, typer.Option(help="file.py[:name] with a mechanism or function.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short lengths and few repeats: half a minute.")] = False,
    patience: Annotated[float | None, typer.Option(help="Seconds that one run may take.")] = None,
    seed: Annotated[int, typer.Option(help="Of random features and of the laws' cases.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder; none: runs/bench-<stamp>.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Race mechanisms on this machine: time, memory, FLOP/s and bytes/s over length, beside the floor."""
    require_matplotlib()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    gpu = device.startswith("cuda")
    asked: dict[str, Any] = {"tokens": (1024, 4096, 16384, 65536), "total": 32768} if gpu else {}
    heads = heads or (16 if gpu else 8)
    asked |= QUICK if quick else {}
    asked |= {"passes": tuple(passes.split(",")), "device": device, "dtype": dtype or ("bf16" if gpu else "fp32")}
    asked |= {"batch": batch, "heads": heads, "groups": kv_heads or heads, "width": width, "features": features}
    asked |= {"causal": not not_causal, "seed": seed}
    asked |= {"tokens": _numbers(tokens)} if tokens else {}
    asked |= {"total": total} if total else {}
    asked |= {"patience": patience} if patience is not None else {}
    config = Race(**asked)
    folder = _folder(out)
    head = {"lab": "bench", "command": f"regard {shlex.join(sys.argv[1:])}"}
    with _progress() as say:
        strangers = [plugged(file) for file in plugin or ()]
        keep = partial(_keep, folder, head)
        results = race(config, mechanisms or (), strangers, NAMES if peers else (), say, keep)
    _write(results, folder, head)
    if json:
        print_json(head | results.as_dict())
    else:
        _print(results, folder)
    if results.interrupted:
        raise typer.Exit(130)
    raise typer.Exit(0 if results.rows else 1)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"--tokens {text!r}: expected whole numbers with commas between, such as 256,1024") from None


def _folder(out: Path | None) -> Path:
    folder = out or Path("runs") / f"bench-{time.strftime('%Y%m%d-%H%M%S')}"
    if (folder / RESULTS).exists():
        raise OptionError(f"{folder} holds results already ({RESULTS}); choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _keep(folder: Path, head: dict[str, Any], results: RaceResults) -> None:
    """Writes results.json."""
    with atomic_write(folder / RESULTS) as file:
        file.write(json_format.dumps(head | results.as_dict(), indent=1, ensure_ascii=False).encode() + b"\n")


def _write(results: RaceResults, folder: Path, head: dict[str, Any]) -> None:
    """Writes results.json, the page and the pictures."""
    _keep(folder, head, results)
    if results.rows:
        shown.bench_page(head | results.as_dict()).write(folder / "bench.html")
        for ending in ("png", "svg"):
            shown.picture([results], folder / f"bench.{ending}")


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    with console(stderr=True).status("racing") as status:
        yield status.update


def _print(results: RaceResults, folder: Path) -> None:
    """Prints the tables of a race and where its files are."""
    out = console()
    device = results.device
    peak = f"{device.flops / 1e9:,.0f} GFLOP/s, " if device.flops else ""
    source = "measured here" if device.measured else "as stated by the maker"
    out.print(f"{device.name}: {peak}{device.bandwidth / 1e9:,.0f} GB/s ({source})")
    for passing, title in shown.PASSES.items():
        rows = [[str(cell) for cell in row] for row in shown.pass_table(results, passing)]
        if not rows:
            continue
        made = table(*shown.COLUMNS, title=f"\n{title}")
        for column in made.columns[1:]:
            column.justify = "right"
        last = rows[0][0]
        for row in sorted(rows, key=lambda row: [r[0] for r in rows].index(row[0])):
            if row[0] != last:
                made.add_section()
            made.add_row("" if row[0] == last and made.row_count else row[0], *row[1:])
            last = row[0]
        out.print(made)
    if results.absent:
        out.print("\nLeft out:", style="bold")
        for absence in results.absent:
            where = f", {absence.passing} from {absence.N:,} tokens on" if absence.N is not None else ""
            out.print(f"  {absence.what}{where}: {absence.why}", soft_wrap=True)
    if results.interrupted:
        out.print("\nInterrupted: this is what was measured until then.", style="bold")
    if results.rows:
        out.print(f"\n{folder / 'bench.html'} (and bench.png, bench.svg, {RESULTS})", soft_wrap=True)
