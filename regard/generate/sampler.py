"""Greedy decoding and sampling: each row is a separate output, and leaves the batch when it ends."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.data.tokenizers import Tokenizer
from regard.generate.greedy import Greedy
from regard.generate.sampling import draw, penalize_repetition, uniforms
from regard.generate.settings import Choice, Settings
from regard.generate.text import OutputText
from regard.shapes import upcast_half


class Sampler:
    """The unfinished outputs of one batch, one a row, and the finished ones.

    `limits`: how many tokens each may have. `streams` numbers their random streams. `seen`: which tokens have occurred
    in each row, for a repetition penalty. `watch`: text is decoded at each token, not only at the end.
    """

    moves_source = True  # when rows leave, the sources of others move to new rows

    def __init__(
        self,
        settings: Settings,
        limits: list[int],
        streams: list[int],
        seed: int,
        tokenizer: Tokenizer | None,
        stop_tokens: frozenset[int],
        seen: Bool[Tensor, "B N"] | None,
        device: torch.device,
        watch: bool = False,
    ) -> None:
        self.settings = settings
        self.limits = limits
        self.limit = max(limits)
        self._ends = set(limits)
        self.tokenizer = tokenizer
        self.stop_tokens = stop_tokens
        self.seen = seen
        self.count = 0  # tokens of each row
        self.active = list(range(len(limits)))  # the number of the output in each row
        self.finished: dict[int, Choice] = {}
        # In float64, as log p is summed over many tokens.
        self.scores = torch.zeros(len(limits), dtype=torch.float64, device=device)
        # Tokens are kept by step and joined only when they are read: joining at each step would take quadratic time.
        self._joined = torch.zeros(len(limits), 0, dtype=torch.long, device=device)
        self._steps: list[Int[Tensor, " B"]] = []
        self._uniforms = None
        if settings.samples:
            self._uniforms = uniforms(seed, streams, self.limit).to(device)
        self.texts: list[OutputText] = []
        if tokenizer is not None and (settings.stops or watch):
            self.texts = [OutputText(tokenizer, settings.stops) for _ in limits]

    @property
    def done(self) -> bool:
        return not self.active

    @property
    def choices(self) -> list[Choice]:
        """Returns every output, in order."""
        return [self.finished[n] for n in range(len(self.limits))]

    @property
    def tokens(self) -> Int[Tensor, "B count"]:
        """Returns the tokens that each row has generated so far."""
        if self._steps:
            self._joined = torch.cat([self._joined, torch.stack(self._steps, 1)], 1)
            self._steps = []
        return self._joined

    def step(
        self, logits: Float[Tensor, "B N"], greedy: Greedy | None = None
    ) -> tuple[Int[Tensor, " M"], Int[Tensor, " M"] | None]:
        """Returns the next token of each row that continues, and the numbers of those rows; None: all of them.

        `greedy`, if given, has the likeliest tokens of these logits, which a graph has already found.
        """
        if greedy is not None and self._uniforms is None and self.seen is None:
            tokens = greedy.tokens
            self.scores += greedy.logp
            self._steps.append(tokens.clone())  # the next step overwrites its buffers
        else:
            tokens = self._choose(logits)
            self.scores += upcast_half(logits).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
            self._steps.append(tokens)
        self.count += 1
        ended = self._find_ended(tokens)
        if not ended:
            return tokens, None
        return self._remove_ended(tokens, ended)

    def _choose(self, logits: Float[Tensor, "B N"]) -> Int[Tensor, " B"]:
        """Returns the likeliest token of each row, or one that is drawn."""
        if self.seen is not None:
            logits = penalize_repetition(logits, self.seen, self.settings.repetition_penalty)
        if self._uniforms is None:
            tokens = logits.argmax(-1)
        else:
            tokens = draw(logits, self.settings, self._uniforms[:, self.count])
        if self.seen is not None:
            self.seen.scatter_(-1, tokens[:, None], True)
        return tokens

    def _find_ended(self, tokens: Int[Tensor, " B"]) -> dict[int, str]:
        """Returns the rows that end here, and why."""
        ended: dict[int, str] = {}
        if self.count in self._ends:
            why = "max" if self.count == self.settings.max_tokens else "full"
            ended = {row: why for row, output in enumerate(self.active) if self.limits[output] == self.count}
        # Reading tokens waits for the GPU, so it is left out if no token can end an output.
        if self.stop_tokens or self.texts:
            for row, token in enumerate(tokens.tolist()):
                if token in self.stop_tokens or (self.texts and self.texts[self.active[row]].push(token)):
                    ended[row] = "stop"
        return ended

    def _remove_ended(self, tokens: Int[Tensor, " B"], ended: dict[int, str]) -> tuple[Tensor, Tensor | None]:
        """Finishes the rows that have ended; returns the tokens and the numbers of those that continue."""
        written = self.tokens.tolist()
        scores = self.scores.tolist()
        for row, why in ended.items():
            ids = written[row]
            if ids[-1] in self.stop_tokens:
                ids = ids[:-1]
            output = self.active[row]
            self.finished[output] = Choice(self._final_text(output, ids), ids, scores[row], why)
        rows = [row for row in range(len(self.active)) if row not in ended]
        self.active = [self.active[row] for row in rows]
        if not rows:
            return tokens, None
        index = torch.tensor(rows, device=tokens.device)
        self._joined = self.tokens[index]
        self.scores = self.scores[index]
        if self._uniforms is not None:
            self._uniforms = self._uniforms[index]
        if self.seen is not None:
            self.seen = self.seen[index]
        return tokens[index], index

    def _final_text(self, output: int, ids: list[int]) -> str | None:
        """Returns the whole text of an output; None without a tokenizer."""
        if self.texts:
            self.texts[output].finish()
            return self.texts[output].text
        if self.tokenizer is None:
            return None
        return self.tokenizer.decode(ids)
