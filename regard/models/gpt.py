"""GPT: a decoder-only language model over any mechanism."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.data.batch import IGNORE
from regard.mechanisms.foreign import refuse_others
from regard.models.base import MODELS
from regard.models.config import GPTConfig
from regard.models.decoder import Decoder
from regard.models.stack import StackState


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {"width": width, "layers": layers, "attention": {"heads": heads}}


@MODELS.add("GPT")
class GPT(Decoder[GPTConfig]):
    """Logits of the next token at each place: `model(tokens) → [B,T,vocabulary]`."""

    Config = GPTConfig
    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "nano": {"width": 48, "layers": 3, "attention": {"heads": 3}},
        "char": {"width": 256, "layers": 4, "length": 128, "vocabulary": 256, "attention": {"heads": 8}},
        "gpt2": _gpt2(768, 12, 12),
        "gpt2-medium": _gpt2(1024, 24, 16),
        "gpt2-large": _gpt2(1280, 36, 20),
        "gpt2-xl": _gpt2(1600, 48, 25),
    }

    def __init__(self, config: GPTConfig | None = None, **changes: Any) -> None:
        super().__init__(config, **changes)
        self._build(self.config.vocabulary, self.config, self.config.tied)

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        visible: Bool[Tensor, "B T"] | None = None,
        documents: Int[Tensor, "B T"] | None = None,
        **others: Any,
    ) -> Float[Tensor, "B T N"]:
        """Returns logits of the next token at each place of a whole sequence.

        `documents` numbers documents packed into a row: a change of number starts a new one, read as if alone.
        """
        refuse_others(others, "GPT")
        return self.logits(self.stack(self.embedding(tokens), visible, documents=documents))

    def loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        visible: Bool[Tensor, "B T"] | None = None,
        ignore: int = IGNORE,
        mean: bool = True,
        smoothing: float = 0.0,
    ) -> Float[Tensor, ""]:
        """Returns the mean (or sum) of the losses of the targets that are not `ignore`, as `token_loss` does."""
        x = self.stack(self.embedding(tokens), visible)
        return self.loss_of_vectors(x, targets, ignore, mean, smoothing)

    def prefill(
        self, tokens: Int[Tensor, "B T"], visible: Bool[Tensor, "B T"] | None, capacity: int
    ) -> tuple[Float[Tensor, "B 1 N"], StackState]:
        """Reads a prompt whose last column is visible; returns logits [B,1,N] of the next token, and the state."""
        state = self.empty(tokens.shape[0], tokens.shape[1] + capacity)
        return self.extend(tokens, state, visible, last=True)

    def max_new_tokens(self, prompt: int) -> int | None:
        """Returns how many tokens can follow a prompt of that length; None: any number."""
        if self.limit is None:
            return None
        # The last token is generated, but not read, so it takes no position.
        return self.limit - prompt + 1
