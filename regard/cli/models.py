"""What the command line says about a MODEL, and the labels of its heads."""

from __future__ import annotations

from typing import Any

from regard.cli.show import console
from regard.errors import OptionError
from regard.lens.heads.examine import examine
from regard.lens.models import RecordableModel

HELP = (
    "A run, a model folder, a Hugging Face folder or name, a GGUF file; random:MODEL is an untrained twin, as is "
    "random:gpt2."
)


def label_heads(model: RecordableModel, seed: int) -> list[dict[str, Any]] | None:
    """Returns what each head does, measured on texts that come with regard.

    A model that cannot read these texts gets None, and a line on the terminal says why.
    """
    if not model.reads_text:
        return None
    try:
        labels: list[dict[str, Any]] = examine(model, None, seed)[0]["heads"]
    except OptionError as error:  # such as letters that a small vocabulary lacks
        console(stderr=True).print(f"no labels: {error}", soft_wrap=True)
        return None
    return labels
