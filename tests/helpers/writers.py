"""All that regard writes whole or not at all, each with how its newest is read, and a crash at every moment of it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from crashes import Recorder
from training import gpt

import regard
from regard.data.tokens import TokenFile, write_tokens
from regard.errors import DataError
from regard.hub import export
from regard.models import ModelFolderError
from regard.report.page import Page
from regard.storage import write_text
from regard.train import checkpoint


def model_of(number: int) -> Any:
    """Returns the smallest GPT with all weights this number; odd ones have a tokenizer, a file that comes and goes."""
    model = gpt()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    if number % 2 == 0:
        model.tokenizer = None
    return model


def saved_number(folder: Path) -> float | None:
    """Returns the number of the model that a folder holds, which is whole, or None."""
    try:
        model = regard.load(folder)
    except ModelFolderError as error:
        assert "no config.json" in str(error)
        return None
    numbers = {float(x) for p in model.parameters() for x in p.detach().unique()}
    assert len(numbers) == 1
    number = numbers.pop()
    assert (model.tokenizer is None) == (number % 2 == 0)
    return number


def write_checkpoint(folder: Path, number: int) -> None:
    checkpoint.write(folder, number, model_of(number), {"a": torch.full((3,), float(number))}, {})
    checkpoint.prune(folder, 1, None, written=number)


def newest_checkpoint(folder: Path) -> int | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those that are passed over
        return checkpoint.newest(folder)


def write_export(folder: Path, number: int) -> None:
    model = model_of(1)
    model.tokenizer = None
    export(model, folder / f"export-{number}")


def newest_export(folder: Path) -> int | None:
    done = sorted(folder.glob("export-*"))
    for path in done:
        assert sorted(p.name for p in path.iterdir()) == ["config.json", "model.safetensors", "regard-hashes.json"]
        regard.hub.load(path)
    return int(done[-1].name[-1]) if done else None


def text_file(folder: Path) -> int | None:
    path = folder / "sub" / "file"
    return int(path.read_text()) if path.exists() else None


def page_number(folder: Path) -> int | None:
    path = folder / "page.html"
    if not path.exists():
        return None
    text = path.read_text()
    assert text.endswith("</html>\n")
    return int(text.partition("<title>")[2].partition("<")[0])


def write_token_files(folder: Path, number: int) -> None:
    """Writes tokens of a text of so many different characters, over those that are there."""
    text = folder.parent / f"{number}.txt"
    text.write_text("abcdefghij"[: number + 1] * 40)
    write_tokens(text, folder / "tokens")


def token_files_number(folder: Path) -> int | None:
    """Returns the number of the text that a folder has tokens of; all files are of the same text."""
    if not (folder / "tokens").is_dir():
        return None
    try:
        found = [TokenFile.open(folder / "tokens" / name) for name in ("train.npy", "dev.npy")]
    except DataError as error:
        assert "does not exist" in str(error), error  # nothing was committed yet
        return None
    sizes = {x.tokenizer.size for x in found} | {int(x.tokens.max()) + 1 for x in found}
    assert len(sizes) == 1 and sum(map(len, found)) == 40 * max(sizes)
    return sizes.pop() - 1


KINDS: dict[str, tuple[Callable[[Path, int], Any], Callable[[Path], Any]]] = {
    "model": (lambda folder, n: model_of(n).save(folder), saved_number),
    "checkpoint": (write_checkpoint, newest_checkpoint),
    "text": (lambda folder, n: write_text(folder / "sub" / "file", str(n)), text_file),
    "page": (lambda folder, n: Page(str(n), "").write(folder / "page.html"), page_number),
    "tokens": (write_token_files, token_files_number),
    "export": (write_export, newest_export),
}


def crash(kind: str, root: Path, before: Sequence[int] = (1,), number: int = 2) -> int:
    """Writes over what was there before, and reads after a crash at every moment; returns how many there were."""
    write, read = KINDS[kind]
    folder = root / "folder"
    folder.mkdir(parents=True)
    for n in before:
        write(folder, n)
    with Recorder(folder) as recorder:
        write(folder, number)
    found: set[Any] = set()

    def check(world: Path, finished: bool) -> None:
        got = read(world)
        found.add(got)
        assert got == number or (not finished and got == (before[-1] if before else None)), (got, os.listdir(world))

    worlds = recorder.play(root / "world", check)
    assert len(found) == 2  # some crashes came too early, some too late
    return worlds
