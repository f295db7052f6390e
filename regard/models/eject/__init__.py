"""A model as one file of plain PyTorch, so that nobody is locked in."""

from regard.models.eject.write import eject, example_text, write_source

__all__ = ["eject", "example_text", "write_source"]
