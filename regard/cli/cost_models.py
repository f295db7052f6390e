"""`regard cost --model`: whole models, regard's and Hugging Face's."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from regard import cost as costs
from regard.cli.amounts import amount, bytes_of, seconds
from regard.cli.show import console, print_json, table
from regard.errors import OptionError
from regard.hub import HubError
from regard.hub.costs import HubModelCost, hub_model_cost
from regard.hub.opening import RANDOM, find_source
from regard.models import GPT, Encoder, Model, Seq2Seq, Stack, load
from regard.models.summary import Row, Summary

HELP = "A preset (gpt2, Encoder:bert, …), a run or model folder, or a Hugging Face folder, name or kind (llama)."
_CLASSES: dict[str, type[Model[Any]]] = {"GPT": GPT, "Encoder": Encoder, "Seq2Seq": Seq2Seq}


def shown(
    name: str,
    tokens: int | None,
    batch: int,
    source: int | None,
    dtype: torch.dtype,
    device: costs.Device,
    *,
    download: bool,
    json: bool,
) -> None:
    """Prints what a model costs."""
    model = _ours(name)
    if model is None:
        found = _theirs(name, tokens or 1024, batch, dtype, download)
        print_json(asdict(found)) if json else _print_theirs(found, dtype, device)
        return
    _check_length(model, tokens, source)
    summary = model.to(dtype).summary(tokens, source, batch)
    if json:
        print_json(summary.as_dict() | {"floor_seconds": _floors(summary, device, dtype)})
    else:
        _print_ours(name, summary, model, dtype, device)


def _ours(name: str) -> Model[Any] | None:
    """A model of regard's own, without its numbers where it is a preset; None: it is none."""
    if name.startswith(RANDOM):
        return None
    if Path(name).is_dir():
        source = find_source(name)
        return load(source.location) if source.kind == "regard" else None
    cls, _, preset = name.rpartition(":")
    if cls and cls not in _CLASSES:
        raise OptionError(f"--model {name}: expected a preset of {', '.join(_CLASSES)}, e.g. Encoder:bert")
    known = [_CLASSES[cls]] if cls else [c for c in _CLASSES.values() if preset in c.PRESETS]
    if not known:
        return None
    with torch.device("meta"):
        return known[0].preset(preset)


def _check_length(model: Model[Any], tokens: int | None, source: int | None) -> None:
    """An error where a model cannot take so many tokens."""
    for stack, n in ((model.stack, tokens), (getattr(model, "encoder", None), source or tokens)):
        if isinstance(stack, Stack) and n is not None:
            stack.check_length(n)


def _theirs(name: str, T: int, B: int, dtype: torch.dtype, download: bool) -> HubModelCost:
    try:
        return hub_model_cost(find_source(name).location, T, B, dtype, download)
    except HubError as error:
        presets = ", ".join(f"{c}:{p}" for c, cls in _CLASSES.items() for p in cls.PRESETS)
        raise HubError(f"{error}. Presets of regard: {presets}") from error


def _floors(summary: Summary, device: costs.Device, dtype: torch.dtype) -> dict[str, float]:
    total = summary.total
    work = {"forward": total.whole, "training": total.training, "token": total.step}
    return {what: costs.floor(cost, device, dtype) for what, cost in work.items() if cost.bytes}


def _print_ours(name: str, summary: Summary, model: Model[Any], dtype: torch.dtype, device: costs.Device) -> None:
    out, total, e = console(), summary.total, dtype.itemsize
    title = f"{summary.title} {name}: B = {summary.B}, T = {summary.T:,}, {str(dtype).removeprefix('torch.')}\n"
    made = table("", "parameters", "forward", "training", "kept", "a token", "its bytes", "state", title=title)
    for row in (*(r for r in summary.folded if r.parameters or r.whole.bytes), total):
        made.add_row(row.part, f"{row.parameters:,}", *_cells(row), style="bold" if row is total else "")
    for column in made.columns[1:]:
        column.justify = "right"
    out.print(made)
    memory = {
        "weights": e * total.parameters,
        "gradients": e * total.parameters,
        "AdamW's moments": 8 * total.parameters,
        "kept for gradients": total.activations,
    }
    out.print("\ntraining holds " + ", ".join(f"{bytes_of(x)} {what}" for what, x in memory.items()))
    out.print(f"  together {bytes_of(sum(memory.values()))}, the mechanisms fused")
    if total.state:
        out.print(f"decoding holds {bytes_of(e * total.parameters)} weights and {bytes_of(total.state)} state")
    out.print(f"\nat the least on {device.name}, {amount(device.bandwidth)}B/s, {amount(device.peak(dtype))}FLOP/s:")
    out.print("  " + ", ".join(f"{what} {seconds(x)}" for what, x in _floors(summary, device, dtype).items()))
    out.print(
        "\nuseful FLOPs of matrix products; kept: bytes for gradients; a token: the T-th of each sequence, by a state",
        style="dim",
    )


def _cells(row: Row) -> list[str]:
    whole, step = [row.whole.useful, row.training.useful], row.step.useful
    flops = [f"{amount(x)}FLOP" if x else "–" for x in (*whole, step)]
    moved = [bytes_of(x) if x else "–" for x in (row.activations, row.step.bytes, row.state)]
    return [*flops[:2], moved[0], flops[2], *moved[1:]]


def _print_theirs(found: HubModelCost, dtype: torch.dtype, device: costs.Device) -> None:
    out, kind = console(), str(dtype).removeprefix("torch.")
    out.print(f"{found.name} ({found.kind}): B = {found.B}, T = {found.T:,}, {kind}\n")
    made = table("", "")
    made.show_header = False
    made.columns[1].justify = "right"
    made.add_row("parameters", f"{found.parameters:,}")
    made.add_row("weights", bytes_of(found.weights))
    if found.forward is not None:
        made.add_row("forward, matrix products", f"{amount(found.forward)}FLOP")
    if found.step is not None:
        made.add_row("one more token of each sequence", f"{amount(found.step)}FLOP")
    if found.cache is not None and found.a_token is not None:
        made.add_row(f"cache at {found.T:,} tokens", bytes_of(found.cache))
        made.add_row("cache, one more token of a sequence", bytes_of(found.a_token))
        least = (found.weights + found.cache) / device.bandwidth
        made.add_row(f"a step, at the least on {device.name}", seconds(least))
    out.print(made)
    if found.forward is None:
        out.print("\nIts tokens choose their experts, so its FLOPs are not counted.", style="dim")
    if found.cache is None:
        out.print("\nIt keeps no cache.", style="dim")
