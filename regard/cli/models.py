"""The MODEL of a command: a run, a model folder, a Hugging Face folder or name, or 'random:' before any of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regard import hub
from regard.cli.show import console
from regard.devices import resolve_device
from regard.errors import OptionError
from regard.lens.heads.examine import examine
from regard.lens.models import RANDOM, RecordableModel, open_recordable
from regard.models import Model, load
from regard.models.locate import model_folder

HELP = (
    "A run, a model folder, a Hugging Face folder or name, a GGUF file; random:MODEL is an untrained twin, as is "
    "random:gpt2."
)


def opened(name: str, device: str | None = None, *, seed: int = 0, download: bool = False) -> RecordableModel:
    """The model that a name on the command line stands for."""
    prefix = RANDOM if name.startswith(RANDOM) else ""
    bare = name.removeprefix(RANDOM)
    found = str(model_folder(bare)) if Path(bare).is_dir() else bare
    return open_recordable(prefix + found, resolve_device(device or "cpu"), seed=seed, download=download)


def labels(subject: RecordableModel, seed: int) -> list[dict[str, Any]] | None:
    """What each head does, over texts that come with regard; None, and a word on why, where it cannot read them."""
    if not subject.reads_text:
        return None
    try:
        found: list[dict[str, Any]] = examine(subject, None, seed)[0]["heads"]
    except OptionError as error:  # such as letters that a small vocabulary lacks
        console(stderr=True).print(f"no labels: {error}", soft_wrap=True)
        return None
    return found


def loaded(name: str, device: str = "cpu", *, download: bool = False) -> Model[Any]:
    """A model of regard: of a run or folder of its own, or with the weights of a Hugging Face folder or name."""
    folder = model_folder(name)
    foreign = (
        hub.is_hub_folder(folder) if folder.is_dir() else name.count("/") <= 1 and not name.startswith((".", "/", "~"))
    )
    return hub.load(folder, resolve_device(device), download) if foreign else load(folder, resolve_device(device))
