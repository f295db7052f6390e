"""Launches the programs of a decoding step, of which the host has to start many in little time.

This module imports Triton, so it is imported only when a program runs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.kernels.devices import can_start_early
from regard.kernels.linear.launch import launch


def launch_step(
    program: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    named: dict[str, Any],
    early: bool | None = None,
    **settings: int,
) -> None:
    """Launches a program on the device of its tensors, by what was compiled for the same call before.

    `numbers` are its arguments behind the tensors, `named` its constexprs but EARLY: whether it may start while the
    program before it still runs, which it may where the device can unless `early` says. `settings`: warps and stages.
    """
    if early is None:
        early = can_start_early(tensors[0])
    constants = {**named, "EARLY": early}
    chosen: dict[str, Any] = dict(settings)
    if early:
        chosen["launch_pdl"] = True
    key = (program, program.__name__, tensors[0].device, numbers, *constants.values(), *settings.values())
    launch(key, program, grid, tensors, numbers, lambda: constants, lambda: [chosen])
