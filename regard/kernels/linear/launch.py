"""Launches Triton programs: which compiler settings they take, and a faster look-up of what was compiled than Triton's.

Imported only where a program runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources, PTXASError

from regard.errors import KernelError
from regard.kernels.linear.plan import BLOCK_F, CHUNK, Plan, tile_side

Tensors = tuple[Tensor, ...]
CompilerSetting = tuple[int, int | None]  # pipeline stages, and registers of a thread (None: the compiler decides)


def launch_planned(
    program: Any, plan: Plan, grid: tuple[int, int], tensors: Tensors, numbers: tuple[int, ...], **flags: Any
) -> None:
    """Launches a program of a plan. Each has the plan's constants as parameters, and those of `flags`."""

    def constants() -> dict[str, Any]:
        return {
            "K": plan.K, "V": plan.V, "F": plan.F, "BK": tile_side(plan.K), "BF": BLOCK_F, "BV": plan.block_v,
            "C": CHUNK, "MAP": plan.map, "PRECISION": plan.precision, "STABILISED": plan.stabilised,
            "W_PARTS": plan.w_parts, **flags,
        }  # fmt: skip

    key = (program, plan, tensors[0].device, numbers, *flags.values())
    launch(key, program, (*grid, 1), tensors, numbers, constants, lambda: compiler_settings(program, plan, flags))


def launch(
    key: tuple[Any, ...], program: Any, grid: tuple[int, int, int], tensors: Tensors, numbers: tuple[int, ...],
    constants: Callable[[], dict[str, Any]], settings: Callable[[], list[dict[str, int]]],
) -> None:  # fmt: skip
    """Launches a program with the first compiler settings that fit the device.

    What was compiled is kept under `key` and the dtypes and alignment of the tensors: Triton's own look-up takes longer
    than most of these programs run. So `key` holds the program, then all that decides constants and settings; errors
    show its second entry. `constants` and `settings` are called only where nothing was kept.
    """
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():  # Triton launches on the current one
        with torch.cuda.device(device):
            return launch(key, program, grid, tensors, numbers, constants, settings)
    pointers = [x.data_ptr() for x in tensors]
    key = (*key, *[x.dtype for x in tensors], *[n & 15 for n in pointers])
    compiled = _COMPILED.get(key)
    if compiled is not None:
        binary, constant_values = compiled
        binary[grid](*pointers, *numbers, *constant_values)
        return
    named = constants()
    reason = None
    for setting in settings():
        try:
            binary = program[grid](*tensors, *numbers, **named, **setting)
        except (OutOfResources, PTXASError) as error:  # too little shared memory, or too few registers for a product
            reason = error
            continue
        if binary is not None:  # None where programs are interpreted
            names = program.arg_names[len(tensors) + len(numbers) :]
            _COMPILED[key] = binary, [(named | setting)[name] for name in names]
        return
    raise KernelError(f"attention in Triton, {key[1]}: it does not fit {device}. Use plain(model).") from reason


_COMPILED: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}


def compiler_settings(program: Any, plan: Plan, flags: dict[str, Any]) -> list[dict[str, int]]:
    """Returns warps, stages and registers to try: first the best on an H200, then one for smaller devices."""
    stages, registers = _best_setting(program.__name__, plan, flags)
    best = {"num_warps": 4, "num_stages": stages}
    if registers is not None:
        best["maxnreg"] = registers
    return [best, {"num_warps": 4, "num_stages": 1}]


def _best_setting(name: str, plan: Plan, flags: dict[str, Any]) -> CompilerSetting:
    """Returns the best setting of a program, measured on an H200."""
    best: dict[str, CompilerSetting]
    if plan.precision in ("bf16x3", "tf32x3"):
        best = {"output_kernel": (1, None), "key_value_grad_kernel": (1, None)}
    elif plan.precision == "fp16":
        best = _best_in_fp16(flags)
    elif plan.stabilised:
        best = _best_with_stabilisers(plan, flags)
    elif plan.narrow:
        best = {
            "output_kernel": (2, None),
            "query_grad_kernel": (2, 128),
            "chunk_sums_kernel": (2, 128),
            "key_value_grad_kernel": (2, 168),
            "chained_kernel": (3, None),
        }
    else:
        wide = ("output_kernel", "query_grad_kernel", "chunk_sums_kernel", "key_value_grad_kernel")
        best = dict.fromkeys(wide, (1, None))
    return best.get(name, (2, None))


def _best_in_fp16(flags: dict[str, Any]) -> dict[str, CompilerSetting]:
    """Returns the best settings by program for products of float16, which `fourier` takes."""
    best: dict[str, CompilerSetting] = {
        "stabiliser_kernel": (1, None),
        "chunk_sums_kernel": (3, None),
        "output_kernel": (3, None),
        "query_grad_kernel": (3, None),
        "key_value_grad_kernel": (2, None),
    }
    if flags.get("CHUNK_SUMS"):
        best["chunk_sums_kernel"] = (2, None)
    if flags.get("CAUSAL"):
        best["output_kernel"] = (1, None)
        if flags.get("SEGMENT_SUMS"):
            best["output_kernel"] = (2, None)
            best["key_value_grad_kernel"] = (1, None)
    return best


def _best_with_stabilisers(plan: Plan, flags: dict[str, Any]) -> dict[str, CompilerSetting]:
    """Returns the best settings by program for products of bfloat16 with stabilisers, which `performer` takes."""
    best: dict[str, CompilerSetting] = {
        "stabiliser_kernel": (3, 128),
        "chunk_sums_kernel": (2, 128),  # registers for four programs a processor
        "output_kernel": (2, 168),
        "query_grad_kernel": (2, None),
        "key_value_grad_kernel": (2, 168),
    }
    segments = plan.keys
    if flags.get("REVERSE"):
        segments = plan.queries
    if segments.slots > 2:  # the sequence was cut into as many segments as run at once, three a processor
        best["chunk_sums_kernel"] = (3, 168)
    if flags.get("CAUSAL"):
        best["output_kernel"] = (1, 168)
        best["query_grad_kernel"] = (1, 168)
        best["key_value_grad_kernel"] = (3, None)
        if flags.get("SEGMENT_SUMS"):
            best["key_value_grad_kernel"] = (2, None)
    return best
