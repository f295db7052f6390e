"""Seeing what a model attends to."""

from regard.lens.arrays import TraceError
from regard.lens.format import decode, encode, load
from regard.lens.maps import attention_maps
from regard.lens.record import record
from regard.lens.small_model import shipped
from regard.lens.trace import Attended, Card, Recording, Trace
from regard.lens.widget import show

__all__ = [
    "Attended",
    "Card",
    "Recording",
    "Trace",
    "TraceError",
    "attention_maps",
    "decode",
    "encode",
    "load",
    "record",
    "shipped",
    "show",
]
