"""How a call of linear attention is divided into blocks, chunks and segments, and how precise its products are."""

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
BLOCK_F = 64  # directions in a tile: features are computed this many at a time
MAX_BLOCK_V = 128  # columns of V per program, at most
MAX_SLOTS = 128  # slots of a sequence, at most
HANDOVER_TOKENS = 48  # cost of handing sums to the next segment, in tokens processed meanwhile
FEW_FEATURES = 32  # fewer than this are few: rounding errors of bfloat16 do not average out
RANDOM_FEATURES = ("performer", "fourier")


class Segments(NamedTuple):
    """How the tokens of a sequence are divided into segments."""

    span: int  # tokens of a segment, a multiple of CHUNK
    slots: int  # segments, and one more slot for a state that is carried in

    @property
    def several(self) -> bool:
        """Whether there is more than one segment."""
        return self.slots > 2


class Plan(NamedTuple):
    """How one call is divided among programs, and how precise its products are."""

    map: str
    precision: str  # of products, as `triton_primitives` names them
    dtype: torch.dtype  # of q and k
    H: int
    G: int
    K: int
    V: int
    F: int
    block_v: int  # columns of V per block
    key_segments: Segments  # for the sums over keys
    query_segments: Segments  # for the sums over queries in the backward pass
    chained_span: int  # tokens of a segment of `chained_kernel`
    w_parts: int = 0  # parts of w, filled in by `prepare_directions`; 0 before, and where vectors are not projected

    @property
    def stabilised(self) -> bool:
        """Whether the map needs stabilisers. Features of `precomputed` arrive computed and are used unscaled. `elu`
        does without: a query's normaliser underflows only if, for every key that it sees and every feature f, the
        product φ_f(q) φ_f(k) does, which takes entries far below zero."""
        return self.map in RANDOM_FEATURES

    @property
    def signed(self) -> bool:
        """Whether weights may be negative. Outputs can then be far larger than values, and the backward pass needs them
        in float32."""
        return self.map == "fourier"

    @property
    def has_spare_registers(self) -> bool:
        """Whether a program has registers for tiles of more than CHUNK tokens or BLOCK_F features: K and V are at most
        64, and products are single ones, not three (some products of `fourier` are three even so)."""
        return self.precision in ("bf16", "fp16") and max(self.K, self.V) <= 64

    @property
    def projects_identity(self) -> bool:
        """Whether vectors are multiplied by the identity before the feature map. This does not change their values,
        but the product has the register layout that the next tl.dot takes as an operand. A loaded tile has
        another layout, and the compiler would compute the features of a loaded tile twice, once in each layout. The
        kernels of ∂q, ∂k and ∂v do without."""
        return not self.stabilised and self.has_spare_registers and self.dtype == torch.bfloat16

    @property
    def blocks_f(self) -> int:
        """The number of blocks along the directions."""
        return ceil_div(self.F // features_per_direction(self.map), BLOCK_F)

    @property
    def blocks_v(self) -> int:
        """The number of blocks along V (columns of values)."""
        return ceil_div(self.V, self.block_v)

    @property
    def state_size(self) -> int:
        """The number of elements of S and Z together."""
        return self.F * self.V + self.F

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which S is stored at each chunk: the one to which the products would round it anyway."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision, torch.float32)

    @property
    def backward_sum_dtype(self) -> torch.dtype:
        """The dtype in which R is stored at each chunk: that of S, but bfloat16 instead of float16, whose range is too
        small for gradients."""
        if self.precision == "fp16":
            return torch.bfloat16
        return self.sum_dtype

    def peak_to_log2(self, peak: Tensor) -> Tensor:
        """Returns the peak of a state as the kernels keep it. A state stands for e^peak · sums with the φ of
        `regard.mechanisms`. The kernels' 2^peak · sums has a φ that is √D times as large. The sums are the same numbers
        in both, so the kernels' peak is peak · log₂e + log₂√D."""
        return peak.float() * LOG2E + self._peak_offset

    def peak_from_log2(self, peak: Tensor) -> Tensor:
        """Returns a peak of the kernels as a state keeps it; the inverse of `peak_to_log2`."""
        return (peak - self._peak_offset) / LOG2E

    @property
    def _peak_offset(self) -> float:
        """log₂ √D: what `peak_to_log2` adds, because the kernels' φ is √D times that of a state. 0 for maps without
        stabilisers."""
        if not self.stabilised:
            return 0.0
        return math.log2(self.F // features_per_direction(self.map)) / 2

    def is_chained(self, causal: bool, has_initial_state: bool, needs_grad: bool) -> bool:
        """Returns whether `chained_kernel` does the whole forward pass. It does so for causal attention under the
        conditions of `projects_identity`, because it projects on the identity and keeps S in registers. The exception
        is a call with an initial state and a backward pass: `query_grad_kernel` would need the sums before the first
        chunk, which `chained_kernel` does not store."""
        return self.projects_identity and causal and not (has_initial_state and needs_grad)


def plan_call(call: LinearCall) -> Plan:
    """Returns the plan of a call."""
    return plan_shapes(call.q, call.v, call.w, call.map)


def plan_shapes(q: Tensor, v: Tensor, w: Tensor | None, map: str) -> Plan:
    """Returns the plan for q [B,H,T,K], v [B,G,T_k,V] and directions w [D,K]."""
    F = q.shape[3]
    if w is not None:
        F = w.shape[0] * features_per_direction(map)
    sizes = (tuple(q.shape), tuple(v.shape), F, map, q.dtype, v.dtype, v.device)
    if torch.compiler.is_compiling():  # sizes may be symbolic, and those have no hash
        return _make_plan.__wrapped__(*sizes)
    return _make_plan(*sizes)


@lru_cache(4096)
def _make_plan(
    q_shape: tuple[int, int, int, int], v_shape: tuple[int, int, int, int], F: int, map: str, q_dtype: torch.dtype,
    v_dtype: torch.dtype, device: torch.device,
) -> Plan:  # fmt: skip
    """Returns the plan for these shapes and dtypes. It takes no tensors, so that its results can be cached."""
    B, H, T, K = q_shape
    _, G, T_k, V = v_shape
    precision = choose_precision(map, v_dtype, F)
    widest = MAX_BLOCK_V
    if map in RANDOM_FEATURES and precision != "bf16":
        widest = MAX_BLOCK_V // 2
    block_v = min(tile_side(V), widest)
    # As many segments as fit into one wave of `chunk_sums_kernel`: 1, 3 or 4 of its programs are resident per SM.
    programs = {"fourier": 1, "performer": 3}.get(map, 4) * sm_count(device)
    blocks = ceil_div(F // features_per_direction(map), BLOCK_F) * ceil_div(V, block_v)
    segments_of_all_heads = programs // (blocks * B)
    return Plan(
        map, precision, q_dtype, H, G, K, V, F, block_v, cut_into_segments(T_k, segments_of_all_heads // G),
        cut_into_segments(T, segments_of_all_heads // H), _chained_span(T_k, B * G, device),
    )  # fmt: skip


def choose_precision(map: str, dtype: torch.dtype, F: int) -> str:
    """Returns the precision of products for values of a dtype, a map and F features."""
    if dtype == torch.float32:
        return "tf32x3"
    if dtype != torch.bfloat16 or F < FEW_FEATURES:
        return "bf16x3"
    if map == "fourier":
        return "fp16"
    return "bf16"


def cut_into_segments(tokens: int, wanted: int) -> Segments:
    """Divides a number of tokens into equal segments of whole chunks (the last may be shorter): at most `wanted` and at
    most MAX_SLOTS − 1 of them, but at least one."""
    span = ceil_div(tokens, CHUNK * max(1, min(wanted, MAX_SLOTS - 1))) * CHUNK
    return Segments(span, ceil_div(tokens, span) + 1)


def _chained_span(tokens: int, BH: int, device: torch.device) -> int:
    """Returns the number of tokens in a segment for `chained_kernel`. Two of its programs are resident on each SM
    (streaming multiprocessor). With more than √(tokens / HANDOVER_TOKENS) segments, the last one would wait longer for
    the sums of the others than it computes."""
    span = cut_into_segments(tokens, 2 * sm_count(device) // BH).span
    return max(span, ceil_div(math.isqrt(HANDOVER_TOKENS * tokens), CHUNK) * CHUNK)


@lru_cache
def sm_count(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors of a GPU; 1 for the CPU, where kernels are interpreted."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def tile_side(n: int) -> int:
    """Returns the side of a tile for n elements: a power of two, and at least 64. With narrower operands, Triton 3.6
    reads beyond shared memory and sums wrongly."""
    return max(64, 1 << (n - 1).bit_length())


def ceil_div(a: int, b: int) -> int:
    """Returns ⌈a / b⌉."""
    return -(-a // b)
