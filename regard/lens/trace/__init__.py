"""Traces: recorded queries, keys, values and normalisers, from which weights are computed; and their file format."""

from regard.lens.trace.arrays import TraceError
from regard.lens.trace.format import decode, encode, load
from regard.lens.trace.trace import Card, RecordedAttention, Recording, Trace

__all__ = ["Card", "RecordedAttention", "Recording", "Trace", "TraceError", "decode", "encode", "load"]
