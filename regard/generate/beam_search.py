"""Beam search for the likeliest outputs.

Each prompt keeps its `beams` likeliest unfinished outputs. An output that ends goes to the finished ones, ranked by log
p / lengthᵃ. The search ends when no unfinished output can still become one of the best. That is exact, without
heuristics: log p only falls, and the length stays within the limit.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.data.tokenizers import Tokenizer
from regard.generate.sampling import probabilities
from regard.generate.settings import Choice, Settings
from regard.generate.text import OutputText


class BeamSearch:
    """The search for P prompts side by side, with A unfinished outputs each. Row p·A + a of the model is output a of
    prompt p."""

    moves_source = False  # outputs take each other's rows only within a prompt

    def __init__(
        self, settings: Settings, P: int, limit: int, tokenizer: Tokenizer | None, stop_tokens: frozenset[int]
    ) -> None:
        assert settings.beams is not None
        self.settings = settings
        self.width = settings.beams
        self.limit = limit
        self.tokenizer = tokenizer
        self.stop_tokens = sorted(stop_tokens)
        self.count = 0  # tokens of each unfinished output
        self.scores: Float[Tensor, "P A"] | None = None  # log p of unfinished outputs; −inf for those that have ended
        self.tokens: Int[Tensor, "P A count"] | None = None
        self.finished: list[list[Choice]] = [[] for _ in range(P)]  # best first

    @property
    def done(self) -> bool:
        """Returns whether no unfinished output can still become one of the best."""
        if self.count >= self.limit:
            return True
        assert self.scores is not None
        best_alive = self.scores.amax(1).tolist()
        return all(
            alive == -math.inf or (len(ended) == self.width and self._rank_bound(alive) <= ended[-1].score)
            for ended, alive in zip(self.finished, best_alive, strict=True)
        )

    def step(self, logits: Float[Tensor, "R N"]) -> tuple[Int[Tensor, " M"], Int[Tensor, " M"]]:
        """Returns the next token of each kept output, and the row of the output that it continues."""
        P = len(self.finished)
        N = logits.shape[-1]
        log_p = probabilities(logits, self.settings).log().view(P, -1, N)
        A = log_p.shape[1]
        if self.scores is None or self.tokens is None:
            self.tokens = torch.zeros(P, A, 0, dtype=torch.long, device=logits.device)
        else:
            log_p = log_p + self.scores[:, :, None]
        self.count += 1
        if self.stop_tokens:
            # The output is the same for all stop tokens, so their probabilities are added.
            self._finish_stopped(log_p[:, :, self.stop_tokens].logsumexp(-1).tolist())
            log_p[:, :, self.stop_tokens] = -math.inf
        keep = min(self.width, A * max(1, N - len(self.stop_tokens)))
        self.scores, best = log_p.flatten(1).topk(keep)
        parents = best // N
        new = best % N
        before = self.tokens.gather(1, parents[..., None].expand(-1, -1, self.count - 1))
        self.tokens = torch.cat([before, new[..., None]], -1)
        if self.settings.stops:
            self._finish_stop_texts()
        rows = parents + A * torch.arange(P, device=best.device)[:, None]
        return new.flatten(), rows.flatten()

    @property
    def choices(self) -> list[list[Choice]]:
        """Returns the outputs of each prompt, best first."""
        if self.count < self.limit:
            # The search has ended early: no unfinished output can still become one of the best.
            return self.finished
        assert self.scores is not None and self.tokens is not None
        ended = "max" if self.limit == self.settings.max_tokens else "full"
        for p, (scores, outputs) in enumerate(zip(self.scores.tolist(), self.tokens.tolist(), strict=True)):
            for score, ids in zip(scores, outputs, strict=True):
                if score > -math.inf:
                    self._add_finished(p, ids, score, ended)
        return self.finished

    def _rank(self, score: float, length: int) -> float:
        return score / math.pow(length, self.settings.length_penalty)

    def _rank_bound(self, score: float) -> float:
        """Returns the best rank that an unfinished output can still reach.

        The rank is monotonic in the length, so it is largest at the next length or at the limit.
        """
        return max(self._rank(score, self.count + 1), self._rank(score, self.limit))

    def _finish_stopped(self, stop_scores: list[list[float]]) -> None:
        """Adds the outputs that end with a stop token at this step; the token is scored, but not kept."""
        assert self.tokens is not None
        tokens = self.tokens.tolist()
        for p, scores in enumerate(stop_scores):
            for a, score in enumerate(scores):
                if score > -math.inf:
                    self._add_finished(p, tokens[p][a], score, "stop")

    def _finish_stop_texts(self) -> None:
        """Adds the outputs whose text now holds a stop text, and takes them out of the search."""
        assert self.tokens is not None and self.scores is not None
        for p, outputs in enumerate(self.tokens.tolist()):
            for a, ids in enumerate(outputs):
                score = float(self.scores[p, a])
                if score > -math.inf and self._read(ids).stopped:
                    self._add_finished(p, ids, score, "stop")
                    self.scores[p, a] = -math.inf

    def _add_finished(self, p: int, ids: list[int], score: float, ended: str) -> None:
        """Adds an output to the finished ones of a prompt if it is among the best of them."""
        rank = self._rank(score, self.count)
        best = self.finished[p]
        if len(best) == self.width and rank <= best[-1].score:
            return
        text = None
        if self.tokenizer is not None:
            text = self._read(ids).text
        best.append(Choice(text, ids, rank, ended))
        best.sort(key=lambda c: -c.score)
        del best[self.width :]

    def _read(self, ids: list[int]) -> OutputText:
        """Returns the text of an output, up to a stop text."""
        assert self.tokenizer is not None
        output = OutputText(self.tokenizer, self.settings.stops)
        for token in ids:
            if output.push(token):
                return output
        output.finish()
        return output
