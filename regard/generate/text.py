"""Text as it is generated: pieces that no later token can change, cut where a stop text begins."""

from __future__ import annotations

from collections.abc import Sequence

from regard.data.tokenizers import Tokenizer


class OutputText:
    """The text of one output. An end that may be the beginning of a stop text is held back until that is known."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.pieces = tokenizer.pieces()
        self.stops = stops
        self.text = ""
        self.stopped = False
        self._emitted = 0  # characters

    def push(self, token: int) -> bool:
        """Takes a token; returns whether a stop text is complete."""
        return self._append(self.pieces.push(token))

    def finish(self) -> bool:
        """Takes the bytes held back of an unfinished character; returns whether a stop text is complete."""
        return self.stopped or self._append(self.pieces.finish())

    def _append(self, piece: str) -> bool:
        """Adds a piece and cuts the text where the first stop text begins; returns whether there is one."""
        # A new stop text must end in the new piece.
        longest = max(map(len, self.stops), default=1)
        start = max(0, len(self.text) - (longest - 1))
        self.text += piece
        matches = [place for place in (self.text.find(stop, start) for stop in self.stops) if place >= 0]
        if matches:
            self.text = self.text[: min(matches)]
            self.stopped = True
        return self.stopped

    def take_new(self, final: bool = False) -> str:
        """Returns the text that has not been returned before and that no stop text can remove."""
        end = len(self.text)
        if not final and not self.stopped:
            end -= self._open_stop()
        new = self.text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return new

    def _open_stop(self) -> int:
        """Returns how many characters at the end may be the beginning of a stop text."""
        beginnings = (stop[:n] for stop in self.stops for n in range(1, len(stop)))
        return max((len(begun) for begun in beginnings if self.text.endswith(begun)), default=0)
