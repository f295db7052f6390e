"""The small model that comes with regard: trained by the recipe `lens`, so that there is something to see at once."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import Path

from regard.errors import RegardError

SUMS = "SHA256SUMS"
TEXT = "Nora Pernistein was born in Zinelfall. Nora Pernistein was born in Zinelfall."


class ShippedError(RegardError, OSError):
    """The model that comes with regard is missing or was changed."""


def shipped() -> Path:
    """Returns the folder of the small model, whose files are as they were when it was pack."""
    folder = Path(str(files("regard.lens").joinpath("small-model")))
    repair = "install regard again, or make the model with `regard train lens`"
    try:
        lines = (folder / SUMS).read_text("ascii").splitlines()
        for line in lines:
            expected, name = line.split()
            actual = hashlib.sha256((folder / name).read_bytes()).hexdigest()
            if actual != expected:
                raise ShippedError(f"{folder / name} is not what came with regard (SHA-256 {actual[:12]}…); {repair}")
    except (OSError, ValueError) as error:
        if isinstance(error, ShippedError):
            raise
        raise ShippedError(f"{folder} cannot be read: {error}; {repair}") from None
    return folder


def shipped_text() -> str:
    """Returns a text that shows what its heads do: someone the model has never read of, said twice."""
    return TEXT
