"""The small model that is bundled with regard, so that every command has a model to be tried with at once.

It was trained by the recipe `lens`.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import Path

from regard.errors import RegardError

NAME = "small"  # what it is called where a model is named
SUMS = "SHA256SUMS"
TEXT = "Nora Pernistein was born in Zinelfall. Nora Pernistein was born in Zinelfall."


class ShippedError(RegardError, OSError):
    """The bundled model is missing, or its files differ from those that were packed."""


def shipped() -> Path:
    """Returns the folder of the bundled model, after checking its files against SHA256SUMS."""
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
    """Returns an example text for the bundled model: one sentence about an invented person, given twice.

    The second time its names can be copied from the first, so induction heads show.
    """
    return TEXT
