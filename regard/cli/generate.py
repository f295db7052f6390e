"""`regard generate`."""

from __future__ import annotations

from typing import Annotated

import typer

from regard.cli.models import OWN_HELP
from regard.cli.show import console, print_json, print_text
from regard.errors import OptionError
from regard.generate import Choice, Settings, stream
from regard.generate import generate as run
from regard.hub.opening import load_regard_model


def generate(
    model: Annotated[str, typer.Argument(help=OWN_HELP)],
    prompt: Annotated[str, typer.Argument(help="The text to continue; for an encoder-decoder, the source.")],
    max_tokens: Annotated[int, typer.Option("--max", help="The most tokens to generate.")] = 100,
    temperature: Annotated[float | None, typer.Option(help="Sample tokens; below 1 prefers likely ones.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest with total probability p.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Sample from tokens at least p times as likely as the likeliest.")
    ] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens that occurred become less likely.")] = 1.0,
    beams: Annotated[int | None, typer.Option(help="Beam search of this width.")] = None,
    length_penalty: Annotated[float, typer.Option(help="Beams are ranked by log p / length to this power.")] = 0.0,
    n: Annotated[int, typer.Option("--n", help="Number of different outputs.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends an output; repeatable.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same tokens.")] = None,
    slide: Annotated[
        bool, typer.Option("--slide", help="When the model's length is reached, forget the beginning.")
    ] = False,
    streaming: Annotated[bool, typer.Option("--stream", help="Print text as it comes (one output, no beams).")] = False,
    device: Annotated[str, typer.Option(help="Where to run, e.g. cuda.")] = "cpu",
    download: Annotated[bool, typer.Option("--download", help="Download a model by its Hugging Face name.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Continue a prompt with a model: greedy, unless --temperature, --top-k, --top-p, --min-p or --beams is given."""
    settings = Settings(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        beams=beams,
        length_penalty=length_penalty,
        n=n,
        stop=tuple(stop or ()),
        seed=seed,
        slide=slide,
    )
    loaded = load_regard_model(model, device, download=download)
    if loaded.tokenizer is None:
        raise OptionError(f"{model} has no tokenizer.json, so it cannot read text; use regard.generate with token ids")
    # Beams and several outputs are known only at the end, so there is nothing to stream.
    if streaming and not json and beams is None and n == 1:
        for piece in stream(loaded, prompt, settings):
            print_text(piece, end="")
        print_text("")
        return
    result = run(loaded, prompt, settings)
    choices = result.choices
    if beams is not None:
        choices = choices[:n]  # a search has an output for each beam, the best first
    if json:
        print_json({"prompt": prompt, "outputs": [_json_row(choice) for choice in choices]})
        return
    # The text alone goes to stdout, and not through rich, which would wrap its lines.
    for number, choice in enumerate(choices, 1):
        if len(choices) > 1:
            console(stderr=True).print(f"{number}. score {choice.score:.3f}, ended by {choice.ended}", style="dim")
        print_text(choice.text or "")


def _json_row(choice: Choice) -> dict[str, object]:
    """Returns one output for JSON."""
    return {"text": choice.text, "tokens": choice.tokens, "score": choice.score, "ended": choice.ended}
