"""Checks the parts of a trace before anything is computed from them, since anybody may have written the file."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from regard.errors import quote
from regard.lens.trace.arrays import TraceError
from regard.lens.trace.attended import RecordedAttention
from regard.lens.trace.formulas import Dense, KernelFormula, OneHot, RecurrenceFormula, SoftmaxFormula
from regard.lens.trace.tokens import Tokens
from regard.reading import check_hints

MAX_HEADS = 1 << 12
LARGEST_POSITION = 1 << 40
# The arrays of a trace are read as float32, which takes some tens of times the room of packed codes of a few bits or of
# runs of zeros. A file that asks for more than FREE_BYTES + EXPANSION · its size was made to fill the memory.
EXPANSION = 64
FREE_BYTES = 1 << 28
PICTURE = (
    "data:image/jpeg;base64,"  # how the picture of a sequence must begin, so that it is never fetched from anywhere
)
MAX_PICTURE = 1 << 24  # characters
_BASE64 = re.compile(r"[A-Za-z0-9+/]*={0,2}")
_TENSORS = (
    "q",
    "k",
    "v",
    "n",
    "sign",
    "choice",
    "w",
    "cq",
    "ck",
    "slopes",
    "offsets",
    "a",
    "b",
    "skip",
    "g",
    "vo",
    "overview",
)


class Budget:
    """Counts the bytes that the arrays of a trace take in memory, and refuses more than a file of its size can need."""

    def __init__(self, file_bytes: int) -> None:
        self.left = FREE_BYTES + EXPANSION * file_bytes

    def take(self, shape: Any, source: str) -> None:
        """Subtracts an array's float32 bytes; raises TraceError if the shape is invalid or too little is left."""
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise TraceError(f"{source}: the shape {quote(shape)}, expected a list of sizes; record it again")
        self.left -= 4 * math.prod(shape)
        if self.left < 0:
            raise TraceError(
                f"{source}: its arrays take more memory than a trace of this size can have; record it again"
            )


def check_tokens(tokens: Tokens, source: str) -> None:
    """Raises TraceError if a field of a sequence has the wrong type or length, or numbers out of range.

    A picture must be a JPEG in a data: address.
    """
    check_hints(tokens, source, TraceError)
    lists: tuple[list[int], ...] = (
        tokens.starts,
        tokens.ends,
        tokens.words,
        tokens.special,
        tokens.visible,
        tokens.positions,
    )
    if tokens.segment is not None:
        lists = (*lists, tokens.segment)
    if any(len(x) != len(tokens) for x in lists):
        raise TraceError(f"{source}: the lists of sequence {quote(tokens.name)} differ in length; record it again")
    if tokens.picture is not None and not _is_picture(tokens.picture):
        raise TraceError(f"{source}: the picture of sequence {quote(tokens.name)} is no JPEG; record it again")
    numbers = [n for x in (*lists, tokens.ids or [], tokens.steps or [], tokens.grid or []) for n in x]
    if any(abs(n) > LARGEST_POSITION for n in numbers) or min(tokens.positions, default=0) < 0:
        raise TraceError(f"{source}: a number of sequence {quote(tokens.name)} is out of range; record it again")


def _is_picture(address: str) -> bool:
    """Returns whether an address is a JPEG in base64; a URL would make the reader's browser fetch it."""
    letters = address.removeprefix(PICTURE)
    return letters != address and len(address) <= MAX_PICTURE and _BASE64.fullmatch(letters) is not None


def check_attended(attended: RecordedAttention, sequences: Sequence[Tokens], source: str) -> None:
    """Raises TraceError if the parts of an attention module do not fit together."""
    check_hints(attended, source, TraceError, (*_TENSORS, "formula", "rules"))
    check_hints(attended.rules, source, TraceError, ("hidden",))
    check_hints(attended.formula, source, TraceError)
    if not 1 <= attended.heads <= MAX_HEADS or not 1 <= attended.groups <= attended.heads:
        raise TraceError(f"{source}: {attended.heads} heads in {attended.groups} groups; record it again")
    for rule in (attended.rules.window, attended.rules.chunk):
        if rule is not None and not 1 <= rule <= LARGEST_POSITION:
            raise TraceError(f"{source}: a window or chunk of {rule} tokens; record it again")
    T = len(sequences[attended.queries])
    S = len(sequences[attended.keys])
    _check_arrays(attended, T, S, source)
    _check_formula(attended, T, S, source)


def _check_arrays(attended: RecordedAttention, T: int, S: int, source: str) -> None:
    """Raises TraceError if an array does not have the shape in `expected`, where 0 stands for any size.

    The number of key heads must be between 1 and H, and queries and keys must have the same width.
    """
    H = attended.heads
    G = len(attended.k) if attended.k is not None else attended.groups
    expected: dict[str, tuple[int, ...]] = {
        "q": (H, T, 0),
        "k": (G, S, 0),
        "v": (0, S, 0),
        "g": (H, T, 0),
        "n": (H, T),
        "sign": (H, T),
        "choice": (H, T),
        "cq": (H, T),
        "ck": (G, S),
        "w": (0, 0),
        "a": (G, S, 0),
        "b": (G, S),
        "skip": (H,),
        "slopes": (H,),
        "vo": (H, S),
        "offsets": (H, T + S - 1),
        "overview": (H, 0, 0),
    }
    arrays = {name: getattr(attended, name) for name in expected}
    arrays["hidden"] = attended.rules.hidden
    expected["hidden"] = (T, S)
    for name, x in arrays.items():
        if x is not None and not _has_shape(x, expected[name]):
            raise TraceError(f"{source}: {name} is {list(x.shape)}, expected {list(expected[name])} (0: any size)")
    if not 1 <= G <= H:
        raise TraceError(f"{source}: {G} key heads for {H} heads; record it again")
    if attended.q is not None and attended.k is not None and attended.q.shape[-1] != attended.k.shape[-1]:
        raise TraceError(f"{source}: queries and keys have different widths; record it again")


def _has_shape(x: Tensor, shape: tuple[int, ...]) -> bool:
    return x.dim() == len(shape) and all(n in (0, size) for n, size in zip(shape, x.shape, strict=True))


def _check_formula(attended: RecordedAttention, T: int, S: int, source: str) -> None:
    """Raises TraceError if what the formula needs is missing or does not fit."""
    formula = attended.formula
    if isinstance(formula, Dense):
        wanted = -(-T // formula.tile) if formula.tile > 0 else -1
        if len(formula.tiles) != attended.heads or any(len(tiles) != wanted for tiles in formula.tiles):
            raise TraceError(f"{source}: the tiles do not cover {attended.heads} heads and {T} rows; record it again")
    if isinstance(formula, OneHot):
        choice = attended.choice
        if choice is None or (choice.numel() and int(choice.max()) >= S):
            raise TraceError(f"{source}: the chosen keys are missing, or not among the {S} keys; record it again")
    if isinstance(formula, SoftmaxFormula | KernelFormula) and (attended.q is None or attended.k is None):
        raise TraceError(f"{source}: the queries or keys are missing; record it again")
    if isinstance(formula, RecurrenceFormula):
        _check_memory(attended, source)
    if isinstance(formula, SoftmaxFormula) and formula.softcap == 0:
        raise TraceError(f"{source}: a softcap of 0; record it again")
    if isinstance(formula, KernelFormula) and formula.feature_map == "performer":
        width = attended.w.shape[-1] if attended.w is not None else -1
        if attended.q is None or width != attended.q.shape[-1] or not len(attended.w if attended.w is not None else ()):
            raise TraceError(f"{source}: the random projection is missing or does not fit; record it again")


def _check_memory(attended: RecordedAttention, source: str) -> None:
    """Raises TraceError if q, k, v or the decays of a memory are missing or do not fit, or if a decay is above 1."""
    q, k, v, a = attended.q, attended.k, attended.v, attended.a
    if q is None or k is None or v is None or a is None or len(v) != len(k):
        raise TraceError(f"{source}: queries, keys, values or decays of a memory are missing; record it again")
    if attended.queries != attended.keys:
        raise TraceError(f"{source}: a memory of another sequence than that of its queries; record it again")
    if a.shape[-1] not in (1, k.shape[-1]) or q.shape[1] != k.shape[1]:
        raise TraceError(f"{source}: the decays {list(a.shape)} do not fit the keys {list(k.shape)}; record it again")
    if not bool((a <= 0).all()):
        raise TraceError(f"{source}: a decay that lets the memory grow; record it again")
