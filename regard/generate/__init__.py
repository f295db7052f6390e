"""Generating text: greedy, sampling, beam search, streaming; one decoding loop, always with a state."""

from regard.generate.decode import PromptError, generate, padded, stream
from regard.generate.sampling import draw, probabilities
from regard.generate.settings import Choice, Result, Settings

__all__ = ["Choice", "PromptError", "Result", "Settings", "draw", "generate", "padded", "probabilities", "stream"]
