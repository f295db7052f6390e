"""`regard mechanisms`."""

from __future__ import annotations

from typing import Annotated

import typer

from regard.cli.show import console, print_json, table
from regard.kernels import registered, runs_here
from regard.mechanisms import mechanisms as known


def mechanisms(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List every mechanism: formula, time, state, which faces have kernels here, and up to which sizes."""
    made = table("name", "formula", "time", "state", "kernels here")
    made.columns[1].no_wrap = True
    rows = []
    for name, cls in known().items():
        kernels = {f: [k.name for k in ks if runs_here(k)] for f, ks in registered(cls).items()}
        elsewhere = sorted({k.name for ks in registered(cls).values() for k in ks if not runs_here(k)})
        row = {"name": name, "formula": cls.formula, "time": cls.order, "state": cls.memory}
        limits = {k.name: k.limits for ks in registered(cls).values() for k in ks if k.limits}
        rows.append(row | {"kernels": kernels, "needs_cuda": elsewhere, "limits": limits})
        shown = "; ".join(f"{face}: {', '.join(names)}" for face, names in kernels.items() if names) or "plain"
        if elsewhere:
            shown += f"; with CUDA: {', '.join(elsewhere)}"
        shown += "".join(f" ({name}: {limit})" for name, limit in limits.items())
        made.add_row(name, cls.formula, f"O({cls.order})", cls.memory, shown)
    if json:
        print_json(rows)
        return
    out = console()
    out.print(made)
    out.print(
        "\nN tokens, K key width, V value width, G key/value heads, F features. Each has a parallel, a recurrent and\n"
        "an explicit-weights face; `regard check NAME` shows that they agree.",
        style="dim",
    )
