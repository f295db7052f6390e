"""What must hold of any whole model, as functions: law(trial) → Finding, or `DoesNotApply`.

A model is put to the test in float64 unless asked otherwise, on random tokens: the laws are about what it computes, not
about what it has learned. Weights that may be negative can cancel, which magnifies rounding: a model with such a
mechanism may differ by ten times what one rounding of its parameters does to it. `regard.check` runs all laws.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.laws import DoesNotApply, Finding
from regard.laws.case import TOLERANCE, difference, worst
from regard.mechanisms import Mechanism
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.seq2seq import Seq2Seq
from regard.nn import LooksAheadError


class Trial(ABC):
    """A model with random tokens [B,T] to put to the laws, and for an encoder-decoder a source [B,S] for each row."""

    model: Any
    draw: torch.Generator
    T: int
    tokens: Int[Tensor, "B T"]
    source: Int[Tensor, "B S"] | None
    limit: float  # how far two ways of computing the same may be apart
    writes: bool  # whether it goes on from a text, token by token
    sides: tuple[str, ...] = ("left", "right", "inside")  # where it may be padded

    @abstractmethod
    def random(self, *shape: int, source: bool = False) -> Int[Tensor, "B T"]:
        """Tokens that it knows."""

    @abstractmethod
    def whole(
        self, tokens: Int[Tensor, "B T"], visible: Bool[Tensor, "B T"] | None = None, rows: Tensor | slice = slice(None)
    ) -> Float[Tensor, "B T D"]:
        """One vector a token, from a whole pass. `rows`: which sources the tokens belong to."""

    @abstractmethod
    def pieces(
        self, tokens: Int[Tensor, "B T"], sizes: list[int], visible: Bool[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """The same from a state, extended piece by piece."""

    @abstractmethod
    def continued(
        self, prompt: Int[Tensor, "B T"], visible: Bool[Tensor, "B T"] | None, new: Int[Tensor, "B N"]
    ) -> Float[Tensor, "B M D"]:
        """Vectors after a prompt and after each of some more tokens; an encoder-decoder's prompt is its source."""

    def padding(self, *shape: int, source: bool = False) -> Int[Tensor, "B T"]:
        """Tokens that nobody may see: any will do."""
        return self.random(*shape, source=source)

    def must_write(self) -> None:
        if not self.writes:
            raise DoesNotApply("an encoder sees the whole text at once")

    def sensitivity(self) -> float:
        """How much the output moves when every parameter is rounded once more."""
        exact, want = self.model, self.whole(self.tokens)
        self.model = copy.deepcopy(exact)
        for p in self.model.parameters():
            p.data *= 1 + torch.finfo(p.dtype).eps * torch.randn(p.shape, generator=self.draw).to(p)
        moved = difference(self.whole(self.tokens), want)
        self.model = exact
        return moved

    def finding(self, got: Tensor, want: Tensor, what: str) -> Finding:
        return Finding(difference(got, want), self.limit, what)


class ModelSubject(Trial):
    """A trial of a copy of a regard model."""

    def __init__(self, model: Model[Any], seed: int = 0, dtype: torch.dtype = torch.float64, B: int = 3, T: int = 11):
        self.model = copy.deepcopy(model).to(dtype).eval()
        self.draw = torch.Generator().manual_seed(seed)
        limit = getattr(model, "limit", None)
        self.T = T if limit is None else min(T, int(limit))
        self.tokens = self.random(B, self.T)
        self.source = self.random(B, self.T + 2, source=True) if isinstance(model, Seq2Seq) else None
        self.writes = isinstance(model, Decoder)
        self.limit = allowed(dtype)
        if any(isinstance(m, Mechanism) and m.signed for m in self.model.modules()):
            self.limit = max(self.limit, 10 * self.sensitivity())

    def random(self, *shape: int, source: bool = False) -> Tensor:
        model: Any = self.model
        size = model.config.vocabulary if source else model.embedding.num_embeddings
        return torch.randint(0, size, shape, generator=self.draw).to(model.device)

    @torch.no_grad()
    def whole(self, tokens: Tensor, visible: Tensor | None = None, rows: Tensor | slice = slice(None)) -> Tensor:
        if self.source is not None:
            out: Tensor = self.model(self.source[rows], tokens, None, visible)
        elif isinstance(self.model, Encoder):
            out = self.model.vectors(tokens, visible)
        else:
            out = self.model(tokens, visible)
        return out

    @torch.no_grad()
    def pieces(self, tokens: Tensor, sizes: list[int], visible: Tensor | None = None) -> Tensor:
        self.must_write()
        model: Any = self.model
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

    @torch.no_grad()
    def continued(self, prompt: Tensor, visible: Tensor | None, new: Tensor) -> Tensor:
        model: Any = self.model
        try:
            logits, state = model.prefill(prompt, visible, new.shape[1])
        except LooksAheadError as reason:
            raise DoesNotApply(str(reason)) from None
        out = [logits]
        for token in new.split(1, 1):
            logits, state = model.extend(token, state)
            out.append(logits)
        return torch.cat(out, 1)


def allowed(dtype: torch.dtype) -> float:
    """How far apart two ways of computing the same may be, relative to the largest value."""
    return TOLERANCE.get(dtype, 8 * torch.finfo(dtype).eps)


def looks_ahead(subject: Trial) -> Finding:
    """never looks ahead: changing token j leaves every logit before j as it was"""
    subject.must_write()
    before, findings = subject.whole(subject.tokens), []
    for j in sorted({subject.T - 1, subject.T // 2} - {0}):
        changed = subject.tokens.clone()
        changed[:, j:] = subject.random(*changed[:, j:].shape)
        after = subject.whole(changed)
        findings.append(subject.finding(after[:, :j], before[:, :j], f"logits before token {j} of {subject.T}"))
    if not findings:
        raise DoesNotApply("one token has nothing ahead of it")
    return worst(findings)


def cache_is_whole_pass(subject: Trial) -> Finding:
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


def padding_does_not_matter(subject: Trial) -> Finding:
    """padding changes nothing, in a whole pass and with a state"""
    want, findings = subject.whole(subject.tokens), []
    B, T = subject.tokens.shape
    for style in subject.sides:
        shown = torch.zeros(B, T + 3, dtype=torch.bool)
        for b in range(B):
            start = {"left": 3, "right": 0, "inside": b % 3}[style]
            shown[b, start : start + T] = True
            if style == "inside" and T > 1:
                shown[b, start + 1], shown[b, start + T] = False, True
        shown = shown.to(subject.tokens.device)
        tokens = subject.padding(B, T + 3)
        tokens[shown] = subject.tokens.flatten()
        got = subject.whole(tokens, shown)[shown].view_as(want)
        findings.append(subject.finding(got, want, f"a whole pass padded {style}"))
        if subject.writes:
            try:
                got = subject.pieces(tokens, [1] * (T + 3), shown)[shown].view_as(want)
            except DoesNotApply:
                continue
            findings.append(subject.finding(got, want, f"token by token padded {style}"))
    return worst(findings)


def batch_does_not_matter(subject: Trial) -> Finding:
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


def prompts_of_unequal_length(subject: Trial) -> Finding:
    """prompts of unequal length are continued together as each would be alone"""
    subject.must_write()
    steps, findings = 3, []
    whole = subject.tokens if subject.source is None else subject.source
    longest = subject.T - steps if subject.source is None else whole.shape[1]
    if longest < 2:
        raise DoesNotApply("the model is too short for prompts of unequal length")
    lengths = [max(1, longest - 2 * b) for b in range(len(whole))]
    some = torch.tensor(lengths, device=whole.device)[:, None]
    place = torch.arange(longest, device=whole.device)
    shown = place >= longest - some if "left" in subject.sides else place < some
    prompts = subject.padding(len(whole), longest, source=subject.source is not None)
    for b, n in enumerate(lengths):
        prompts[b, shown[b]] = whole[b, :n]
    new = subject.random(len(whole), steps)
    together = subject.continued(prompts, shown, new)
    for b, n in enumerate(lengths):
        alone = subject.continued(whole[b : b + 1, :n], None, new[b : b + 1])[0]
        findings.append(subject.finding(together[b], alone, f"a prompt of {n} tokens among others of {lengths}"))
    return worst(findings)


ModelLaw = Callable[[Trial], Finding]
MODEL_LAWS: dict[str, ModelLaw] = {
    "looks-ahead": looks_ahead,
    "cache": cache_is_whole_pass,
    "padding": padding_does_not_matter,
    "batch": batch_does_not_matter,
    "prompts": prompts_of_unequal_length,
}
