"""Launches Triton kernels: chooses compiler settings, and looks compiled kernels up faster than Triton does.

This module imports Triton, so it is imported only when a kernel runs.
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
CompilerSetting = tuple[int, int | None]  # pipeline stages; registers per thread (None: the compiler decides)


def launch_planned(
    kernel: Any, plan: Plan, grid: tuple[int, int], tensors: Tensors, scalars: tuple[int, ...], **flags: Any
) -> None:
    """Launches a kernel with the constexprs of a plan. scalars: its arguments that follow the tensors. flags: further
    constexprs, which also replace those of the plan that have the same name (C, BF)."""

    def constants() -> dict[str, Any]:
        return {
            "K": plan.K, "V": plan.V, "F": plan.F, "BK": tile_side(plan.K), "BF": BLOCK_F, "BV": plan.block_v,
            "C": CHUNK, "MAP": plan.map, "PRECISION": plan.precision, "STABILISED": plan.stabilised,
            "W_PARTS": plan.w_parts, **flags,
        }  # fmt: skip

    key = (kernel, plan, tensors[0].device, scalars, *flags.values())
    launch(key, kernel, (*grid, 1), tensors, scalars, constants, lambda: compiler_settings(kernel, plan, flags))


def launch(
    key: tuple[Any, ...], kernel: Any, grid: tuple[int, int, int], tensors: Tensors, scalars: tuple[float, ...],
    constants: Callable[[], dict[str, Any]], settings: Callable[[], list[dict[str, Any]]],
) -> None:  # fmt: skip
    """Launches a kernel with the first compiler settings that fit the device.

    Compiled kernels are cached under `key` and the dtypes and alignment of the tensors: Triton's own look-up takes
    longer than most of these kernels run. So `key` has to begin with the kernel and to hold everything that determines
    constants and settings, and the scalars, because Triton compiles other code where one of them is 1 or divisible by
    16. Error messages show the second entry of `key`. `constants` and `settings` are called only if nothing is cached.
    """
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():  # Triton launches on the current device
        with torch.cuda.device(device):
            return launch(key, kernel, grid, tensors, scalars, constants, settings)
    pointers = [x.data_ptr() for x in tensors]
    # The identity of a kernel: its hash would read its source. What is cached keeps it alive.
    key = (id(kernel), *key[1:], *[x.dtype for x in tensors], *[n & 15 for n in pointers])
    compiled = _COMPILED.get(key)
    if compiled is not None:
        _, binary, constant_values = compiled
        binary[grid](*pointers, *scalars, *constant_values)
        return
    named = constants()
    reason = None
    for setting in settings():
        try:
            binary = kernel[grid](*tensors, *scalars, **named, **setting)
        except (OutOfResources, PTXASError) as error:  # too little shared memory, or too few registers for a product
            reason = error
            continue
        if binary is not None:  # None where kernels are interpreted
            names = kernel.arg_names[len(tensors) + len(scalars) :]
            _COMPILED[key] = kernel, binary, [(named | setting)[name] for name in names]
        return
    raise KernelError(f"attention in Triton, {key[1]}: it does not fit {device}. Use plain(model).") from reason


_COMPILED: dict[tuple[Any, ...], tuple[Any, Any, list[Any]]] = {}


def compiler_settings(kernel: Any, plan: Plan, flags: dict[str, Any]) -> list[dict[str, int]]:
    """Returns warps, stages and registers to try: first the fastest on an H200, then a setting for smaller devices."""
    stages, registers = _best_setting(kernel.__name__, plan, flags)
    best = {"num_warps": 4, "num_stages": stages}
    if registers is not None:
        best["maxnreg"] = registers
    return [best, {"num_warps": 4, "num_stages": 1}]


def _best_setting(name: str, plan: Plan, flags: dict[str, Any]) -> CompilerSetting:
    """Returns the fastest setting of a kernel, measured on an H200."""
    best: dict[str, CompilerSetting]
    if plan.precision in ("bf16x3", "tf32x3"):
        best = {"output_kernel": (1, None), "key_value_grad_kernel": (1, None)}
    elif plan.precision == "fp16":
        best = _best_in_fp16(flags)
    elif plan.stabilised:
        best = _best_with_stabilisers(plan, flags)
    elif plan.has_spare_registers:
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
    """Returns the fastest settings by kernel for precision fp16, which is that of `fourier`."""
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
    """Returns the fastest settings by kernel for precision bf16 with stabilisers, which is the case of `performer`."""
    best: dict[str, CompilerSetting] = {
        "stabiliser_kernel": (3, 128),
        "chunk_sums_kernel": (2, 128),  # few enough registers for four programs per SM
        "output_kernel": (2, 168),
        "query_grad_kernel": (2, None),
        "key_value_grad_kernel": (2, 168),
    }
    segments = plan.key_segments
    if flags.get("REVERSE"):
        segments = plan.query_segments
    if segments.several:  # the plan makes at most three programs per SM, which leaves each of them 168 registers
        best["chunk_sums_kernel"] = (3, 168)
    if flags.get("CAUSAL"):
        best["output_kernel"] = (1, 168)
        best["query_grad_kernel"] = (1, 168)
        best["key_value_grad_kernel"] = (3, None)
        if flags.get("SEGMENT_SUMS"):
            best["key_value_grad_kernel"] = (2, None)
    if (
        not plan.has_spare_registers
    ):  # of wide heads shared memory holds one or two programs: fewer registers only spill
        best = {name: (stages, None) for name, (stages, _) in best.items()}
    return best
