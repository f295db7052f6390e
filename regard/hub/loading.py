"""Loading the weights of GPT-2-, Llama- and BERT-like models of Hugging Face into models of regard.

Only config.json, safetensors and tokenizer.json are read, and not by transformers, which need not be installed. The
shapes of a model are compared with the headers of its files before any memory is allocated.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.data.tokenizers import BPE, Tokenizer, TokenizerFileError
from regard.errors import HubError, RegardError
from regard.hub.families import FAMILIES, Family, Part, head_of
from regard.hub.keys import Keys
from regard.hub.safety import CONFIG, find_folder, read_config
from regard.hub.weights import Weights
from regard.models import GPT, Encoder

TOKENIZER = "tokenizer.json"
GENERATION = "generation_config.json"
# Files of tokenizers that have no tokenizer.json.
_OTHER_TOKENIZERS = (
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
)


def load(
    name: str | Path,
    device: torch.device | str = "cpu",
    download: bool = False,
    *,
    dtype: torch.dtype | None = None,
    ignore: Collection[str] = (),
) -> GPT | Encoder:
    """Returns a Hugging Face model, from a folder or by its id on the hub, as a model of regard with its tokenizer.

    `download` fetches it if it was not downloaded before. `dtype` is that of the weights in the file unless given.
    `ignore` names keys of its config that you know to change nothing; others that regard cannot honour are refused.
    """
    folder = find_folder(name, download)
    document = read_config(folder)
    family = _find_family(folder / CONFIG, document)
    with Weights(folder, family.prefix) as weights:
        keys = Keys(folder / CONFIG, document, family.default, ignore)
        try:
            config = family.read(keys, _find_head(family, keys, weights))
            keys.finish()
            with torch.device("meta"):  # no memory, and no random numbers, for what the files give
                model = family.model(config)
        except HubError:  # it names the file already
            raise
        except RegardError as error:
            raise HubError(f"{folder / CONFIG}: {error}") from error
        tensors = _convert_tensors(weights, family, config, document, model.state_dict(), dtype)
    model.load_state_dict(tensors, assign=True)
    model.tokenizer = _load_tokenizer(folder, document, config.vocabulary)
    assert isinstance(model, GPT | Encoder)
    return model.to(device).eval()


def _find_family(path: Path, document: Mapping[str, Any]) -> Family:
    """Returns the family of a config; the error for another lists those that there are."""
    model_type = document.get("model_type")
    if "format_version" in document:
        raise HubError(f"{path} is of a model saved by regard itself: regard.load reads it")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise HubError(
            f"{path}: model_type {model_type!r} is not among the families whose weights regard's models hold: "
            f"{', '.join(FAMILIES)}. Where the model is used as it is (regard view, check, heads), any of "
            "transformers' will do"
        )
    return FAMILIES[model_type]


def _find_head(family: Family, keys: Keys, weights: Weights) -> str:
    """Returns the head that a config asks for by its architecture, else the one that its tensors belong to."""
    classes = keys.document.get("architectures")
    if not classes:
        return family.head(weights.names)
    if not isinstance(classes, list) or len(classes) != 1 or classes[0] not in tuple(family.heads):
        raise keys.refuse("architectures", f"regard has the heads of {', '.join(family.heads)}")
    return family.heads[classes[0]]


def _convert_tensors(
    weights: Weights,
    family: Family,
    config: Any,
    document: Mapping[str, Any],
    ours: Mapping[str, Tensor],
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    """Returns our tensors, made of theirs. Raises an error if one is missing, left over, or of another shape."""
    parts = list(family.parts(config, document))
    used = {name for part in parts for name in part.theirs}
    copies = {name: other for name, other in family.copies(config).items() if name in weights.names}
    for name in sorted(weights.names - used - set(copies)):
        if not _is_unused(name, family, config):
            architecture = family.architecture(head_of(config))
            raise HubError(f"{weights.place(name)} has {name}, which is no part of a {architecture}")
    for part in parts:
        _check_shapes(weights, part, list(ours[part.ours].shape))
    if config.tied:
        _check_copies(weights, copies)
    # Files may mix dtypes, such as norms in float32: the model gets one that holds all of them.
    dtype = dtype or reduce(torch.promote_types, {weights.dtype(name) for name in used})
    return {part.ours: _assemble(weights, part).to(dtype) for part in parts}


def _check_copies(weights: Weights, copies: Mapping[str, str]) -> None:
    """Raises an error if a tensor that is stored twice differs from its copy."""
    for name, other in copies.items():
        if not torch.equal(weights.get(name), weights.get(other)):
            raise HubError(
                f"{weights.place(name)}: {name} differs from {other}, although {CONFIG} says that they are one "
                "(tie_word_embeddings); say false there if it is to be used"
            )


def _is_unused(name: str, family: Family, config: Any) -> bool:
    """Tells whether the model does without a tensor: a buffer, or a pooler, which only a head for classes uses."""
    pooler = name.startswith("pooler.") and getattr(config, "head", None) in ("none", "masked")
    return pooler or name.endswith(family.spare)


def _check_shapes(weights: Weights, part: Part, want: list[int]) -> None:
    """Raises an error if a tensor of theirs is missing, quantised, or has not the shape that makes up ours."""
    for name, size in zip(part.theirs, part.sizes or (want[0] + part.skip,), strict=True):
        if name not in weights.names:
            raise HubError(
                f"{weights.folder} lacks {name}, which {CONFIG} asks for: the file is incomplete, or of another model"
            )
        shape = weights.shape(name)
        expected = [size, *want[1:]]
        if part.transposed:
            expected.reverse()
        if shape != expected:
            raise HubError(f"{weights.place(name)} does not fit {CONFIG}: {name} is {shape}, expected {expected}")
        weights.dtype(name)


def _assemble(weights: Weights, part: Part) -> Tensor:
    """Returns one tensor of ours."""
    tensors = [weights.get(name) for name in part.theirs]
    if part.transposed:
        tensors = [x.T for x in tensors]
    return torch.cat([x[part.skip :] for x in tensors])  # a copy, as the file will be closed


def _load_tokenizer(folder: Path, document: Mapping[str, Any], vocabulary: int) -> Tokenizer | None:
    """Returns the tokenizer of a folder, or None, with a warning if there is one that regard cannot read."""
    path = folder / TOKENIZER
    if not path.exists():
        others = [name for name in _OTHER_TOKENIZERS if (folder / name).exists()]
        if others:
            warnings.warn(
                f"{folder} has {others[0]} but no {TOKENIZER}, so the model gets no tokenizer; "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes one",
                stacklevel=3,
            )
        return None
    try:
        tokenizer = BPE(path.read_text(encoding="utf-8"), _end_ids(folder, document))
    except (TokenizerFileError, OSError, UnicodeDecodeError) as error:
        raise HubError(f"{path} is damaged or no tokenizer: {error}") from error
    if tokenizer.size > vocabulary:
        warnings.warn(
            f"{path} has {tokenizer.size} tokens, the model only {vocabulary}: a text with one of the others fails",
            stacklevel=3,
        )
    return tokenizer


def _end_ids(folder: Path, document: Mapping[str, Any]) -> list[int] | None:
    """Returns the ids that end a text, where transformers looks: in generation_config.json, else in config.json."""
    path = folder / CONFIG
    value = document.get("eos_token_id")
    if (folder / GENERATION).exists():
        path = folder / GENERATION
        try:
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id", value)
        except (OSError, ValueError, AttributeError) as error:
            raise HubError(f"{path} is damaged or no JSON: {error}") from None
    if value is None:
        return None
    ids = value
    if isinstance(value, int):
        ids = [value]
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise HubError(f"{path}: eos_token_id = {value!r}: expected ids of tokens")
    return ids
