"""The next tokens that each layer predicts (logit lens), and what each head adds to a token's logit.

The logit lens applies the last norm and the language-model head to the stream after each block (nostalgebraist 2020). A
direct contribution is what a part of the stream adds to a logit while the divisor of the last norm is held fixed; then
the parts add up to the logit exactly (Elhage et al. 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import OptionError
from regard.lens.recording.losses import has_language_head
from regard.lens.recording.outputs import records_contributions
from regard.lens.recording.stream import Stream, StreamError, read_stream
from regard.lens.trace.predictions import Predictions
from regard.lens.trace.trace import Recording
from regard.models import GPT, Model

MAX_OPERATIONS = 2e11  # largest number of operations of a logit lens that is made by default: some seconds of one core
TOP = 5  # tokens that are kept for each layer and position


def add_predictions(recording: Recording, model: Any, tokenizer: Any, wanted: bool | None) -> None:
    """Adds predictions to a recording, if the model is a decoder-only language model.

    `wanted`: True adds them, and raises StreamError if the model's stream cannot be read; False adds none; None adds
    them only if that takes seconds and the stream can be read.
    """
    if not records_contributions(wanted, max(map(len, recording.sequences))) or not predicts_next(model):
        return
    sequence = recording.sequences[-1]
    if sequence.ids is None or not all(sequence.visible):
        return
    width = recording.model.width * (recording.model.layers + 1)
    if wanted is None and 2.0 * len(sequence) * width * _vocabulary_size(model) > MAX_OPERATIONS:
        return
    try:
        stream = read_stream(model, sequence.ids)
    except StreamError:
        if wanted:
            raise
        return
    recording.predictions = predictions_of(stream, recording, tokenizer)


def predicts_next(model: Any) -> bool:
    """Returns whether a model is a decoder that predicts the next token of its own text."""
    if isinstance(model, Model):
        return isinstance(model, GPT)
    if getattr(model.config, "is_encoder_decoder", False) or not has_language_head(model):
        return False
    return bool(model.can_generate()) and model.get_output_embeddings() is not None


def predictions_of(stream: Stream, recording: Recording, tokenizer: Any) -> Predictions:
    """Returns the predictions of a recorded text from the stream of a pass over it."""
    ids = recording.sequences[-1].ids
    assert ids is not None
    names = [attended.name for attended in recording.attentions]
    top, p = _lens(stream)
    candidates = _candidates(stream.logits, ids)
    heads, rest = direct_contributions(stream, candidates)
    known = {int(x) for x in torch.cat([top.flatten(), candidates.flatten()]).unique()}
    return Predictions(
        len(recording.sequences) - 1,
        [names.index(name) for name in stream.attentions],
        {token: token_text(tokenizer, token) for token in sorted(known)},
        top,
        p,
        candidates,
        stream.logits.gather(1, candidates.long()),
        heads,
        rest,
        stream.why,
    )


@torch.no_grad()
def _lens(stream: Stream) -> tuple[Int[Tensor, "M T K"], Float[Tensor, "M T K"]]:
    """Returns the likeliest tokens by the stream before the first block and after each, and their probabilities."""
    tops = []
    last = len(stream.residuals) - 1
    for n, x in enumerate(stream.residuals):
        logits = stream.logits if n == last else stream.read(x)
        p = logits.softmax(-1)
        tops.append(p.topk(min(TOP, p.shape[-1]), -1))
    return torch.stack([found.indices for found in tops]).int(), torch.stack([found.values for found in tops])


def _candidates(logits: Float[Tensor, "T N"], ids: Sequence[int]) -> Int[Tensor, "T C"]:
    """Returns the TOP + 1 likeliest next tokens of each position, the last replaced by the actual next token.

    It is not replaced if the next token is among them already, nor at the last position.
    """
    best = logits.topk(min(TOP + 1, logits.shape[-1]), -1).indices
    coming = torch.tensor([*ids[1:], int(best[-1, -1])])
    missing = ~(best == coming[:, None]).any(-1)
    best[missing, -1] = coming[missing]
    return best.int()


@torch.no_grad()
def direct_contributions(
    stream: Stream, candidates: Int[Tensor, "T C"]
) -> tuple[list[Float[Tensor, "T C H"]], Float[Tensor, "T C R"]]:
    """Returns what each head of each block adds to the logits of the candidates, and what everything else adds.

    Everything else is, in this order, the embeddings, each block's MLP with its biases, and the constant of the last
    norm and the language-model head. Both are empty if the parts do not add up (`stream.why`).
    """
    if stream.why or stream.frozen is None:
        return [], torch.zeros(*candidates.shape, 0)
    rows, constant = stream.head_rows(candidates)
    directions = stream.frozen.directions(rows)
    constant = constant + rows @ stream.frozen.shift
    before = stream.residuals[0]
    rest = [torch.einsum("td,tcd->tc", before, directions)]
    heads = []
    for after, out, matrix in zip(stream.residuals[1:], stream.outputs, stream.matrices, strict=True):
        read = torch.einsum("hvd,tcd->tchv", matrix, directions)
        mine = torch.einsum("thv,tchv->tch", out, read)
        heads.append(mine)
        rest.append(torch.einsum("td,tcd->tc", after - before, directions) - mine.sum(-1))
        before = after
    return heads, torch.stack([*rest, constant], -1)


def token_text(tokenizer: Any, token: int) -> str:
    """Returns the text of a token, or its number if there is no tokenizer or the tokenizer does not know it."""
    if tokenizer is None:
        return str(token)
    known = tokenizer.size if hasattr(tokenizer, "role") else len(tokenizer)
    if token >= known:
        return f"<{token}>"
    text = str(tokenizer.decode([token]))
    if "\ufffd" in text and hasattr(tokenizer, "convert_ids_to_tokens"):  # part of a character
        return str(tokenizer.convert_ids_to_tokens(token))
    return text


def token_of(tokenizer: Any, text: str) -> int:
    """Returns the first token of a text, with a tokenizer of transformers or of regard's."""
    special = {} if hasattr(tokenizer, "role") else {"add_special_tokens": False}
    ids = list(tokenizer.encode(text, **special)) if tokenizer is not None else []
    if not ids:
        raise OptionError(f"{text!r} has no tokens: type the beginning of what might come next")
    return int(ids[0])


def _vocabulary_size(model: Any) -> int:
    """Returns the size of a model's vocabulary."""
    if isinstance(model, Model):
        return int(model.config.vocabulary)
    return int(model.config.get_text_config().vocab_size)
