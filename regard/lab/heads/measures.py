"""Measurements of trained models that merge their heads in different ways."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.checking.models import ModelSubject, looks_ahead
from regard.data.batch import Batch
from regard.lab.heads.results import LookAhead
from regard.laws.case import difference, worst
from regard.models import GPT
from regard.nn.capture import forward_hooks

PLACES = 12  # prefixes of a window that a model reads
DRAWS = 3  # draws of random tokens for a law


def with_merge(model: GPT, merge: str, **options: Any) -> GPT:
    """Returns a model of the same weights with another merge, or another option of it."""
    with torch.random.fork_rng([]):  # building a model draws numbers
        made = GPT(model.config.but(attention={"merge": merge, "merge_options": options}))
    made.to(next(model.parameters()))  # its device and precision
    made.load_state_dict(model.state_dict())
    made.tokenizer = model.tokenizer
    return made.eval()


def sees_ahead(model: GPT, T: int) -> LookAhead:
    """Returns what the causality law says at the length of the windows: how far logits move when only later tokens
    change, relative to the largest logit."""
    found = worst(looks_ahead(ModelSubject(model, seed, T=T)) for seed in range(DRAWS))
    return LookAhead(found.error, found.limit, found.broken, found.what)


def straightened(model: GPT) -> GPT:
    """Returns the model with merge "concatenate" that computes what a given one with merge "shift" computes: the row
    blocks of each output projection are moved back by one head, W'_h = W_{h+1}."""
    made = with_merge(model, "concatenate")
    with torch.no_grad():
        for block in made.stack.layers:
            out = block.attention.out.weight  # [D, H·V]: a head's rows of W_o are columns here
            H = block.attention.size.H
            out.copy_(out.unflatten(1, (H, -1)).roll(-1, 1).flatten(1))
    return made


@torch.no_grad()
def shift_is_concatenate(model: GPT, tokens: Tensor) -> float:
    """Returns how far the logits of a model that shifts are from those of `straightened`, relative to the largest."""
    return difference(straightened(model)(tokens), model(tokens))


@torch.no_grad()
def growth(model: GPT, tokens: Tensor) -> list[dict[str, float]]:
    """Returns how much longer the merge makes its heads, ‖merged‖ / ‖heads‖ over all layers, by number of tokens."""
    T = tokens.shape[1]
    rows = []
    lengths = [n for n in (1 << k for k in range(3, 24)) if n < T] + [T]
    for n in lengths:
        ratios: list[float] = []

        def measure(merge: nn.Module, given: tuple[Tensor, ...], merged: Tensor, ratios: list[float] = ratios) -> None:
            ratios.append(float(merged.double().norm() / given[0].double().norm()))

        with forward_hooks((block.attention.merge for block in model.stack.layers), measure):
            model(tokens[:, :n])
        rows.append({"tokens": n, "ratio": sum(ratios) / len(ratios)})
    return rows


def slope(rows: Sequence[Mapping[str, float]]) -> float:
    """Returns the exponent a of ratio ∝ tokensᵃ, by least squares of the logarithms."""
    xs, ys = ([math.log(row[key]) for row in rows] for key in ("tokens", "ratio"))
    x0 = sum(xs) / len(xs)
    y0 = sum(ys) / len(ys)
    return sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / sum((x - x0) ** 2 for x in xs)


@torch.no_grad()
def as_it_writes(model: GPT, windows: Batch) -> list[dict[str, float]]:
    """Returns the loss at places spread over the windows, as the model reads these in different ways, a row a place.

    whole    the window in one pass, as in training; a merge over the sequence then reads later tokens
    before   a pass over each prefix, so that no later token is read: this is how a text has to be generated
    off      as `whole`, with the weighing switched off outside training (reweight-sequence)
    state    token by token with a state, each piece weighed by itself (reweight-sequence)
    """
    T = windows.x.shape[1]
    places = sorted({round((n + 1) * T / PLACES) for n in range(PLACES)} - {0})
    ends = torch.tensor(places, device=windows.x.device) - 1
    logits = {"whole": model(windows.x)[:, ends]}
    logits["before"] = torch.stack([model(windows.x[:, :n])[:, -1] for n in places], 1)
    if any(block.attention.merge.looks_ahead for block in model.stack.layers):
        merge = model.config.attention.merge
        logits["off"] = with_merge(model, merge, at_inference=False)(windows.x)[:, ends]
        logits["state"] = _token_by_token(with_merge(model, merge, by_piece=True), windows.x)[:, ends]
    targets = windows.y[:, ends]
    rows = [{"tokens": float(n)} for n in places]
    for name, found in logits.items():
        losses = nn.functional.cross_entropy(found.float().transpose(1, 2), targets, reduction="none").double().mean(0)
        for row, loss in zip(rows, losses.tolist(), strict=True):
            row[name] = loss
    return rows


def _token_by_token(model: GPT, tokens: Tensor) -> Tensor:
    state = model.empty(*tokens.shape)
    out = []
    for token in tokens.split(1, 1):
        logits, state = model.extend(token, state)
        out.append(logits)
    return torch.cat(out, 1)
