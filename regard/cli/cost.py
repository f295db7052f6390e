"""`regard cost`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, cast, get_args

import torch
import typer
from rich.table import Table

from regard import cost as costs
from regard.cli import cost_models
from regard.cli.amounts import amount, bytes_of, seconds
from regard.cli.show import console, print_json, table
from regard.cost.crossing import Crossing, Named, Point, measured, modelled
from regard.cost.formulas import KINDS, LEGEND, QUANTITIES, Kind, formula, legend
from regard.devices import resolve_device, resolve_dtype
from regard.errors import OptionError
from regard.mechanisms import Cost, Face, Mechanism, fitted, lookup, on_meta
from regard.mechanisms import mechanisms as known
from regard.nn import Attention
from regard.registry import accepted_options
from regard.shapes import Size


@dataclass(frozen=True)
class Asked:
    """The sizes, the device and the face that a table is about."""

    size: Size
    device: costs.Device
    face: Face
    training: bool
    features: int | None
    layer: bool = False

    def build(self, name: str, size: Size | None = None, make: Callable[..., Mechanism] = on_meta) -> Mechanism:
        """A mechanism of these sizes; to run it, `make` is `fitted`."""
        cls = lookup(name)
        offered = {} if self.features is None else {"features": self.features}
        return make(cls, self.size if size is None else size, **accepted_options(cls, offered))

    def cost(self, name: str) -> Cost:
        """Of the mechanism alone, or of a layer as wide as its heads, without biases."""
        built, s = self.build(name), self.size
        if not self.layer:
            return costs.of(built, s, self.face, training=self.training)
        with torch.device("meta"):
            sizes: dict[str, Any] = {"G": s.G, "K": s.K, "V": s.V, "causal": s.causal, "bias": False}
            made = Attention(s.H * s.K, s.H, mechanism=built, **sizes).to(s.dtype)
        found = made.cost(s.T, s.S, self.face, s.B)
        return found + made.gradient_cost(s.T, s.S, s.B) if self.training else found

    def floor(self, cost: Cost) -> float:
        return costs.floor(cost, self.device, self.size.dtype)

    def predicted(self, cost: Cost) -> float:
        return costs.predicted(cost, self.device, self.size.dtype)

    @property
    def title(self) -> str:
        s, d = self.size, self.device
        tokens = f"{s.S:,} tokens" if self.face != "recurrent" else f"{s.T:,} new of {s.S:,} tokens"
        what = self.face + (", forward and backward" if self.training else "")
        what += f", a layer of width D = {s.H * s.K}" if self.layer else ""
        return (
            f"{what}: B = {s.B}, {tokens}, H = {s.H}, G = {s.G}, K = {s.K}, V = {s.V}, {_short(s.dtype)}"
            f"{', causal' if s.causal else ''}\n{d.name}: {amount(d.peak(s.dtype))}FLOP/s, "
            f"{amount(d.bandwidth)}B/s{', measured' if d.measured else ', as its maker states'}\n"
        )


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
    crossing: Annotated[bool, typer.Option("--crossing", help="From which N on the others beat the first.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="With --crossing: by the clock, too.")] = False,
    model: Annotated[str | None, typer.Option(help=cost_models.HELP)] = None,
    source: Annotated[int | None, typer.Option(help="Tokens that a Seq2Seq model reads; none: as many.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or a name such as H200: for the least time.")] = "cpu",
    download: Annotated[bool, typer.Option("--download", help="Fetch a model's config by name if need be.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """FLOPs, bytes and state of mechanisms and models, as formulas and numbers; and which is faster from where on."""
    where = costs.device(device)
    kind = getattr(torch, resolve_dtype(dtype)) if dtype else torch.float32 if "cpu" in where.name else torch.bfloat16
    _at_least_one(tokens=tokens, batch=batch, heads=heads, kv_heads=kv_heads, width=width, new=new, decode=decode)
    if model is not None:
        cost_models.shown(model, tokens, batch, source, kind, where, download=download, json=json)
        return
    if face not in get_args(Face):
        raise OptionError(f"--face {face}: expected {', '.join(get_args(Face))}")
    if training and (face != "parallel" or decode is not None):
        raise OptionError("--training is of whole sequences: leave out --face and --decode")
    size = _size(tokens or 1024, batch, heads, kv_heads, width, value_width, not not_causal, kind)
    if decode is not None:
        face, size = "recurrent", replace(size, T=1, S=decode + 1)
    elif face == "recurrent":
        size = replace(size, T=new, S=max(size.S, new))
    if layer and (formulas or crossing or face == "weights"):
        raise OptionError("--layer gives numbers of whole sequences and of decoding: leave out the other options")
    asked = Asked(size, where, cast(Face, face), training, features, layer)
    chosen = [lookup(name).name for name in names or known()]
    if crossing:
        _crossings(asked, chosen, measure, device, json)
    elif len(chosen) == 1 and names and decode is None and not layer:
        _card(asked, chosen[0], json)
    elif formulas:
        _formulas(asked, chosen, decode is not None or (face == "recurrent" and new == 1), json)
    else:
        _numbers(asked, chosen, decode, json)


def _at_least_one(**given: int | None) -> None:
    for name, value in given.items():
        if value is not None and value < 1:
            raise OptionError(f"--{name.replace('_', '-')} {value}: expected at least 1")


def _size(N: int, B: int, H: int, G: int | None, K: int, V: int | None, causal: bool, dtype: torch.dtype) -> Size:
    G = H if G is None else G
    if H % G:
        raise OptionError(f"--kv-heads {G} do not divide --heads {H}")
    return Size(B, N, N, H, G, K, K if V is None else V, causal, dtype)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _row(asked: Asked, found: Cost) -> dict[str, Any]:
    times = {"floor_seconds": asked.floor(found), "predicted_seconds": asked.predicted(found)}
    return asdict(found) | {"intensity": found.intensity} | times


def _cells(asked: Asked, found: Cost) -> list[str]:
    flops = [amount(x) for x in (found.matmul, found.useful, found.elementwise)]
    moved = [bytes_of(found.bytes), bytes_of(found.state), f"{found.intensity:,.1f}"]
    return [*flops, *moved, seconds(asked.floor(found)), seconds(asked.predicted(found))]


_COLUMNS = ("matmul", "useful", "other", "bytes", "state", "FLOP/B", "floor", "predicted")


def _right(made: Table, first: int) -> Table:
    for column in made.columns[first:]:
        column.justify = "right"
    return made


def _numbers(asked: Asked, names: list[str], decode: int | None, json: bool) -> None:
    """All mechanisms side by side."""
    found = {name: asked.cost(name) for name in names}
    order = {
        n: {"time": known()[n].order, "state": known()[n].memory, "training": known()[n].training_memory} for n in names
    }
    layers = _layers(asked, decode) if decode is not None else {}
    if json:
        rows = [{"name": n, "order": order[n]} | _row(asked, c) for n, c in found.items()]
        sized = asdict(asked.size) | {"face": asked.face, "training": asked.training, "layer": asked.layer}
        sized |= {"device": asked.device.name}
        more = {"layer": [{"heads": n} | _row(asked, c) for n, c in layers.items()]} if layers else {}
        print_json({"size": sized, "rows": rows} | more)
        return
    out = console()
    memory = "training" if asked.training else "state"
    orders = ("time, O(…)", "memory, O(…)" if asked.training else "state, O(…)")
    made = table("", *orders, *_COLUMNS, padding=(0, 1, 0, 0))
    for name, one in found.items():
        made.add_row(name, order[name]["time"], order[name][memory], *_cells(asked, one))
    out.print(asked.title)
    out.print(_right(made, 3))
    if layers:
        out.print(_layer_table(asked, layers))
    out.print(f"\n{NOTE}", style="dim")


NOTE = (
    "FLOPs of matrix products as executed (matmul) and as needed (useful: causal pairs once), and of the rest, which\n"
    "goes element by element (other). floor: max(bytes / bandwidth, useful / peak), all at once. predicted: products,\n"
    "the rest and memory one after the other.\n"
    "`regard cost NAME` shows the formulas of one; docs/cost.md says how far to trust them."
)


def _layers(asked: Asked, n: int) -> dict[str, Cost]:
    """One decoding step of a whole softmax layer: multi-head, grouped, multi-query."""
    s = asked.size
    groups = {"multi-head": s.H, "multi-query": 1}
    middle = s.G if 1 < s.G < s.H else next((g for g in (s.H // 4, s.H // 2) if 1 < g < s.H and s.H % g == 0), None)
    if middle is not None:
        groups = {"multi-head": s.H, f"grouped, G = {middle}": middle, "multi-query": 1}
    return {name: costs.decode(s.B, n, s.H * s.K, s.H, G, s.K, s.V, s.e) for name, G in groups.items()}


def _layer_table(asked: Asked, layers: dict[str, Cost]) -> Table:
    D = asked.size.H * asked.size.K
    title = (
        f"\nThe same step of a whole softmax layer, D = {D}, projections included:\n"
        "  FLOPs = 2BD(HK+GK+GV+HV) + 2BH(n+1)(K+V)            O(Bd²+Bnd) for all three\n"
        "  bytes = e[D(HK+GK+GV+HV) + BG(n+1)(K+V) + B(2D+HK+GK+GV+HV)]\n"
        "          O(d²+Bd+Bnd) for multi-head, O(d²+Bd+Bnd/H) for multi-query\n"
    )
    made = table("", *_COLUMNS, title=title)
    for name, one in layers.items():
        made.add_row(name, *_cells(asked, one))
    return _right(made, 1)


def _card(asked: Asked, name: str, json: bool) -> None:
    """Every face of one mechanism, as formulas and numbers."""
    cls, built = known()[name], asked.build(name)
    rows = []
    for kind in KINDS:
        found = _at(asked, name, kind)
        for quantity, written in formula(built, kind, asked.size.causal).items():
            rows.append({"face": kind, "quantity": quantity, "formula": written, "number": getattr(found, quantity)})
    orders = {"time": cls.order, "state": cls.memory, "training": cls.training_memory}
    if json:
        print_json({"name": name, "order": orders, "size": asdict(asked.size), "rows": rows})
        return
    out = console()
    out.print(f"{name}: {cls.formula}\n")
    out.print(f"time O({cls.order}), state O({cls.memory}), memory in training O({cls.training_memory})\n")
    made = table("", "", "formula", "here")
    for n, row in enumerate(rows):
        number = bytes_of(row["number"]) if row["quantity"] in ("bytes", "state") else amount(row["number"])
        made.add_row(row["face"] if n % len(QUANTITIES) == 0 else "", row["quantity"], row["formula"], number)
        if n % len(QUANTITIES) == len(QUANTITIES) - 1:
            made.add_section()
    made.columns[3].justify = "right"
    out.print(made)
    s = asked.size
    out.print(
        f"\nhere: B = {s.B}, N = {s.S:,}, H = {s.H}, G = {s.G}, K = {s.K}, V = {s.V}, {_short(s.dtype)}", style="dim"
    )
    out.print(
        "recurrent: T = 128 more tokens, S = N in all; step: one more. " + _legend([r["formula"] for r in rows]),
        style="dim",
    )


def _at(asked: Asked, name: str, kind: Kind) -> Cost:
    """The number that goes with a formula: a recurrent piece is 128 tokens, a step one."""
    sizes = {"recurrent": replace(asked.size, T=min(128, asked.size.S)), "step": replace(asked.size, T=1)}
    size = sizes.get(kind, asked.size)
    face = cast(Face, {"training": "parallel", "step": "recurrent"}.get(kind, kind))
    return costs.of(asked.build(name, asked.size), size, face, training=kind == "training")


def _formulas(asked: Asked, names: list[str], step: bool, json: bool) -> None:
    kind: Kind = "training" if asked.training else "step" if step else asked.face
    rows = {name: formula(asked.build(name), kind, asked.size.causal) for name in names}
    if json:
        print_json({"face": kind, "rows": [{"name": n} | r for n, r in rows.items()], "letters": LEGEND})
        return
    made = table("", *QUANTITIES, title=f"{kind}{', causal' if asked.size.causal else ''}\n")
    for name, row in rows.items():
        made.add_row(name, *row.values())
    out = console()
    out.print(made)
    out.print("\n" + _legend([x for row in rows.values() for x in row.values()]), style="dim")


def _legend(formulas: list[str]) -> str:
    return "; ".join(f"{letter} {meaning}" for letter, meaning in legend(formulas).items()) + "."


def _crossings(asked: Asked, names: list[str], measure: bool, device: str, json: bool) -> None:
    """From where on each of the others takes less time than the first."""
    if len(names) < 2:
        raise OptionError(
            "--crossing compares mechanisms: name two or more, e.g. regard cost softmax performer --crossing"
        )
    where = resolve_device(device) if measure else asked.device.name
    first, found = names[0], []
    for name in names[1:]:
        pair = (_at_any_length(asked, name), _at_any_length(asked, first))
        given = (*pair, asked.size, asked.device, asked.face, asked.training)
        ways = {"floor": modelled(*given), "predicted": modelled(*given, time=costs.predicted)}
        found.append(ways | ({"measured": _measured(asked, pair, where)} if measure else {}))
    if json:
        rows = [{way: asdict(one) for way, one in ways.items()} for ways in found]
        print_json({"face": asked.face, "training": asked.training, "device": asked.device.name, "rows": rows})
        return
    made = table("", "by the floors", "predicted", *(["by the clock"] if measure else []))
    for ways in found:
        one = ways["floor"]
        made.add_row(f"{one.first} beats {one.second} from", *map(_from, ways.values()))
    out = console()
    out.print(asked.title.replace(f"{asked.size.S:,} tokens", "N tokens"))
    out.print(made)
    if not measure:
        out.print(
            "\n--measure finds the same by the clock, on this machine, with the kernels that run here.", style="dim"
        )


def _at_any_length(asked: Asked, name: str) -> Named:
    return lambda size: asked.build(name, size, fitted)


def _measured(asked: Asked, pair: tuple[Named, Named], device: str) -> Crossing:
    screen = console(stderr=True)
    with screen.status("measuring") if screen.is_terminal else nullcontext() as status:

        def progress(point: Point) -> None:
            if status is not None:
                status.update(f"N = {point.tokens:,}: {seconds(point.first)} against {seconds(point.second)}")

        size = replace(asked.size, device=device)
        return measured(pair[0], pair[1], size, asked.face, asked.training, progress=progress)


def _from(found: Crossing) -> str:
    return f"N = {found.tokens:,}" if found.tokens is not None else f"never, up to N = {found.upto:,}"
