"""`regard cost --crossing`: at which lengths one mechanism takes less time than another."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace

from rich.status import Status

from regard import cost as costs
from regard.cli.amounts import format_seconds
from regard.cli.cost_query import CostQuery
from regard.cli.show import console, print_json, table
from regard.cost.crossing import Crossing, Named, Point, measured, modelled
from regard.devices import resolve_device
from regard.errors import OptionError
from regard.mechanisms import fitted


def print_crossings(query: CostQuery, names: list[str], measure: bool, device: str, json: bool) -> None:
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
    # The title has a length, which here is the unknown.
    out.print(query.title.replace(f"{query.size.S:,} tokens", "N tokens"))
    out.print(made)
    if not measure:
        out.print(
            "\n--measure finds the same by the clock, on this machine, with the kernels that run here.", style="dim"
        )


def _find_crossings(query: CostQuery, name: str, other: str, measure: bool, device: str) -> dict[str, Crossing]:
    """Returns where one mechanism is faster than the other: by the floors, as predicted and as measured."""
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
    # Only on a terminal, as the thread of a status line disturbs the measurement.
    display: AbstractContextManager[Status | None] = nullcontext()
    if screen.is_terminal:
        display = screen.status("measuring")
    with display as status:

        def progress(point: Point) -> None:
            if status is not None:
                times = f"{format_seconds(point.first)} against {format_seconds(point.second)}"
                status.update(f"N = {point.tokens:,}: {times}")

        return measured(pair[0], pair[1], size, query.face, query.training, progress=progress)
