"""`regard mechanisms`."""

from __future__ import annotations

from typing import Annotated

import typer

from regard.cli.show import console, print_json, table
from regard.kernels import registered
from regard.mechanisms import Mechanism, Pairwise
from regard.mechanisms import mechanisms as known


def mechanisms(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List every mechanism: formula, time, state, and which faces have kernels here."""
    made = table("name", "formula", "time", "state", "kernels")
    rows = []
    for name, cls in known().items():
        kernels = _kernels(cls)
        rows.append({"name": name, "formula": cls.formula, "time": cls.order, "state": cls.memory, "kernels": kernels})
        unique = dict.fromkeys(n for found in kernels.values() for n in found)
        shown = ", ".join(f"{name} ({', '.join(f for f in kernels if name in kernels[f])})" for name in unique)
        made.add_row(name, cls.formula, f"O({cls.order})", cls.memory, shown or "plain")
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


def _kernels(cls: type[Mechanism]) -> dict[str, list[str]]:
    """Kernel names by face; a pairwise mechanism decodes with its parallel kernel over the cache."""
    names = registered(cls)
    found = {"parallel": names.get("forward", []), "recurrent": names.get("extend", [])}
    if issubclass(cls, Pairwise):
        found["recurrent"] = found["parallel"]
    return {face: kernels for face, kernels in found.items() if kernels}
