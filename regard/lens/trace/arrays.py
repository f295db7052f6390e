"""Arrays as a trace keeps them: shuffled byte by byte and deflated, so that a browser's own decoder reads them.

Of n numbers the lowest bytes come first, then the second, and so on: upper bytes are alike and shrink, while the last
bytes of a mantissa are noise that no coder shrinks. Each plane of bytes has a Huffman code of its own.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import RegardError

PARTS = 32  # steps in the root mean square of a column, at least
LARGEST = 1 << 23  # whole numbers that steps are counted in
FINE = 64  # steps are powers of 2 to the 1/FINE
MIDDLE = 128  # added to upper parts, so that small ones of either sign share their upper bytes
SAMPLE = 1 << 14  # numbers by which the low bits are chosen
TYPES = {"f32": "<f4", "f16": "<f2", "i32": "<i4", "i16": "<i2", "u8": "u1"}


class TraceError(RegardError, ValueError):
    """A trace that is damaged, foreign or of a newer format, or that does not hold what was asked for."""


def pack(x: Tensor, kind: str) -> bytes:
    """Returns the bytes of an array of a type that docs/trace-format.md lists."""
    if kind == "step":
        return pack_steps(x, steps(x))
    if kind == "bit":
        return _deflated(np.packbits(x.cpu().numpy().astype(bool), axis=-1, bitorder="little").tobytes())
    return _deflated(*_planes(x.detach().cpu().numpy().astype(TYPES[kind])))


def pack_steps(x: Float[Tensor, "T K"], step: Float[Tensor, " K"]) -> bytes:
    """Returns the bytes of an array of type step with given steps, which lie on the grid (see `on_grid`).

    A whole number is cut in two. Its low bits are noise and stand as they are, bit behind bit; what is left is small,
    and Huffman coding does nearly all that can be done.
    """
    whole = (x.detach().float() / step).round().clamp(-LARGEST, LARGEST).int().cpu().numpy()
    low = _low(whole)
    upper = ((whole >> low) + MIDDLE).astype("<i2")
    noise = np.unpackbits(
        (whole & ((1 << low) - 1)).astype("<u4").reshape(-1, 1).view("u1"), axis=-1, count=low, bitorder="little"
    )
    exponent = (step.double().log2() * FINE).round().cpu().numpy().astype("<i2")
    return _deflated(bytes([low]), *_planes(exponent), *_planes(upper), np.packbits(noise, bitorder="little").tobytes())


def _low(whole: np.ndarray) -> int:
    """Returns how many low bits are best kept apart: so many that the rest and they take fewest bits together."""
    sample = whole.reshape(-1)[:: -(-whole.size // SAMPLE) or 1]
    most = max(0, int(np.abs(sample).max(initial=0)).bit_length() - 7)
    least = max(0, int(np.abs(whole).max(initial=0)).bit_length() - 15)  # what is left has 16 bits
    return min(range(least, max(least, most) + 1), key=lambda low: _entropy(sample >> low) + low)


def _entropy(x: np.ndarray) -> float:
    """Returns the bits that a number takes when numbers are coded one by one."""
    share = np.unique(x, return_counts=True)[1] / max(1, x.size)
    return float(-(share * np.log2(share)).sum())


def unpack(raw: bytes, kind: str, shape: Sequence[int], place: str = "an array") -> Tensor:
    """Returns what `pack` was given, as far as its type keeps it; an error names the place where bytes are missing."""
    if kind not in (*TYPES, "step", "bit") or min(shape, default=0) < 0:
        raise TraceError(f"{place}: type {kind!r} and shape {list(shape)} are no array; record the trace again")
    size = math.prod(shape)
    columns = shape[-1] if shape else 1
    low = 0  # bits of each whole number that stand by themselves
    try:
        coder = zlib.decompressobj()
        if kind == "step":
            low = coder.decompress(raw, 1)[0]
            expected = 2 * columns + 2 * size - (-size * low // 8)
        elif kind == "bit":
            expected = size // max(columns, 1) * -(-columns // 8)
        else:
            expected = size * np.dtype(TYPES[kind]).itemsize
        data = coder.decompress(coder.unconsumed_tail or raw, expected + 1)  # never more than was announced
    except (zlib.error, IndexError) as error:
        raise TraceError(f"{place} is damaged ({error}); copy or record the trace again") from None
    if len(data) != expected:
        raise TraceError(f"{place}: {len(data)} bytes of type {kind!r}, expected {expected} for shape {list(shape)}")
    if kind == "bit":
        bits = np.frombuffer(data, "u1").reshape(*shape[:-1], -1)
        return torch.from_numpy(np.unpackbits(bits, axis=-1, count=columns, bitorder="little").astype(bool))
    if kind == "step":
        exponent = _join_planes(data[: 2 * columns], "<i2", (columns,))
        upper = _join_planes(data[2 * columns : 2 * (columns + size)], "<i2", shape).astype("<i4") - MIDDLE
        bits = np.unpackbits(np.frombuffer(data[2 * (columns + size) :], "u1"), count=size * low, bitorder="little")
        noise = bits.reshape(*shape, low) @ (1 << np.arange(low, dtype="<i4"))
        whole = torch.from_numpy((upper << low) + noise.astype("<i4"))
        return whole.float() * grid(torch.from_numpy(exponent))
    return torch.from_numpy(_join_planes(data, TYPES[kind], shape))


def round_to_steps(x: Tensor, step: Tensor) -> Tensor:
    """Returns an array as it reads when it was written with these steps."""
    return (x / step).round() * step


def steps(x: Float[Tensor, "*N T K"]) -> Float[Tensor, "*N K"]:
    """Returns a step for each column: a part of its root mean square, and no smaller than can be counted."""
    x = x.detach().float()
    if x.shape[-2] == 0:
        return torch.ones_like(x.sum(-2))
    return on_grid(torch.maximum(x.square().mean(-2).sqrt() / PARTS, x.abs().amax(-2) / (LARGEST / 2)))


def on_grid(step: Tensor) -> Tensor:
    """Returns the next smaller steps that can be stored; 1 where a column is nothing but zeros."""
    exponent = (step.double().log2() * FINE).floor()
    return grid(exponent.masked_fill(step <= 0, 0).clamp(-120 * FINE, 120 * FINE))


def grid(exponent: Tensor) -> Tensor:
    """Returns steps by their exponents."""
    return torch.exp2(exponent.double() / FINE).float()


def _planes(x: np.ndarray) -> list[bytes]:
    """Returns the lowest bytes of all numbers, the second ones, and so on."""
    x = np.ascontiguousarray(x)
    if not x.size:
        return []
    return [plane.tobytes() for plane in x.view("u1").reshape(x.size, x.itemsize).T]


def _join_planes(data: bytes, dtype: str, shape: Sequence[int]) -> np.ndarray:
    """Returns the array that `_planes` took apart."""
    size = np.dtype(dtype).itemsize
    planes = np.frombuffer(data, "u1").reshape(size, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(shape).copy()


def _deflated(*parts: bytes) -> bytes:
    """Returns a zlib stream in which each part has a code of its own."""
    coder = zlib.compressobj(9, zlib.DEFLATED, 15, 9, zlib.Z_RLE)
    coded = [coder.compress(part) + coder.flush(zlib.Z_BLOCK) for part in parts if part]
    return b"".join([*coded, coder.flush()])
