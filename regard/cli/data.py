"""`regard world` and `regard data`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer

from regard.cli.batches import print_batch
from regard.cli.groups import Group
from regard.cli.show import console, print_json, print_text, table
from regard.data.batch import IGNORE, Batch
from regard.data.corruption import corrupt, longest_cut
from regard.data.questions import (
    MARK,
    PAD,
    Question,
    pack_documents,
    question_batch,
    read_documents,
    read_questions,
    special_id,
    vocabulary,
)
from regard.data.tokenizers import Tokenizer
from regard.data.tokens import write_tokens
from regard.data.world import World, WorldConfig, make_world
from regard.errors import OptionError, UnknownNameError, did_you_mean
from regard.hub.classifier import Classifier
from regard.lab.results import to_json
from regard.lab.sentiment.run import inspect_batch
from regard.reading import check_path
from regard.train.inspection import first_batch
from regard.train.recipe import load as load_recipe
from regard.train.tasks.sentiment import Sentiment, SentimentData

DEFAULT = WorldConfig()
MEANINGS = {"names": "question⁇answer⁇, loss on the answer", "corruption": "prefix⁇suffix⁇span, loss on all of it"}
SENTIMENT = "sentiment"
BATCHES = ("summarize", "lm", "heads")  # recipes whose first batch is shown
NO_LOSS = "·"

data = typer.Typer(
    cls=Group,
    help="Show training data, and turn texts into files of tokens.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def world(
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    people: Annotated[int, typer.Option(help="People with biographies.")] = DEFAULT.people,
    biographies: Annotated[int, typer.Option(help="Biographies of each person.")] = DEFAULT.biographies,
    sentences: Annotated[int, typer.Option(help="Sentences of a biography, at most 6.")] = DEFAULT.sentences,
    permuted: Annotated[bool, typer.Option(help="Shuffle the facts of each biography.")] = DEFAULT.permuted,
    full_names: Annotated[
        bool, typer.Option(help="Use the full name in each sentence, not only the first.")
    ] = DEFAULT.full_names,
    told: Annotated[float, typer.Option(help="Share of biographies that state the birthplace.")] = DEFAULT.told,
    celebrities: Annotated[
        float, typer.Option(help="Share of people with --fame times as many biographies.")
    ] = DEFAULT.celebrities,
    fame: Annotated[int, typer.Option(help="How many times as many biographies a celebrity has.")] = DEFAULT.fame,
    places: Annotated[int, typer.Option(help="Number of birthplaces.")] = DEFAULT.places,
    skew: Annotated[float, typer.Option(help="How unequal the places' shares are; 0: all equal.")] = DEFAULT.skew,
    variety: Annotated[float, typer.Option(help="Share of names with an initial, a particle …")] = DEFAULT.variety,
    asked: Annotated[
        float | None, typer.Option(help="People with a training question; below 1, their share; default: half.")
    ] = None,
    held_out: Annotated[
        float | None,
        typer.Option(help="People with a test question, or their share; as many for dev; default: half the rest."),
    ] = None,
    unwritten: Annotated[
        float, typer.Option(help="People without biographies, as a share of those with.")
    ] = DEFAULT.unwritten,
    seed: Annotated[int, typer.Option(help="The same seed makes the same world.")] = DEFAULT.seed,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Generate an invented world of people.

    It has biographies to train on, and questions about birthplaces.
    """
    config = WorldConfig(
        people=people,
        biographies=biographies,
        sentences=sentences,
        permuted=permuted,
        full_names=full_names,
        told=told,
        celebrities=celebrities,
        fame=fame,
        places=places,
        skew=skew,
        variety=variety,
        asked=asked,
        held_out=held_out,
        unwritten=unwritten,
        seed=seed,
    )
    invented = make_world(config)
    invented.write(out)
    files = _world_files(invented)
    if json:
        lines = {name: len(texts) for name, texts in files.items()}
        print_json({"folder": str(out), "config": config.as_dict(), "lines": lines})
        return
    made = table("file", "lines", "the first")
    for name, texts in files.items():
        made.add_row(name, f"{len(texts):,}", next(iter(texts), ""))
    console().print(f"{out} holds a world of seed {seed}; world.toml has its config.\n", soft_wrap=True)
    console().print(made)


def _world_files(invented: World) -> dict[str, list[str]]:
    """Returns the lines of each file of a world, formatted for reading, by the file's name."""
    files = {"documents.txt": list(invented.documents)}
    for split, questions in invented.questions.items():
        files[f"{split}.tsv"] = [f"{question.text} {question.answer}" for question in questions]
    files["test_inputs.tsv"] = [question.text for question in invented.test]
    files["unwritten.tsv"] = [question.text for form in invented.unwritten.values() for question in form]
    files["people.jsonl"] = [person.name for person in invented.people]
    return files


@data.command()
def show(
    what: Annotated[
        str,
        typer.Argument(
            help="A recipe: summarize, lm, heads, sentiment …; or names (questions), corruption (documents)."
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to a recipe, e.g. data.train=pairs.jsonl.")
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Number of examples.")] = 5,
    documents: Annotated[Path | None, typer.Option(help="A file with one document a line; default: generated.")] = None,
    questions: Annotated[Path | None, typer.Option(help="Lines of question, tab, answer; default: generated.")] = None,
    sentences: Annotated[Path | None, typer.Option(help="Lines of sentence, tab, 0 or 1; default: generated.")] = None,
    model: Annotated[str, typer.Option(help="The encoder whose tokenizer reads sentences.")] = "",
    block: Annotated[int, typer.Option(help="Tokens of a row.")] = 128,
    seed: Annotated[int, typer.Option(help="The same seed draws the same cuts, spans and rows.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Print examples as a model gets them: x, and y at each place of x."""
    if n < 1:
        raise OptionError(f"--n {n}: expected at least 1")
    if what in BATCHES:
        return _show_batch(what, [f"train.seed={seed}", *(overrides or ())], n, json)
    if overrides:
        raise OptionError(f"{overrides[0]}: only {', '.join(BATCHES)} take changes by KEY=VALUE; see the options")
    if what == SENTIMENT:
        return _show_sentiment(sentences, model, n, block, seed, json)
    if what not in MEANINGS:
        raise UnknownNameError(f"no data '{what}' to show.{did_you_mean(what, (*MEANINGS, *BATCHES, SENTIMENT))}")
    texts, pairs = _read_texts(documents, questions, seed)
    tokenizer = vocabulary([*texts, *(text for pair in pairs for text in (pair.text, pair.answer or ""))])
    if what == "names":
        batch = question_batch(tokenizer, pairs[:n], block)
    else:
        rows, lengths = pack_documents(tokenizer, texts[:n], longest_cut(block))
        source = torch.Generator().manual_seed(seed)
        batch = corrupt(rows, lengths, block, special_id(tokenizer, MARK), special_id(tokenizer, PAD), source)
    lines = _decode_rows(tokenizer, batch)
    if json:
        print_json([{"x": x, "y": y} for x, y in lines])
        return
    # The explanation goes to stderr, so that stdout holds the examples alone.
    console(stderr=True).print(f"{what}: {MEANINGS[what]}; {PAD} padding, {NO_LOSS} no loss here\n", style="dim")
    for x, y in lines:
        print_text(f"x: {x}\ny: {y}\n")


def _read_texts(documents: Path | None, questions: Path | None, seed: int) -> tuple[Sequence[str], Sequence[Question]]:
    """Returns the documents and the questions of these files; those without a file are generated."""
    texts: Sequence[str]
    pairs: Sequence[Question]
    if documents is None or questions is None:
        invented = make_world(WorldConfig(seed=seed))
        texts = invented.documents
        pairs = invented.train
    if documents is not None:
        texts = read_documents(documents)
    if questions is not None:
        pairs = read_questions(questions, answers=True)
    return texts, pairs


def _show_batch(recipe: str, overrides: list[str], n: int, json: bool) -> None:
    """Prints the batch of the first step of a recipe: its tensors, and its rows as ids and tokens."""
    batch = first_batch(load_recipe(recipe, overrides), n)
    if json:
        return print_json(batch.as_dict())
    print_batch(recipe, batch)


def _show_sentiment(sentences: Path | None, model: str, n: int, length: int, seed: int, json: bool) -> None:
    """Prints the batch of the first step of a classifier: its tensors, and its rows as text."""
    encoder = Classifier(name=model)
    config = SentimentData(train=str(sentences or ""), length=length)
    # Generated sentences are written into a folder, which is not needed afterwards.
    with TemporaryDirectory() as folder:
        task = Sentiment(config, seed, torch.device("cpu"), Path(folder), encoder.tokenizer)
    inspected = inspect_batch(task, n, n)
    if json:
        return print_json(to_json(inspected))
    tensors = table("tensor", "type", "dtype", "shape", "what it holds")
    for tensor in inspected.tensors:
        tensors.add_row(tensor.name, tensor.type, tensor.dtype, str(tensor.shape), tensor.what)
    rows = table("row, decoded", "label", "tokens", "padding")
    for row in inspected.rows:
        rows.add_row(row.text, row.label, str(row.tokens), str(row.padding))
    for made in (tensors, rows):
        console().print(made)


def _decode_rows(tokenizer: Tokenizer, batch: Batch) -> list[tuple[str, str]]:
    """Returns the texts of x and y of each row."""
    pairs = zip(batch.x.tolist(), batch.y.tolist(), strict=True)
    return [(_decode(tokenizer, x), _decode(tokenizer, y)) for x, y in pairs]


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Returns the text of one row, with a dot where there is no loss, and long runs of dots or padding as ×N."""
    text = "".join(NO_LOSS if token == IGNORE else tokenizer.decode([token]) for token in ids)
    return re.sub(f"({PAD}|{NO_LOSS})\\1{{3,}}", lambda m: f"{m[1]}×{len(m[0])}", text)


@data.command()
def tokens(
    file: Annotated[Path, typer.Argument(help="A UTF-8 text file.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    tokenizer: Annotated[str, typer.Option(help="characters, bytes or bpe.")] = "characters",
    vocabulary_size: Annotated[int, typer.Option("--vocabulary", help="Vocabulary size of bpe.")] = 8192,
    share: Annotated[float, typer.Option(help="Share of the tokens for training; the rest is for dev.")] = 0.9,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Turn a text into files of tokens.

    train.npy, dev.npy and tokenizer.json, for a language model: data.tokens=FOLDER.
    """
    if check_path(out, OptionError).is_file():
        raise OptionError(f"--out {out} is a file; expected a folder")
    train, dev = write_tokens(file, out, tokenizer, vocabulary_size, share)
    if json:
        lengths = {"folder": str(out), "train": len(train), "dev": len(dev)}
        print_json(lengths | {"vocabulary": train.tokenizer.size, "dtype": str(train.tokens.dtype)})
        return
    console().print(
        f"{out}: {len(train):,} tokens to train on and {len(dev):,} for dev ({train.tokens.dtype}), "
        f"{train.tokenizer.size:,} different ones ({train.tokenizer.kind})",
        soft_wrap=True,
    )
