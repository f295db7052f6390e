"""Seeing what a model attends to."""

from regard.lens.pages.page import write_page
from regard.lens.pages.widget import show
from regard.lens.recording.maps import attention_maps
from regard.lens.recording.record import record
from regard.lens.recording.weights import trace_of_weights
from regard.lens.small_model import shipped
from regard.lens.trace import Card, RecordedAttention, Recording, Trace, TraceError, decode, encode, load

__all__ = [
    "Card",
    "RecordedAttention",
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
    "trace_of_weights",
    "write_page",
]
