"""`regard cost`."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any, cast, get_args

import torch
import typer
from rich.table import Table

from regard import cost as costs
from regard.cli import cost_models
from regard.cli.amounts import format_amount, format_bytes, format_seconds
from regard.cli.cost_crossing import print_crossings
from regard.cli.cost_query import CostQuery, dtype_name, sight
from regard.cli.show import align_right, console, print_json, table
from regard.cost.formulas import KINDS, LEGEND, QUANTITIES, Kind, formula, legend
from regard.devices import resolve_dtype
from regard.errors import OptionError
from regard.mechanisms import Cost, Face, Mechanism, lookup
from regard.mechanisms import mechanisms as known
from regard.shapes import Size

COLUMNS = ("matmul", "useful", "other", "bytes", "state", "FLOP/B", "floor", "predicted")
RECURRENT_TOKENS = 128  # new tokens of the recurrent face on the card of one mechanism
NOTE = (
    "FLOPs of matrix products as executed (matmul) and as needed (useful: causal pairs once), and of the rest, which "
    "goes element by element (other). floor: max(bytes / bandwidth, useful / peak), all at once. predicted: products, "
    "the rest and memory one after the other.\n"
    "`regard cost NAME` shows the formulas of one; docs/cost.md says how far to trust them."
)


def cost(
    names: Annotated[list[str] | None, typer.Argument(help="Mechanisms; one: its formulas; default: all.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of a sequence; default: 1024, or the model's length.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences in a batch.")] = 1,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads; default: as many as --heads.")] = None,
    width: Annotated[int, typer.Option(help="Width of a head's keys.")] = 64,
    value_width: Annotated[int | None, typer.Option(help="Width of a head's values; default: --width.")] = None,
    features: Annotated[int | None, typer.Option(help="Random features of performer and fourier.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16, fp16 or fp64; default: fp32 on a CPU, else bf16.")
    ] = None,
    face: Annotated[str, typer.Option(help="The form of computation: parallel, recurrent or weights.")] = "parallel",
    new: Annotated[int, typer.Option(help="New tokens of --face recurrent.")] = 1,
    window: Annotated[
        int | None, typer.Option(help="Tokens that each token sees, itself included; default: all.")
    ] = None,
    not_causal: Annotated[bool, typer.Option("--not-causal", help="Every token attends to all tokens.")] = False,
    training: Annotated[bool, typer.Option("--training", help="Count forward and backward pass.")] = False,
    decode: Annotated[int | None, typer.Option(help="Count one decoding step with this many tokens cached.")] = None,
    layer: Annotated[bool, typer.Option("--layer", help="Add the projections of a layer of width H·K.")] = False,
    formulas: Annotated[bool, typer.Option("--formulas", help="Print formulas instead of numbers.")] = False,
    crossing: Annotated[
        bool, typer.Option("--crossing", help="At which N each other mechanism is faster than the first.")
    ] = False,
    measure: Annotated[bool, typer.Option("--measure", help="With --crossing: measure it here, too.")] = False,
    model: Annotated[str | None, typer.Option(help=cost_models.HELP)] = None,
    source: Annotated[int | None, typer.Option(help="Source tokens of a Seq2Seq model; default: --tokens.")] = None,
    device: Annotated[
        str, typer.Option(help="The device that times are for: cpu, cuda, or a name such as H200.")
    ] = "cpu",
    download: Annotated[
        bool, typer.Option("--download", help="Download a model's config if it is not on this machine.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """FLOPs, bytes and state of mechanisms and models, as formulas and numbers; and which is faster at what length."""
    where = costs.device(device)  # the maker's numbers for a name such as H200; a CPU is measured
    kind = _choose_dtype(dtype, where)
    _check_positive(tokens=tokens, batch=batch, heads=heads, kv_heads=kv_heads, width=width, new=new, decode=decode)
    _check_positive(window=window)
    if model is not None and window is not None:
        raise OptionError("--window is for mechanisms: leave it out, as a model's config has its window")
    if model is not None:
        cost_models.print_model_cost(model, tokens, batch, source, kind, where, download=download, json=json)
        return
    if face not in get_args(Face):
        raise OptionError(f"--face {face}: expected {', '.join(get_args(Face))}")
    if training and (face != "parallel" or decode is not None):
        raise OptionError("--training is of whole sequences: leave out --face and --decode")
    if formulas and window is not None:
        raise OptionError("--window gives numbers: the formulas are those of attention to everything")
    size = _build_size(tokens or 1024, batch, heads, kv_heads, width, value_width, not not_causal, kind)
    size = replace(size, window=window)
    if decode is not None:
        face = "recurrent"
        size = replace(size, T=1, S=decode + 1)
    elif face == "recurrent":
        size = replace(size, T=new, S=max(size.S, new))
    if layer and (formulas or crossing or face == "weights"):
        raise OptionError("--layer gives numbers of whole sequences and of decoding: leave out the other options")
    query = CostQuery(size, where, cast(Face, face), training, features, layer)
    chosen = [lookup(name).name for name in names or known()]
    if crossing:
        print_crossings(query, chosen, measure, device, json)
    elif len(chosen) == 1 and names and decode is None and not layer and window is None:
        _print_card(query, chosen[0], json)
    elif formulas:
        _print_formulas(query, chosen, decode is not None or (face == "recurrent" and new == 1), json)
    else:
        _print_numbers(query, chosen, decode, json)


def _choose_dtype(name: str | None, device: costs.Device) -> torch.dtype:
    """Returns the dtype of a name; without one, float32 for a CPU and bfloat16 for other devices."""
    if name:
        dtype: torch.dtype = getattr(torch, resolve_dtype(name))
        return dtype
    if "cpu" in device.name:
        return torch.float32
    return torch.bfloat16


def _check_positive(**options: int | None) -> None:
    """Raises an OptionError if an option that was given is below 1."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise OptionError(f"--{name.replace('_', '-')} {value}: expected at least 1")


def _build_size(N: int, B: int, H: int, G: int | None, K: int, V: int | None, causal: bool, dtype: torch.dtype) -> Size:
    """Returns the sizes of self-attention over N tokens; by default G is H and V is K."""
    if G is None:
        G = H
    if V is None:
        V = K
    if H % G:
        raise OptionError(f"--kv-heads {G} do not divide --heads {H}")
    return Size(B, N, N, H, G, K, V, causal, dtype)


def _json_row(query: CostQuery, cost: Cost) -> dict[str, Any]:
    """Returns a cost with its intensity and times, for JSON."""
    times = {"floor_seconds": query.floor(cost), "predicted_seconds": query.predicted(cost)}
    return asdict(cost) | {"intensity": cost.intensity} | times


def _cells(query: CostQuery, cost: Cost) -> list[str]:
    """Returns the cells of a cost, in the order of `COLUMNS`."""
    flops = [format_amount(x) for x in (cost.matmul, cost.useful, cost.elementwise)]
    moved = [format_bytes(cost.bytes), format_bytes(cost.state), f"{cost.intensity:,.1f}"]
    return [*flops, *moved, format_seconds(query.floor(cost)), format_seconds(query.predicted(cost))]


def _orders(cls: type[Mechanism]) -> dict[str, str]:
    """Returns how time, state and memory in training grow, each in the O notation without its O."""
    return {"time": cls.order, "state": cls.memory, "training": cls.training_memory}


def _print_numbers(query: CostQuery, names: list[str], decode: int | None, json: bool) -> None:
    """Prints all mechanisms side by side."""
    found = {name: query.cost(name) for name in names}
    orders = {name: _orders(known()[name]) for name in names}
    layers: dict[str, Cost] = {}
    if decode is not None:
        layers = _layer_costs(query, decode)
    if json:
        rows = [{"name": name, "order": orders[name]} | _json_row(query, cost) for name, cost in found.items()]
        size = asdict(query.size) | {"face": query.face, "training": query.training, "layer": query.layer}
        document: dict[str, Any] = {"size": size | {"device": query.device.name}, "rows": rows}
        if layers:
            document["layer"] = [{"heads": name} | _json_row(query, cost) for name, cost in layers.items()]
        print_json(document)
        return
    out = console()
    memory = "state"
    memory_title = "state, O(…)"
    if query.training:
        memory = "training"
        memory_title = "memory, O(…)"
    made = table("", "time, O(…)", memory_title, *COLUMNS, padding=(0, 1, 0, 0))
    for name, cost in found.items():
        made.add_row(name, orders[name]["time"], orders[name][memory], *_cells(query, cost))
    out.print(query.title)
    out.print(align_right(made, 3))
    if layers:
        out.print(_layer_table(query, layers))
    out.print(f"\n{NOTE}", style="dim")


def _layer_costs(query: CostQuery, n: int) -> dict[str, Cost]:
    """Returns the cost of one decoding step of a whole softmax layer: multi-head, grouped, multi-query."""
    s = query.size
    groups = {"multi-head": s.H}
    # The number of the options, else a usual number of groups that divides the heads.
    between = [g for g in (s.G, s.H // 4, s.H // 2) if 1 < g < s.H and s.H % g == 0]
    if between:
        groups[f"grouped, G = {between[0]}"] = between[0]
    groups["multi-query"] = 1
    if s.window is not None:
        n = min(n, s.window - 1)  # a window of keys is kept, the new one among them
    return {name: costs.decode(s.B, n, s.H * s.K, s.H, G, s.K, s.V, s.e) for name, G in groups.items()}


def _layer_table(query: CostQuery, layers: dict[str, Cost]) -> Table:
    """Returns the table of `_layer_costs`, with the formulas as its title."""
    D = query.size.H * query.size.K
    title = (
        f"\nThe same step of a whole softmax layer, D = {D}, projections included:\n"
        "  FLOPs = 2BD(HK+GK+GV+HV) + 2BH(n+1)(K+V)            O(Bd²+Bnd) for all three\n"
        "  bytes = e[D(HK+GK+GV+HV) + BG(n+1)(K+V) + B(2D+HK+GK+GV+HV)]\n"
        "          O(d²+Bd+Bnd) for multi-head, O(d²+Bd+Bnd/H) for multi-query\n"
    )
    made = table("", *COLUMNS, title=title)
    for name, cost in layers.items():
        made.add_row(name, *_cells(query, cost))
    return align_right(made, 1)


def _print_card(query: CostQuery, name: str, json: bool) -> None:
    """Prints the costs of every face of one mechanism, as formulas and numbers."""
    cls = known()[name]
    mechanism = query.build(name)
    rows = []
    for kind in KINDS:
        cost = _cost_of_kind(query, name, kind)
        for quantity, text in formula(mechanism, kind, query.size.causal).items():
            rows.append({"face": kind, "quantity": quantity, "formula": text, "number": getattr(cost, quantity)})
    s = query.size
    if json:
        print_json({"name": name, "order": _orders(cls), "size": asdict(s), "rows": rows})
        return
    out = console()
    out.print(f"{name}: {cls.formula}\n")
    out.print(f"time O({cls.order}), state O({cls.memory}), memory in training O({cls.training_memory})\n")
    out.print(_card_table(rows))
    sizes = f"B = {s.B}, N = {s.S:,}, H = {s.H}, G = {s.G}, K = {s.K}, V = {s.V}, {dtype_name(s.dtype)}"
    out.print(f"\nhere: {sizes}", style="dim")
    meanings = _explain_letters([row["formula"] for row in rows])
    out.print(f"recurrent: T = {RECURRENT_TOKENS} more tokens, S = N in all; step: one more. {meanings}", style="dim")


def _card_table(rows: list[dict[str, Any]]) -> Table:
    """Returns the table of a card; only the first row of a face has its name."""
    made = table("", "", "formula", "here")
    for row in rows:
        face = ""
        if row["quantity"] == QUANTITIES[0]:
            made.add_section()
            face = row["face"]
        formatted = format_amount(row["number"])
        if row["quantity"] in ("bytes", "state"):
            formatted = format_bytes(row["number"])
        made.add_row(face, row["quantity"], row["formula"], formatted)
    return align_right(made, 3)


def _cost_of_kind(query: CostQuery, name: str, kind: Kind) -> Cost:
    """Returns the cost of one kind of call in numbers: "recurrent" takes 128 new tokens, "step" one."""
    tokens = {"recurrent": min(RECURRENT_TOKENS, query.size.S), "step": 1}
    size = replace(query.size, T=tokens.get(kind, query.size.T))
    face = cast(Face, {"training": "parallel", "step": "recurrent"}.get(kind, kind))
    return costs.of(query.build(name, query.size), size, face, training=kind == "training")


def _print_formulas(query: CostQuery, names: list[str], step: bool, json: bool) -> None:
    """Prints the formulas of several mechanisms for one face."""
    kind: Kind = query.face
    if query.training:
        kind = "training"
    elif step:
        kind = "step"
    rows = {name: formula(query.build(name), kind, query.size.causal) for name in names}
    if json:
        listed = [{"name": name} | row for name, row in rows.items()]
        print_json({"face": kind, "rows": listed, "letters": LEGEND})
        return
    made = table("", *QUANTITIES, title=f"{kind}{sight(query.size)}\n")
    for name, row in rows.items():
        made.add_row(name, *row.values())
    out = console()
    out.print(made)
    out.print("\n" + _explain_letters([text for row in rows.values() for text in row.values()]), style="dim")


def _explain_letters(formulas: list[str]) -> str:
    """Returns a sentence that says what the letters of these formulas mean."""
    return "; ".join(f"{letter} {meaning}" for letter, meaning in legend(formulas).items()) + "."
