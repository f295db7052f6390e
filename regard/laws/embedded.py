"""Language models over token ids, asked as modules over the vectors of their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.laws.signatures import required_names


class EmbeddedTokens(nn.Module):
    """A model over token ids [B,T] as a module over vectors x [B,T,D], which stand for what its embedding returns."""

    def __init__(self, model: nn.Module, embedding: nn.Embedding) -> None:
        super().__init__()
        self.model = model
        self.width = embedding.embedding_dim
        self.__dict__["embedding"] = embedding  # it belongs to the model, where it is registered already

    def forward(self, x: Tensor) -> Any:
        ids = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        with _returning(self.__dict__["embedding"], x):
            return self.model(ids)

    def __deepcopy__(self, memo: dict[int, Any]) -> EmbeddedTokens:
        import copy

        model = copy.deepcopy(self.model, memo)
        return EmbeddedTokens(model, copy.deepcopy(self.__dict__["embedding"], memo))


@contextmanager
def _returning(embedding: nn.Embedding, x: Tensor) -> Iterator[None]:
    """Makes an embedding return x while the context lasts, where it is given as many ids."""

    def replace(module: nn.Module, given: tuple[Any, ...], output: Tensor) -> Tensor:
        if output.shape == x.shape:
            return x
        return output

    handle = embedding.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()


def over_embeddings(model: nn.Module) -> nn.Module:
    """Returns a model over token ids as a module over their vectors; any other module as it is.

    It is one over ids if it runs on ids and not on vectors, and its first embedding is given them all.
    """
    embedding = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if embedding is None or len(required_names(model)) != 1:
        return model
    weight = embedding.weight
    ids = torch.zeros(2, 3, dtype=torch.long, device=weight.device)
    seen: list[torch.Size] = []
    handle = embedding.register_forward_hook(lambda module, given, output: seen.append(output.shape))
    try:
        with torch.no_grad():
            model(ids)
    except Exception:  # whatever it takes, it is no batch of ids alone
        return model
    finally:
        handle.remove()
    if seen != [torch.Size([2, 3, embedding.embedding_dim])]:
        return model
    return EmbeddedTokens(model, embedding)
