"""The mathematics: plain PyTorch, the reference for everything else. Read base.py first, then one file a mechanism.

`regard.mechanisms()` lists them: it is short for `regard.mechanisms.base.mechanisms`.
"""

from regard.mechanisms.softmax import Softmax  # first in every list

# isort: split
from regard.mechanisms.argmax import Argmax
from regard.mechanisms.base import (
    Cost,
    Face,
    Kernel,
    Mechanism,
    State,
    fitted,
    fork,
    lookup,
    mechanism,
    mechanisms,
    on_meta,
    register,
)
from regard.mechanisms.cache import Cache
from regard.mechanisms.features import AnyFeatures, Elu, Polynomial, Quadratic
from regard.mechanisms.linear import Linear
from regard.mechanisms.pairwise import Pairwise, mix, scores
from regard.mechanisms.random_features import Fourier, Performer
from regard.mechanisms.similarity import AnySimilarity, Gaussian
from regard.mechanisms.sums import Sums
from regard.mechanisms.synthesizer import RandomSynthesizer, Synthesizer

# isort: split
from regard.mechanisms.recurrence import Memory, Recurrence
from regard.mechanisms.retention import Retention

# isort: split
from regard.mechanisms.gated import Gated

# isort: split
from regard.mechanisms.delta import Delta
from regard.mechanisms.gated_delta import GatedDelta
from regard.packages import make_callable

__all__ = [
    "AnyFeatures",
    "AnySimilarity",
    "Argmax",
    "Cache",
    "Cost",
    "Delta",
    "Elu",
    "Face",
    "Fourier",
    "Gated",
    "GatedDelta",
    "Gaussian",
    "Kernel",
    "Linear",
    "Mechanism",
    "Memory",
    "Pairwise",
    "Performer",
    "Polynomial",
    "Quadratic",
    "RandomSynthesizer",
    "Recurrence",
    "Retention",
    "Softmax",
    "State",
    "Sums",
    "Synthesizer",
    "fitted",
    "fork",
    "lookup",
    "mechanism",
    "mechanisms",
    "mix",
    "on_meta",
    "register",
    "scores",
]

make_callable(__name__, mechanisms)
