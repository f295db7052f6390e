"""Packing arrays for a trace: optional quantisation, then byte shuffling, then zlib, which a browser can decode itself.

Byte shuffling stores the lowest byte of all numbers first (a byte plane), then the second, and so on. Upper bytes are
similar and compress well, while the low bytes of a mantissa are noise. Each byte plane gets its own Huffman code.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import RegardError, quote

STEPS_PER_RMS = 32  # the default step size of a column is its RMS divided by this
MAX_CODE = 1 << 23  # largest absolute value of the integer code of a quantised number
STEP_SIZES_PER_OCTAVE = 64  # step sizes are integer powers of 2^(1/64)
MAX_RAW_BITS = MAX_CODE.bit_length()  # no code has more low bits than this
# Added to the upper part of each integer code (see `pack_steps`), so that the high byte of small parts, negative ones
# too, is 0.
MIDDLE = 128
SAMPLE = 1 << 14  # number of codes in the sample by which the number of raw bits is chosen
# The NumPy dtype, little-endian, of each storage type but "step" and "bit".
TYPES = {"f32": "<f4", "f16": "<f2", "i32": "<i4", "i16": "<i2", "u8": "u1"}


class TraceError(RegardError, ValueError):
    """A trace cannot be read, is damaged, is no trace at all, has a newer format, or has no recordings."""


def pack(x: Tensor, kind: str) -> bytes:
    """Returns the packed bytes of an array; docs/trace-format.md lists the storage types (`kind`)."""
    if kind == "step":
        return pack_steps(x, default_steps(x))
    if kind == "bit":
        return _deflated(np.packbits(x.cpu().numpy().astype(bool), axis=-1, bitorder="little").tobytes())
    return _deflated(*_planes(x.detach().cpu().numpy().astype(TYPES[kind])))


def pack_steps(x: Float[Tensor, "T K"], step: Float[Tensor, " K"]) -> bytes:
    """Quantises an array with one step size per column (as `round_down_steps` returns them), and packs it.

    Each integer code is split: its low bits are incompressible and are stored raw, bit-packed; the upper part is small,
    and Huffman coding brings it near its entropy.
    """
    whole = (x.detach().float() / step).round().clamp(-MAX_CODE, MAX_CODE).int().cpu().numpy()
    low = _choose_raw_bits(whole)
    upper = ((whole >> low) + MIDDLE).astype("<i2")
    noise = np.unpackbits(
        (whole & ((1 << low) - 1)).astype("<u4").reshape(-1, 1).view("u1"), axis=-1, count=low, bitorder="little"
    )
    exponent = (step.double().log2() * STEP_SIZES_PER_OCTAVE).round().cpu().numpy().astype("<i2")
    return _deflated(bytes([low]), *_planes(exponent), *_planes(upper), np.packbits(noise, bitorder="little").tobytes())


def _choose_raw_bits(whole: np.ndarray) -> int:
    """Returns the number of low bits to store raw that minimises raw bits plus the entropy of the upper parts."""
    sample = whole.reshape(-1)[:: -(-whole.size // SAMPLE) or 1]
    # With this many raw bits, the upper parts of the sample, plus MIDDLE, fit one byte; more would gain nothing.
    largest = max(0, int(np.abs(sample).max(initial=0)).bit_length() - 7)
    smallest = max(0, int(np.abs(whole).max(initial=0)).bit_length() - 15)  # the upper part must fit 16 bits
    return min(range(smallest, max(smallest, largest) + 1), key=lambda low: _entropy(sample >> low) + low)


def _entropy(x: np.ndarray) -> float:
    """Returns the empirical entropy of the numbers, in bits per number."""
    frequency = np.unique(x, return_counts=True)[1] / max(1, x.size)
    return float(-(frequency * np.log2(frequency)).sum())


def unpack(raw: bytes, kind: str, shape: Sequence[int], source: str = "an array") -> Tensor:
    """Inverts `pack`, up to the precision of the type; `source` names the array in error messages."""
    if kind not in (*TYPES, "step", "bit") or min(shape, default=0) < 0:
        raise TraceError(
            f"{source}: type {quote(kind)} and shape {quote(list(shape))} are no array; record the trace again"
        )
    size = math.prod(shape)
    columns = shape[-1] if shape else 1
    low = 0  # raw low bits of each integer code
    try:
        coder = zlib.decompressobj()
        if kind == "step":
            low = coder.decompress(raw, 1)[0]
            if low > MAX_RAW_BITS:
                raise TraceError(
                    f"{source}: {low} raw bits a number, expected at most {MAX_RAW_BITS}; record the trace again"
                )
            expected = 2 * columns + 2 * size - (-size * low // 8)
        elif kind == "bit":
            expected = size // max(columns, 1) * -(-columns // 8)
        else:
            expected = size * np.dtype(TYPES[kind]).itemsize
        # Bounded, so that a damaged file cannot fill the memory.
        data = coder.decompress(coder.unconsumed_tail or raw, expected + 1)
    except (zlib.error, IndexError) as error:
        raise TraceError(f"{source} is damaged ({error}); copy or record the trace again") from None
    if len(data) != expected:
        shown = quote(list(shape))
        raise TraceError(
            f"{source}: {len(data)} bytes of type {kind!r}, expected {expected} for shape {shown}; record it again"
        )
    if kind == "bit":
        bits = np.frombuffer(data, "u1").reshape(*shape[:-1], -1)
        return torch.from_numpy(np.unpackbits(bits, axis=-1, count=columns, bitorder="little").astype(bool))
    if kind == "step":
        exponent = _join_planes(data[: 2 * columns], "<i2", (columns,))
        upper = _join_planes(data[2 * columns : 2 * (columns + size)], "<i2", shape).astype("<i4") - MIDDLE
        noise = _join_raw_bits(data[2 * (columns + size) :], size, low).reshape(shape)
        whole = torch.from_numpy((upper << low) + noise)
        return whole.float() * step_from_exponent(torch.from_numpy(exponent))
    return torch.from_numpy(_join_planes(data, TYPES[kind], shape))


def round_to_steps(x: Tensor, step: Tensor) -> Tensor:
    """Returns the array rounded to multiples of the step sizes."""
    return (x / step).round() * step


def default_steps(x: Float[Tensor, "*N T K"]) -> Float[Tensor, "*N K"]:
    """Returns the default step size of each column: RMS / STEPS_PER_RMS, or larger.

    It is larger if an integer code would otherwise exceed MAX_CODE / 2, and rounded by `round_down_steps`.
    """
    x = x.detach().float()
    if x.shape[-2] == 0:
        return torch.ones_like(x.sum(-2))
    return round_down_steps(
        torch.maximum(x.square().mean(-2).sqrt() / STEPS_PER_RMS, x.abs().amax(-2) / (MAX_CODE / 2))
    )


def round_down_steps(step: Tensor) -> Tensor:
    """Rounds step sizes down to powers of 2^(1/64), from 2^−120 to 2^120; 0 (an all-zero column) becomes 1."""
    exponent = (step.double().log2() * STEP_SIZES_PER_OCTAVE).floor()
    return step_from_exponent(
        exponent.masked_fill(step <= 0, 0).clamp(-120 * STEP_SIZES_PER_OCTAVE, 120 * STEP_SIZES_PER_OCTAVE)
    )


def step_from_exponent(exponent: Tensor) -> Tensor:
    """Returns the step size 2^(exponent/64)."""
    return torch.exp2(exponent.double() / STEP_SIZES_PER_OCTAVE).float()


def _planes(x: np.ndarray) -> list[bytes]:
    """Returns the byte planes of an array: the lowest bytes of all numbers, the second ones, and so on."""
    x = np.ascontiguousarray(x)
    if not x.size:
        return []
    return [plane.tobytes() for plane in x.view("u1").reshape(x.size, x.itemsize).T]


def _join_planes(data: bytes, dtype: str, shape: Sequence[int]) -> np.ndarray:
    """Inverts `_planes`: returns the array of the concatenated byte planes."""
    size = np.dtype(dtype).itemsize
    planes = np.frombuffer(data, "u1").reshape(size, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(shape).copy()


def _join_raw_bits(data: bytes, size: int, low: int) -> np.ndarray:
    """Returns `size` numbers of `low` bits each, which were packed with the lowest bit first.

    It reads a part at a time, because each bit takes several bytes while it is read.
    """
    numbers = np.zeros(size, dtype="<i4")
    values = 1 << np.arange(low, dtype="<i4")
    packed = np.frombuffer(data, "u1")
    for start in range(0, size, SAMPLE):  # a multiple of 8, so that a part begins with a byte
        stop = min(size, start + SAMPLE)
        bits = np.unpackbits(packed[start * low // 8 :], count=(stop - start) * low, bitorder="little")
        numbers[start:stop] = bits.reshape(stop - start, low) @ values
    return numbers


def _deflated(*parts: bytes) -> bytes:
    """Returns one zlib stream in which each part has its own Huffman code."""
    coder = zlib.compressobj(9, zlib.DEFLATED, 15, 9, zlib.Z_RLE)
    coded = [coder.compress(part) + coder.flush(zlib.Z_BLOCK) for part in parts if part]
    return b"".join([*coded, coder.flush()])
