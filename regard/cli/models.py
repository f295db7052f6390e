"""The MODEL of a command: a run, a model folder, a Hugging Face folder or name, or 'random:' before any of them."""

from __future__ import annotations

from pathlib import Path

from regard.checking import usable
from regard.lens.models import RANDOM, Subject
from regard.lens.models import opened as opened_model
from regard.train.run import model_folder

HELP = "A run, a model folder, a Hugging Face folder or name; random:MODEL is an untrained twin, as is random:gpt2."


def opened(name: str, device: str | None = None, *, seed: int = 0, download: bool = False) -> Subject:
    """The model that a name on the command line stands for."""
    prefix = RANDOM if name.startswith(RANDOM) else ""
    bare = name.removeprefix(RANDOM)
    found = str(model_folder(bare)) if Path(bare).is_dir() else bare
    return opened_model(prefix + found, usable(device or "cpu"), seed=seed, download=download)
