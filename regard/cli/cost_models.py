"""`regard cost --model`: whole models, regard's and Hugging Face's."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from regard import cost as costs
from regard.cli.amounts import format_amount, format_bytes, format_seconds
from regard.cli.show import align_right, console, print_json, table
from regard.devices import without_values
from regard.errors import OptionError
from regard.hub import HubError
from regard.hub.costs import HubModelCost, hub_model_cost
from regard.hub.opening import RANDOM, find_source
from regard.models import GPT, Encoder, Model, Seq2Seq, Stack, load
from regard.models.summary import Row, Summary
from regard.reading import check_path

HELP = "A preset (gpt2, Encoder:bert, …), a run or model folder, or a Hugging Face folder, name or kind (llama)."
_CLASSES: dict[str, type[Model[Any]]] = {"GPT": GPT, "Encoder": Encoder, "Seq2Seq": Seq2Seq}


def print_model_cost(
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
    """Prints the cost of a model: regard's own if the name is one of those, else a Hugging Face model."""
    model = _find_regard_model(name)
    if model is None:
        _print_hub_model_cost(name, tokens or 1024, batch, dtype, device, download=download, json=json)
        return
    _check_length(model, tokens, source)
    summary = model.to(dtype).summary(tokens, source, batch)
    if json:
        print_json(summary.as_dict() | {"floor_seconds": _floors(summary, device, dtype)})
    else:
        _print_summary(name, summary, dtype, device)


def _find_regard_model(name: str) -> Model[Any] | None:
    """Returns a model of regard's own, a preset without values; None for other names."""
    if name.startswith(RANDOM):
        return None
    if check_path(name).is_dir():
        source = find_source(name)
        if source.kind != "regard":
            return None
        return load(source.location)
    cls, _, preset = name.rpartition(":")
    if cls and cls not in _CLASSES:
        raise OptionError(f"--model {name}: expected a preset of {', '.join(_CLASSES)}, e.g. Encoder:bert")
    candidates = [c for c in _CLASSES.values() if preset in c.PRESETS]
    if cls:
        candidates = [_CLASSES[cls]]  # a wrong preset of a named class raises that class's error
    if not candidates:
        return None
    # Shapes are enough to count with, and a large preset would not fit into memory.
    with without_values():
        return candidates[0].preset(preset)


def _check_length(model: Model[Any], tokens: int | None, source: int | None) -> None:
    """Raises a LengthError if a model cannot read this many tokens."""
    for stack, n in ((model.stack, tokens), (getattr(model, "encoder", None), source or tokens)):
        if isinstance(stack, Stack) and n is not None:
            stack.check_length(n)


def _print_hub_model_cost(
    name: str, T: int, B: int, dtype: torch.dtype, device: costs.Device, *, download: bool, json: bool
) -> None:
    """Prints the cost of a Hugging Face model."""
    try:
        cost = hub_model_cost(find_source(name).location, T, B, dtype, download)
    except HubError as error:
        presets = ", ".join(f"{c}:{p}" for c, cls in _CLASSES.items() for p in cls.PRESETS)
        raise HubError(f"{error}. Presets of regard: {presets}") from error
    if json:
        print_json(asdict(cost))
    else:
        _print_hub_table(cost, dtype, device)


def _floors(summary: Summary, device: costs.Device, dtype: torch.dtype) -> dict[str, float]:
    """Returns the least seconds of a forward pass, a training step and one more token."""
    total = summary.total
    work = {"forward": total.whole, "training": total.training, "token": total.step}
    return {what: costs.floor(cost, device, dtype) for what, cost in work.items() if cost.bytes}


def _print_summary(name: str, summary: Summary, dtype: torch.dtype, device: costs.Device) -> None:
    """Prints the costs of a model's parts, the memory of training and decoding, and the least times."""
    out = console()
    total = summary.total
    title = f"{summary.title} {name}: B = {summary.B}, T = {summary.T:,}, {str(dtype).removeprefix('torch.')}\n"
    made = table("", "parameters", "forward", "training", "kept", "a token", "its bytes", "state", title=title)
    for row in summary.folded:
        if row.parameters or row.whole.bytes:
            made.add_row(row.part, f"{row.parameters:,}", *_cells(row))
    made.add_row(total.part, f"{total.parameters:,}", *_cells(total), style="bold")
    out.print(align_right(made, 1))
    weights = dtype.itemsize * total.parameters
    memory = {
        "weights": weights,
        "gradients": weights,
        "AdamW's moments": 8 * total.parameters,  # two of them, in float32
        "kept for gradients": total.activations,
    }
    out.print("\ntraining holds " + ", ".join(f"{format_bytes(x)} {what}" for what, x in memory.items()))
    out.print(f"  together {format_bytes(sum(memory.values()))}, the mechanisms fused")
    if total.state:
        out.print(f"decoding holds {format_bytes(weights)} weights and {format_bytes(total.state)} state")
    speed = f"{format_amount(device.bandwidth)}B/s, {format_amount(device.peak(dtype))}FLOP/s"
    out.print(f"\nat the least on {device.name}, {speed}:")
    out.print("  " + ", ".join(f"{what} {format_seconds(x)}" for what, x in _floors(summary, device, dtype).items()))
    out.print(
        "\nuseful FLOPs of matrix products; kept: bytes for gradients; a token: the T-th of each sequence, by a state",
        style="dim",
    )


def _cells(row: Row) -> list[str]:
    """Returns the cells of a part: forward, training, kept, a token, its bytes, state."""
    return [
        _flops(row.whole.useful),
        _flops(row.training.useful),
        _bytes(row.activations),
        _flops(row.step.useful),
        _bytes(row.step.bytes),
        _bytes(row.state),
    ]


def _flops(x: float) -> str:
    """Formats FLOPs, a dash for none."""
    if not x:
        return "–"
    return f"{format_amount(x)}FLOP"


def _bytes(x: float) -> str:
    """Formats bytes, a dash for none."""
    if not x:
        return "–"
    return format_bytes(x)


def _print_hub_table(cost: HubModelCost, dtype: torch.dtype, device: costs.Device) -> None:
    """Prints the costs of a Hugging Face model; what could not be counted is left out, with the reason below."""
    out = console()
    name = str(dtype).removeprefix("torch.")
    out.print(f"{cost.name} ({cost.kind}): B = {cost.B}, T = {cost.T:,}, {name}\n")
    made = table("", "")
    made.show_header = False
    align_right(made, 1)
    made.add_row("parameters", f"{cost.parameters:,}")
    made.add_row("weights", format_bytes(cost.weights))
    if cost.forward is not None:
        made.add_row("forward, matrix products", f"{format_amount(cost.forward)}FLOP")
    if cost.step is not None:
        made.add_row("one more token of each sequence", f"{format_amount(cost.step)}FLOP")
    if cost.cache is not None and cost.a_token is not None:
        made.add_row(f"cache at {cost.T:,} tokens", format_bytes(cost.cache))
        made.add_row("cache, one more token of a sequence", format_bytes(cost.a_token))
        least = (cost.weights + cost.cache) / device.bandwidth
        made.add_row(f"a step, at the least on {device.name}", format_seconds(least))
    out.print(made)
    if cost.forward is None:
        out.print("\nIts tokens choose their experts, so its FLOPs are not counted.", style="dim")
    if cost.cache is None:
        out.print("\nIt keeps no cache.", style="dim")
