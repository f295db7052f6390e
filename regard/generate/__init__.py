"""Generating text: greedy, sampling, beam search, streaming; one decoding loop, always with a state.

`regard.generate(model, prompt, …)` is short for `regard.generate.generate`.
"""

from regard.generate.decode import generate, stream
from regard.generate.prompts import PromptError, padded
from regard.generate.sampling import draw, probabilities
from regard.generate.settings import Choice, Result, Settings
from regard.packages import make_callable

__all__ = ["Choice", "PromptError", "Result", "Settings", "draw", "generate", "padded", "probabilities", "stream"]

make_callable(__name__, generate)
