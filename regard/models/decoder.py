"""What writes text: an embedding, a causal stack, and logits of the next token. GPT is one; Seq2Seq has one."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.kernels.matvec import linear
from regard.models.base import C, Model
from regard.models.config import StackConfig
from regard.models.stack import Stack, StackState, fork_stack, initialise


class Decoder(Model[C]):
    """A model that generates. Its state is that of its stack."""

    embedding: nn.Embedding
    head: nn.Linear | None
    stack: Stack

    def _build(self, vocabulary: int, config: StackConfig, tied: bool, **cross: Any) -> None:
        self.embedding = nn.Embedding(vocabulary, config.width)
        self.head = None if tied else nn.Linear(config.width, vocabulary, bias=False)
        initialise(self, residuals=1)
        self.stack = Stack(config, **cross)

    @property
    def limit(self) -> int | None:
        """The most tokens that its stack can take; None: any number."""
        return self.stack.limit

    @abstractmethod
    def begin(
        self, tokens: Int[Tensor, "B T"], visible: Bool[Tensor, "B T"] | None, capacity: int
    ) -> tuple[Float[Tensor, "B 1 N"], StackState]:
        """Reads a prompt whose last column is visible: logits of what follows, and the state."""

    @abstractmethod
    def room(self, prompt: int) -> int | None:
        """How many tokens can follow a prompt of that length; None: any number."""

    def empty(self, B: int, capacity: int) -> StackState:
        """A state that has seen nothing, with room for `capacity` tokens before it has to grow."""
        return self.stack.empty(B, capacity)

    def extend(
        self,
        tokens: Int[Tensor, "B T"],
        state: StackState,
        visible: Bool[Tensor, "B T"] | None = None,
        *,
        last: bool = False,
    ) -> tuple[Float[Tensor, "B _ N"], StackState]:
        """Logits after T more tokens (`last`: only of the last), and the state. The state handed in is used up."""
        x, state = self.stack.extend(self.embedding(tokens), state, visible)
        return self.logits(x[:, -1:] if last else x), state

    def fork(self, state: StackState, rows: Int[Tensor, " N"] | None = None, same_source: bool = False) -> StackState:
        """A copy of a state, or of some rows of it in any order. `same_source`: rows move only within one source."""
        return fork_stack(state, rows, same_source)

    def logits(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T N"]:
        """Logits of the next token from the vectors of the stack."""
        return linear(x, self.embedding.weight if self.head is None else self.head.weight)
