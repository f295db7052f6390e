"""The base class of models that generate: an embedding, a causal stack, and logits of the next token."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.data.batch import IGNORE
from regard.kernels.matvec import linear
from regard.models.base import C, Model
from regard.models.config import StackConfig
from regard.models.embedding import TokenEmbedding
from regard.models.losses import chunk_tokens, head_loss, token_loss
from regard.models.stack import Stack, StackState, fork_stack, init_weights


class Decoder(Model[C]):
    """A model that generates tokens (GPT, Seq2Seq); its decoding state is that of its stack."""

    embedding: nn.Embedding
    head: nn.Linear | None
    stack: Stack

    def _build(self, vocabulary: int, config: StackConfig, tied: bool, **cross: Any) -> None:
        """Builds embedding, head and stack; the order must stay, as it decides which weights a seed draws."""
        self.embedding = TokenEmbedding(vocabulary, config.width)
        self.head = None
        if not tied:
            self.head = nn.Linear(config.width, vocabulary, bias=False)
        init_weights(self, residuals=1)
        self.stack = Stack(config, **cross)

    @property
    def limit(self) -> int | None:
        """Returns the most tokens that its stack can take; None: any number."""
        return self.stack.limit

    @abstractmethod
    def prefill(
        self, tokens: Int[Tensor, "B T"], visible: Bool[Tensor, "B T"] | None, capacity: int
    ) -> tuple[Float[Tensor, "B 1 N"], StackState]:
        """Reads a prompt whose last column is visible; returns logits [B,1,N] of the next token, and the state.

        `capacity`: the number of further tokens for which the state has room before it has to grow.
        """

    @abstractmethod
    def max_new_tokens(self, prompt: int) -> int | None:
        """Returns how many tokens can follow a prompt of that length; None: any number."""

    def empty(self, B: int, capacity: int) -> StackState:
        """Returns a state without tokens, with room for `capacity` tokens before it has to grow."""
        return self.stack.empty(B, capacity)

    def extend(
        self,
        tokens: Int[Tensor, "B T"],
        state: StackState,
        visible: Bool[Tensor, "B T"] | None = None,
        *,
        last: bool = False,
    ) -> tuple[Float[Tensor, "B _ N"], StackState]:
        """Returns logits after T more tokens (`last`: only of the last), and the state.

        The given state must not be used again: its buffers are written to.
        """
        x, state = self.stack.extend(self.embedding(tokens), state, visible)
        if last:
            x = x[:, -1:]
        return self.logits(x), state

    def fork(self, state: StackState, rows: Int[Tensor, " N"] | None = None, same_source: bool = False) -> StackState:
        """Returns a copy of a state, or of some of its rows in any order.

        `same_source`: each row takes the place of one with the same source, so cross-attention need not be copied.
        """
        return fork_stack(state, rows, same_source)

    def logits(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T N"]:
        """Returns logits of the next token, given the vectors of the stack."""
        # For one token at a time, a product of a matrix and a vector, `linear` has a faster kernel.
        return linear(x, self._head_weight)

    @property
    def _head_weight(self) -> Float[Tensor, "N D"]:
        """Returns the weight of the head: one of its own, or that of the embedding."""
        table = self.head or self.embedding
        return table.weight

    def loss_of_vectors(
        self,
        x: Float[Tensor, "B T D"],
        targets: Int[Tensor, "B T"],
        ignore: int = IGNORE,
        mean: bool = True,
        smoothing: float = 0.0,
    ) -> Float[Tensor, ""]:
        """Returns `token_loss` of the logits of the vectors [B,T,D] of the stack, by chunks of tokens if logits are
        many."""
        weight = self._head_weight
        if targets.numel() > chunk_tokens(weight.shape[0]):
            return head_loss(x, weight, targets, ignore, mean, smoothing)
        return self._loss_of_few(x, targets, ignore, mean, smoothing)

    def _loss_of_few(self, x: Tensor, targets: Tensor, ignore: int, mean: bool, smoothing: float) -> Tensor:
        """Returns the loss of tokens [B,T], with all of their logits computed at once."""
        return token_loss(self.logits(x), targets, ignore, mean, smoothing)
