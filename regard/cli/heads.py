"""`regard heads`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.models import HELP
from regard.cli.show import console, print_json, table
from regard.data.files import read_lines
from regard.errors import OptionError
from regard.lens.heads.ablation import ablate as remove
from regard.lens.heads.annotations import read_conllu, read_mentions
from regard.lens.heads.examine import default_texts, examine
from regard.lens.heads.linguistics import follow_mentions, follow_syntax
from regard.lens.models import open_recordable
from regard.lens.trace.trace import Trace

SHOWN = 12  # redundant pairs, and relations


def heads(
    model: Annotated[str, typer.Argument(help=HELP)],
    texts: Annotated[
        Path | None, typer.Option(help="Texts to read, one a line; without it, a dozen short ones.")
    ] = None,
    syntax: Annotated[Path | None, typer.Option(help="Sentences with their syntax, in CoNLL-U.")] = None,
    coreference: Annotated[Path | None, typer.Option(help="Texts with mentions, in JSONL.")] = None,
    ablate: Annotated[bool, typer.Option("--ablate", help="Also measure what removing each head costs.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write a .trace of the first text with the labels here.")] = None,
    device: Annotated[str | None, typer.Option(help="Where to run, e.g. cuda.")] = None,
    seed: Annotated[int, typer.Option(help="Of the bootstrap and of random weights.")] = 0,
    download: Annotated[bool, typer.Option("--download", help="Fetch a model by name if it is not here.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what each head of a model does: labels with intervals, redundant heads, change over the layers."""
    lines = None if texts is None else [line for line in read_lines(texts) if line.strip()]
    if lines == []:
        raise OptionError(f"{texts} has only empty lines; expected one text a line")
    parsed = None if syntax is None else read_conllu(syntax)
    mentions = None if coreference is None else read_mentions(coreference)
    subject = open_recordable(model, device or "cpu", seed=seed, download=download)
    with _progress() as told:
        found, recordings = examine(subject, lines, seed, told)
        if parsed is not None:
            found["syntax"] = follow_syntax(subject.read, parsed)
        if mentions is not None:
            found["coreference"] = follow_mentions(subject.read, mentions)
        if ablate:
            chosen = lines or default_texts()
            found["ablation"] = remove(subject, chosen[:4], lambda n, of: told("removing heads", n, of))
    if save is not None:
        recordings[0].labels = found["heads"]
        size = Trace(recordings[:1]).save(save)
        console(stderr=True).print(f"{save}: {size:,} bytes", soft_wrap=True)
    if json:
        print_json(found)
    else:
        _print(found)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    with console(stderr=True).status("recording") as status:
        yield lambda what, n, of: status.update(f"{what} {n + 1} of {of}" if of > 1 else what)


def _print(found: dict[str, Any]) -> None:
    out, card = console(), found["model"]
    labelled = [x for x in found["heads"] if x["label"] != "mixed"]
    out.print(
        f"{card['name']}: {card['class']}, {card['layers']} layers, {card['heads']} heads; "
        f"{found['texts']} texts, {found['tokens']} tokens\n",
        soft_wrap=True,
    )
    made = table("head", "label", "effect", "95% interval", "also")
    for x in sorted(labelled, key=lambda x: -x["effect"]):
        interval = f"{x['low']:.2f} to {x['high']:.2f}"
        made.add_row(_name(x), x["label"], f"{x['effect']:.2f}", interval, ", ".join(x["also"]))
    if labelled:
        out.print(made)
    else:
        out.print("no head stands out from an even spread")
    counts = ", ".join(f"{n} {label}" for label, n in found["counts"].items())
    out.print(f"\n{found['specialised']:.0%} of {len(found['heads'])} heads are specialised: {counts}", soft_wrap=True)
    _print_layers(found["layers"])
    _print_redundant(found["redundant"])
    for part in ("syntax", "coreference", "ablation"):
        if part in found:
            _PARTS[part](found[part])


def _print_layers(rows: list[dict[str, Any]]) -> None:
    _title("Over the layers")
    made = table("layer", "distance", "entropy", "on first", "largest")
    for row in rows:
        cells = ("–" if row[n] is None else f"{row[n]:.2f}" for n in ("distance", "entropy", "first", "peak"))
        made.add_row(f"{row['side']} {row['layer']}", *cells)
    console().print(made)


def _print_redundant(pairs: list[dict[str, Any]]) -> None:
    if not pairs:
        console().print("\nNo two heads do the same.")
        return
    _title(f"{len(pairs)} pairs of heads do nearly the same")
    made = table("heads", "divergence", "of that from even")
    for pair in pairs[:SHOWN]:
        names = " and ".join(_name(x) for x in pair["heads"])
        made.add_row(names, f"{pair['divergence']:.4f}", f"{pair['divergence'] / pair['from_even']:.0%}")
    console().print(made)


def _print_syntax(rows: list[dict[str, Any]]) -> None:
    if not rows:
        console().print("\nSyntax: no relation occurs often enough.")
        return
    _title("Syntax: the best head of each relation")
    made = table("relation", "head", "right", "fixed distance", "more by")
    for row in sorted(rows, key=lambda row: row["baseline"] - row["score"]):
        fixed = f"{row['baseline']:.0%} at {row['distance']:+d}"
        more = f"{row['low']:+.2f} to {row['high']:+.2f}" + (" ✓" if row["stands_out"] else "")
        made.add_row(f"{row['relation']} {row['direction']}", _name(row), f"{row['score']:.0%}", fixed, more)
    console().print(made)


def _print_coreference(row: dict[str, Any] | None) -> None:
    if row is None:
        console().print("\nCoreference: too few mentions with something to get wrong.")
        return
    console().print(
        f"\nCoreference: {_name(row)} finds an earlier mention of the same in {row['score']:.0%} of {row['pairs']}, "
        f"the nearest mention is right in {row['baseline']:.0%} (more by {row['low']:+.2f} to {row['high']:+.2f})"
        + (" ✓" if row["stands_out"] else ""),
        soft_wrap=True,
    )


def _print_ablation(found: dict[str, Any]) -> None:
    loss = found["measure"] == "loss"
    what = f"rise of the loss ({found['whole']:.4f} nats)" if loss else "change of the last vectors"
    _title(f"Without a head: {what}")
    made = table("head", "cost")
    for row in sorted(found["heads"], key=lambda row: -row["cost"])[:SHOWN]:
        made.add_row(_name(row), f"{row['cost']:+.4f}" if loss else f"{row['cost']:.1%}")
    console().print(made)


def _title(text: str) -> None:
    console().print(f"\n{text}", style="bold", soft_wrap=True)


def _name(x: dict[str, Any]) -> str:
    return f"{x['side'] + ' ' if x['side'] else ''}{x['layer']}.{x['head']}"


_PARTS: dict[str, Callable[[Any], None]] = {
    "syntax": _print_syntax,
    "coreference": _print_coreference,
    "ablation": _print_ablation,
}
