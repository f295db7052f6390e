"""`regard heads`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.models import HELP
from regard.cli.show import console, print_json, table
from regard.data.files import read_lines
from regard.errors import OptionError
from regard.lens.heads.ablation import ablate as remove
from regard.lens.heads.ablation import add_costs
from regard.lens.heads.annotations import read_conllu, read_mentions
from regard.lens.heads.examine import default_texts, examine
from regard.lens.heads.labels import MIN_TEXTS, RESTS
from regard.lens.heads.linguistics import evaluate_coreference, evaluate_syntax
from regard.lens.models import Sample, open_recordable
from regard.lens.trace.trace import Trace

MAX_ROWS = 12  # of redundant pairs, and of removed heads
ABLATED_TEXTS = 4


def heads(
    model: Annotated[str, typer.Argument(help=HELP)],
    texts: Annotated[
        Path | None, typer.Option(help="Texts to read, one a line; without it, a dozen short ones.")
    ] = None,
    pairs: Annotated[
        Path | None, typer.Option(help="The second text of a pair for each of --texts, one a line.")
    ] = None,
    targets: Annotated[
        Path | None, typer.Option(help="What an encoder-decoder writes for each of --texts, one a line.")
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
    sentences = mentions = None
    # All files are read before the model is, so that a mistake in one is told at once.
    samples = _read_samples(texts, pairs, targets)
    if syntax is not None:
        sentences = read_conllu(syntax)
    if coreference is not None:
        mentions = read_mentions(coreference)
    subject = open_recordable(model, device or "cpu", seed=seed, download=download)
    with _progress() as report:
        results, recordings = examine(subject, samples, seed, report)
        if sentences is not None:
            results["syntax"] = evaluate_syntax(subject.record_one, sentences)
        if mentions is not None:
            results["coreference"] = evaluate_coreference(subject.record_one, mentions)
        if ablate:
            # Every head is a pass over these texts, so a few have to do.
            chosen = (samples or default_texts())[:ABLATED_TEXTS]
            results["ablation"] = remove(subject, chosen, lambda n, total: report("removing heads", n, total))
            add_costs(results["heads"], results["ablation"])
    if save is not None:
        recordings[0].labels = results["heads"]
        size = Trace(recordings[:1]).save(save)
        console(stderr=True).print(f"{save}: {size:,} bytes", soft_wrap=True)
    if json:
        print_json(results)
    else:
        _print_results(results)


def _read_samples(texts: Path | None, pairs: Path | None, targets: Path | None) -> list[Sample] | None:
    """Returns the texts of a file with second texts and targets, without empty lines; None without a file."""
    if texts is None:
        if pairs is not None or targets is not None:
            raise OptionError("--pairs and --targets belong to the texts of --texts, line by line; give them too")
        return None
    lines = read_lines(texts)
    beside: list[Sequence[str | None]] = []
    for path in (pairs, targets):
        others: list[str] | None = None
        if path is not None:
            others = read_lines(path)
            if len(others) != len(lines):
                raise OptionError(f"{path} has {len(others)} lines, {texts} has {len(lines)}; expected one for each")
        beside.append(others or [None] * len(lines))
    samples = [Sample(*row) for row in zip(lines, *beside, strict=True) if row[0].strip()]
    if not samples:
        raise OptionError(f"{texts} has only empty lines; expected one text a line")
    return samples


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Shows a status line, and yields what changes it: the work, and how many of how many parts are done."""
    with console(stderr=True).status("recording") as status:

        def report(work: str, n: int, total: int) -> None:
            if total > 1:
                work = f"{work} {n + 1} of {total}"
            status.update(work)

        yield report


def _print_results(results: dict[str, Any]) -> None:
    """Prints all that `examine` and the options beside it found."""
    out = console()
    card = results["model"]
    out.print(
        f"{card['name']}: {card['class']}, {card['layers']} layers, {card['heads']} heads; "
        f"{results['texts']} texts, {results['tokens']} tokens\n",
        soft_wrap=True,
    )
    _print_labels(results)
    counts = ", ".join(f"{n} {label}" for label, n in results["counts"].items())
    resting = sum(head["rests"] is not None for head in results["heads"])
    share = f"{results['specialised']:.0%} of {len(results['heads'])} heads"
    out.print(f"\n{share} are specialised: {counts}; {resting} rest", soft_wrap=True)
    _print_layers(results["layers"])
    _print_redundant(results["redundant"])
    if "syntax" in results:
        _print_syntax(results["syntax"])
    if "coreference" in results:
        _print_coreference(results["coreference"])
    if "ablation" in results:
        _print_ablation(results["ablation"])


def _print_labels(results: dict[str, Any]) -> None:
    """Prints the heads that have a label, the strongest first, with their costs where they were removed."""
    if results["texts"] < MIN_TEXTS:
        console().print(f"a label takes {MIN_TEXTS} texts at least; give more with --texts")
    heads = [head for head in results["heads"] if head["label"] != "mixed"]
    if not heads:
        console().print("no head stands out from an even spread")
        return
    columns = ["head", "label", "effect", "95% interval", "rests on", "also"]
    ablation = results.get("ablation")
    if ablation is not None:
        columns.append("cost")
    made = table(*columns)
    for head in sorted(heads, key=lambda head: -head["effect"]):
        rests = head["rests"]
        cells = [_name(head), head["label"], f"{head['effect']:.2f}", f"{head['low']:.2f} to {head['high']:.2f}"]
        cells.append("" if rests is None else f"{rests['on']} {rests['effect']:.2f}")
        cells.append(", ".join(name for name in head["also"] if name not in RESTS))
        if ablation is not None:
            cells.append(_cost(head, ablation))
        made.add_row(*cells)
    console().print(made)


def _cost(head: dict[str, Any], ablation: dict[str, Any]) -> str:
    """Returns the cost of a head: nats of loss, or a share of an encoder's vectors."""
    return f"{head['cost']:{'+.4f' if ablation['measure'] == 'loss' else '.1%'}}"


def _print_layers(rows: list[dict[str, Any]]) -> None:
    """Prints how the heads change over the layers; a dash stands for what a layer does not have."""
    _print_title("Over the layers")
    made = table("layer", "distance", "entropy", "on first", "largest")
    for row in rows:
        cells = ["–" if row[key] is None else f"{row[key]:.2f}" for key in ("distance", "entropy", "first", "peak")]
        made.add_row(f"{row['side']} {row['layer']}", *cells)
    console().print(made)


def _print_redundant(pairs: list[dict[str, Any]]) -> None:
    """Prints pairs of heads that do nearly the same."""
    if not pairs:
        console().print("\nNo two heads do the same.")
        return
    _print_title(f"{len(pairs)} pairs of heads do nearly the same")
    made = table("heads", "divergence", "of that from even")
    for pair in pairs[:MAX_ROWS]:
        names = " and ".join(_name(head) for head in pair["heads"])
        made.add_row(names, f"{pair['divergence']:.4f}", f"{pair['divergence'] / pair['from_even']:.0%}")
    console().print(made)


def _print_syntax(rows: list[dict[str, Any]]) -> None:
    """Prints the best head of each syntactic relation, beside always looking at one distance."""
    if not rows:
        console().print("\nSyntax: no relation occurs often enough.")
        return
    _print_title("Syntax: the best head of each relation")
    made = table("relation", "head", "right", "fixed distance", "more by")
    for row in sorted(rows, key=lambda row: row["baseline"] - row["score"]):
        fixed = f"{row['baseline']:.0%} at {row['distance']:+d}"
        gain = f"{row['low']:+.2f} to {row['high']:+.2f}{_tick(row)}"
        made.add_row(f"{row['relation']} {row['direction']}", _name(row), f"{row['score']:.0%}", fixed, gain)
    console().print(made)


def _print_coreference(row: dict[str, Any] | None) -> None:
    """Prints the head that best finds an earlier mention of the same, if any."""
    if row is None:
        console().print("\nCoreference: too few mentions with something to get wrong.")
        return
    console().print(
        f"\nCoreference: {_name(row)} finds an earlier mention of the same in {row['score']:.0%} of {row['pairs']}, "
        f"the nearest mention is right in {row['baseline']:.0%} (more by {row['low']:+.2f} to {row['high']:+.2f})"
        f"{_tick(row)}",
        soft_wrap=True,
    )


def _print_ablation(results: dict[str, Any]) -> None:
    """Prints what removing each head costs, the dearest first: nats of loss, or a share of an encoder's vectors."""
    measure = "change of the last vectors"
    if results["measure"] == "loss":
        measure = f"rise of the loss ({results['whole']:.4f} nats)"
    _print_title(f"Without a head: {measure}")
    made = table("head", "cost")
    for row in sorted(results["heads"], key=lambda row: -row["cost"])[:MAX_ROWS]:
        made.add_row(_name(row), _cost(row, results))
    console().print(made)


def _print_title(text: str) -> None:
    """Prints the title of a table."""
    console().print(f"\n{text}", style="bold", soft_wrap=True)


def _tick(row: dict[str, Any]) -> str:
    """Returns a tick where a head is better than the baseline beyond chance."""
    if row["stands_out"]:
        return " ✓"
    return ""


def _name(head: dict[str, Any]) -> str:
    """Returns the name of a head, such as 3.5; of an encoder-decoder with its side: decoder 3.5."""
    return f"{head['side']} {head['layer']}.{head['head']}".strip()
