"""The output projection of an attention module, and the length ‖v · W_o‖ of each value (Kobayashi et al. 2020).

The projection of a Hugging Face model is found while the model runs, because it has another name and place in each
family: it is the module with a matrix that is given exactly the heads' outputs, side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.nn import Attention
from regard.nn.merges import Merge

MAX_TOKENS = 512  # largest number of tokens of a text for which contributions are recorded by default


def records_contributions(wanted: bool | None, length: int) -> bool:
    """Returns whether a text's contributions are recorded: as `wanted` says, or if it is None for short texts."""
    return length <= MAX_TOKENS if wanted is None else wanted


class OutputProjections:
    """The output projections of a model's attention modules, by the modules' names, found while it runs."""

    def __init__(self) -> None:
        self.found: dict[str, nn.Module] = {}
        self._waiting: tuple[str, Tensor] | None = None

    def expect(self, name: str, out: Tensor) -> None:
        """Notes the heads' outputs [B,T,H,V] of an attention module, whose projection is then found by its input."""
        if name not in self.found:
            self._waiting = (name, out)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Looks at the input of every module with a weight matrix while the context lasts."""
        with ExitStack() as removal:
            for module in model.modules():
                weight = getattr(module, "weight", None)
                if isinstance(weight, Tensor) and weight.dim() == 2 and not isinstance(module, nn.Embedding):
                    removal.callback(module.register_forward_pre_hook(self._look).remove)
            yield

    def _look(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Forward pre-hook: stores the module as a projection if its input is the outputs that `expect` noted."""
        if self._waiting is None or not inputs or not isinstance(inputs[0], Tensor):
            return
        name, out = self._waiting
        given = inputs[0]
        if given.numel() == out.numel() and torch.equal(given.flatten(), out.flatten()):
            self.found[name] = module
            self._waiting = None


@torch.no_grad()
def head_matrices(projection: nn.Module, heads: int) -> Float[Tensor, "H V D"]:
    """Returns the part of an output projection that multiplies each head's output, in float32 on the CPU.

    It is what the projection makes of the identity matrix, so that it does not matter whether the weight is transposed.
    """
    weight: Any = projection.weight
    width = _input_width(projection)
    probe = torch.eye(width, device=weight.device, dtype=weight.dtype)
    matrix: Tensor = (projection(probe) - projection(torch.zeros_like(probe[:1]))).float().cpu()
    return matrix.view(heads, width // heads, -1)


def _input_width(projection: Any) -> int:
    """Returns the width of a projection's input; transformers' Conv1D stores its weight as [in,out]."""
    found = getattr(projection, "in_features", None)
    return int(projection.weight.shape[0] if found is None else found)


def regard_head_matrices(attention: Attention) -> Float[Tensor, "H V D"] | None:
    """Returns what `head_matrices` returns for a layer of regard's.

    Returns None if a gate, a norm or another merge stands between the heads and the projection.
    """
    if type(attention.merge) is not Merge or attention.gate is not None or attention.head_norm is not None:
        return None
    return head_matrices(attention.out, attention.size.H)


def value_lengths(v: Float[Tensor, "G S V"], matrices: Float[Tensor, "H V D"]) -> Float[Tensor, "H S"]:
    """Returns ‖v_j · W_o‖ for each head and key: the length of the vector that a key adds to the stream at weight 1.

    It is computed with W_o · W_oᵀ [V,V], which costs less than computing all v_j · W_o, of the model's width.
    """
    values = v.repeat_interleave(len(matrices) // len(v), 0).double()
    products = matrices.double() @ matrices.double().mT
    return ((values @ products) * values).sum(-1).clamp(min=0).sqrt().float()
