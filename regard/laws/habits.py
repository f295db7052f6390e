"""What somebody's attention does without being told: in which precision it computes, and whether it looks ahead."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.devices import DTYPES
from regard.laws.calling import Caller
from regard.laws.case import Case, difference
from regard.laws.layouts import CROSS
from regard.laws.signatures import CAUSAL_NAMES

REPEATED = 1e-9  # how far the same call made twice may differ in float64: sums may be taken in another order


def measure_roughness(call: Caller, case: Case, step: float) -> float:
    """Returns how large the steps are that rounding leaves along a line of inputs in float64, relative to outputs.

    f(x + 2h) − 2f(x + h) + f(x) is of the order h² for what is computed in float64; rounding to float32 on the way
    leaves steps of 1e-8 in it, and rounding to half precision steps of 1e-4 or more, which show only with a larger h.
    Returns 0 if the same call gives another output the second time, as with a random choice: that is no rounding.
    """
    inputs = call.draw_inputs(case)
    with torch.no_grad():
        first, again = (call.call(case, inputs) for _ in range(2))
    if difference(again, first) > REPEATED:
        return 0.0
    bends = []
    for n in range(1, 9):
        h = step * n
        with torch.no_grad():
            points = [call.call(case, [x * (1 + i * h) for x in inputs]) for i in range(3)]
        size = points[0].abs().max().clamp(min=1e-30)
        bend = points[2] - 2 * points[1] + points[0]
        bends.append(max(float(bend.abs().max() / size), torch.finfo(points[0].dtype).eps))
    # A choice that changes on the way, as an argmax's does, is one step; rounding leaves many.
    return sorted(bends)[-3]


class _Autocasts(TorchFunctionMode):
    """Notices the dtype of an autocast under which functions of torch are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                self.seen.add(torch.get_autocast_dtype(kind))
        return func(*args, **(kwargs or {}))


def find_own_autocast(call: Callable[[], Any]) -> str | None:
    """Returns the half precision to which a call turns autocast on by itself, or None.

    Autocast is a choice, unlike a cast that slipped in, so such attention is checked in that dtype only.
    """
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        return None  # whoever asks has turned it on
    watch = _Autocasts()
    with watch, torch.no_grad():
        call()
    return next((name for name in ("bfloat16", "float16") if DTYPES[name] in watch.seen), None)


# Words that say it: CausalSelfAttention, masked_attention, Retention, GPT2Attention; and words that take it back.
_CAUSAL_WORDS = re.compile(r"causal|(?<!un)(?<!not[_ ])masked|autoregressive|retention|gpt")
_DENIALS = re.compile(r"(non|not|un)[_ -]?causal|\bacausal|bidirectional|both directions|optional|\b(if|or|may|can)\b")
CHOICES = 8  # draws of inputs, for each of which a top-k chooses other tokens
_TRIANGLE_LEAST = 2  # a matrix of one number is a triangle of every kind


def claims_causality(call: Caller, case: Case) -> bool:
    """Returns whether attention without a causal flag or mask claims to be causal, by its names or by what it sees.

    Attention that sees later tokens as much as earlier ones means to; if it sees only some of them, or faintly, it is
    taken to claim causality and to break it.
    """
    if call.layout is CROSS or call.layout.single is not None:
        return False
    said = _says_causal(call)
    if said is not None:
        return said
    if call.pools:
        return False
    influence = _influence(call, case)
    sees = _seen(call, case, influence)
    if sees is None:
        return False  # no token sees another, and none is ahead
    if not bool(sees.triu(1).any()):
        return True
    if bool((sees == sees.mT).all()):
        return False
    return not _chooses_both_ways(call, case, influence, sees)


def _seen(call: Caller, case: Case, influence: Tensor) -> Tensor | None:
    """Returns which token sees which, [T,T], by how much it moves; None where none sees another."""
    others = influence[~torch.eye(len(influence), dtype=torch.bool)]
    # A convolution by FFT moves all outputs by rounding.
    precision = DTYPES[getattr(call, "precision", None) or case.dtype]
    moving = others[others > 100 * torch.finfo(precision).eps * influence.max()]
    if not moving.numel():
        return None
    return influence > 0.01 * moving.median()


def _is_irregular(sees: Tensor) -> bool:
    """Tells whether the earlier tokens that are seen depend on more than their distance."""
    diagonals = [sees.diagonal(-n) for n in range(1, len(sees))]
    return any(bool(seen.any()) and not bool(seen.all()) for seen in diagonals)


def _chooses_both_ways(call: Caller, case: Case, influence: Tensor, sees: Tensor) -> bool:
    """Returns whether it chooses among tokens, and sees later ones about as much as earlier ones.

    A top-k chooses other tokens for other inputs; a random pattern is drawn once, and leaves out earlier tokens too.
    """
    draws = [_influence(call, case.but(seed=case.seed + n)) for n in range(1, CHOICES)]
    patterns = [_seen(call, case, drawn) for drawn in draws]
    if all(pattern is not None and torch.equal(pattern, sees) for pattern in patterns):
        return _is_irregular(sees) and bool(sees.triu(1).sum() >= 0.5 * sees.tril(-1).sum())
    mean = torch.stack([influence, *draws]).mean(0)
    later = mean.triu(1).sum()
    earlier = mean.tril(-1).sum()
    return bool(later > 0.5 * earlier)


def _says_causal(call: Caller) -> bool | None:
    """Returns what somebody's attention says: by its name, an attribute, its docstring or a triangular mask it keeps.

    None where it says nothing.
    """
    f = call.pristine
    if _names_causality(_in_words(call.label)):
        return True
    names = []
    if isinstance(f, nn.Module):
        told = [getattr(f, name, None) for name in CAUSAL_NAMES]
        flag = next((x for x in told if isinstance(x, bool)), None)
        if flag is not None:
            return flag or None  # one that says no may see no later token all the same
        names = [kind.__name__ for kind in type(f).__mro__ if kind.__module__.partition(".")[0] != "torch"]
    if any(_names_causality(_in_words(name)) for name in names):
        return True
    first_line = (inspect.getdoc(f) or "").partition("\n")[0].lower()
    says = "attention" in first_line and re.search(r"\b(causal|masked)", first_line)
    # "Causal, by chunks", "The delta rule, causal." and no more than a word in the middle of a sentence.
    says = says or re.search(r"(^(an? |the )?|[,;:(]\s*)(causal|masked)\b", first_line)
    if says and _names_causality(first_line):
        return True
    if re.search(r"\b(bidirectional|both (directions|ways))\b", first_line) and "causal" not in first_line:
        return False
    if isinstance(f, nn.Module) and any(_is_triangle(x) for x in f.buffers()):
        return True
    return None


def _names_causality(words: str) -> bool:
    return bool(_CAUSAL_WORDS.search(words)) and not _DENIALS.search(words)


def _in_words(name: str) -> str:
    """Returns a name in lower case with words apart: CausalAttention, causal_attention."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _is_triangle(x: Tensor) -> bool:
    """Tells whether a mask [..., n, n] is a lower triangle with its diagonal, or an upper one without."""
    if x.dim() < 2 or not x.numel() or x.shape[-1] != x.shape[-2] or x.shape[-1] < _TRIANGLE_LEAST:
        return False
    marked = x.reshape(-1, *x.shape[-2:])[0] != 0
    full = torch.ones_like(marked)
    return torch.equal(marked, full.tril()) or torch.equal(marked, full.triu(1))


def _influence(call: Caller, case: Case) -> Tensor:
    """Returns [T,T]: at (i, j) the largest change of the output at token i when the value of token j is replaced.

    Only values are replaced, as these are what attention mixes: where later keys act through a sum over all keys, but
    not through their values, the attention is meant to be causal, and leaks. Queries and keys are small, so that
    weights are nearly even and none vanishes by chance.
    """
    inputs = [0.1 * x for x in call.draw_inputs(case)]
    axis = call.layout.token_axis
    with torch.no_grad():
        before = call.call(case, inputs)
        rows = []
        for j in range(case.T):
            changed = [x.clone() for x in inputs]
            row = changed[-1].select(axis, j)
            row.copy_(0.1 * case.draw(*row.shape, stream=50))
            moved = (call.call(case, changed) - before).abs().movedim(axis, 0).flatten(1)
            rows.append(moved.amax(1))
    return torch.stack(rows, 1)


def mixes_along(axis: int, run: Callable[[list[Tensor]], Tensor], case: Case, inputs: list[Tensor]) -> bool:
    """Tells whether replacing the last input at index 0 of an axis changes the output at another index of it."""
    changed = [x.clone() for x in inputs]
    slot = changed[-1].select(axis, 0)
    slot.copy_(case.draw(*slot.shape, stream=50))
    with torch.no_grad():
        moved = (run(changed) - run(inputs)).abs()
    return bool(moved.narrow(axis, 1, moved.shape[axis] - 1).max() > 0)


def knows_positions(call: Caller, case: Case) -> bool:
    """Returns whether the order of tokens matters beyond causality: the last token sees the others in another order."""
    inputs = call.draw_inputs(case)
    axis = call.layout.token_axis
    T = inputs[0].shape[axis]
    order = torch.tensor([*range(1, T - 1), 0, T - 1], device=case.device)  # the last one stays where it is
    with torch.no_grad():
        before = call.call(case, inputs).select(axis, T - 1)
        after = call.call(case, [x.index_select(axis, order) for x in inputs]).select(axis, T - 1)
    return difference(after, before) > case.tolerance_or(4.0)
