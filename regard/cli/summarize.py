"""`regard summarize`."""

from __future__ import annotations

import json as jsons
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.show import console, print_json
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
        str, typer.Argument(metavar="FILE", help="Articles: .jsonl, .csv, .tsv, or text with one a line; - for input.")
    ],
    beams: Annotated[int | None, typer.Option(help="Beam search of this width; 4 unless tokens are drawn.")] = None,
    n: Annotated[int, typer.Option("--n", help="So many different summaries of each.")] = 1,
    max_tokens: Annotated[int | None, typer.Option("--max", help="At most so many tokens.")] = None,
    length_penalty: Annotated[float, typer.Option(help="Beams are ranked by log p / length to this power.")] = 1.0,
    temperature: Annotated[float | None, typer.Option(help="Draw tokens instead; below 1 prefers likely ones.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw only the likeliest that have probability p.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same tokens.")] = None,
    article: Annotated[str, typer.Option(help="The key or column that holds the article.")] = "article",
    out: Annotated[Path | None, typer.Option(help="Write the summaries here: lines, or JSON lines (.jsonl).")] = None,
    device: Annotated[str, typer.Option(help="Where to run, e.g. cuda.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Summarise articles with a trained encoder-decoder."""
    draws = temperature is not None or top_p is not None
    if not draws and beams is None:
        beams = max(4, n)
    settings = Settings(
        beams=beams,
        n=n,
        max_tokens=max_tokens or 1 << 20,
        length_penalty=length_penalty,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )
    if out is not None and n > 1 and out.suffix != ".jsonl":
        raise OptionError(f"--n {n} --out {out}: several summaries of an article need a file that ends in .jsonl")
    articles = _articles(file, article)
    found = summaries(writer(load(model, resolve_device(device)), model), articles, settings)
    _warn(found, file)
    rows = [_row(number, summary) for number, summary in enumerate(found, 1)]
    if out is not None:
        write_lines(out, _lines(rows, out))
        console().print(f"Summaries of {len(rows):,} articles in {out}", soft_wrap=True)
    elif json:
        print_json(rows)
    else:
        _print(rows, n)


def _articles(file: str, article: str) -> list[str]:
    if file != "-":
        return read_articles(file, article)
    try:
        lines = [normalize_spaces(line) for line in sys.stdin.read().splitlines()]
    except UnicodeDecodeError as error:
        raise DataError(f"the input is not UTF-8 text: {error}") from None
    if not lines:
        raise DataError("the input is empty; expected one article a line")
    return lines


def _warn(found: Sequence[Summaries], file: str) -> None:
    empty, cut = sum(not s.choices for s in found), sum(s.cut > 0 for s in found)
    if empty:
        warnings.warn(f"{file}: {empty:,} of {len(found):,} articles are empty and have no summary", stacklevel=2)
    if cut:
        warnings.warn(
            f"{file}: {cut:,} of {len(found):,} articles are longer than the model reads; their ends were not read",
            stacklevel=2,
        )


def _row(number: int, found: Summaries) -> dict[str, Any]:
    texts = [{"text": c.text, "score": c.score, "ended": c.ended} for c in found.choices]
    return {"article": number, "summaries": texts, "tokens_not_read": found.cut}


def _lines(rows: Sequence[dict[str, Any]], out: Path) -> list[str]:
    if out.suffix == ".jsonl":
        return [jsons.dumps(row, ensure_ascii=False) for row in rows]
    return [row["summaries"][0]["text"] if row["summaries"] else "" for row in rows]


def _print(rows: Sequence[dict[str, Any]], n: int) -> None:
    for row in rows:
        if n == 1:
            print(row["summaries"][0]["text"] if row["summaries"] else "")
            continue
        for place, summary in enumerate(row["summaries"], 1):
            print(f"{row['article']}.{place}  {summary['text']}")
