"""The layers around a mechanism: attention with its options, positions, merges of heads, norms, and the block."""

from regard.nn.attention import Attention
from regard.nn.block import MLPS, Block, BlockState
from regard.nn.convolution import ACTIVATIONS, ShortConvolution, mechanism_state, with_mechanism_state
from regard.nn.gates import DECAYS, Gates
from regard.nn.merges import MERGES, LooksAheadError, Merge
from regard.nn.norms import NORMS
from regard.nn.positions import (
    POSITIONS,
    Positions,
    Rotary,
    Rotation,
    attend_to_offset,
    rotate,
    shift_matrix,
    sinusoids,
)
from regard.registry import Registry

__all__ = [
    "ACTIVATIONS",
    "DECAYS",
    "MERGES",
    "MLPS",
    "NORMS",
    "POSITIONS",
    "Attention",
    "Block",
    "BlockState",
    "Gates",
    "LooksAheadError",
    "Merge",
    "Positions",
    "Registry",
    "Rotary",
    "Rotation",
    "ShortConvolution",
    "attend_to_offset",
    "mechanism_state",
    "rotate",
    "shift_matrix",
    "sinusoids",
    "with_mechanism_state",
]
