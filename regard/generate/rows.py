"""Greedy decoding and sampling: every row goes its own way, and leaves when it is done."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.data.tokenizers import Tokenizer
from regard.generate.sampling import draw, penalised, uniforms
from regard.generate.settings import Choice, Settings
from regard.generate.text import Writer
from regard.shapes import upcast_half


class Rows:
    """Outputs under way, one a row. `limits`: how many tokens each may have; `draws` numbers their random streams."""

    moves_source = True  # rows that leave take their source with them

    def __init__(
        self,
        settings: Settings,
        limits: list[int],
        draws: list[int],
        seed: int,
        tokenizer: Tokenizer | None,
        stop_tokens: frozenset[int],
        seen: Bool[Tensor, "B N"] | None,
        device: torch.device,
        watch: bool = False,
    ) -> None:
        self.settings, self.limits, self.tokenizer, self.stop_tokens = settings, limits, tokenizer, stop_tokens
        self.limit, self.count, self._ends = max(limits), 0, set(limits)
        self.going = list(range(len(limits)))  # which output each row is
        self.finished: dict[int, Choice] = {}
        self._written = torch.zeros(len(limits), 0, dtype=torch.long, device=device)
        self._latest: list[Tensor] = []  # tokens of each step since
        self.scores = torch.zeros(len(limits), dtype=torch.float64, device=device)
        self.seen = seen
        self.u = uniforms(seed, draws, self.limit).to(device) if settings.samples else None
        writes = tokenizer is not None and (settings.stops or watch)
        self.writers = [Writer(tokenizer, settings.stops) for _ in limits] if writes and tokenizer else []

    @property
    def done(self) -> bool:
        return not self.going

    @property
    def choices(self) -> list[Choice]:
        """Every output, in order."""
        return [self.finished[n] for n in range(len(self.limits))]

    @property
    def tokens(self) -> Int[Tensor, "B count"]:
        """What each row has written."""
        if self._latest:
            self._written = torch.cat([self._written, torch.stack(self._latest, 1)], 1)
            self._latest = []
        return self._written

    def step(self, logits: Float[Tensor, "B N"]) -> tuple[Int[Tensor, " M"], Int[Tensor, " M"] | None]:
        """The next token of each row that goes on, and which rows those are; None: all of them."""
        raw = logits
        if self.seen is not None:
            logits = penalised(logits, self.seen, self.settings.repetition_penalty)
        tokens = logits.argmax(-1) if self.u is None else draw(logits, self.settings, self.u[:, self.count])
        if self.seen is not None:
            self.seen.scatter_(-1, tokens[:, None], True)
        self.scores += upcast_half(raw).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        self._latest.append(tokens)
        self.count += 1
        leaving = self._leaving(tokens)
        return (tokens, None) if not leaving else self._left(tokens, leaving)

    def _leaving(self, tokens: Tensor) -> dict[int, str]:
        """Rows that end here, and why."""
        ended: dict[int, str] = {}
        if self.count in self._ends:
            full = {n for n, output in enumerate(self.going) if self.limits[output] == self.count}
            ended = {n: "max" if self.count == self.settings.max_tokens else "full" for n in full}
        if self.stop_tokens or self.writers:
            for n, token in enumerate(tokens.tolist()):
                if token in self.stop_tokens or (self.writers and self.writers[self.going[n]].push(token)):
                    ended[n] = "stop"
        return ended

    def _left(self, tokens: Tensor, leaving: dict[int, str]) -> tuple[Tensor, Tensor | None]:
        rows, scores = self.tokens.tolist(), self.scores.tolist()
        for n, why in leaving.items():
            ids = rows[n][:-1] if rows[n][-1] in self.stop_tokens else rows[n]
            self.finished[self.going[n]] = Choice(self._text(self.going[n], ids), ids, scores[n], why)
        stay = [n for n in range(len(self.going)) if n not in leaving]
        self.going = [self.going[n] for n in stay]
        if not stay:
            return tokens, None
        index = torch.tensor(stay, device=tokens.device)
        self._written, self.scores = self.tokens[index], self.scores[index]
        self.u = None if self.u is None else self.u[index]
        self.seen = None if self.seen is None else self.seen[index]
        return tokens[index], index

    def _text(self, output: int, ids: list[int]) -> str | None:
        if not self.writers:
            return None if self.tokenizer is None else self.tokenizer.decode(ids)
        self.writers[output].finish()
        return self.writers[output].text
