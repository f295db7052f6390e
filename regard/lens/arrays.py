"""Arrays as a trace keeps them: shuffled byte by byte and deflated, so that a browser's own decoder reads them.

Of n numbers the lowest bytes come first, then the second, and so on: upper bytes are alike and shrink, while the last
bytes of a mantissa are noise that no coder shrinks. So Huffman coding and runs do nearly all that can be done.
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

LARGEST = {"s16": 32000, "s32": 1 << 23}  # whole numbers that steps are counted in
MIDDLE = 128  # added to them, so that small ones of either sign share their upper bytes
PARTS = 64  # steps in the root mean square of a column, at least
_WHOLE = {"s16": "<i2", "s32": "<i4"}
TYPES = {"f32": "<f4", "f16": "<f2", "i32": "<i4", "i16": "<i2", "u8": "u1"}


class TraceError(RegardError, ValueError):
    """A trace that is damaged, foreign or of a newer format, or that does not hold what was asked for."""


def packed(x: Tensor, kind: str) -> bytes:
    """The bytes of an array of a type that docs/trace-format.md lists."""
    if kind in LARGEST:
        return packed_with(x, steps(x), kind)
    if kind == "bit":
        return _deflated(np.packbits(x.cpu().numpy().astype(bool), axis=-1, bitorder="little").tobytes())
    return _deflated(_shuffled(x.detach().cpu().numpy().astype(TYPES[kind])))


def packed_with(x: Tensor, step: Tensor, kind: str = "s16") -> bytes:
    """The bytes of an array of type s16 or s32 with given steps."""
    largest = LARGEST[kind]
    whole = (x.detach().float() / step).round().clamp(-largest, largest).cpu().numpy().astype(_WHOLE[kind]) + MIDDLE
    return _deflated(step.cpu().numpy().astype("<f4").tobytes(), _shuffled(whole.astype(_WHOLE[kind])))


def unpacked(raw: bytes, kind: str, shape: Sequence[int], place: str = "an array") -> Tensor:
    """What `packed` was given, as far as its type keeps it; an error names the place where bytes are missing."""
    if kind not in (*TYPES, *LARGEST, "bit") or min(shape, default=0) < 0:
        raise TraceError(f"{place}: type {kind!r} and shape {list(shape)} are no array; record the trace again")
    size, columns = math.prod(shape), shape[-1] if shape else 1
    special = {
        "s16": 4 * columns + 2 * size,
        "s32": 4 * columns + 4 * size,
        "bit": size // max(columns, 1) * -(-columns // 8),
    }
    want = special[kind] if kind in special else size * np.dtype(TYPES[kind]).itemsize
    try:
        data = zlib.decompressobj().decompress(raw, want + 1)  # never more than was announced
    except zlib.error as error:
        raise TraceError(f"{place} is damaged ({error}); copy or record the trace again") from None
    if len(data) != want:
        raise TraceError(f"{place}: {len(data)} bytes of type {kind!r}, expected {want} for shape {list(shape)}")
    if kind == "bit":
        bits = np.frombuffer(data, "u1").reshape(*shape[:-1], -1)
        return torch.from_numpy(np.unpackbits(bits, axis=-1, count=columns, bitorder="little").astype(bool))
    if kind in LARGEST:
        step = np.frombuffer(data[: 4 * columns], "<f4")
        whole = _ordered(data[4 * columns :], _WHOLE[kind], shape) - MIDDLE
        return torch.from_numpy(whole.astype("<f4") * step)
    return torch.from_numpy(_ordered(data, TYPES[kind], shape))


def rounded(x: Tensor, step: Tensor) -> Tensor:
    """An array as it reads when it was written with these steps."""
    return (x / step).round() * step


def steps(x: Float[Tensor, "*N T K"]) -> Float[Tensor, "*N K"]:
    """A step a column: a part of its root mean square, and no smaller than 16 bits can count."""
    x = x.detach().float()
    if x.shape[-2] == 0:
        return torch.ones_like(x.sum(-2))
    step = torch.maximum(x.square().mean(-2).sqrt() / PARTS, x.abs().amax(-2) / (LARGEST["s16"] - 1))
    return torch.where(step > 0, step, 1.0)


def _shuffled(x: np.ndarray) -> bytes:
    x = np.ascontiguousarray(x)
    return x.view("u1").reshape(x.size, x.itemsize).T.tobytes() if x.size else b""


def _ordered(data: bytes, dtype: str, shape: Sequence[int]) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    planes = np.frombuffer(data, "u1").reshape(size, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(shape).copy()


def _deflated(*parts: bytes) -> bytes:
    coder = zlib.compressobj(6, zlib.DEFLATED, 15, 9, zlib.Z_RLE)
    return b"".join([*(coder.compress(part) for part in parts), coder.flush()])
