"""How a call of linear attention is cut up: blocks, chunks, segments, and the precision of its products."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.linear.tensors import LinearCall
from regard.kernels.linear.triton_features import features_per_direction

LOG2E = 1.4426950408889634
CHUNK = 64  # tokens; a segment is a multiple of it
BLOCK_F = 64  # features made at a time
WIDEST_BLOCK_V = 128  # values of a program
MOST_SLOTS = 128  # of running totals over segments
HANDOVER_TOKENS = 48  # that are done in the time in which a segment hands its sums to the next
FEW_FEATURES = 32  # the rounding of as many averages out, that of fewer does not
RANDOM_FEATURES = ("performer", "fourier")


class Segments(NamedTuple):
    """How the tokens of a sequence are cut into segments."""

    span: int  # tokens of a segment, a multiple of CHUNK
    slots: int  # segments, and one more slot for a state from outside


class Plan(NamedTuple):
    """How one call is cut up, and how precise its products are."""

    map: str
    precision: str  # of products, as `triton_primitives` names them
    dtype: torch.dtype  # of q and k
    H: int
    G: int
    K: int
    V: int
    F: int
    block_v: int  # values of a block
    keys: Segments  # for the sums over keys
    queries: Segments  # for the sums over queries, backward
    chained_span: int  # tokens of a segment where one program does all
    w_parts: int = 0  # parts of the directions; 0 where vectors are not projected

    @property
    def stabilised(self) -> bool:
        """Whether keys have stabilisers: features of the others are of moderate size as they are."""
        return self.map in RANDOM_FEATURES

    @property
    def signed(self) -> bool:
        """Whether weights may be negative. Outputs can then be far larger than values, and the gradient needs all
        their digits."""
        return self.map == "fourier"

    @property
    def narrow(self) -> bool:
        """Whether a program has room for more tokens than a chunk."""
        return self.precision in ("bf16", "fp16") and max(self.K, self.V) <= 64

    @property
    def projects_identity(self) -> bool:
        """Whether vectors are multiplied by the identity, which is exact. What comes out of a product lies in registers
        as the next product takes it, and what is loaded does not; so features are made once instead of twice."""
        return not self.stabilised and self.narrow and self.dtype == torch.bfloat16

    @property
    def blocks_f(self) -> int:
        """The number of blocks of directions."""
        return ceil_div(self.F // features_per_direction(self.map), BLOCK_F)

    @property
    def blocks_v(self) -> int:
        """The number of blocks of values."""
        return ceil_div(self.V, self.block_v)

    @property
    def state_size(self) -> int:
        """How many numbers S and Z have."""
        return self.F * self.V + self.F

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of S at each chunk: that to which the products would round it anyway."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision, torch.float32)

    @property
    def backward_sum_dtype(self) -> torch.dtype:
        """The dtype of R at each chunk: as of S, but the range of gradients is too large for float16."""
        if self.precision == "fp16":
            return torch.bfloat16
        return self.sum_dtype

    def peak_to_log2(self, peak: Tensor) -> Tensor:
        """Returns a state's peak as an exponent of two. The programs leave the factor 1/√D of φ out."""
        return peak.float() * LOG2E + self._peak_offset

    def peak_from_log2(self, peak: Tensor) -> Tensor:
        """Returns the natural exponent of a peak of the programs."""
        return (peak - self._peak_offset) / LOG2E

    @property
    def _peak_offset(self) -> float:
        """log₂ √D, by which a state's peak is lower than that of the programs."""
        if not self.stabilised:
            return 0.0
        return math.log2(self.F // features_per_direction(self.map)) / 2

    def is_chained(self, causal: bool, started: bool, learns: bool) -> bool:
        """Whether `chained_kernel` does all of forward. The gradient does not look for a state before the first chunk,
        so not where there is one (`started`) and a gradient is to come (`learns`)."""
        return self.projects_identity and causal and not (started and learns)


def plan_call(call: LinearCall) -> Plan:
    """Returns the plan of a call."""
    return plan_shapes(call.q, call.v, call.w, call.map)


def plan_shapes(q: Tensor, v: Tensor, w: Tensor | None, map: str) -> Plan:
    """Returns the plan for q [B,H,T,K], v [B,G,S,V] and directions w [D,K]."""
    F = q.shape[3]
    if w is not None:
        F = w.shape[0] * features_per_direction(map)
    sizes = (tuple(q.shape), tuple(v.shape), F, map, q.dtype, v.dtype, v.device)
    if torch.compiler.is_compiling():  # sizes may be symbols, which have no hash
        return _make_plan.__wrapped__(*sizes)
    return _make_plan(*sizes)


@lru_cache(4096)
def _make_plan(
    q_shape: tuple[int, int, int, int], v_shape: tuple[int, int, int, int], F: int, map: str, q_dtype: torch.dtype,
    v_dtype: torch.dtype, device: torch.device,
) -> Plan:  # fmt: skip
    """Returns the plan for sizes alone, so that it can be kept."""
    B, H, T, K = q_shape
    _, G, S, V = v_shape
    precision = choose_precision(map, v_dtype, F)
    widest = WIDEST_BLOCK_V
    if map in RANDOM_FEATURES and precision != "bf16":
        widest = WIDEST_BLOCK_V // 2
    block_v = min(tile_side(V), widest)
    # As many segments as `chunk_sums_kernel` can do in one round: so many of its programs fit on a processor at once.
    programs = {"fourier": 1, "performer": 3}.get(map, 4) * processors(device)
    blocks = ceil_div(F // features_per_direction(map), BLOCK_F) * ceil_div(V, block_v)
    segments = programs // (blocks * B)
    return Plan(
        map, precision, q_dtype, H, G, K, V, F, block_v, cut_into_segments(S, segments // G),
        cut_into_segments(T, segments // H), _chained_span(S, B * G, device),
    )  # fmt: skip


def choose_precision(map: str, dtype: torch.dtype, F: int) -> str:
    """Returns the precision of products for values of a dtype and F features."""
    if dtype == torch.float32:
        return "tf32x3"
    if dtype != torch.bfloat16 or F < FEW_FEATURES:
        return "bf16x3"
    if map == "fourier":
        return "fp16"
    return "bf16"


def cut_into_segments(tokens: int, wanted: int) -> Segments:
    """Returns segments of whole chunks, about `wanted` of them."""
    span = ceil_div(tokens, CHUNK * max(1, min(wanted, MOST_SLOTS - 1))) * CHUNK
    return Segments(span, ceil_div(tokens, span) + 1)


def _chained_span(tokens: int, rows: int, device: torch.device) -> int:
    """Returns the tokens of a segment of `chained_kernel`. Two programs on each processor start at once; of more than
    about √tokens segments the last waits longer than it works."""
    span = cut_into_segments(tokens, 2 * processors(device) // rows).span
    return max(span, ceil_div(math.isqrt(HANDOVER_TOKENS * tokens), CHUNK) * CHUNK)


@lru_cache
def processors(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors of a GPU; one for the CPU, where programs are interpreted."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def tile_side(n: int) -> int:
    """Returns the side of a tile that holds n numbers: a power of two, and at least 64. With operands narrower than
    that, Triton 3.6 reads beyond shared memory and sums wrongly."""
    return max(64, 1 << (n - 1).bit_length())


def ceil_div(a: int, b: int) -> int:
    """Returns ⌈a / b⌉."""
    return -(-a // b)
