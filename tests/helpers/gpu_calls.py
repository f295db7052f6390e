"""The calls that launch regard's Triton programs, in the sizes and dtypes that users have by default.

`python tests/helpers/gpu_calls.py` compiles them all for an H200 and prints what each program came to; with names of
groups, those alone; with `--json`, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import ahead_of_time
import torch
from torch import Tensor

from regard.generate.fused import FusedStep, refuse_parts
from regard.generate.graph import _fix_shapes
from regard.kernels import fast
from regard.kernels.crossentropy import losses_and_gradient
from regard.kernels.decode.triton_greedy import pick_likeliest
from regard.mechanisms import mechanism
from regard.models import GPT
from regard.shapes import Mask, Size

BF16 = torch.bfloat16
F32 = torch.float32
GROUPS: dict[str, Callable[[], None]] = {}


def group(run: Callable[[], None]) -> Callable[[], None]:
    """Makes a function that calls one family of programs known by its name."""
    GROUPS[run.__name__] = run
    return run


def draw(B: int, heads: tuple[int, ...], T: int, widths: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Returns q, k and v, of which nobody reads the numbers."""
    return [torch.zeros(B, n, T, w, dtype=dtype, requires_grad=T > 1) for n, w in zip(heads, widths, strict=True)]


def sequence(
    name: str, K: int = 64, dtype: torch.dtype = BF16, G: int = 16, T: int = 4096, padded: bool = False,
    options: dict[str, Any] | None = None, **rules: Any,
) -> None:  # fmt: skip
    """Attends over sequences of 16 heads, with gradients."""
    q, k, v = draw(2, (16, G, G), T, (K, K, K), dtype)
    visible = None
    if padded:
        visible = torch.ones(2, T, dtype=torch.bool)
    out = fast(mechanism(name, **(options or {})), "triton")(
        q, k, v, Mask(**{"causal": True, **rules}, visible=visible)
    )
    out.backward(torch.empty_like(out))


def extend(
    name: str, T: int, K: int = 64, dtype: torch.dtype = BF16, G: int = 16, rules: Mask = Mask(),
    options: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Continues two sequences of 16 heads by T tokens, with gradients where there are several."""
    m = fast(mechanism(name, **(options or {})), "triton")
    state = m.empty(Size(B=2, H=16, G=G, K=K, V=K, S=4096, dtype=dtype), rules)
    q, k, v = draw(2, (16, G, G), T, (K, K, K), dtype)
    gates = {x: torch.zeros(2, G, T) for x in "ab" if x in m.needs}
    out, _ = m.extend(q, k, v, state, None, **gates)
    if T > 1:
        out.backward(torch.empty_like(out))


@group
def elu() -> None:
    sequence("elu")
    sequence("elu", G=4, padded=True)
    sequence("elu", causal=False)
    sequence("elu", K=128)
    sequence("elu", dtype=F32)
    sequence("linear")
    extend("elu", 200)


@group
def performer() -> None:
    for K in (64, 128):
        options = {"features": 256, "width": K}
        sequence("performer", K=K, options=options)
    options = {"features": 256, "width": 64}
    sequence("performer", causal=False, options=options)
    sequence("performer", dtype=F32, options=options)
    sequence("fourier", options=options)


@group
def pairs() -> None:
    for K in (64, 128):
        for name in ("quadratic", "argmax"):
            sequence(name, K=K)
    for name in ("quadratic", "argmax"):
        sequence(name, causal=False, padded=True, G=4)
    sequence("argmax", window=256)


def gated_sequence(K: int, dtype: torch.dtype = BF16, heads: tuple[int, int, int] = (16, 16, 16)) -> None:
    """Attends by `gated` over sequences with gradients; `heads` are those of q, k and v."""
    q, k, v = draw(2, heads, 4096, (K, K, K), dtype)
    a = torch.zeros(2, heads[2], 4096, requires_grad=True)
    out = fast(mechanism("gated"), "triton")(q, k, v, Mask(causal=True), a=a)
    out.backward(torch.empty_like(out))


@group
def gated() -> None:
    gated_sequence(64)
    gated_sequence(128, heads=(16, 16, 32))
    gated_sequence(64, F32)
    extend("retention", 200)


@group
def tokens() -> None:
    """One token of mechanisms that keep sums or a memory."""
    extend("elu", 1)
    extend("performer", 1, options={"features": 256, "width": 64})
    extend("gated-delta", 1)


@group
def decoding() -> None:
    """One token of all mechanisms, in more sizes and dtypes, and under the rules that softmax has."""
    extend("elu", 1, K=128, dtype=F32)
    extend("linear", 1)
    extend("fourier", 1, options={"features": 256, "width": 64})
    for name in ("retention", "gated", "delta"):
        extend(name, 1)
    extend("gated-delta", 1, K=128, dtype=F32)
    slopes = torch.ones(16)
    for rules in (Mask(), Mask(window=256), Mask(softcap=50.0), Mask(slopes=slopes)):
        extend("softmax", 1, rules=rules)
    extend("softmax", 1, K=128, G=4)
    extend("softmax", 1, K=128, dtype=F32)


@group
def fused() -> None:
    """A step of GPT-2 124M, of which one layer stands for all, and of a model with gates, RMS norm and rotations."""
    other: dict[str, Any] = {
        "position": "rotary",
        "block": {"mlp": "swiglu", "norm": "rms", "bias": False},
        "attention": {"heads": 12, "groups": 4},
        "tied": False,
    }
    for changes, B in (({}, 1), ({}, 8), (other, 1), (other, 64)):
        sizes = {"width": 768, "layers": 1, "length": 1024, "vocabulary": 50304, "attention": {"heads": 12}}
        model = GPT(**(sizes | changes)).to(BF16).eval()
        state = _fix_shapes(model.empty(B, 1024), 1024)
        assert refuse_parts(model, state) is None
        logits = FusedStep(model, B)(torch.zeros(B, 1, dtype=torch.long), state)
        pick_likeliest(logits[:, 0], torch.zeros(B, dtype=torch.long), torch.zeros(B))


@group
def losses() -> None:
    for dtype in (BF16, F32):
        for gradient in (True, False):
            logits = torch.zeros(8, 50304, dtype=dtype)
            losses_and_gradient(logits, torch.zeros(8, dtype=torch.long), -100, 0.1 * gradient, gradient)


def compile_groups(names: list[str]) -> list[dict[str, Any]]:
    """Compiles the programs of some groups, or of all; returns what each program came to, with its group."""
    found = []
    for name in names or GROUPS:
        start = len(ahead_of_time.COMPILED)
        with torch.set_grad_enabled(name not in ("tokens", "decoding", "fused")):
            GROUPS[name]()
        found += [{"group": name, **x._asdict(), "fits": x.fits} for x in ahead_of_time.COMPILED[start:]]
    return found


def main() -> None:
    """Prints what the programs came to, as a table or as JSON."""
    arguments = sys.argv[1:]
    found = compile_groups([x for x in arguments if x != "--json"])
    if "--json" in arguments:
        print(json.dumps(found, default=str))
        return
    for row in found:
        constants = {name: value for name, value in row["constants"].items() if value is not None}
        print(f"{row['program']}: {row['registers']} registers, {row['spilled']} bytes spilled, {row['shared']} shared")
        print(f"    {row['group']}: {constants}")


if __name__ == "__main__":
    main()
