"""What must hold of any whole model, as functions: law(subject) → Finding, or `DoesNotApply`.

A model is put to the test in float64 unless asked otherwise, on random tokens: the laws are about what it computes, not
about what it has learned. Weights that may be negative can cancel, which magnifies rounding: a model with such a
mechanism may differ by ten times what one rounding of its parameters does to it. `check(model)` runs all laws.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.laws import DoesNotApply, Finding
from regard.laws.case import TOLERANCE, difference, worst
from regard.mechanisms import Mechanism
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.seq2seq import Seq2Seq
from regard.nn import LooksAheadError


class ModelSubject:
    """A copy of a model with random tokens [B,T], and for a Seq2Seq a source [B,S] for each row."""

    def __init__(self, model: Model[Any], seed: int = 0, dtype: torch.dtype = torch.float64, B: int = 3, T: int = 11):
        self.model = copy.deepcopy(model).to(dtype).eval()
        self.draw = torch.Generator().manual_seed(seed)
        limit = getattr(model, "limit", None)
        self.T = T if limit is None else min(T, int(limit))
        self.tokens = self.random(B, self.T)
        self.source = self.random(B, self.T + 2, source=True) if isinstance(model, Seq2Seq) else None
        self.limit = TOLERANCE.get(dtype, 8 * torch.finfo(dtype).eps)
        if any(isinstance(m, Mechanism) and m.signed for m in self.model.modules()):
            self.limit = max(self.limit, 10 * self._sensitivity())

    def random(self, *shape: int, source: bool = False) -> Tensor:
        model: Any = self.model
        size = model.config.vocabulary if source else model.embedding.num_embeddings
        return torch.randint(0, size, shape, generator=self.draw).to(model.device)

    @torch.no_grad()
    def whole(self, tokens: Tensor, visible: Tensor | None = None, rows: Tensor | slice = slice(None)) -> Tensor:
        """One vector a token, from a whole pass. `rows`: which sources the tokens belong to."""
        if self.source is not None:
            out: Tensor = self.model(self.source[rows], tokens, None, visible)
        elif isinstance(self.model, Encoder):
            out = self.model.vectors(tokens, visible)
        else:
            out = self.model(tokens, visible)
        return out

    def _sensitivity(self) -> float:
        """How much the output moves when every parameter is rounded once more."""
        exact, want = self.model, self.whole(self.tokens)
        self.model = copy.deepcopy(exact)
        for p in self.model.parameters():
            p.data *= 1 + torch.finfo(p.dtype).eps * torch.randn(p.shape, generator=self.draw).to(p)
        moved = difference(self.whole(self.tokens), want)
        self.model = exact
        return moved

    def decoder(self) -> Decoder[Any]:
        if not isinstance(self.model, Decoder):
            raise DoesNotApply("an encoder sees the whole text at once")
        return self.model

    @torch.no_grad()
    def pieces(self, tokens: Tensor, sizes: list[int], visible: Tensor | None = None) -> Tensor:
        """The same from a state, extended piece by piece."""
        model = self.decoder()
        try:
            state = model.empty(tokens.shape[0], 2)
        except LooksAheadError as reason:
            raise DoesNotApply(str(reason)) from None
        if isinstance(model, Seq2Seq):
            assert self.source is not None
            state = model.write(state, self.source)
        out = []
        seen = [None] * len(sizes) if visible is None else visible.split(sizes, 1)
        for part, shown in zip(tokens.split(sizes, 1), seen, strict=True):
            logits, state = model.extend(part, state, shown)
            out.append(logits)
        return torch.cat(out, 1)

    def finding(self, got: Tensor, want: Tensor, what: str) -> Finding:
        return Finding(difference(got, want), self.limit, what)


def looks_ahead(subject: ModelSubject) -> Finding:
    """never looks ahead: changing token j leaves every logit before j as it was"""
    subject.decoder()
    before, findings = subject.whole(subject.tokens), []
    for j in sorted({subject.T - 1, subject.T // 2} - {0}):
        changed = subject.tokens.clone()
        changed[:, j:] = subject.random(*changed[:, j:].shape)
        after = subject.whole(changed)
        findings.append(subject.finding(after[:, :j], before[:, :j], f"logits before token {j} of {subject.T}"))
    if not findings:
        raise DoesNotApply("one token has nothing ahead of it")
    return worst(findings)


def cache_is_whole_pass(subject: ModelSubject) -> Finding:
    """token by token, and in any pieces = the whole pass; the likeliest tokens are the same"""
    want, findings = subject.whole(subject.tokens), []
    half = subject.T // 2
    for sizes in ([1] * subject.T, [subject.T], [half, subject.T - half], [subject.T - 1, 1]):
        sizes = [n for n in sizes if n]
        got = subject.pieces(subject.tokens, sizes)
        findings.append(subject.finding(got, want, f"pieces of {sizes} against the whole"))
        other = int((got.argmax(-1) != want.argmax(-1)).sum())
        findings.append(Finding(float(other), 0.0, f"likeliest tokens that differ, pieces of {sizes}"))
    return worst(findings)


def padding_does_not_matter(subject: ModelSubject) -> Finding:
    """padding left, right or inside changes nothing, in a whole pass and with a state"""
    want, findings = subject.whole(subject.tokens), []
    B, T = subject.tokens.shape
    for style in ("left", "right", "inside"):
        shown = torch.zeros(B, T + 3, dtype=torch.bool)
        for b in range(B):
            start = {"left": 3, "right": 0, "inside": b % 3}[style]
            shown[b, start : start + T] = True
            if style == "inside" and T > 1:
                shown[b, start + 1], shown[b, start + T] = False, True
        shown = shown.to(subject.tokens.device)
        tokens = subject.random(B, T + 3)
        tokens[shown] = subject.tokens.flatten()
        got = subject.whole(tokens, shown)[shown].view_as(want)
        findings.append(subject.finding(got, want, f"a whole pass padded {style}"))
        if isinstance(subject.model, Decoder):
            try:
                got = subject.pieces(tokens, [1] * (T + 3), shown)[shown].view_as(want)
            except DoesNotApply:
                continue
            findings.append(subject.finding(got, want, f"token by token padded {style}"))
    return worst(findings)


def batch_does_not_matter(subject: ModelSubject) -> Finding:
    """the size and order of a batch change nothing"""
    want = subject.whole(subject.tokens)
    B = len(want)
    order = torch.arange(B, device=want.device).roll(1)
    got = subject.whole(subject.tokens[order], rows=order)[order.argsort()]
    findings = [subject.finding(got, want, "order of the batch")]
    for b in range(B):
        alone = subject.whole(subject.tokens[b : b + 1], rows=slice(b, b + 1))[0]
        findings.append(subject.finding(alone, want[b], f"sequence {b} alone and in a batch"))
    return worst(findings)


@torch.no_grad()
def prompts_of_unequal_length(subject: ModelSubject) -> Finding:
    """prompts of unequal length are continued together as each would be alone"""
    model, steps, findings = subject.decoder(), 3, []
    whole = subject.tokens if subject.source is None else subject.source
    longest = whole.shape[1] if isinstance(model, Seq2Seq) else subject.T - steps
    if longest < 2:
        raise DoesNotApply("the model is too short for prompts of unequal length")
    lengths = [max(1, longest - 2 * b) for b in range(len(whole))]
    blank = longest - torch.tensor(lengths, device=whole.device)
    shown = torch.arange(longest, device=whole.device) >= blank[:, None]
    prompts = torch.zeros_like(whole[:, :longest])
    for b, n in enumerate(lengths):
        prompts[b, longest - n :] = whole[b, :n]
    new = subject.random(len(whole), steps)
    try:
        together = _continued(model, prompts, shown, new)
    except LooksAheadError as reason:
        raise DoesNotApply(str(reason)) from None
    for b, n in enumerate(lengths):
        alone = _continued(model, whole[b : b + 1, :n], None, new[b : b + 1])[0]
        findings.append(subject.finding(together[b], alone, f"a prompt of {n} tokens among others of {lengths}"))
    return worst(findings)


def _continued(model: Decoder[Any], prompt: Tensor, visible: Tensor | None, new: Tensor) -> Tensor:
    """Logits after a prompt and after each of some more tokens."""
    logits, state = model.begin(prompt, visible, new.shape[1])
    out = [logits]
    for token in new.split(1, 1):
        logits, state = model.extend(token, state)
        out.append(logits)
    return torch.cat(out, 1)


ModelLaw = Callable[[ModelSubject], Finding]
MODEL_LAWS: dict[str, ModelLaw] = {
    "looks-ahead": looks_ahead,
    "cache": cache_is_whole_pass,
    "padding": padding_does_not_matter,
    "batch": batch_does_not_matter,
    "prompts": prompts_of_unequal_length,
}


def check(model: Model[Any], seeds: int = 3, dtype: torch.dtype = torch.float64) -> dict[str, Finding | str]:
    """Each law's worst finding over some random inputs, or the reason why it does not apply."""
    found: dict[str, Finding | str] = {}
    for name, law in MODEL_LAWS.items():
        try:
            found[name] = worst(law(ModelSubject(model, seed, dtype)) for seed in range(seeds))
        except DoesNotApply as reason:
            found[name] = str(reason)
        except RegardError as error:
            found[name] = Finding(float("inf"), 0.0, f"{type(error).__name__}: {error}")
    return found
