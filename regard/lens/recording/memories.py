"""Recording gated and delta attention: q, k, v, decays and write strengths, and how exactly they give the outputs.

A trace computes the weights W of a memory from q, k, v, a and b by its own code (`regard.lens.trace.memory`), not the
layer's. So each recording compares W v with the outputs of the layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from regard.hub.memories import MemoryCall
from regard.lens.recording.mechanism_formulas import first_example
from regard.lens.trace.attended import RecordedAttention
from regard.lens.trace.formulas import RecurrenceFormula
from regard.lens.trace.memory import RecordedMemory
from regard.lens.trace.rules import MAX_ENTRIES, MaskRules
from regard.lens.trace.tokens import Tokens
from regard.lens.trace.trace import Recording
from regard.lens.trace.weighing import memory_of
from regard.mechanisms.decays import STRONGEST
from regard.mechanisms.gates import share_heads
from regard.mechanisms.recurrence import Recurrence

EXACT = 1e-5  # largest ‖W v − out‖ / ‖out‖ of a head, in float32, that raises no warning


def describe_memory(attended: RecordedAttention, mechanism: Recurrence, parts: Mapping[str, Tensor | None]) -> None:
    """Stores q, k, v, a and b of one of regard's layers in `attended`; `parts` holds these and the output, by name."""
    q, k, v, a = parts["q"], parts["k"], parts["v"], parts["a"]
    assert q is not None and k is not None and v is not None
    if a is None:
        a = mechanism.log_decay(v).expand(*v.shape[:3], 1)
    elif not mechanism.channels:
        a = a[..., None]
    store_memory(
        attended,
        RecurrenceFormula(mechanism.score_scale(q.shape[-1]), mechanism.erases),
        {"q": q, "k": k, "v": v, "a": a, "b": parts["b"]},
        first_example(parts["out"]),
    )


def store_memory(
    attended: RecordedAttention,
    formula: RecurrenceFormula,
    tokens: Mapping[str, Tensor | None],
    out: Float[Tensor, "H T V"],
) -> None:
    """Stores q, k, v, a and b in `attended`, and measures how far W v is from the output `out`.

    `tokens` has them by name, each [1,heads,T,…], with a [1,G,T,X]. q and k that have fewer heads than v are repeated;
    a layer may have more query heads than value heads.
    """
    v = tokens["v"]
    q, k = tokens["q"], tokens["k"]
    assert v is not None and q is not None and k is not None
    q, k = share_heads(q, k, v.shape[1])
    attended.formula = formula
    attended.signed = True
    attended.heads, attended.groups = q.shape[1], v.shape[1]
    for name, x in {**tokens, "q": q, "k": k}.items():
        setattr(attended, name, first_example(x))
    assert attended.a is not None
    attended.a = attended.a.clamp(min=STRONGEST)
    if bool(torch.isfinite(out).all()):
        attended.missed = measure_misses(attended, out)
    worst = max(attended.missed.get("output", [0.0]))
    if worst > max(EXACT, 4 * torch.finfo(v.dtype).eps):
        warnings.warn(
            f"{attended.name}: weights @ v misses what the layer gave by {worst:.1e} of its length, so what is shown "
            "is not exactly what it computes",
            stacklevel=2,
        )


def tap_output(out: Tensor, tap_gradients: bool) -> tuple[Tensor | None, Tensor]:
    """Returns zeros that require a gradient, and the heads' outputs plus these zeros; without a tap None and `out`."""
    if not tap_gradients:
        return None, out
    tap = torch.zeros_like(out, requires_grad=True)
    return tap, out + tap


class MemoryCapture:
    """The calls of one gated or delta layer of transformers for one text: one, or one for each step of generation."""

    explained = True  # weights are never stored dense; `store_memory` measures how exact they are
    cross = False

    def __init__(self, call: MemoryCall) -> None:
        self.name = call.name
        self.mechanism = call.mechanism
        self.formula = RecurrenceFormula(call.scale, call.mechanism == "gated-delta")
        self.skip = call.skip
        self.parts: dict[str, list[Tensor]] = {name: [] for name in ("q", "k", "v", "a", "b", "out")}
        self.grad_tap: Tensor | None = None
        self.output_grad: Tensor | None = None

    @property
    def queries(self) -> int:
        """The number of tokens so far."""
        return sum(part.shape[2] for part in self.parts["v"])

    @property
    def keys(self) -> int:
        """The number of keys so far: every token is a query and a key."""
        return self.queries

    def add(self, call: MemoryCall, out: Float[Tensor, "B T H V"], tap_gradients: bool) -> Tensor:
        """Stores the inputs and the output of a call; returns the output, with zeros added if gradients are tapped."""
        made = {"q": call.q, "k": call.k, "v": call.v, "a": call.a, "b": call.b, "out": out.transpose(1, 2)}
        for name, x in made.items():
            self.parts[name].append(x[:1].detach())
        self.grad_tap, out = tap_output(out, tap_gradients)
        return out

    def to_recorded(self, layer: int, side: str, queries: int, keys: int, sequences: list[Tokens]) -> RecordedAttention:
        """Returns the `RecordedAttention` of this layer; `queries` and `keys` are indices into `sequences`."""
        parts = {name: torch.cat(x, 2) for name, x in self.parts.items()}
        heads = parts["v"].shape[1]
        attended = RecordedAttention(
            layer,
            side,
            "self",
            self.name,
            self.mechanism,
            queries,
            keys,
            heads,
            heads,
            self.formula,
            MaskRules(causal=True),
        )
        if self.skip is not None:
            attended.skip = self.skip.detach().float().cpu()
        out = first_example(parts.pop("out"))
        store_memory(attended, self.formula, parts, out)
        if self.output_grad is not None:
            attended.g = first_example(self.output_grad.transpose(1, 2))
        return attended


def measure_misses(attended: RecordedAttention, out: Float[Tensor, "H T V"]) -> dict[str, list[float]]:
    """Returns, for each head, how far the weights W of a trace are from giving the layer's outputs.

    output: ‖W v − out‖ / ‖out‖, over all queries of the head (‖W v‖ if out is 0)
    usual: the same for the weights scale · q·k · b · decay, which leave out what a delta rule erases
    moved: the share of queries whose largest weight, in absolute value, is then on another token
    "usual" and "moved" are measured only for heads that erase.
    """
    names = ["output"]
    if isinstance(attended.formula, RecurrenceFormula) and attended.formula.erases:
        names += ["usual", "moved"]
    missed: dict[str, list[float]] = {name: [] for name in names}
    for head in range(attended.heads):
        memory = memory_of(attended, [head])
        target = out[head].double()
        length = target.norm() + (target.norm() == 0)
        found = _measure_head(memory, target, len(names) > 1)
        missed["output"].append(float(found[0].sqrt() / length))
        if len(names) > 1:
            missed["usual"].append(float(found[1].sqrt() / length))
            missed["moved"].append(float(found[2] / max(1, len(target))))
    return missed


def describe_misses(recordings: Iterable[Recording]) -> list[str]:
    """Returns a sentence for each mechanism with a memory, which sums up what `measure_misses` found."""
    sentences = []
    attentions = [attended for recording in recordings for attended in recording.attentions if attended.missed]
    for mechanism in dict.fromkeys(attended.mechanism for attended in attentions):
        missed: dict[str, list[float]] = {"output": [], "usual": [], "moved": []}
        for attended in attentions:
            if attended.mechanism == mechanism:
                for name, values in attended.missed.items():
                    missed[name] += values
        said = f"{mechanism}: weights @ v misses the outputs of {len(missed['output'])} heads by at most "
        said += f"{max(missed['output']):.0e} of their length"
        if missed["usual"]:
            usual, moved = (sum(missed[name]) / len(missed[name]) for name in ("usual", "moved"))
            said += f"; q·k with decay, without the erase term, by {usual:.0%} on average, with the largest weight on "
            said += f"another token for {moved:.0%} of the queries"
        sentences.append(said)
    return sentences


def _measure_head(memory: RecordedMemory, out: Float[Tensor, "T V"], erases: bool) -> Tensor:
    """Returns [3]: ‖W v − out‖², the same without erasing, and how many queries then have another largest weight."""
    T = len(out)
    totals = torch.zeros(3, dtype=torch.double)
    for rows in torch.arange(T).split(max(1, MAX_ENTRIES // max(1, T))):
        weights = memory.weights(rows)[0]
        totals[0] += (weights @ memory.v[0] - out[rows]).square().sum()
        if not erases:
            continue
        usual = memory.without_erasing().weights(rows)[0]
        totals[1] += (usual @ memory.v[0] - out[rows]).square().sum()
        totals[2] += (usual.abs().argmax(-1) != weights.abs().argmax(-1)).sum()
    return totals
