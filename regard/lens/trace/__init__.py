"""Traces: recorded queries, keys, values and normalisers, from which every weight can be computed, and their file."""

from regard.lens.trace.arrays import TraceError
from regard.lens.trace.format import decode, encode, load
from regard.lens.trace.trace import Attended, Card, Recording, Trace

__all__ = ["Attended", "Card", "Recording", "Trace", "TraceError", "decode", "encode", "load"]
