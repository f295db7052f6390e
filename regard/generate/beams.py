"""Beam search: the likeliest outputs, several at a time.

Each prompt keeps its `beams` likeliest unfinished outputs. An output that ends goes to the finished ones, ranked by
log p / lengthᵃ. The search ends when no unfinished output could still come among the best, which is certain, not a
guess: log p only falls, and the length stays within the limit.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.data.tokenizers import Tokenizer
from regard.generate.sampling import probabilities
from regard.generate.settings import Choice, Settings
from regard.generate.text import Writer


class Beams:
    """The search for P prompts side by side."""

    moves_source = False  # outputs change places only within a prompt

    def __init__(
        self, settings: Settings, P: int, limit: int, tokenizer: Tokenizer | None, stop_tokens: frozenset[int]
    ) -> None:
        assert settings.beams is not None
        self.settings, self.width, self.power = settings, settings.beams, settings.length_penalty
        self.limit, self.tokenizer, self.stops = limit, tokenizer, settings.stops
        self.stop_tokens = sorted(stop_tokens)
        self.count, self.last = 0, "max" if limit == settings.max_tokens else "full"
        self.scores: Tensor | None = None  # log p of the unfinished, [P,A]
        self.tokens: Tensor | None = None  # [P,A,count]
        self.finished: list[list[Choice]] = [[] for _ in range(P)]

    @property
    def done(self) -> bool:
        if self.count >= self.limit:
            return True
        assert self.scores is not None
        best = self.scores.amax(1).tolist()
        return all(
            alive == -math.inf or (len(ended) == self.width and self._bound(alive) <= ended[-1].score)
            for ended, alive in zip(self.finished, best, strict=True)
        )

    def step(self, logits: Float[Tensor, "R N"]) -> tuple[Int[Tensor, " M"], Int[Tensor, " M"]]:
        """The next token of each unfinished output, and the row that it continues."""
        P, N = len(self.finished), logits.shape[-1]
        total = probabilities(logits, self.settings).log().view(P, -1, N)
        A = total.shape[1]
        if self.scores is None or self.tokens is None:
            self.tokens = torch.zeros(P, A, 0, dtype=torch.long, device=logits.device)
        else:
            total = total + self.scores[:, :, None]
        self.count += 1
        if self.stop_tokens:
            self._end(total[:, :, self.stop_tokens].logsumexp(-1).tolist())
            total[:, :, self.stop_tokens] = -math.inf
        keep = min(self.width, A * max(1, N - len(self.stop_tokens)))
        self.scores, at = total.flatten(1).topk(keep)
        parents, new = at // N, at % N
        kept = self.tokens.gather(1, parents[..., None].expand(-1, -1, self.count - 1))
        self.tokens = torch.cat([kept, new[..., None]], -1)
        if self.stops:
            self._end_texts()
        rows = parents + A * torch.arange(P, device=at.device)[:, None]
        return new.flatten(), rows.flatten()

    @property
    def choices(self) -> list[list[Choice]]:
        """Every beam of each prompt, best first."""
        if self.count < self.limit:
            # The search has ended early: no unfinished output could still come among the best.
            return self.finished
        assert self.scores is not None and self.tokens is not None
        for p, (scores, rows) in enumerate(zip(self.scores.tolist(), self.tokens.tolist(), strict=True)):
            for score, ids in zip(scores, rows, strict=True):
                if score > -math.inf:
                    self._finish(p, ids, score, self.last)
        return self.finished

    def _ranked(self, score: float, length: int) -> float:
        return score / math.pow(length, self.power)

    def _bound(self, score: float) -> float:
        """The best rank that an unfinished output can still reach."""
        return max(self._ranked(score, n) for n in (self.count + 1, self.limit))

    def _end(self, ended: list[list[float]]) -> None:
        """Outputs that go on with a stop token, which is scored and not kept."""
        assert self.tokens is not None
        rows = self.tokens.tolist()
        for p, scores in enumerate(ended):
            for a, score in enumerate(scores):
                if score > -math.inf:
                    self._finish(p, rows[p][a], score, "stop")

    def _end_texts(self) -> None:
        assert self.tokens is not None and self.scores is not None
        for p, rows in enumerate(self.tokens.tolist()):
            for a, ids in enumerate(rows):
                score = float(self.scores[p, a])
                if score > -math.inf and self._text(ids)[1]:
                    self._finish(p, ids, score, "stop")
                    self.scores[p, a] = -math.inf

    def _finish(self, p: int, ids: list[int], score: float, why: str) -> None:
        ranked = self._ranked(score, self.count)
        best = self.finished[p]
        if len(best) < self.width or ranked > best[-1].score:
            text = None if self.tokenizer is None else self._text(ids)[0]
            best.append(Choice(text, ids, ranked, why))
            best.sort(key=lambda c: -c.score)
            del best[self.width :]

    def _text(self, ids: list[int]) -> tuple[str, bool]:
        assert self.tokenizer is not None
        writer = Writer(self.tokenizer, self.stops)
        for token in ids:
            if writer.push(token):
                break
        else:
            writer.finish()
        return writer.text, writer.stopped
