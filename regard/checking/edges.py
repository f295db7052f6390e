"""Laws of whole models at the lengths where faults live: around windows, chunks and convolutions, and in packed rows.

A model that is right on eleven tokens may be wrong on sixty-five. `Trial.edges` gives the lengths to ask at, from the
model's config.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.laws import DoesNotApply, Finding
from regard.laws.case import worst
from regard.mechanisms import Linear, Mechanism, Softmax
from regard.nn.capture import forward_hooks

if TYPE_CHECKING:
    from regard.checking.models import Trial

CHUNK = 64  # tokens that implementations of linear attention and state spaces take at once, unless a config says more
LONGEST = 1024  # tokens at which a law is still asked


def choose_edges(found: dict[int, str], limit: int | None) -> dict[int, str]:
    """Returns those of the lengths in `found`, each with what begins there, at which a model can be tested.

    Tests read up to three tokens more. `limit` is the most tokens that the model reads; None: any number.
    """
    longest = LONGEST
    if limit is not None:
        longest = min(longest, limit)
    return {n: found[n] for n in sorted(found) if 2 < n <= longest - 3}


def documents_do_not_mix(trial: Trial) -> Finding:
    """documents packed into one row = each alone"""
    sets = [[n + 1, 2, n - 1] for n in (trial.T // 2, *trial.edges()) if n > 1]
    findings = []
    for lengths in sets:
        tokens = trial.draw_tokens(len(trial.tokens), sum(lengths))
        together = trial.run_packed(tokens, lengths)
        for i, (part, found) in enumerate(zip(tokens.split(lengths, 1), together.split(lengths, 1), strict=True)):
            alone = trial.run_whole(part)
            what = f"document {i + 1} of {lengths} tokens, packed and alone"
            findings.append(trial.compare(found, alone, what)._replace(limit=trial.limit_for(part)))
    return worst(findings)


def long_texts(trial: Trial) -> Finding:
    """around its window, its chunks and its convolution: a text cut short, in pieces or padded gives the same"""
    edges = trial.edges()
    if not edges:
        raise DoesNotApply("it reads too few tokens to have an edge")
    return worst(found for n, what in edges.items() for found in _compare_around(trial, n, what))


def _compare_around(trial: Trial, n: int, what: str) -> Iterator[Finding]:
    """Compares texts of about n tokens, in one pass, in pieces and with padding; `what` names what begins at n."""
    B = len(trial.tokens)
    tokens = trial.draw_tokens(B, n + 2)
    want = trial.run_whole(tokens)
    if trial.is_decoder:
        for m in (n - 1, n, n + 1):
            got = trial.run_whole(tokens[:, :m])
            yield trial.compare(got, want[:, :m], f"the first {m} of {n + 2} tokens alone, around {what}")
        try:
            for sizes in ([n - 2, 1, 1, 1, 1], [n - 1, 3], [n, 1, 1], [n + 1, 1], [1, n + 1]):
                got = trial.run_pieces(tokens, sizes)
                yield trial.compare(got, want, f"pieces of {sizes} against the whole, around {what}")
        except DoesNotApply:
            pass  # it has no state, and the law goes on
    for side in trial.padding_sides:
        if side == "inside":
            continue
        shown = torch.ones(B, n + 3, dtype=torch.bool, device=tokens.device)
        shown[:, 0 if side == "left" else -1] = False
        padded = trial.draw_padding(B, n + 3)
        padded[shown] = tokens.flatten()
        got = trial.run_whole(padded, shown)[shown].view_as(want)
        yield trial.compare(got, want, f"{n + 2} tokens padded {side}, around {what}")


def windows_are_as_wide_as_said(trial: Trial) -> Finding:
    """each attention layer sees as far as its window says: not one token more, not one fewer"""
    windows = trial.windows()
    widths = [window for _, _, window in windows if window is not None]
    if not widths:
        raise DoesNotApply("it has no window")
    if 2 * max(widths) + 3 > min(LONGEST, trial.longest or LONGEST):
        raise DoesNotApply(f"its window of {max(widths):,} tokens is too long to be asked about")
    # The token that changes; an encoder looks both ways, so that tokens on both sides are needed.
    at = 0
    if not trial.is_decoder:
        at = max(widths) + 1
    tokens = trial.draw_tokens(len(trial.tokens), at + max(widths) + 2)
    return worst(
        found for name, module, window in windows for found in _compare_reach(trial, name, module, window, tokens, at)
    )


def _compare_reach(
    trial: Trial, name: str, module: nn.Module, window: int | None, tokens: Int[Tensor, "B T"], at: int
) -> Iterator[Finding]:
    """Compares the outputs of one layer that change with the input at place `at` with those that its window allows."""
    change = measure_reach(trial, module, tokens, at)
    T = tokens.shape[1]
    distance = torch.arange(T, device=change.device) - at
    near = distance >= 0
    if not trial.is_decoder:
        near = torch.ones_like(near)
    if window is not None:
        near = near & (distance.abs() < window)
    leaks = change.masked_fill(near, 0)
    farthest = int(leaks.argmax())
    yield Finding(
        float(leaks.max()),
        trial.limit,
        f"{name}, a window of {window}: token {farthest} sees token {at}, {abs(farthest - at)} away",
    )
    blind = near & (change == 0)
    if bool(blind.any()) and _weighs_every_key(module):
        first = int(blind.int().argmax())
        yield Finding(
            float("inf"),
            0.0,
            f"{name}, a window of {window}: token {first} does not see token {at}, which is within it",
        )


def _weighs_every_key(module: nn.Module) -> bool:
    """Tells whether attention gives a weight to every key that it may see, unlike argmax, which picks a single key."""
    return all(isinstance(m, Softmax | Linear) for m in module.modules() if isinstance(m, Mechanism))


@torch.no_grad()
def measure_reach(trial: Trial, module: nn.Module, tokens: Int[Tensor, "B T"], at: int) -> Float[Tensor, " T"]:
    """Returns the change [T] of each output of a module when its input at `at` changes, relative to the largest."""
    outputs: list[Tensor] = []
    noise: list[Tensor | None] = [None]

    def disturb(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        name = next((n for n in ("hidden_states", "x") if n in kwargs), None)
        x = args[0] if name is None else kwargs[name]
        if noise[0] is None:
            noise[0] = torch.zeros_like(x[:, at])
        changed = x.clone()
        changed[:, at] += noise[0]
        if name is None:
            return (changed, *args[1:]), kwargs
        return args, kwargs | {name: changed}

    def keep(_: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    handle = module.register_forward_pre_hook(disturb, with_kwargs=True)
    try:
        with forward_hooks([module], keep):
            trial.run_whole(tokens)
            assert noise[0] is not None
            for _ in range(3):
                drawn = torch.randn(noise[0].shape, generator=trial.generator)
                noise[0] = 3 * drawn.to(noise[0])
                trial.run_whole(tokens)
    finally:
        handle.remove()
    before, *after = outputs
    change = torch.stack([(x - before).abs().amax((0, 2)) for x in after]).amax(0)
    return change / before.abs().max().clamp(min=1e-30)


def restart_positions(lengths: Sequence[int], B: int, device: torch.device) -> Int[Tensor, "B T"]:
    """Returns the positions of documents packed into one row: each begins at zero."""
    return torch.cat([torch.arange(n, device=device) for n in lengths]).expand(B, -1)
