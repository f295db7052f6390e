"""`regard mechanisms`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from regard.cli.show import console, print_json, table
from regard.kernels import registered, runs_here
from regard.mechanisms import Mechanism
from regard.mechanisms import mechanisms as known


def mechanisms(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List every mechanism: formula, time, state, and the kernels that run on this machine, with their limits."""
    made = table("name", "formula", "time", "state", "kernels here")
    made.columns[1].no_wrap = True
    rows = []
    for name, cls in known().items():
        row = {"name": name, "formula": cls.formula, "time": cls.order, "state": cls.memory} | _kernels(cls)
        rows.append(row)
        made.add_row(name, cls.formula, f"O({cls.order})", cls.memory, _describe_kernels(row))
    if json:
        print_json(rows)
        return
    out = console()
    out.print(made)
    out.print(
        "\nN tokens, K key width, V value width, G key/value heads, F features. Each has a parallel, a recurrent and "
        "an explicit-weights face; `regard check NAME` shows that they agree.",
        style="dim",
    )


def _kernels(cls: type[Mechanism]) -> dict[str, Any]:
    """Returns the kernels that run here by face, those that need CUDA, and up to which sizes each works."""
    by_face = registered(cls)
    every = [kernel for kernels in by_face.values() for kernel in kernels]
    return {
        "kernels": {face: [k.name for k in kernels if runs_here(k)] for face, kernels in by_face.items()},
        "needs_cuda": sorted({kernel.name for kernel in every if not runs_here(kernel)}),
        "limits": {kernel.name: kernel.limits for kernel in every if kernel.limits},
    }


def _describe_kernels(row: Mapping[str, Any]) -> str:
    """Returns the kernels of a row of `mechanisms` in words."""
    text = "; ".join(f"{face}: {', '.join(names)}" for face, names in row["kernels"].items() if names) or "plain"
    if row["needs_cuda"]:
        text += f"; with CUDA: {', '.join(row['needs_cuda'])}"
    return text + "".join(f" ({name}: {limit})" for name, limit in row["limits"].items())
