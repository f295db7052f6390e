"""`regard view`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.models import HELP
from regard.cli.show import console
from regard.errors import OptionError
from regard.hub.opening import GGUF, RANDOM
from regard.lens import Trace, encode, load
from regard.lens.heads.examine import default_labels
from regard.lens.models import open_recordable
from regard.lens.pages.page import write_page
from regard.lens.recording.memories import describe_misses
from regard.lens.small_model import is_shipped, shipped, shipped_text
from regard.reading import check_path


def view(
    model: Annotated[
        str | None,
        typer.Argument(help=f"{HELP} Or a .trace file, which needs no text. Default: small."),
    ] = None,
    text: Annotated[str | None, typer.Argument(help="A text, or the file of an image, for the model to read.")] = None,
    text_b: Annotated[str | None, typer.Argument(help="Another text or image, to compare.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("page.html"),
    beside: Annotated[
        list[str] | None, typer.Option("--with", help="Another model or .trace to compare with; repeatable.")
    ] = None,
    pair: Annotated[
        str | None, typer.Option(help="The second text of a pair, for a model that reads two at once, such as BERT.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="The target text of an encoder-decoder.")] = None,
    generate: Annotated[int | None, typer.Option(help="Let the model first generate this many tokens.")] = None,
    gradient: Annotated[
        bool, typer.Option("--gradient", help="Also show gradients of the loss with respect to attention weights.")
    ] = False,
    contributions: Annotated[
        bool | None,
        typer.Option(
            help="Also show the outputs of heads, the prediction after each layer, and which heads favour which token. "
            "Default: for texts of at most 512 tokens, if it takes seconds."
        ),
    ] = None,
    labels: Annotated[
        bool, typer.Option("--labels/--no-labels", help="Label what each head does, from a dozen short texts.")
    ] = True,
    device: Annotated[str | None, typer.Option(help="Where to run, e.g. cuda.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of random weights.")] = 0,
    download: Annotated[
        bool, typer.Option("--download", help="Download a model if it is not on this machine.")
    ] = False,
) -> None:
    """Write one page that shows what a model attends to: every head, every weight, offline."""
    screen = console(stderr=True)
    if model is None:
        model = str(shipped())
        text = shipped_text()
    elif text is None and is_shipped(model):
        text = shipped_text()
    traces = []
    for name in (model, *(beside or ())):
        with screen.status(f"reading with {name}"):
            if _is_trace(name):
                traces.append(load(name))
                continue
            if _is_sentence(name):
                raise OptionError(f"{name!r} was taken for a model but reads like a text: {_correct_call(name)}")
            if text is None:
                raise OptionError(_explain_missing_text(name))
            subject = open_recordable(name, device or "cpu", seed=seed, download=download)
            options = {"target": target, "generate": generate, "gradient": gradient, "contributions": contributions}
            trace = subject.record(text, text_b, pair=pair, **options)
            if labels:
                head_labels = default_labels(subject, seed)
                for recording in trace.recordings:
                    recording.labels = head_labels
        traces.append(trace)
    # Otherwise a text given with traces alone would be ignored silently.
    if text is not None and all(map(_is_trace, (model, *(beside or ())))):
        raise OptionError(f"{model} is a trace and has its text already; leave the text out, or name a model")
    joined = Trace.joined(*traces)
    for sentence in describe_misses(joined.recordings):
        screen.print(sentence, soft_wrap=True)
    encoded = encode(joined)
    screen.print(f"{_count(traces)}; {encoded.page_size / 1e6:.1f} MB to write", soft_wrap=True)
    write_page(encoded, out)
    console().print(f"{out} shows it: open it in a browser", soft_wrap=True)


def _is_trace(name: str) -> bool:
    """Returns whether a name is that of a file with a trace; the only other file is a model in GGUF."""
    return check_path(name).is_file() and not name.endswith(GGUF)


def _explain_missing_text(name: str) -> str:
    """Returns the error for a single argument that is not a trace: what it was taken for, and a correct call."""
    if name.endswith(".trace"):
        return f"{name} does not exist; expected a .trace file, or a model and a text"
    quoted = shlex.quote(name)
    if Path(name.removeprefix(RANDOM)).exists():
        return f'{name} was taken for a model, and it needs a text: regard view {quoted} "The dog ran"'
    return (
        f"{name!r} was taken for a model, and there is no text for it to read. If it is a model: regard view {quoted} "
        f'"The dog ran". If it is the text: {_correct_call(name)}'
    )


def _correct_call(text: str) -> str:
    """Returns a correct call of the command with this text, for an error."""
    return (
        f"regard view MODEL {shlex.quote(text)}, where MODEL is a run, a model folder, or a Hugging Face folder or "
        "name; small is one that comes with regard, which `regard view` alone shows"
    )


def _is_sentence(name: str) -> bool:
    """Returns whether the name of a model can only be a text: it has spaces, and no file is called so."""
    return len(name.split()) > 1 and not Path(name.removeprefix(RANDOM)).exists()


def _count(traces: list[Trace]) -> str:
    """Returns a summary of what was recorded: 24 heads over 7 tokens."""
    recordings = [recording for trace in traces for recording in trace.recordings]
    heads = sum(attention.heads for recording in recordings for attention in recording.attentions)
    tokens = ", ".join(str(sum(map(len, recording.sequences))) for recording in recordings)
    texts = f"{tokens} tokens"
    if len(recordings) > 1:
        texts = f"{len(recordings)} recordings of {tokens} tokens"
    return f"{heads} heads over {texts}"
