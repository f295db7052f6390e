"""Encoder: a bidirectional model over any mechanism, with a head for masked words or for classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from regard.data.batch import IGNORE
from regard.mechanisms.foreign import refuse_others
from regard.models.base import MODELS, Model
from regard.models.config import EncoderConfig
from regard.models.embedding import TokenEmbedding
from regard.models.losses import token_loss
from regard.models.stack import Stack, init_weights
from regard.nn import NORMS, Registry

_BERT: dict[str, Any] = {"before": False, "embedding_norm": True, "mlp": "gelu", "eps": 1e-12}


class Head(nn.Module):
    """The head "none", which returns the vectors unchanged, and the base class of the other heads.

    `forward` takes the vectors [B,T,D], which of them are visible [B,T], and the weights of the embedding [N,D].
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()

    def forward(self, x: Tensor, visible: Tensor | None, embedding: Tensor) -> Tensor:
        return x


HEADS: Registry[Callable[..., Head]] = Registry("head")
HEADS.add("none")(Head)


@HEADS.add("masked")
class MaskedHead(Head):
    """Logits of the word at each place: norm(gelu(x A + a)) Eᵀ + b, with E the embedding if `tied`."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        D = config.width
        block = config.block
        self.dense = nn.Linear(D, D)
        self.norm = NORMS.build(block.norm, {"D": D, "eps": block.eps, "bias": block.bias})
        self.table = None
        if not config.tied:
            self.table = nn.Linear(D, config.vocabulary, bias=False)
        self.offset = nn.Parameter(torch.zeros(config.vocabulary))

    def forward(self, x: Tensor, visible: Tensor | None, embedding: Tensor) -> Tensor:
        x = self.norm(functional.gelu(self.dense(x)))
        if self.table is not None:
            embedding = self.table.weight
        return functional.linear(x, embedding, self.offset)


@HEADS.add("classes")
class ClassHead(Head):
    """Logits of the classes of a whole text, from its first visible token: tanh(x A + a) C + c."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.dense = nn.Linear(config.width, config.width)
        self.classes = nn.Linear(config.width, config.classes)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, visible: Tensor | None, embedding: Tensor) -> Tensor:
        first = x[:, 0]
        if visible is not None:  # argmax of equal values is the first of them
            rows = torch.arange(x.shape[0], device=x.device)
            first = x[rows, visible.int().argmax(1)]
        out: Tensor = self.classes(self.dropout(torch.tanh(self.dense(first))))
        return out


@MODELS.add("Encoder")
class Encoder(Model[EncoderConfig]):
    """`model(tokens)` returns, by its head, vectors [B,T,D], or logits: of words [B,T,vocabulary], of classes
    [B,classes]."""

    Config = EncoderConfig
    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "nano": {"width": 48, "layers": 3, "attention": {"heads": 3}, "vocabulary": 256, "length": 128},
        "mini": {"width": 256, "layers": 4, "attention": {"heads": 4}, "length": 512, "token_types": 2, "block": _BERT},
        "bert": {"length": 512, "token_types": 2, "block": _BERT},
    }

    def __init__(self, config: EncoderConfig | None = None, **changes: Any) -> None:
        super().__init__(config, **changes)
        c = self.config
        self.embedding = TokenEmbedding(c.vocabulary, c.width)
        self.types = None
        if c.token_types:
            self.types = nn.Embedding(c.token_types, c.width)
        self.head = HEADS.find(c.head)(c)
        init_weights(self, residuals=1)
        self.stack = Stack(c, causal=False)

    @property
    def limit(self) -> int | None:
        """Returns the most tokens that it can read; None: any number."""
        return self.stack.limit

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        visible: Bool[Tensor, "B T"] | None = None,
        types: Int[Tensor, "B T"] | None = None,
        **others: Any,
    ) -> Float[Tensor, "B ..."]:
        """Returns the output of the head.

        `types`: the token types, such as which of two texts a token belongs to; 0 unless given.
        """
        refuse_others(others, "Encoder")
        return self.head(self.vectors(tokens, visible, types), visible, self.embedding.weight)  # type: ignore[no-any-return]

    def vectors(
        self,
        tokens: Int[Tensor, "B T"],
        visible: Bool[Tensor, "B T"] | None = None,
        types: Int[Tensor, "B T"] | None = None,
        documents: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Returns one vector a token; `documents` numbers documents packed into a row, each read as if alone."""
        x = self.embedding(tokens)
        if self.types is not None:
            if types is None:
                types = torch.zeros_like(tokens)
            x = x + self.types(types)
        out: Tensor = self.stack(x, visible, documents=documents)
        return out

    def loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "*target"],
        visible: Bool[Tensor, "B T"] | None = None,
        types: Int[Tensor, "B T"] | None = None,
        ignore: int = IGNORE,
    ) -> Float[Tensor, ""]:
        """Returns the mean loss of words at the places whose target is not `ignore`, or of classes."""
        return token_loss(self(tokens, visible, types), targets, ignore)
