"""`regard evaluate` and `predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.show import console, print_json, print_text, table
from regard.data.files import DataError, read_pieces
from regard.data.questions import MARK, Question, read_questions, write_predictions
from regard.data.sentences import read_sentences
from regard.devices import resolve_device
from regard.errors import OptionError
from regard.hub import is_hub_folder
from regard.hub.classifier import Classifier
from regard.lab.knowledge.answers import answer, score
from regard.lab.likelihood import Likelihood, judge_text
from regard.lens.models import open_recordable
from regard.models import Decoder, load
from regard.models.locate import model_folder
from regard.train.tasks.sentiment import positive_probabilities

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A run, experiment or model folder.")]
Device = Annotated[str | None, typer.Option(help="Where to run, e.g. cuda; default: cpu.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
_SHOWN = 60  # characters of a line of text that a table shows


def evaluate(
    model: Model,
    data: Annotated[
        Path | None, typer.Option(help="Lines of question, tab, answer; for a classifier: sentence, tab, 0 or 1.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="A text file: loss, perplexity and bits by a language model, also of Hugging Face."),
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Evaluate each line of --text by itself.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show every token of --text and its probability.")] = False,
    predictions: Annotated[
        Path | None, typer.Option(help="Write the answers to --data to this file, one a line.")
    ] = None,
    device: Device = None,
    download: Annotated[bool, typer.Option("--download", help="Download a model by its Hugging Face name.")] = False,
    json: Json = False,
) -> None:
    """Count right answers, or measure how likely a model finds a text.

    With --data a model answers questions or labels sentences; where the file has no answers, they are predicted. With
    --text a language model reads a text, which may be as long as you like.
    """
    if (data is None) == (text is None):
        raise OptionError("expected either --data FILE, to count right answers, or --text FILE, to measure a loss")
    if text is not None:
        if predictions is not None:
            raise OptionError("--predictions belongs to --data")
        _evaluate_text(model, text, lines, tokens, device, download, json)
        return
    if lines or tokens:
        raise OptionError("--lines and --tokens belong to --text")
    assert data is not None
    _evaluate_answers(model, data, predictions, device, json)


def predict(
    model: Model,
    input: Annotated[
        Path, typer.Option(help="A file with one question or sentence a line; answers in it are ignored.")
    ],
    out: Annotated[
        Path, typer.Option(help="Write the answers to this file, one a line, in the order of the questions.")
    ],
    device: Device = None,
) -> None:
    """Write a model's answers to questions, or the labels of sentences and how likely each is positive."""
    questions = read_questions(input, answers=False)
    classifier = _load_classifier(model, device)
    if classifier is None:
        answers = [found.text for found in answer(_load_answerer(model, device), questions)]
    else:
        probabilities = positive_probabilities(classifier, [question.text for question in questions])
        answers = [f"{int(p > 0.5)}\t{p:.4f}" for p in probabilities]
    write_predictions(out, answers)
    console().print(f"{len(questions)} answers in {out}", soft_wrap=True)


def _evaluate_answers(model: str, data: Path, predictions: Path | None, device: str | None, json: bool) -> None:
    """Answers the questions or labels the sentences of a file; prints how many are right, or the answers themselves."""
    classifier = _load_classifier(model, device)
    questions = read_questions(data)
    known = questions[0].answer is not None
    if classifier is None:
        answers = [found.text for found in answer(_load_answerer(model, device), questions)]
    else:
        if known:
            questions = [Question(sentence.text, str(sentence.label)) for sentence in read_sentences(data)]
        probabilities = positive_probabilities(classifier, [question.text for question in questions])
        answers = [str(int(p > 0.5)) for p in probabilities]
    if predictions is not None:
        write_predictions(predictions, answers)
    if not known:
        _show_predictions(data, answers, predictions, json)
        return
    result = score(answers, questions)
    assert result is not None
    if json:
        print_json(result)
    else:
        interval = f"95% interval {result['low']:.1%} to {result['high']:.1%}"
        console().print(f"{result['right']} of {result['n']} right: {result['accuracy']:.1%} ({interval})")


def _show_predictions(data: Path, answers: list[str], predictions: Path | None, json: bool) -> None:
    """Prints that a file has no answers to compare with, and the predicted ones or their file."""
    if json:
        print_json({"n": len(answers), "answers": answers})
        return
    where = "here they are"
    if predictions is not None:
        where = f"they are in {predictions}"
    console(stderr=predictions is None).print(
        f"{data} has no answers to compare with: {len(answers)} predicted, {where}", soft_wrap=True
    )
    if predictions is None:
        for line in answers:
            print_text(line)


def _evaluate_text(
    model: str, path: Path, lines: bool, tokens: bool, device: str | None, download: bool, json: bool
) -> None:
    """Prints the loss of a text under a language model: of the whole or by line, and of each token with `tokens`."""
    content = "".join(read_pieces(path))
    texts = [content]
    if lines:
        texts = [line for line in content.split("\n") if line.strip()]
    if not any(part.strip() for part in texts):
        raise DataError(f"{path} holds no text")
    opened = open_recordable(model, resolve_device(device or "cpu"), download=download)
    judged = [judge_text(opened, part, with_tokens=tokens) for part in texts]
    if json:
        rows = [_json_row(part, found, tokens, lines) for part, found in zip(texts, judged, strict=True)]
        if not lines:
            print_json(rows[0])
        else:
            print_json(rows)
        return
    if lines:
        _print_lines(texts, judged)
    for part, found in zip(texts, judged, strict=True):
        if tokens:
            if lines:
                console().print(f"\n{part[:_SHOWN]!r}", soft_wrap=True)
            _print_tokens(found)
        if not lines:
            _print_summary(found)


def _json_row(text: str, found: Likelihood, tokens: bool, lines: bool) -> dict[str, Any]:
    """Returns the loss of one text, and of its tokens if asked for, as plain data for JSON."""
    row: dict[str, Any] = dict(found.summary())
    if lines:
        row = {"text": text} | row
    if tokens:
        row["each"] = [vars(token) for token in found.tokens]
    return row


def _print_summary(found: Likelihood) -> None:
    numbers = found.summary()
    console().print(
        f"{numbers['tokens']:,} tokens: loss {numbers['loss']:.4f}, perplexity {numbers['perplexity']:,.2f}\n"
        f"bits: {numbers['bits_per_token']:.3f} a token, {numbers['bits_per_character']:.3f} a character, "
        f"{numbers['bits_per_byte']:.3f} a byte",
        soft_wrap=True,
    )


def _print_lines(texts: list[str], judged: list[Likelihood]) -> None:
    made = table("text", "tokens", "loss", "perplexity", "bits/byte")
    for text, found in zip(texts, judged, strict=True):
        numbers = found.summary()
        cells = [f"{numbers['tokens']:,}", f"{numbers['loss']:.4f}", f"{numbers['perplexity']:,.2f}"]
        made.add_row(text[:_SHOWN], *cells, f"{numbers['bits_per_byte']:.3f}")
    console().print(made)


def _print_tokens(found: Likelihood) -> None:
    """Prints a table of the tokens: the probability of each, its rank, and the likeliest token if it was another."""
    made = table("token", "loss", "probability", "rank", "likeliest")
    for token in found.tokens:
        if token.loss is None:
            made.add_row(repr(token.text), "–", "–", "–", "")
            continue
        other = ""
        if token.rank != 1:
            other = repr(token.likeliest)
        made.add_row(repr(token.text), f"{token.loss:.3f}", f"{token.probability:.4f}", f"{token.rank:,}", other)
    console().print(made)


def _load_answerer(model: str, device: str | None) -> Decoder[Any]:
    """Returns a model that was trained to answer questions; raises an OptionError for any other."""
    loaded = load(model, resolve_device(device or "cpu"))
    if not isinstance(loaded, Decoder):
        raise OptionError(f"{model} is a {type(loaded).__name__}, which writes no answers; expected a GPT")
    if loaded.tokenizer is None or loaded.tokenizer.id(MARK) is None:
        raise OptionError(
            f"{model} was not trained to answer; expected a model of `regard run knowledge`. The loss of a text is "
            f"measured by regard evaluate {model} --text FILE"
        )
    return loaded


def _load_classifier(model: str, device: str | None) -> Classifier | None:
    """Returns the model if it is a classifier of sentences; None if it is another model."""
    folder = model_folder(model)
    if not is_hub_folder(folder):
        return None
    return Classifier(name=str(folder)).to(resolve_device(device or "cpu")).eval()
