"""`regard heads`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import typer

from regard.cli.heads_checkpoints import examine_run, plot_run, print_run
from regard.cli.heads_pruning import PRUNE_HELP, plot_pruning, prepare, print_cost, print_pruning
from regard.cli.models import HELP
from regard.cli.optional import OptionalValueCommand
from regard.cli.show import console, print_json, table
from regard.data.files import read_lines
from regard.data.sentences import Sentence, read_sentences
from regard.errors import OptionError
from regard.lens.heads.ablation import ablate as remove
from regard.lens.heads.ablation import add_costs
from regard.lens.heads.annotations import Mentions, Parsed
from regard.lens.heads.examine import examine
from regard.lens.heads.labels import MIN_TEXTS, RESTS
from regard.lens.heads.linguistics import MIN_PAIRS, evaluate_coreference, evaluate_syntax
from regard.lens.heads.measures import encode_default_texts
from regard.lens.heads.pruning import PRUNING_ORDERS
from regard.lens.heads.shipped import OWN, read_coreference, read_parsed
from regard.lens.models import RecordableModel, Sample, open_recordable
from regard.lens.trace.trace import Trace
from regard.report.head_curves import head_name
from regard.report.paper import check_figure

MAX_ROWS = 12  # rows of the tables of redundant pairs and of removed heads
ABLATED_TEXTS = 4
X = TypeVar("X")


class HeadsCommand(OptionalValueCommand):
    """The command, with default values of --prune, --syntax and --coreference."""

    defaults: ClassVar = {"--prune": "importance", "--syntax": OWN, "--coreference": OWN}
    instead = 'Texts are read from a file, --texts FILE; `regard view MODEL "a text"` shows a text.'


COMMAND = HeadsCommand


def heads(
    model: Annotated[str, typer.Argument(help=HELP)],
    texts: Annotated[
        Path | None, typer.Option(help="A file with one text a line; default: a dozen short texts.")
    ] = None,
    pairs: Annotated[
        Path | None, typer.Option(help="A file with the second text of each pair, a line for each of --texts.")
    ] = None,
    targets: Annotated[
        Path | None, typer.Option(help="A file with the target of an encoder-decoder for each of --texts.")
    ] = None,
    syntax: Annotated[
        Path | None,
        typer.Option(metavar="[FILE]", help="Find heads for syntax, with a CoNLL-U file or regard's own sentences."),
    ] = None,
    coreference: Annotated[
        Path | None,
        typer.Option(metavar="[FILE]", help="Find heads for coreference, with a JSONL file or regard's own texts."),
    ] = None,
    prune: Annotated[str | None, typer.Option(metavar="[ORDER]", help=PRUNE_HELP)] = None,
    labelled: Annotated[
        Path | None, typer.Option("--sentences", help="Lines of sentence, tab, 0 or 1, to prune a classifier on.")
    ] = None,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="What heads do at each checkpoint that a run has kept.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the curves of --prune or --checkpoints to this .svg, .png or .pdf.")
    ] = None,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Also measure how much worse the model is without each head.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option(help="Write a .trace of the first text, with the labels, to this file.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to run, e.g. cuda.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap and of random weights.")] = 0,
    download: Annotated[
        bool, typer.Option("--download", help="Download a model if it is not on this machine.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Find out what each head of a model does: labels with intervals, redundant heads, and changes over layers."""
    if prune is not None:
        PRUNING_ORDERS.find(prune)
    elif labelled is not None:
        raise OptionError("--sentences belong to --prune")
    elif plot is not None and not checkpoints:
        raise OptionError("--plot belongs to --prune or --checkpoints")
    if plot is not None:
        check_figure(plot)
    if checkpoints:
        _refuse_beside_checkpoints(prune=prune, syntax=syntax, coreference=coreference, save=save, ablate=ablate)
        with _progress() as report:
            over_steps = examine_run(model, _read_samples(texts, pairs, targets), seed, device or "cpu", report)
        if json:
            print_json(over_steps)
        else:
            print_run(over_steps)
        if plot is not None:
            plot_run(over_steps, plot)
        return
    given = _read_files(_read_samples(texts, pairs, targets), syntax, coreference, labelled)
    subject = open_recordable(model, device or "cpu", seed=seed, download=download)
    with _progress() as report:
        results, recordings = examine(subject, given.texts, seed, report)
        results |= _evaluate_annotated(subject, given, report)
        if ablate:
            # Each head takes a pass over these texts, so only a few are used.
            chosen = given.texts or encode_default_texts(subject, ABLATED_TEXTS)
            done = partial(_report_done, report, "removing heads")
            results["ablation"] = remove(subject, chosen[:ABLATED_TEXTS], done)
            add_costs(results["heads"], results["ablation"])
    if prune is not None:
        pruning = prepare(subject, prune, results["heads"], given.texts, given.labelled, seed)
        print_cost(pruning)
        with _progress() as report:
            results["pruning"] = pruning.run(partial(_report_done, report, "pruning, pass"))
    if save is not None:
        recordings[0].labels = results["heads"]
        size = Trace(recordings[:1]).save(save)
        console(stderr=True).print(f"{save}: {size:,} bytes", soft_wrap=True)
    if json:
        print_json(results)
    else:
        _print_results(results)
    if plot is not None:
        plot_pruning(results["pruning"], plot)
        console(stderr=True).print(f"{plot}: {plot.stat().st_size:,} bytes", soft_wrap=True)


def _refuse_beside_checkpoints(**given: object) -> None:
    """Raises an OptionError if an option was given that is for one model, not for its checkpoints."""
    wrong = next((name for name, value in given.items() if value), None)
    if wrong is not None:
        raise OptionError(f"--{wrong} is about one model: leave it out, or name one checkpoint without --checkpoints")


class Given(NamedTuple):
    """The contents of the files that the user gave; None for those not given."""

    texts: list[Sample] | None
    parsed: list[Parsed] | None
    mentions: list[Mentions] | None
    labelled: list[Sentence] | None


def _read_files(
    samples: list[Sample] | None, syntax: Path | None, coreference: Path | None, labelled: Path | None
) -> Given:
    """Returns the contents of all files, which are read before the model so that errors in them come at once."""
    parsed = mentions = sentences = None
    if syntax is not None:
        parsed = read_parsed(syntax)
    if coreference is not None:
        mentions = read_coreference(coreference)
    if labelled is not None:
        sentences = read_sentences(labelled)
    return Given(samples, parsed, mentions, sentences)


def _evaluate_annotated(
    subject: RecordableModel, given: Given, report: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """Returns how well heads find syntactic relations and coreference, if annotated sentences are given."""
    found: dict[str, Any] = {}
    if given.parsed is not None:
        rare: dict[str, int] = {}
        parsed = _with_progress(given.parsed, "syntax, sentence", report)
        found["syntax"] = evaluate_syntax(subject.record_one, parsed, rare)
        found["syntax_rare"] = rare
        found["pairs_needed"] = MIN_PAIRS
    if given.mentions is not None:
        mentions = _with_progress(given.mentions, "coreference, text", report)
        found["coreference"] = evaluate_coreference(subject.record_one, mentions)
        found["pairs_needed"] = MIN_PAIRS
    return found


def _with_progress(items: Sequence[X], work: str, report: Callable[[str, int, int], None]) -> Iterator[X]:
    """Yields the items and reports each."""
    for n, item in enumerate(items):
        report(work, n, len(items))
        yield item


def _report_done(report: Callable[[str, int, int], None], work: str, done: int, total: int) -> None:
    """Reports that `done` of `total` parts of a work are done."""
    report(work, done - 1, total)


def _read_samples(texts: Path | None, pairs: Path | None, targets: Path | None) -> list[Sample] | None:
    """Returns the texts of a file, without empty lines, with their second texts and targets; None without a file."""
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
    """Shows a status line, and yields the function that changes it: (work, parts done, parts in all)."""
    with console(stderr=True).status("recording") as status:

        def report(work: str, n: int, total: int) -> None:
            if total > 1:
                work = f"{work} {n + 1} of {total}"
            status.update(work)

        yield report


def _print_results(results: dict[str, Any]) -> None:
    """Prints the results of `examine` and of the further options."""
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
        _print_syntax(results["syntax"], results["syntax_rare"])
    if "coreference" in results:
        _print_coreference(results["coreference"])
    if "ablation" in results:
        _print_ablation(results["ablation"])
    if "pruning" in results:
        print_pruning(results["pruning"])


def _print_labels(results: dict[str, Any]) -> None:
    """Prints the heads that have a label, the strongest first, with the cost of their removal if measured."""
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
        cells = [head_name(head), head["label"], f"{head['effect']:.2f}", f"{head['low']:.2f} to {head['high']:.2f}"]
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
    """Prints the mean measures of each layer's heads; a dash for those that a layer does not have."""
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
        names = " and ".join(head_name(head) for head in pair["heads"])
        made.add_row(names, f"{pair['divergence']:.4f}", f"{pair['divergence'] / pair['from_even']:.0%}")
    console().print(made)


def _print_syntax(rows: list[dict[str, Any]], rare: Mapping[str, int]) -> None:
    """Prints the best head of each syntactic relation, beside the baseline of one fixed distance."""
    out = console()
    if rows:
        _print_title("Syntax: the best head of each relation")
        made = table("relation", "head", "right", "pairs", "fixed distance", "more by")
        for row in sorted(rows, key=lambda row: row["baseline"] - row["score"]):
            fixed = f"{row['baseline']:.0%} at {row['distance']:+d}"
            gain = f"{row['low']:+.2f} to {row['high']:+.2f}{_tick(row)}"
            name = f"{row['relation']} {_short(row['direction'])}"
            made.add_row(name, head_name(row), f"{row['score']:.0%}", str(row["pairs"]), fixed, gain)
        out.print(made)
    if rare:
        out.print(f"Left out, since a relation needs {MIN_PAIRS} pairs: {_describe_rare(rows, rare)}.", soft_wrap=True)
    if not rows:
        out.print(f"\nSyntax: no relation has the {MIN_PAIRS} pairs that it needs.")


def _describe_rare(rows: list[dict[str, Any]], rare: Mapping[str, int]) -> str:
    """Returns how many pairs each relation that is left out has, without the direction where both are left out."""
    found = {row["relation"] for row in rows}
    counts: dict[str, int] = {}
    for name, pairs in rare.items():
        relation, _, direction = name.partition(" ")
        if relation in found:
            relation = f"{relation} {_short(direction)}"
        counts[relation] = max(pairs, counts.get(relation, 0))
    return ", ".join(f"{relation} has {pairs}" for relation, pairs in counts.items())


def _short(direction: str) -> str:
    return direction.replace("dependent", "dep")


def _print_coreference(row: dict[str, Any] | None) -> None:
    """Prints the head that best finds an earlier mention of the same entity, if any."""
    if row is None:
        console().print(
            f"\nCoreference: fewer than {MIN_PAIRS} mentions have an earlier mention of the same, and one of something "
            f"else, where a head can look; {MIN_PAIRS} are needed."
        )
        return
    console().print(
        f"\nCoreference: {head_name(row)} finds an earlier mention of the same in {row['score']:.0%} of "
        f"{row['pairs']}, "
        f"the {row['rule']} mention is right in {row['baseline']:.0%} (more by {row['low']:+.2f} to {row['high']:+.2f})"
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
        made.add_row(head_name(row), _cost(row, results))
    console().print(made)


def _print_title(text: str) -> None:
    """Prints the title of a table."""
    console().print(f"\n{text}", style="bold", soft_wrap=True)


def _tick(row: dict[str, Any]) -> str:
    """Returns a tick if a head is significantly better than the baseline."""
    if row["stands_out"]:
        return " ✓"
    return ""
