"""The linear layer of regard's models."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from regard.kernels.matvec import linear


class Projection(nn.Linear):
    """x Wᵀ + b. A single row on a GPU, as in decoding, is multiplied by a kernel that reads W at full speed."""

    def forward(self, x: Float[Tensor, "... K"]) -> Float[Tensor, "... N"]:
        return linear(x, self.weight, self.bias)
