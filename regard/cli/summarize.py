"""`regard summarize`."""

from __future__ import annotations

import json as json_format
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.show import console, print_json, print_text
from regard.data.files import DataError, write_lines
from regard.data.pairs import normalize_spaces, read_articles
from regard.devices import resolve_device
from regard.errors import OptionError
from regard.generate import Settings
from regard.lab.summarize.summaries import Summaries, summaries, writer
from regard.models import load


def summarize(
    model: Annotated[str, typer.Argument(metavar="RUN", help="A run, experiment or model folder.")],
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Articles: .jsonl, .csv, .tsv, or text with one a line; - for stdin.")
    ],
    beams: Annotated[int | None, typer.Option(help="Beam search of this width; default: 4 unless sampling.")] = None,
    n: Annotated[int, typer.Option("--n", help="Number of different summaries of each article.")] = 1,
    max_tokens: Annotated[int | None, typer.Option("--max", help="The most tokens of a summary.")] = None,
    length_penalty: Annotated[float, typer.Option(help="Beams are ranked by log p / length to this power.")] = 1.0,
    temperature: Annotated[float | None, typer.Option(help="Sample tokens; below 1 prefers likely ones.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest with total probability p.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same tokens.")] = None,
    article: Annotated[str, typer.Option(help="The key or column that holds the article.")] = "article",
    out: Annotated[
        Path | None, typer.Option(help="Write the summaries to this file: text lines, or JSON lines (.jsonl).")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to run, e.g. cuda.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Summarise articles with a trained encoder-decoder."""
    is_drawn = temperature is not None or top_k is not None or top_p is not None
    if not is_drawn and beams is None:
        beams = max(4, n)  # n different summaries need as many beams
    settings = Settings(
        beams=beams,
        n=n,
        max_tokens=max_tokens or 1 << 20,
        length_penalty=length_penalty,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    if out is not None and n > 1 and out.suffix != ".jsonl":
        raise OptionError(f"--n {n} --out {out}: several summaries of an article need a file that ends in .jsonl")
    articles = _read_articles(file, article)
    written = summaries(writer(load(model, resolve_device(device)), model), articles, settings)
    _warn_of_articles(written, file)
    rows = [_json_row(number, summary) for number, summary in enumerate(written, 1)]
    if out is not None:
        write_lines(out, _format_lines(rows, out))
        console().print(f"Summaries of {len(rows):,} articles in {out}", soft_wrap=True)
    elif json:
        print_json(rows)
    else:
        _print_summaries(rows, n)


def _read_articles(file: str, article: str) -> list[str]:
    """Returns the articles of a file, or for "-" the lines of stdin."""
    if file != "-":
        return read_articles(file, article)
    try:
        lines = [normalize_spaces(line) for line in sys.stdin.read().splitlines()]
    except UnicodeDecodeError as error:
        raise DataError(f"the input is not UTF-8 text: {error}") from None
    if not lines:
        raise DataError("the input is empty; expected one article a line")
    return lines


def _warn_of_articles(written: Sequence[Summaries], file: str) -> None:
    """Warns of articles that are empty, or longer than the model reads."""
    empty = sum(not summary.choices for summary in written)
    cut = sum(summary.cut > 0 for summary in written)
    if empty:
        warnings.warn(f"{file}: {empty:,} of {len(written):,} articles are empty and have no summary", stacklevel=2)
    if cut:
        warnings.warn(
            f"{file}: {cut:,} of {len(written):,} articles are longer than the model reads; their ends were not read",
            stacklevel=2,
        )


def _json_row(number: int, summary: Summaries) -> dict[str, Any]:
    """Returns the summaries of one article for JSON."""
    texts = [{"text": choice.text, "score": choice.score, "ended": choice.ended} for choice in summary.choices]
    return {"article": number, "summaries": texts, "tokens_not_read": summary.cut}


def _format_lines(rows: Sequence[dict[str, Any]], out: Path) -> list[str]:
    """Returns the lines of a file of summaries: JSON for .jsonl, else the best summary of each article."""
    if out.suffix == ".jsonl":
        return [json_format.dumps(row, ensure_ascii=False) for row in rows]
    return [_best_text(row) for row in rows]


def _best_text(row: dict[str, Any]) -> str:
    """Returns the best summary of an article; "" without one, so that lines of summaries and articles correspond."""
    if not row["summaries"]:
        return ""
    text: str = row["summaries"][0]["text"]
    return text


def _print_summaries(rows: Sequence[dict[str, Any]], n: int) -> None:
    """Prints the best summary of each article, or several of each with their numbers."""
    for row in rows:
        if n == 1:
            print_text(_best_text(row))
            continue
        for place, summary in enumerate(row["summaries"], 1):
            print_text(f"{row['article']}.{place}  {summary['text']}")
