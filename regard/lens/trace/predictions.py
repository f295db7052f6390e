"""Next-token predictions in a trace: those of the residual stream at each layer, and what each head adds to a logit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import OptionError, quote
from regard.lens.trace.arrays import TraceError
from regard.reading import check_hints

_ARRAYS = {"top": "i32", "p": "f32", "candidates": "i32", "logits": "f32", "rest": "f32"}


@dataclass
class Predictions:
    """The predictions of a model of L blocks over T tokens, with C candidates for the next token at each position.

    The names of the fields are keys of the trace format. `rest` has the R = L + 2 parts of a logit that no head adds:
    the embeddings, each block's MLP with its biases, and the constant of the last norm and the language-model head. The
    heads and the rest add up to the logit. Both are empty in a model where no such sum exists, and `why` says why.
    """

    sequence: int  # index of the text in the recording
    attentions: list[int]  # index of each block's attention in the recording
    tokens: dict[int, str]  # the text of every token id below
    top: Int[Tensor, "M T K"]  # the likeliest tokens by the stream before the first block and after each, M = L + 1
    p: Float[Tensor, "M T K"]  # their probabilities
    candidates: Int[Tensor, "T C"]  # the likeliest next tokens, and the actual next token
    logits: Float[Tensor, "T C"]
    heads: list[Float[Tensor, "T C H"]]  # for each block, what each head adds to the logit of each candidate
    rest: Float[Tensor, "T C R"]
    why: str = ""  # why the logits are no sum over heads in this model, or ""

    def text(self, token: int) -> str:
        """Returns the text of a token id."""
        return self.tokens[token]

    def contributions(self, position: int, token: int) -> tuple[list[Float[Tensor, " H"]], Float[Tensor, " R"]]:
        """Returns what each head of each block, and each part of `rest`, adds to a candidate's logit at a position."""
        found = (self.candidates[position] == token).nonzero()
        if not len(self.heads):
            raise OptionError(self.why)
        if not len(found):
            known = ", ".join(str(int(x)) for x in self.candidates[position])
            raise OptionError(f"token {token} is no candidate at position {position}: there are {known}")
        c = int(found[0, 0])
        return [x[position, c] for x in self.heads], self.rest[position, c]


def encode_predictions(found: Predictions, put: Callable[[Tensor, str], dict[str, Any]]) -> dict[str, Any]:
    """Returns the header entry of predictions; `put` stores an array and returns where it is."""
    arrays: dict[str, Any] = {name: put(getattr(found, name), kind) for name, kind in _ARRAYS.items()}
    arrays["heads"] = [put(x, "f32") for x in found.heads]
    return {
        "sequence": found.sequence,
        "attentions": found.attentions,
        "tokens": [[token, text] for token, text in found.tokens.items()],
        "why": found.why,
        "arrays": arrays,
    }


def decode_predictions(
    entry: dict[str, Any], lengths: Sequence[int], heads: Sequence[int], read: Callable[[Any, str], Tensor], source: str
) -> Predictions:
    """Returns the predictions of a header entry; raises TraceError if its parts do not fit together.

    `lengths` are those of the recording's sequences, `heads` the numbers of heads of its attentions.
    """
    arrays = entry["arrays"]
    found = Predictions(
        entry["sequence"],
        entry["attentions"],
        {int(token): str(text) for token, text in entry["tokens"]},
        heads=[read(x, "heads").float() for x in arrays["heads"]],
        why=str(entry["why"]),
        **{name: read(arrays[name], name) for name in _ARRAYS},
    )
    check_hints(found, source, TraceError, (*_ARRAYS, "heads", "tokens"))
    L = len(found.attentions)
    T = lengths[found.sequence]
    C = found.candidates.shape[-1]
    if min(found.attentions, default=0) < 0 or found.sequence < 0:
        raise TraceError(f"{source}: its predictions name attention {quote(found.attentions)}; record it again")
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]
    shapes = [(x.shape, (T, C, heads[a])) for x, a in zip(found.heads, found.attentions, strict=bool(found.heads))]
    shapes += [(found.p.shape, found.top.shape), (found.logits.shape, (T, C)), (found.candidates.shape, (T, C))]
    shapes += [(found.top.shape[:2], (L + 1, T))]
    if found.heads:
        shapes += [(found.rest.shape, (T, C, L + 2))]
    for shape, expected in shapes:
        if tuple(shape) != tuple(expected):
            raise TraceError(f"{source}: an array of its predictions is {list(shape)}, expected {list(expected)}")
    ids = torch.cat([found.top.flatten(), found.candidates.flatten()]).unique().tolist()
    if not set(map(int, ids)) <= set(found.tokens):
        raise TraceError(f"{source}: its predictions hold tokens without a text; record it again")
    return found
