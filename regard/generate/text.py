"""Text as it is generated: pieces that no later token can change, cut where a stop text begins."""

from __future__ import annotations

from collections.abc import Sequence

from regard.data.tokenizers import Tokenizer


class Writer:
    """The text of one output. What might turn out to begin a stop text is held back until that is known."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.pieces, self.stops = tokenizer.pieces(), stops
        self.text, self.stopped = "", False
        self._given = 0

    def push(self, token: int) -> bool:
        """Takes a token; says whether a stop text is complete."""
        return self._add(self.pieces.push(token))

    def finish(self) -> bool:
        """Takes what was held back in the middle of a character; says whether that completed a stop text."""
        return self.stopped or self._add(self.pieces.finish())

    def _add(self, piece: str) -> bool:
        start = max(0, len(self.text) - max((len(s) - 1 for s in self.stops), default=0))
        self.text += piece
        found = [at for at in (self.text.find(s, start) for s in self.stops) if at >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True
        return self.stopped

    def news(self, final: bool = False) -> str:
        """Text not given out before, that no stop text can take back."""
        end = len(self.text)
        if not final and not self.stopped:
            begun = (n for s in self.stops for n in range(min(len(s) - 1, end), 0, -1) if self.text.endswith(s[:n]))
            end -= max(begun, default=0)
        new = self.text[self._given : end]
        self._given = max(self._given, end)
        return new
