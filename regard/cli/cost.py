"""`regard cost`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, cast, get_args

import torch
import typer
from rich.status import Status
from rich.table import Table

from regard import cost as costs
from regard.cli import cost_models
from regard.cli.amounts import format_amount, format_bytes, format_seconds
from regard.cli.show import align_right, console, print_json, table
from regard.cost.crossing import Crossing, Named, Point, measured, modelled
from regard.cost.formulas import KINDS, LEGEND, QUANTITIES, Kind, formula, legend
from regard.devices import resolve_device, resolve_dtype
from regard.errors import OptionError
from regard.mechanisms import Cost, Face, Mechanism, fitted, lookup, on_meta
from regard.mechanisms import mechanisms as known
from regard.nn import Attention
from regard.registry import accepted_options
from regard.shapes import Size

COLUMNS = ("matmul", "useful", "other", "bytes", "state", "FLOP/B", "floor", "predicted")
RECURRENT_TOKENS = 128  # new tokens of the recurrent face on the card of one mechanism
NOTE = (
    "FLOPs of matrix products as executed (matmul) and as needed (useful: causal pairs once), and of the rest, which\n"
    "goes element by element (other). floor: max(bytes / bandwidth, useful / peak), all at once. predicted: products,\n"
    "the rest and memory one after the other.\n"
    "`regard cost NAME` shows the formulas of one; docs/cost.md says how far to trust them."
)


@dataclass(frozen=True)
class CostQuery:
    """The sizes, the device and the face that a table is about; `layer`: with the projections of a layer."""

    size: Size
    device: costs.Device
    face: Face
    training: bool
    features: int | None
    layer: bool = False

    def build(self, name: str, size: Size | None = None, make: Callable[..., Mechanism] = on_meta) -> Mechanism:
        """Returns a mechanism of these sizes, without memory; to run it, `make` is `fitted`."""
        cls = lookup(name)
        offered = {}
        if self.features is not None:
            offered["features"] = self.features
        return make(cls, size or self.size, **accepted_options(cls, offered))

    def cost(self, name: str) -> Cost:
        """Returns the cost of the mechanism alone, or of a layer as wide as its heads, without biases."""
        mechanism = self.build(name)
        s = self.size
        if not self.layer:
            return costs.of(mechanism, s, self.face, training=self.training)
        # On the meta device a layer of any size has shapes and no memory.
        with torch.device("meta"):
            layer = Attention(
                s.H * s.K,
                s.H,
                mechanism=mechanism,
                G=s.G,
                K=s.K,
                V=s.V,
                causal=s.causal,
                bias=False,
            ).to(s.dtype)
        cost = layer.cost(s.T, s.S, self.face, s.B)
        if self.training:
            cost = cost + layer.gradient_cost(s.T, s.S, s.B)
        return cost

    def floor(self, cost: Cost) -> float:
        """Returns the least seconds that the device needs."""
        return costs.floor(cost, self.device, self.size.dtype)

    def predicted(self, cost: Cost) -> float:
        """Returns the seconds that the model of the device predicts."""
        return costs.predicted(cost, self.device, self.size.dtype)

    @property
    def title(self) -> str:
        """Returns two lines that say what is counted, and on which device."""
        s = self.size
        tokens = f"{s.S:,} tokens"
        if self.face == "recurrent":
            tokens = f"{s.T:,} new of {s.S:,} tokens"
        what: str = self.face
        if self.training:
            what += ", forward and backward"
        if self.layer:
            what += f", a layer of width D = {s.H * s.K}"
        sizes = f"B = {s.B}, {tokens}, H = {s.H}, G = {s.G}, K = {s.K}, V = {s.V}, {_dtype_name(s.dtype)}"
        source = "as its maker states"
        if self.device.measured:
            source = "measured"
        speed = f"{format_amount(self.device.peak(s.dtype))}FLOP/s, {format_amount(self.device.bandwidth)}B/s"
        return f"{what}: {sizes}{_causal_suffix(s)}\n{self.device.name}: {speed}, {source}\n"


def cost(
    names: Annotated[list[str] | None, typer.Argument(help="Mechanisms; one: all of its formulas; none: all.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of a sequence: 1024, or the length of a model.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads; none: as many.")] = None,
    width: Annotated[int, typer.Option(help="Width of a head's keys.")] = 64,
    value_width: Annotated[int | None, typer.Option(help="Width of a head's values; none: the same.")] = None,
    features: Annotated[int | None, typer.Option(help="Features of performer and fourier.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16, fp16 or fp64; none: fp32 on a CPU, else bf16.")] = None,
    face: Annotated[str, typer.Option(help="parallel, recurrent or weights.")] = "parallel",
    new: Annotated[int, typer.Option(help="New tokens of the recurrent face.")] = 1,
    not_causal: Annotated[bool, typer.Option("--not-causal", help="Every token sees every token.")] = False,
    training: Annotated[bool, typer.Option("--training", help="Forward and backward.")] = False,
    decode: Annotated[int | None, typer.Option(help="One decoding step of a layer with so many tokens cached.")] = None,
    layer: Annotated[bool, typer.Option("--layer", help="With the projections of a layer, H·K wide.")] = False,
    formulas: Annotated[bool, typer.Option("--formulas", help="Formulas instead of numbers.")] = False,
    crossing: Annotated[bool, typer.Option("--crossing", help="At which N the others beat the first.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="With --crossing: by the clock, too.")] = False,
    model: Annotated[str | None, typer.Option(help=cost_models.HELP)] = None,
    source: Annotated[int | None, typer.Option(help="Tokens that a Seq2Seq model reads; none: as many.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or a name such as H200: for the least time.")] = "cpu",
    download: Annotated[bool, typer.Option("--download", help="Fetch a model's config by name if need be.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """FLOPs, bytes and state of mechanisms and models, as formulas and numbers; and which is faster at what length."""
    where = costs.device(device)  # as stated for a name such as H200; a CPU is measured
    kind = _choose_dtype(dtype, where)
    _check_positive(tokens=tokens, batch=batch, heads=heads, kv_heads=kv_heads, width=width, new=new, decode=decode)
    if model is not None:
        cost_models.print_model_cost(model, tokens, batch, source, kind, where, download=download, json=json)
        return
    if face not in get_args(Face):
        raise OptionError(f"--face {face}: expected {', '.join(get_args(Face))}")
    if training and (face != "parallel" or decode is not None):
        raise OptionError("--training is of whole sequences: leave out --face and --decode")
    size = _build_size(tokens or 1024, batch, heads, kv_heads, width, value_width, not not_causal, kind)
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
        _print_crossings(query, chosen, measure, device, json)
    elif len(chosen) == 1 and names and decode is None and not layer:
        _print_card(query, chosen[0], json)
    elif formulas:
        _print_formulas(query, chosen, decode is not None or (face == "recurrent" and new == 1), json)
    else:
        _print_numbers(query, chosen, decode, json)


def _choose_dtype(name: str | None, device: costs.Device) -> torch.dtype:
    """Returns the dtype of a name; without one, what such a device is usually used with."""
    if name:
        dtype: torch.dtype = getattr(torch, resolve_dtype(name))
        return dtype
    if "cpu" in device.name:
        return torch.float32
    return torch.bfloat16


def _check_positive(**options: int | None) -> None:
    """Raises where an option that was given is below 1."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise OptionError(f"--{name.replace('_', '-')} {value}: expected at least 1")


def _build_size(N: int, B: int, H: int, G: int | None, K: int, V: int | None, causal: bool, dtype: torch.dtype) -> Size:
    """Returns the sizes of self-attention over N tokens; G is H and V is K unless said."""
    if G is None:
        G = H
    if V is None:
        V = K
    if H % G:
        raise OptionError(f"--kv-heads {G} do not divide --heads {H}")
    return Size(B, N, N, H, G, K, V, causal, dtype)


def _dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without its module: float32."""
    return str(dtype).removeprefix("torch.")


def _causal_suffix(size: Size) -> str:
    """Returns what a title says of causal attention."""
    if size.causal:
        return ", causal"
    return ""


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
    # What was asked for, else a usual number of groups that divides the heads.
    between = [g for g in (s.G, s.H // 4, s.H // 2) if 1 < g < s.H and s.H % g == 0]
    if between:
        groups[f"grouped, G = {between[0]}"] = between[0]
    groups["multi-query"] = 1
    return {name: costs.decode(s.B, n, s.H * s.K, s.H, G, s.K, s.V, s.e) for name, G in groups.items()}


def _layer_table(query: CostQuery, layers: dict[str, Cost]) -> Table:
    """Returns the table of `_layer_costs`, under the formulas that they follow."""
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
    """Prints every face of one mechanism, as formulas and numbers."""
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
    sizes = f"B = {s.B}, N = {s.S:,}, H = {s.H}, G = {s.G}, K = {s.K}, V = {s.V}, {_dtype_name(s.dtype)}"
    out.print(f"\nhere: {sizes}", style="dim")
    meanings = _explain_letters([row["formula"] for row in rows])
    out.print(f"recurrent: T = {RECURRENT_TOKENS} more tokens, S = N in all; step: one more. {meanings}", style="dim")


def _card_table(rows: list[dict[str, Any]]) -> Table:
    """Returns the table of a card; the name of a face stands in the first of its rows only."""
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
    """Returns the number that goes with a formula: a recurrent piece is 128 tokens, a step one."""
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
    made = table("", *QUANTITIES, title=f"{kind}{_causal_suffix(query.size)}\n")
    for name, row in rows.items():
        made.add_row(name, *row.values())
    out = console()
    out.print(made)
    out.print("\n" + _explain_letters([text for row in rows.values() for text in row.values()]), style="dim")


def _explain_letters(formulas: list[str]) -> str:
    """Returns a sentence that says what the letters of these formulas mean."""
    return "; ".join(f"{letter} {meaning}" for letter, meaning in legend(formulas).items()) + "."


def _print_crossings(query: CostQuery, names: list[str], measure: bool, device: str, json: bool) -> None:
    """Prints at which lengths each of the other mechanisms takes less time than the first."""
    if len(names) < 2:
        raise OptionError(
            "--crossing compares mechanisms: name two or more, e.g. regard cost softmax performer --crossing"
        )
    columns = ["by the floors", "predicted"]
    if measure:
        columns.append("by the clock")
        device = resolve_device(device)  # an error about it comes before the models are evaluated
    found = [_find_crossings(query, name, names[0], measure, device) for name in names[1:]]
    if json:
        rows = [{way: asdict(x) | {"tokens": x.tokens} for way, x in ways.items()} for ways in found]
        print_json({"face": query.face, "training": query.training, "device": query.device.name, "rows": rows})
        return
    made = table("", *columns)
    for ways in found:
        pair = ways["floor"]
        made.add_row(f"{pair.first} beats {pair.second}", *(crossing.describe() for crossing in ways.values()))
    out = console()
    # The title names a length, and here the length is what is looked for.
    out.print(query.title.replace(f"{query.size.S:,} tokens", "N tokens"))
    out.print(made)
    if not measure:
        out.print(
            "\n--measure finds the same by the clock, on this machine, with the kernels that run here.", style="dim"
        )


def _find_crossings(query: CostQuery, name: str, other: str, measure: bool, device: str) -> dict[str, Crossing]:
    """Returns where one mechanism is faster than the other: by the floors, as predicted, and by the clock."""
    pair = (_build_at(query, name), _build_at(query, other))
    setting = (*pair, query.size, query.device, query.face, query.training)
    ways = {"floor": modelled(*setting), "predicted": modelled(*setting, time=costs.predicted)}
    if measure:
        ways["measured"] = _measure_crossing(query, pair, device)
    return ways


def _build_at(query: CostQuery, name: str) -> Named:
    """Returns a function that builds the mechanism for any length."""
    return lambda size: query.build(name, size, fitted)


def _measure_crossing(query: CostQuery, pair: tuple[Named, Named], device: str) -> Crossing:
    """Times both mechanisms at growing lengths, with a status line on a terminal."""
    size = replace(query.size, device=device)
    screen = console(stderr=True)
    # A status line has a thread of its own, which would disturb the clock where nobody sees it.
    display: AbstractContextManager[Status | None] = nullcontext()
    if screen.is_terminal:
        display = screen.status("measuring")
    with display as status:

        def progress(point: Point) -> None:
            if status is not None:
                times = f"{format_seconds(point.first)} against {format_seconds(point.second)}"
                status.update(f"N = {point.tokens:,}: {times}")

        return measured(pair[0], pair[1], size, query.face, query.training, progress=progress)
