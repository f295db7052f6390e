"""How a call of linear attention is cut up, and how its Triton programs are started. Imported only where one runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources, PTXASError

from regard.errors import KernelError
from regard.kernels.linear.triton_features import waves

LOG2E = 1.4426950408889634
SLOTS = 128  # of running totals at the most
CHUNK = 64  # tokens; a segment is a multiple of it
HANDING = 48  # tokens that are done in the time in which a segment hands over to the next
BLOCK = 64  # features made at a time
WIDEST = 128  # values of a program


class Plan(NamedTuple):
    """How one call is cut up: blocks of values, and segments of keys and of queries, each with one slot more for what
    comes from outside."""

    map: str
    mode: str
    dtype: torch.dtype
    H: int
    G: int
    K: int
    V: int
    F: int
    values: int  # of a block
    keys_span: int
    keys_slots: int
    queries_span: int
    queries_slots: int
    chain_span: int  # tokens of a segment where one program does all
    parts: int = 0  # of the directions

    @property
    def peaked(self) -> bool:
        return self.map in ("performer", "fourier")

    @property
    def signed(self) -> bool:
        """Weights may be negative. Outputs can then be far larger than values, and the gradient needs all digits."""
        return self.map == "fourier"

    @property
    def narrow(self) -> bool:
        """There is room for more tokens than a chunk."""
        return self.mode in ("half", "fine") and max(self.K, self.V) <= 64

    @property
    def through(self) -> bool:
        """Vectors pass through a product with the identity, which is exact: what comes out of a product lies as the
        next one takes it, and what is loaded does not. So features are made once."""
        return not self.peaked and self.narrow and self.dtype == torch.bfloat16

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks of directions, blocks of values."""
        return -(-self.F // waves(self.map) // BLOCK), -(-self.V // self.values)

    @property
    def numbers(self) -> int:
        """Numbers in S and Z."""
        return self.F * self.V + self.F

    @property
    def kept(self) -> torch.dtype:
        """Of the sums at each chunk: what the products make of them anyway."""
        return {"half": torch.bfloat16, "fine": torch.float16}.get(self.mode, torch.float32)

    @property
    def kept_back(self) -> torch.dtype:
        """The same of the gradient."""
        return torch.bfloat16 if self.mode == "fine" else self.kept

    def inward(self, peak: Tensor) -> Tensor:
        """A state's peak in powers of two. The programs leave performer's 1/√F out of c."""
        return peak.float() * LOG2E + self._shift

    def outward(self, peak: Tensor) -> Tensor:
        return (peak - self._shift) / LOG2E

    @property
    def _shift(self) -> float:
        return math.log2(self.F // waves(self.map)) / 2 if self.peaked else 0.0


def planned(q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, map: str) -> Plan:
    F = q.shape[3] if w is None else w.shape[0] * waves(map)
    sizes = (*q.shape, *v.shape[1:], F, map, q.dtype, v.dtype, v.device)
    return _planned.__wrapped__(*sizes) if torch.compiler.is_compiling() else _planned(*sizes)


@lru_cache(4096)
def _planned(
    B: int, H: int, T: int, K: int, G: int, S: int, V: int, F: int, map: str, dtype: torch.dtype, values: torch.dtype,
    device: torch.device,
) -> Plan:  # fmt: skip
    # The rounding of many features averages out, that of few does not.
    averages = values == torch.bfloat16 and F >= 32
    signed, mixed = map == "fourier", map in ("performer", "fourier")
    mode = "tf32" if values == torch.float32 else ("fine" if signed else "half") if averages else "split"
    columns = min(padded(V), WIDEST // 2 if mixed and mode != "half" else WIDEST)
    at_once = 1 if signed else 3 if mixed else 4  # programs of `states` on a processor: segments for one round
    wanted = at_once * processors(device) // (-(-F // waves(map) // BLOCK) * -(-V // columns) * B)
    cuts = (*_cut(S, wanted // G), *_cut(T, wanted // H))
    # Two programs on each processor start at once; of more than √N segments the last waits longer than it works.
    chain = max(_cut(S, 2 * processors(device) // (B * G))[0], -(-math.isqrt(HANDING * S) // CHUNK) * CHUNK)
    return Plan(map, mode, dtype, H, G, K, V, F, columns, *cuts, chain)


def _cut(tokens: int, wanted: int) -> tuple[int, int]:
    """Tokens of a segment, and the number of slots."""
    span = -(-tokens // (CHUNK * max(1, min(wanted, SLOTS - 1)))) * CHUNK
    return span, -(-tokens // span) + 1


@lru_cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def padded(n: int) -> int:
    """The side of a tile. With operands narrower than 64, Triton 3.6 reads beyond shared memory and sums wrongly."""
    return max(64, 1 << (n - 1).bit_length())


def run(
    program: Any, grid: tuple[int, int], plan: Plan, tensors: tuple[Tensor, ...], *numbers: int, **flags: Any
) -> None:
    """A program of the plan, with all constants that one may need."""
    launch(
        (program, plan, tensors[0].device, numbers, *flags.values()), program, (*grid, 1), tensors, numbers,
        lambda: {
            "K": plan.K, "V": plan.V, "F": plan.F, "KP": padded(plan.K), "FB": BLOCK, "VB": plan.values, "C": CHUNK,
            "MAP": plan.map, "MODE": plan.mode, "PEAKED": plan.peaked, "PARTS": plan.parts, **flags,
        },
        lambda: _ways(program, plan, flags),
    )  # fmt: skip


def launch(
    key: tuple[Any, ...], program: Any, grid: tuple[int, int, int], tensors: tuple[Tensor, ...],
    numbers: tuple[int, ...], constants: Callable[[], dict[str, Any]], ways: Callable[[], list[dict[str, int]]],
) -> None:  # fmt: skip
    """Runs a program in the first way that fits the device. What was compiled is kept under its key and the dtypes and
    alignment of its tensors: Triton's own look-up takes longer than most of these programs run."""
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():  # Triton launches on the current one
        with torch.cuda.device(device):
            return launch(key, program, grid, tensors, numbers, constants, ways)
    pointers = [x.data_ptr() for x in tensors]
    key = (*key, *[x.dtype for x in tensors], *[n & 15 for n in pointers])
    ready = _READY.get(key)
    if ready is not None:
        ready[0][grid](*pointers, *numbers, *ready[1])
        return
    fixed, why = constants(), None
    for way in ways():
        try:
            made = program[grid](*tensors, *numbers, **fixed, **way)
        except (OutOfResources, PTXASError) as error:  # too little shared memory, or too few registers for a product
            why = error
            continue
        if made is not None:  # None where programs are interpreted
            _READY[key] = made, [(fixed | way)[n] for n in program.arg_names[len(tensors) + len(numbers) :]]
        return
    raise KernelError(f"attention in Triton, {key[1]}: it does not fit {device}. Use plain(model).") from why


_READY: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}


def _ways(program: Any, plan: Plan, flags: dict[str, Any]) -> list[dict[str, int]]:
    """Warps, stages and registers to try, the best first: measured on an H200; the last is for smaller devices."""
    outside, causal = bool(flags.get("STATES")), bool(flags.get("CAUSAL"))  # there are sums from outside the segment
    cut = (plan.queries_slots if flags.get("BACK") else plan.keys_slots) > 2  # into as many as run at once
    best: dict[str, tuple[int, int | None]]
    if plan.mode in ("split", "tf32"):
        best = {"outputs": (1, None), "keys_values": (1, None)}
    elif plan.mode == "fine":
        best = {
            "crests": (1, None), "states": (2 if flags.get("LOCAL") else 3, None),
            "outputs": ((2 if outside else 1) if causal else 3, None), "queries": (3, None),
            "keys_values": (1 if causal and outside else 2, None),
        }  # fmt: skip
    elif plan.peaked:
        best = {
            "crests": (3, 128),
            "states": (3, 168) if cut else (2, 128),  # three programs a processor, or four
            "outputs": (1 if causal else 2, 168),
            "queries": (1, 168) if causal else (2, None),
            "keys_values": ((2 if outside else 3), None) if causal else (2, 168),
        }
    elif plan.narrow:
        best = {
            "outputs": (2, None), "queries": (2, 128), "states": (2, 128), "keys_values": (2, 168), "chained": (3, None)
        }  # fmt: skip
    else:
        best = dict.fromkeys(("outputs", "queries", "states", "keys_values"), (1, None))
    stages, registers = best.get(program.__name__, (2, None))
    first = {"num_warps": 4, "num_stages": stages} | ({} if registers is None else {"maxnreg": registers})
    return [first, {"num_warps": 4, "num_stages": 1}]
