"""The embedding of tokens, with errors that explain what is wrong with tokens."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ShapeError, TokenError


class TokenEmbedding(nn.Embedding):
    """The vector of each token: [B,T] → [B,T,D]."""

    def forward(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        if not isinstance(tokens, Tensor):
            raise ShapeError(f"tokens are a {type(tokens).__name__}, expected a tensor [B,T] of whole numbers")
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise ShapeError(
                f"tokens are {tokens.dtype} {list(tokens.shape)}, expected whole numbers [B,T]; one sequence is "
                "tokens[None]"
            )
        if tokens.device != self.weight.device:
            raise ShapeError(
                f"tokens are on {tokens.device}, the model on {self.weight.device}: tokens.to(model.device)"
            )
        try:
            return super().forward(tokens)
        except IndexError:  # on a CPU; a GPU reports it later, as an error of CUDA
            least, most = int(tokens.min()), int(tokens.max())
        raise TokenError(
            f"tokens from {least} to {most}: this model's vocabulary is 0 to {self.num_embeddings - 1}. Is the "
            "tokenizer that of the model?"
        )
