"""What the command line says about a MODEL, and the model behind the name `small`."""

from __future__ import annotations

from regard.lens import small_model

HELP = (
    "A run, a model folder, a Hugging Face folder or name, a GGUF file; minilm, of regard's extra models; "
    "random:MODEL is an untrained twin, as is random:gpt2; random:llama@tiny is a small one."
)


def resolve_small(name: str) -> str:
    """Returns the folder of the model that comes with regard where it is named, as `small`; else the name as it is."""
    if small_model.is_shipped(name):
        return name.replace(small_model.NAME, str(small_model.shipped()))
    return name
