"""Writing a model as one file of plain PyTorch, which runs without regard."""

from regard.models.eject.write import eject, example_text, write_source

__all__ = ["eject", "example_text", "write_source"]
