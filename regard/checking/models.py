"""Laws of whole models, as functions: law(trial) returns a Finding, or raises `DoesNotApply`.

A model is tested in float64 unless asked otherwise, on random tokens: the laws are about what it computes, not
about what it has learned. Weights that may be negative can cancel, which magnifies rounding: a model with such a
mechanism may differ by ten times what one rounding of its parameters does to it. `regard.check` runs all laws.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.checking import edges
from regard.laws import DoesNotApply, Finding
from regard.laws.case import TOLERANCE, difference, worst
from regard.mechanisms import Linear, Mechanism
from regard.mechanisms.linear import CHUNK as LINEAR_CHUNK
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.seq2seq import Seq2Seq
from regard.nn import Attention, LooksAheadError, ShortConvolution
from regard.registry import Registry


class Trial(ABC):
    """A model with random tokens [B,T] to put to the laws, and for an encoder-decoder a source [B,S] for each row.

    `limit` is how far apart two ways of computing the same may be. `is_decoder` says whether it continues a text
    token by token. `padding_sides` are the places where it may be padded. `longest` is the most tokens that it reads;
    None: any number.
    """

    model: Any
    generator: torch.Generator
    T: int
    tokens: Int[Tensor, "B T"]
    source: Int[Tensor, "B S"] | None
    limit: float
    is_decoder: bool
    padding_sides: tuple[str, ...] = ("left", "right", "inside")
    longest: int | None = None

    @abstractmethod
    def draw_tokens(self, *shape: int, source: bool = False) -> Int[Tensor, "B T"]:
        """Returns random tokens that the model knows."""

    @abstractmethod
    def run_whole(
        self, tokens: Int[Tensor, "B T"], visible: Bool[Tensor, "B T"] | None = None, rows: Tensor | slice = slice(None)
    ) -> Float[Tensor, "B T D"]:
        """Returns one vector for each token, from a whole pass. `rows` says which sources the tokens belong to."""

    @abstractmethod
    def run_pieces(
        self, tokens: Int[Tensor, "B T"], sizes: list[int], visible: Bool[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """Returns one vector for each token, from a state that is extended piece by piece."""

    @abstractmethod
    def run_continuation(
        self, prompt: Int[Tensor, "B T"], visible: Bool[Tensor, "B T"] | None, new: Int[Tensor, "B N"]
    ) -> Float[Tensor, "B M D"]:
        """Returns the vectors after a prompt and after each of some more tokens.

        The prompt of an encoder-decoder is its source.
        """

    @abstractmethod
    def run_packed(self, tokens: Int[Tensor, "B T"], lengths: Sequence[int]) -> Float[Tensor, "B T D"]:
        """Returns one vector for each token of documents of these lengths, packed into one row.

        Raises `DoesNotApply` for a model that reads one document a row.
        """

    @abstractmethod
    def edges(self) -> dict[int, str]:
        """Returns the lengths at which the computation changes, such as a window's width, and what begins there."""

    @abstractmethod
    def windows(self) -> list[tuple[str, nn.Module, int | None]]:
        """Returns the name, module and window of each layer of self-attention; without a window, None."""

    def draw_padding(self, *shape: int, source: bool = False) -> Int[Tensor, "B T"]:
        """Returns token ids for padding; any will do, since no query may see them."""
        return self.draw_tokens(*shape, source=source)

    def cut_padded(self, n: int) -> list[int]:
        """Returns the sizes of the pieces in which n tokens with padding among them are given to the model."""
        return [1] * n

    def require_decoder(self) -> None:
        """Raises `DoesNotApply` for an encoder."""
        if not self.is_decoder:
            raise DoesNotApply("an encoder sees the whole text at once")

    def limit_for(self, tokens: Int[Tensor, "B T"]) -> float:
        """Returns how far apart two ways of computing the output of these tokens may be."""
        return self.limit

    def measure_sensitivity(self, tokens: Int[Tensor, "B T"]) -> float:
        """Returns how much the output of tokens changes when every parameter changes by about one rounding."""
        want = self.run_whole(tokens)
        exact = self.model
        self.model = copy.deepcopy(exact)
        for p in self.model.parameters():
            p.data *= 1 + torch.finfo(p.dtype).eps * torch.randn(p.shape, generator=self.generator).to(p)
        moved = difference(self.run_whole(tokens), want)
        self.model = exact
        return moved

    def compare(self, got: Tensor, want: Tensor, what: str) -> Finding:
        """Returns the Finding of two outputs: their difference, relative to the largest value, and its limit."""
        return Finding(difference(got, want), self.limit, what)


class ModelSubject(Trial):
    """A trial of a copy of a regard model."""

    def __init__(self, model: Model[Any], seed: int = 0, dtype: torch.dtype = torch.float64, B: int = 3, T: int = 11):
        self.model = copy.deepcopy(model).to(dtype).eval()
        self.generator = torch.Generator().manual_seed(seed)
        self.longest = getattr(model, "limit", None)
        self.T = T
        if self.longest is not None:
            self.T = min(T, int(self.longest))
        self.tokens = self.draw_tokens(B, self.T)
        self.source = None
        if isinstance(model, Seq2Seq):
            self.source = self.draw_tokens(B, self.T + 2, source=True)
        self.is_decoder = isinstance(model, Decoder)
        self.limit = rounding_limit(dtype)
        self.limit = self.limit_for(self.tokens)

    def draw_tokens(self, *shape: int, source: bool = False) -> Tensor:
        model: Any = self.model
        size = model.embedding.num_embeddings
        if source:
            size = model.config.vocabulary
        return torch.randint(0, size, shape, generator=self.generator).to(model.device)

    @torch.no_grad()
    def run_whole(self, tokens: Tensor, visible: Tensor | None = None, rows: Tensor | slice = slice(None)) -> Tensor:
        if self.source is not None:
            out: Tensor = self.model(self.source[rows], tokens, None, visible)
        elif isinstance(self.model, Encoder):
            out = self.model.vectors(tokens, visible)
        else:
            out = self.model(tokens, visible)
        return out

    @torch.no_grad()
    def run_pieces(self, tokens: Tensor, sizes: list[int], visible: Tensor | None = None) -> Tensor:
        self.require_decoder()
        model: Any = self.model
        try:
            state = model.empty(tokens.shape[0], 2)
        except LooksAheadError as reason:
            raise DoesNotApply(str(reason)) from None
        if isinstance(model, Seq2Seq):
            assert self.source is not None
            state = model.write(state, self.source)
        out = []
        seen: Sequence[Tensor | None] = [None] * len(sizes)
        if visible is not None:
            seen = visible.split(sizes, 1)
        for part, shown in zip(tokens.split(sizes, 1), seen, strict=True):
            logits, state = model.extend(part, state, shown)
            out.append(logits)
        return torch.cat(out, 1)

    @torch.no_grad()
    def run_continuation(self, prompt: Tensor, visible: Tensor | None, new: Tensor) -> Tensor:
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

    def limit_for(self, tokens: Tensor) -> float:
        # Weights that may be negative nearly cancel for some texts, above all short ones.
        if any(isinstance(m, Mechanism) and m.signed for m in self.model.modules()):
            return max(self.limit, 10 * self.measure_sensitivity(tokens))
        return self.limit

    @torch.no_grad()
    def run_packed(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        if self.source is not None:
            raise DoesNotApply("it reads one document a row")
        numbers = torch.arange(len(lengths), device=tokens.device).repeat_interleave(torch.tensor(lengths))
        documents = numbers.expand(tokens.shape)
        read: Any = self.model.vectors if isinstance(self.model, Encoder) else self.model
        try:
            out: Tensor = read(tokens, documents=documents)
        except LooksAheadError as reason:
            raise DoesNotApply(str(reason)) from None
        return out

    def edges(self) -> dict[int, str]:
        found = {edges.CHUNK: f"{edges.CHUNK} tokens"}
        if any(isinstance(m, Linear) for m in self.model.modules()):
            found[LINEAR_CHUNK] = f"the chunk of {LINEAR_CHUNK}"
        convolutions = {m.width for m in self.model.modules() if isinstance(m, ShortConvolution)}
        found |= {w: f"the convolution of {w}" for w in convolutions}
        found |= {w: f"the window of {w}" for _, _, w in self.windows() if w is not None}
        return edges.choose_edges(found, self.longest)

    def windows(self) -> list[tuple[str, nn.Module, int | None]]:
        layers = [(n, m) for n, m in self.model.named_modules() if isinstance(m, Attention) and m.source is None]
        if isinstance(self.model, Seq2Seq):  # the tokens of a trial are the decoder's
            layers = [(name, layer) for name, layer in layers if layer.size.causal]
        return [(name, layer, layer.reach) for name, layer in layers]


def rounding_limit(dtype: torch.dtype) -> float:
    """Returns the largest difference of two computations, relative to the largest value, that rounding explains."""
    return TOLERANCE.get(dtype, 8 * torch.finfo(dtype).eps)


def looks_ahead(trial: Trial) -> Finding:
    """never looks ahead: changing token j leaves every logit before j as it was"""
    trial.require_decoder()
    before = trial.run_whole(trial.tokens)
    findings = []
    for j in sorted({trial.T - 1, trial.T // 2} - {0}):
        changed = trial.tokens.clone()
        changed[:, j:] = trial.draw_tokens(*changed[:, j:].shape)
        after = trial.run_whole(changed)
        findings.append(trial.compare(after[:, :j], before[:, :j], f"logits before token {j} of {trial.T}"))
    if not findings:
        raise DoesNotApply("one token has nothing ahead of it")
    return worst(findings)


def cache_is_whole_pass(trial: Trial) -> Finding:
    """token by token, and in any pieces = the whole pass; the likeliest tokens are the same"""
    want = trial.run_whole(trial.tokens)
    findings = []
    half = trial.T // 2
    for sizes in ([1] * trial.T, [trial.T], [half, trial.T - half], [trial.T - 1, 1]):
        sizes = [n for n in sizes if n]
        got = trial.run_pieces(trial.tokens, sizes)
        findings.append(trial.compare(got, want, f"pieces of {sizes} against the whole"))
        other = int((got.argmax(-1) != want.argmax(-1)).sum())
        findings.append(Finding(float(other), 0.0, f"likeliest tokens that differ, pieces of {sizes}"))
    return worst(findings)


def padding_does_not_matter(trial: Trial) -> Finding:
    """padding changes nothing, in a whole pass and with a state"""
    if not trial.padding_sides:
        raise DoesNotApply("it reads nothing that could be padded")
    want = trial.run_whole(trial.tokens)
    findings = []
    B, T = trial.tokens.shape
    for style in trial.padding_sides:
        shown = _place_tokens(B, T, style).to(trial.tokens.device)
        tokens = trial.draw_padding(B, T + 3)
        tokens[shown] = trial.tokens.flatten()
        got = trial.run_whole(tokens, shown)[shown].view_as(want)
        findings.append(trial.compare(got, want, f"a whole pass padded {style}"))
        if trial.is_decoder:
            try:
                got = trial.run_pieces(tokens, trial.cut_padded(T + 3), shown)[shown].view_as(want)
            except DoesNotApply:
                continue
            findings.append(trial.compare(got, want, f"token by token padded {style}"))
    return worst(findings)


def _place_tokens(B: int, T: int, style: str) -> Bool[Tensor, "B T3"]:
    """Returns a mask [B,T+3] that is True for T tokens, and False for 3 of padding on the side `style` names."""
    shown = torch.zeros(B, T + 3, dtype=torch.bool)
    for b in range(B):
        start = {"left": 3, "right": 0, "inside": b % 3}[style]
        shown[b, start : start + T] = True
        if style == "inside" and T > 1:
            shown[b, start + 1] = False
            shown[b, start + T] = True
    return shown


def batch_does_not_matter(trial: Trial) -> Finding:
    """the size and order of a batch change nothing"""
    want = trial.run_whole(trial.tokens)
    B = len(want)
    order = torch.arange(B, device=want.device).roll(1)
    got = trial.run_whole(trial.tokens[order], rows=order)[order.argsort()]
    findings = [trial.compare(got, want, "order of the batch")]
    for b in range(B):
        alone = trial.run_whole(trial.tokens[b : b + 1], rows=slice(b, b + 1))[0]
        findings.append(trial.compare(alone, want[b], f"sequence {b} alone and in a batch"))
    return worst(findings)


def prompts_of_unequal_length(trial: Trial) -> Finding:
    """prompts of unequal length are continued together as each would be alone"""
    trial.require_decoder()
    steps = 3
    findings = []
    whole = trial.tokens
    longest = trial.T - steps
    if trial.source is not None:
        whole = trial.source
        longest = whole.shape[1]
        if whole.dim() != 2:
            raise DoesNotApply("its source is no text, and always of the same length")
    if longest < 2:
        raise DoesNotApply("the model is too short for prompts of unequal length")
    lengths = [max(1, longest - 2 * b) for b in range(len(whole))]
    some = torch.tensor(lengths, device=whole.device)[:, None]
    place = torch.arange(longest, device=whole.device)
    shown = place < some
    if "left" in trial.padding_sides:
        shown = place >= longest - some
    prompts = trial.draw_padding(len(whole), longest, source=trial.source is not None)
    for b, n in enumerate(lengths):
        prompts[b, shown[b]] = whole[b, :n]
    new = trial.draw_tokens(len(whole), steps)
    together = trial.run_continuation(prompts, shown, new)
    for b, n in enumerate(lengths):
        alone = trial.run_continuation(whole[b : b + 1, :n], None, new[b : b + 1])[0]
        findings.append(trial.compare(together[b], alone, f"a prompt of {n} tokens among others of {lengths}"))
    return worst(findings)


ModelLaw = Callable[[Trial], Finding]
MODEL_LAWS: Registry[ModelLaw] = Registry("law")
MODEL_LAWS.update(
    {
        "looks-ahead": looks_ahead,
        "cache": cache_is_whole_pass,
        "padding": padding_does_not_matter,
        "batch": batch_does_not_matter,
        "prompts": prompts_of_unequal_length,
        "packed": edges.documents_do_not_mix,
        "window": edges.windows_are_as_wide_as_said,
        "long": edges.long_texts,
    }
)
