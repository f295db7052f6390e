"""Seq2Seq: an encoder reads a source; a decoder, which may differ from it in all sizes, attends to it and writes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.config import ConfigError
from regard.data.batch import IGNORE
from regard.models.base import MODELS
from regard.models.config import Seq2SeqConfig
from regard.models.decoder import Decoder
from regard.models.embedding import TokenEmbedding
from regard.models.losses import token_loss
from regard.models.stack import Stack, StackState


def _both_sides(**stack: Any) -> dict[str, Any]:
    """Returns the config of a model whose encoder and decoder are alike."""
    return {"encoder": stack, "decoder": stack}


@MODELS.add("Seq2Seq")
class Seq2Seq(Decoder[Seq2SeqConfig]):
    """Logits of the next target token at each place: `model(source, target) → [B,T,vocabulary]`."""

    Config = Seq2SeqConfig
    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "nano": _both_sides(width=48, layers=3, length=256, attention={"heads": 3})
        | {"vocabulary": 256, "shared": True},
        "small": _both_sides(width=256, layers=4, length=512, attention={"heads": 8}) | {"shared": True},
        "base": _both_sides(
            width=512, layers=6, attention={"heads": 8}, position="sinusoidal", block={"before": False, "mlp": "relu"}
        )
        | {"shared": True},
    }

    def __init__(self, config: Seq2SeqConfig | None = None, **changes: Any) -> None:
        super().__init__(config, **changes)
        c = self.config
        vocabulary = c.target_vocabulary or c.vocabulary
        if c.shared and (c.encoder.width, c.vocabulary) != (c.decoder.width, vocabulary):
            raise ConfigError(
                f"model.shared: one embedding for both sides needs one width and vocabulary, not {c.encoder.width} and "
                f"{c.decoder.width}, {c.vocabulary} and {vocabulary}"
            )
        if not 0 <= c.start < vocabulary:
            raise ConfigError(f"model.start = {c.start}: expected a target token, 0 to {vocabulary - 1}")
        self.source_embedding = None
        if not c.shared:
            self.source_embedding = TokenEmbedding(c.vocabulary, c.encoder.width)
        cross = {"source": c.encoder.width, "cross": c.cross, "cross_options": c.cross_options}
        self._build(vocabulary, c.decoder, c.tied, **cross)
        self.encoder = Stack(c.encoder, causal=False)

    def forward(
        self,
        source: Int[Tensor, "B S"],
        target: Int[Tensor, "B T"],
        source_visible: Bool[Tensor, "B S"] | None = None,
        target_visible: Bool[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T N"]:
        """Returns logits of the next token at each place of a whole target; `target` begins with `config.start`."""
        encoded = self.encode(source, source_visible)
        x = self.stack(self.embedding(target), target_visible, source=encoded, source_visible=source_visible)
        return self.logits(x)

    def loss(
        self,
        source: Int[Tensor, "B S"],
        target: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        source_visible: Bool[Tensor, "B S"] | None = None,
        target_visible: Bool[Tensor, "B T"] | None = None,
        ignore: int = IGNORE,
    ) -> Float[Tensor, ""]:
        """Returns the mean loss of the targets that are not `ignore`."""
        return token_loss(self(source, target, source_visible, target_visible), targets, ignore)

    def encode(self, source: Int[Tensor, "B S"], visible: Bool[Tensor, "B S"] | None = None) -> Float[Tensor, "B S E"]:
        """Returns the encoder's output for a source: one vector for each token, [B,S,E]."""
        embedding = self.source_embedding or self.embedding
        out: Tensor = self.encoder(embedding(source), visible)
        return out

    def write(
        self, state: StackState, source: Int[Tensor, "B S"], visible: Bool[Tensor, "B S"] | None = None
    ) -> StackState:
        """Encodes a source and returns the state with it written once, for every later token to read."""
        return self.stack.write(state, self.encode(source, visible), visible)

    def prefill(
        self, tokens: Int[Tensor, "B S"], visible: Bool[Tensor, "B S"] | None, capacity: int
    ) -> tuple[Float[Tensor, "B 1 N"], StackState]:
        """Reads a source; returns logits of the first target token, and the state."""
        state = self.write(self.empty(tokens.shape[0], capacity), tokens, visible)
        start = torch.full((tokens.shape[0], 1), self.config.start, dtype=torch.long, device=tokens.device)
        return self.extend(start, state, last=True)

    def max_new_tokens(self, prompt: int) -> int | None:
        """Returns how many tokens a target can have, whatever the source; None: any number."""
        # The start token takes a position, and the last token, which is not read, takes none.
        return self.limit
